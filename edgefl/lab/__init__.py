"""Measurements, each beside its limit in the same run (``edgefl bench``), and papers (``edgefl reproduce``).

aggregate      the weighted sum; its parts are the files named after it
ingest         updates a second that the server takes in; bare and bare_sockets are its limits
spawn          how fast clients start, and what memory they take
fidelity       how well phones are emulated; its parts are the files named after it
clocks         how far the two clocks agree
idle, exercise what the clients of a measurement do in place of training
processes      the processes of a measurement, all gone at its end
papers         which papers are reproduced: fedbuff, fedstaleweight, defedavg, theory
study, running, curves    arms and seeds; one run each; what the claims are read off
findings, page a claim with its verdict; the table, the page and summary.json
bound          Toghani and Uribe's bound for FedBuff
weights        FedStaleWeight's equations 6 to 8 and the bounds of its theorem 1
fleets         arrivals of a fleet through the real core
"""
