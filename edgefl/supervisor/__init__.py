"""The process of ``edgefl run``: starts the others, watches them, and shows the user how it goes.

supervisor   from an experiment to a finished run, through Ctrl-C and the end of any process
conclusion   what it writes at the end: the record completed, summary, report, trace
live         the view in the terminal, or a line now and then where there is none
course       where the run stands, worked out from the server's figures
panel        the picture of it, drawn
"""
