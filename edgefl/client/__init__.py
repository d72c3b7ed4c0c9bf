"""The far side of the server's socket: what a forked process does.

client      one emulated phone: downloads, trains and uploads at its device's pace
evaluator   measures published versions on the test examples
line        a peer's connection to the server
workload    what they compute with: data, model, and who holds which examples

The virtual clock's workers, which compute the tasks of any client, are in ``virtual/worker.py``.
"""
