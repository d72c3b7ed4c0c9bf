"""The run's folder and the record in it, an SQLite file that one process at a time writes and any may read.

record       `Record`, which all reports read, also while the run goes on
rows         the tables as typed rows
store        what is written, mostly by the server: events, trips, versions, evaluations, incidents, costs
statements   the SQL that writes them
run_folder   the folder itself: new or empty at the start, one process's own while it runs; has the run begun
"""

from __future__ import annotations

from edgefl.record.record import Record

__all__ = ["Record"]
