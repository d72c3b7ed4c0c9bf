"""Secures the record before a client learns, by its next task, that its update was accepted.

Under the wall clock the record is secured before any task is sent, and the parameter buffer keeps everything
that the last secured state needs. The supervisor holds the buffer, and in it the record's tail, so the
successor of a killed server loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl import failpoints
from edgefl.results.store import Store
from edgefl.run.progress import Stopwatch
from edgefl.run.slots import Aggregator


@dataclass(eq=False)
class WriteAhead:
    """Secures all events since the last call together."""

    store: Store
    aggregator: Aggregator
    watch: Stopwatch

    def __post_init__(self) -> None:
        self.aggregator.recoverable = True
        self.aggregator.settle()

    def secure(self) -> None:
        """Make all events so far survive this process; after that, clients may be sent messages."""
        before = self.watch.to("record")
        failpoints.pass_by("commit")
        self.store.secure()
        failpoints.pass_by("committed")
        self.aggregator.settle()
        self.watch.to(before)
