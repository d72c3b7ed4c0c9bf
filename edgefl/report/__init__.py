"""What is made of a run's record, which is read through `edgefl.record.Record`.

summary        summary.json, a run in numbers
html           report.html, a run on one page: page (its frame), figures (its pictures), style (how they look)
trace          trace.json, a run as a timeline
compare        runs side by side: comparison (the figures), compare_page (the page)
tables         what the terminal shows
measures, costs, attendance, fidelity    figures that several of these show
files          writing so that no reader sees half a file
"""
