"""The run's folder and the record in it, an SQLite file that one process writes and any may read.

record       `Record`, which all reports read, also while the run goes on
rows         the tables as typed rows
store        what the server appends: events, trips, versions, evaluations, incidents, costs
statements   the SQL that writes them
run_folder   the folder itself: new or empty at the start, one process's own while it runs
"""

from __future__ import annotations

from edgefl.record.record import Record

__all__ = ["Record"]
