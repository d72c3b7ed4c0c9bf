"""A run's folder, the record in it, and the results computed from the record.

run_folder   the folder of a run: creation, lock, removal
result       `Result`, which reads a finished run's folder
rows         the record's tables as typed rows
record       `Record`, which reads these tables, also while the run continues
store        `Store`, which writes the record
tail         the writer's calls since its last commit, in memory that survives a kill of the writer
seal         checksums of the record's pages, which detect damage to the file
summary      summary.json: a run in numbers
groups       clients by profile, speed and classes: their weight and accuracy
headline     the headline figures of a run, in words
phase        tests whether phones of one model act in step
report       one run: report.html, and its summary for the terminal
trace        trace.json: a run as a timeline
energy       joules of a run's trips, by use and profile
columns      a run's record as tables of columns for a notebook, a data frame or a file
sweep        `Sweep`, which reads a finished sweep's folder
trackers     copies a run to TensorBoard, MLflow or Weights & Biases
figure       learning curves for a paper
targets      time to accuracy: the target, the cost until it is reached, ratios over seeds
fleets       the share of randomly drawn fleets in which one setting is ahead of another
statistics   means and intervals over seeds, the cost until a curve reaches a target, ratios of costs
grouping     loads, groups and labels the runs of a comparison, and averages them over seeds
compare      comparison of runs: figures, tables, folder and page
page         the page kit: the parts of every HTML page, its tables and its glossary
pictures     the drawing kit: pictures for pages, and cards with learning curves
tables       the table kit: tables for the terminal, and figures as text
protection   cards of a report that state who is protected from whom
spending     the ε that a private run has spent by each version
"""
