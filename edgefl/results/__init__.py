"""The run's folder, the record in it, and what is made of it.

run_folder   new or empty at the start, one process's own while it runs
result       `Result`: what a run leaves behind, read
record       the tables as typed rows, and `Record`, which all reports read, also while the run goes on
store        `Store`, which writes the record; tail: what it was told since its last commit, seal: a checksum
             of each of its pages
summary      summary.json: a run in numbers, with its fidelity and where the server's time went
headline     the figures of a run that people look at first, in words
phase        whether phones of one model act together
report       one run: report.html, and its summary for the terminal
trace        trace.json: a run as a timeline
columns      a run's record as columns: for a notebook, a data frame, a file
sweep        what a sweep leaves behind
figure       learning curves for a paper
targets      time to accuracy: the target, the cost until it, ratios over seeds
statistics   estimates over seeds, smoothed passages of a target, ratios of costs, bands
compare      runs side by side: figures, and the table, the folder and the page made of them
page         the page kit: the parts of every HTML page; terms: a page's words, explained
pictures     the drawing kit: pictures of pages, and the cards of learning curves
tables       the table kit: tables and figures as text, for the terminal and for pages
spending     the ε that a private run has spent, over its versions
"""
