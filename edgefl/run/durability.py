"""The work that comes before a client is told, by its next task, that its update was taken in.

Under the wall clock the record is secured before any task is sent, and the parameter buffer keeps what the
record needs until it is secured again. The supervisor holds the buffer, and with it the record's tail, so a
killed server's successor has all of it. With ``server.durability = "disk"`` the updates are on the disk
first, and then the record is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgefl import failpoints
from edgefl.parameters.update_log import Delivered, UpdateLog
from edgefl.results.store import Store
from edgefl.run.progress import Stopwatch
from edgefl.run.slots import Aggregator, Lease


@dataclass(eq=False)
class WriteAhead:
    """Secures what has happened since the last time, all of it together."""

    store: Store
    aggregator: Aggregator
    watch: Stopwatch
    log: UpdateLog | None = None
    """Where updates go, too, if they have to outlive a power cut."""
    _arrived: list[Delivered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.aggregator.recoverable = True
        self.aggregator.settle()

    def arrived(self, task: int, lease: Lease, *, held: bool) -> None:
        """An update arrived, and is held or of no use."""
        if self.log is not None:
            buffer = self.aggregator.buffer
            checksum = buffer.checksum[lease.slot]
            self._arrived.append(Delivered(task, lease.client, checksum, lease.slot if held else -1))

    def saved(self, journal_seq: int) -> None:
        """A checkpoint holds everything up to that event."""
        self.aggregator.settle()
        if self.log is not None:
            self._arrived.clear()
            self.log.restart(journal_seq)

    def secure(self) -> None:
        """Have everything outlive this process, or a power cut: from now on anyone may be told."""
        before = self.watch.to("record")
        if self.log is not None:
            self.log.append(self._arrived, self.aggregator.buffer)
            self._arrived.clear()
        failpoints.pass_by("commit")
        self.store.secure()
        failpoints.pass_by("committed")
        self.aggregator.settle()
        self.watch.to(before)
