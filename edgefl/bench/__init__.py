"""Measurements, each beside its limit in the same run: ``edgefl bench``.

aggregate      the weighted sum; its parts are the files named after it
ingest         updates a second that the server takes in; bare and bare_sockets are its limits
spawn          how fast phones start, and what memory they take
fidelity       how well phones are emulated; its parts are the files named after it, and statistics
clocks         how far the two clocks agree
idle, exercise what the clients of a measurement do in place of training
started, forks the processes of a measurement, all gone at its end
"""
