"""The work that comes before a client is told, by its next task, that its update was taken in.

Under the wall clock the record is secured before any task is sent, and the parameter buffer keeps what the
record needs until it is secured again. The supervisor holds the buffer, and with it the record's tail, so a
killed server's successor has all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl import failpoints
from edgefl.results.store import Store
from edgefl.run.progress import Stopwatch
from edgefl.run.slots import Aggregator


@dataclass(eq=False)
class WriteAhead:
    """Secures what has happened since the last time, all of it together."""

    store: Store
    aggregator: Aggregator
    watch: Stopwatch

    def __post_init__(self) -> None:
        self.aggregator.recoverable = True
        self.aggregator.settle()

    def secure(self) -> None:
        """Have everything outlive this process: from now on anyone may be told."""
        before = self.watch.to("record")
        failpoints.pass_by("commit")
        self.store.secure()
        failpoints.pass_by("committed")
        self.aggregator.settle()
        self.watch.to(before)
