"""A run's folder, the record in it, and the results computed from the record.

run_folder   the folder of a run: creation, lock, removal
result       `Result`, which reads a finished run's folder
rows         types for the rows of the record's tables
record       `Record`, which reads these tables, even while the run continues
store        `Store`, which writes the record
tail         `Tail`, memory that holds the writer's latest calls and outlives a killed writer
seal         checksums of the record's pages, which detect damage to the file
summary      summary.json: the results of a run
groups       groups of clients by profile, speed and classes, with each group's weight and accuracy
headline     the headline metrics of a run, as text
phase        a test of whether phones of one model act at the same times
report       the report of one run: report.html, and a summary for the terminal
run_pictures the pictures in that report
trace        trace.json: a run as a timeline
energy       the energy that a run's trips drew, in joules, by use and profile
columns      a run's record as tables of columns for a notebook, a data frame or a file
sweep        `Sweep`, which reads a finished sweep's folder
trackers     functions that copy a run to TensorBoard, MLflow or Weights & Biases
figure       learning curves for a paper
targets      time to accuracy: the target, each run's cost of reaching it, and ratios of costs over seeds
fleets       the share of randomly drawn fleets in which one setting is ahead of another
statistics   means and intervals over seeds, a curve's cost of reaching a target, and ratios of costs
grouping     functions that load, group and label the runs of a comparison, and average them over seeds
compare      the comparison of runs: metrics, tables, a folder and a page
own_code     which part of a resumed run was made by which version of the user's own code
page         functions that build HTML pages: their parts, tables and glossary
pictures     functions that draw pictures for pages, and cards with learning curves
tables       functions that build tables for the terminal and format values as text
protection   cards of a report that state who is protected from whom
spending     the ε that a private run has spent up to each version
"""
