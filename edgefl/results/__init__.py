"""The run's folder, the record in it, and what is made of it.

record       `Record`, which all reports read, also while the run goes on
rows         the tables as typed rows; store writes them
run_folder   new or empty at the start, one process's own while it runs; has the run begun
result       what a run leaves behind, for programs
summary      summary.json, a run in numbers
html         report.html, a run on one page: page (its frame), figures (its pictures), style (how they look)
trace        trace.json, a run as a timeline
compare      runs side by side: comparison (the figures), compare_page (the page)
tables       what the terminal shows
measures, fidelity    figures that several of these show
files        writing so that no reader sees half a file
"""
