"""Allocation of update slots and ring entries.

A slot of the parameter buffer holds one update; an entry of the buffer's ring holds one version of the model
and of the vectors that belong to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import msgspec

from edgefl import kernels
from edgefl.errors import SlotError
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer, Raw, SlotState, with_scales
from edgefl.strategies.base import Update

ENTRIES_NOT_LENT = 5
"""Number of ring entries that are never lent to clients: one for the latest version, two for versions at the
evaluator, one for a version that a client is copying, and one for the next version."""


class Lease(msgspec.Struct):
    """A task's slot, and the ring entry that its client may still read."""

    slot: int
    entry: int
    client: int
    version: int
    holder: int = -1
    """Index of the peer that performs the task: the client itself or a worker; −1 if no peer does."""
    order: int = 0
    """Sequence number of the last order for this task that was sent to a peer. The number of the first order
    is the task's number."""


@dataclass
class Slots:
    """Leases the slots of one parameter buffer to tasks, and finds ring entries that may be overwritten.

    It is not thread-safe.
    """

    buffer: ParameterBuffer
    _: KW_ONLY
    lends: bool = False
    """True if clients may train directly from ring entries, which are then kept until the update is
    complete."""
    measures: bool = False
    """True if a ring entry is also kept until the norms of the updates that start from it are computed."""
    recoverable: bool = False
    """True if the slots of released tasks and the last committed version are kept until `settle` is
    called."""
    leases: dict[int, Lease] = field(default_factory=dict)
    blocks: Sequence[slice] = (slice(None),)
    """Ranges of elements of the model and of each exchanged vector, in a ring entry and in an update."""
    statistics: int = 0
    """Number of elements at the end of the model that are averaged without the optimiser: the running
    statistics, and the module's other float buffers."""

    def __post_init__(self) -> None:
        self._free = list(range(self.buffer.shape.slots))[::-1]
        self._unread: dict[int, int] = {}  # slot → ring entry, until the client has fetched the model
        self._pinned: dict[int, int] = {}  # ring entry → number of readers other than tasks
        self._lent: dict[int, int] = {}  # slot → ring entry, until the update is complete
        self._borrowers: dict[int, int] = {}  # ring entry → number of slots that it is lent to
        self._bases: dict[int, int] = {}  # slot → ring entry, until its update is measured
        self._released: list[int] = []  # slots that become free when the release is committed
        self._settled = -1  # ring entry of the last committed version

    def lease(self, *, task: int, client: int, version: int) -> Lease:
        """Allocate a slot for a new task that starts from the latest version."""
        latest, entry = self.buffer.latest
        if version != latest:
            raise SlotError(f"task {task} needs version {version}, but the latest is {latest}")
        return self.resume(task=task, client=client, version=version, entry=entry)

    def resume(self, *, task: int, client: int, version: int, entry: int) -> Lease:
        """Allocate a slot for a new or resumed task.

        ``entry`` is the ring entry that holds the task's base version, or −1 if no entry holds it.
        """
        if not self._free:
            raise SlotError(
                f"no update slot is free for task {task}; all {self.buffer.shape.slots} are taken: the "
                "strategy holds updates that it neither uses nor discards, or more than its max_held allows"
            )
        slot = self._free.pop()
        # Let the client read from the entry if enough other entries can be overwritten.
        lent = self.lends and entry >= 0
        if lent and entry not in self._borrowers:
            lent = len(self._borrowers) < self.buffer.shape.ring - ENTRIES_NOT_LENT
        if lent:
            self._lent[slot] = entry
            self._borrowers[entry] = self._borrowers.get(entry, 0) + 1
        self.buffer.lease(slot, task=task, lent=lent)
        if entry >= 0 and not lent:
            self._unread[slot] = entry
        if entry >= 0 and self.measures:
            self._bases[slot] = entry
        if entry >= 0 and self.buffer.shape.statistics:
            self.buffer.statistics(slot)[:] = self.buffer.model(entry)[self.blocks[0]][-self.statistics :]
        lease = self.leases[task] = Lease(slot, entry, client, version, order=task)
        return lease

    def assign(self, task: int, holder: int) -> None:
        """Assign a task to a peer; from now on no other peer may report the end of the task."""
        self.leases[task].holder = holder

    def renumber(self, task: int, order: int) -> None:
        """Set the number of the next order for a task; results of earlier orders are then ignored."""
        self.leases[task].order = order

    def unassign(self, task: int) -> None:
        """Unassign a task from its peer; the peer's further reports on this task have no effect."""
        self.leases[task].holder = -1

    def reclaim(self, task: int) -> None:
        """Unassign a task from a peer that can no longer write to its slot; mark the slot as incomplete."""
        self.unassign(task)
        self.buffer.state[self.leases[task].slot] = SlotState.LEASED

    def delivered(self, slot: int) -> None:
        """Record that the update in this slot is complete, so that its client no longer reads the model."""
        self._bases.pop(slot, None)
        entry = self._lent.pop(slot, None)
        if entry is not None:
            self._borrowers[entry] -= 1
            if not self._borrowers[entry]:
                del self._borrowers[entry]

    def fetched(self, slot: int) -> None:
        """Record that the client of this slot no longer reads its base model from the ring.

        The model's ring entry may then be overwritten.
        """
        self._unread.pop(slot, None)

    def restore(
        self,
        *,
        task: int,
        client: int,
        version: int,
        update: Raw,
        statistics: Floats | None = None,
        entry: int = -1,
    ) -> Lease:
        """Allocate a slot, and write an update into it that an earlier process received.

        ``statistics`` are the running statistics in the update's base version, if the buffer stores them. For
        ``entry`` see `resume`.
        """
        if not self._free or update.shape != (self.buffer.shape.update_bytes,):
            room = f"{len(self._free)} slots of {self.buffer.shape.update_bytes} bytes are free"
            raise SlotError(f"task {task}'s update of {update.size} bytes does not fit: {room}")
        lease = self.resume(task=task, client=client, version=version, entry=entry)
        if statistics is not None:
            self.buffer.statistics(lease.slot)[:] = statistics
        self._write(lease.slot, task, update)
        return lease

    def write_zero(self, task: int) -> None:
        """Write an all-zero update for a task whose trip failed.

        Call this only when no peer can write to the task's slot any more.
        """
        slot = self.leases[task].slot
        self.fetched(slot)
        self.delivered(slot)
        self.reclaim(task)
        self._write(slot, task, 0)

    def _write(self, slot: int, task: int, update: Raw | int) -> None:
        self.buffer.raw(slot)[:] = update
        values, scales, exact = self.buffer.slot(slot), self.buffer.scales(slot), self.buffer.exact(slot)
        checksum = with_scales(kernels.checksum(values), scales, exact)
        self.buffer.written(slot, task=task, checksum=checksum)

    def release(self, task: int) -> None:
        """Free a task's slot. Call this only when the task's client can no longer write to the slot."""
        lease = self.leases.pop(task, None)
        if lease is not None:
            self._unread.pop(lease.slot, None)
            self.delivered(lease.slot)
            if self.recoverable:
                self._released.append(lease.slot)
            else:
                self.buffer.free(lease.slot)
                self._free.append(lease.slot)

    def settle(self) -> None:
        """After a commit of the record, free the slots and the ring entry that recovery no longer needs."""
        self._settled = self.buffer.latest[1]
        while self._released:
            slot = self._released.pop()
            self.buffer.free(slot)
            self._free.append(slot)

    @property
    def full(self) -> bool:
        """True if no slot is free; `settle` may free some."""
        return not self._free

    def take_over(self, held: Iterable[Update]) -> None:
        """Take over the buffer of a killed server: keep the slots of ``held`` updates and free all others.

        Raises `SlotError` if an update is missing.
        """
        buffer = self.buffer
        written = {
            task: slot
            for slot, task in enumerate(buffer.task)
            if task >= 0 and buffer.state[slot] == SlotState.WRITTEN
        }
        for update in held:
            if update.task not in written:
                raise SlotError(f"no update slot holds the update of task {update.task}")
            slot = written[update.task]
            self.leases[update.task] = Lease(slot, -1, update.client, update.base_version)
            self._free.remove(slot)
        for slot in self._free:
            buffer.free(slot)
        self.settle()

    def pin(self, entry: int) -> None:
        """Keep a ring entry unchanged until `unpin` is called."""
        self._pinned[entry] = self._pinned.get(entry, 0) + 1

    def unpin(self, entry: int) -> None:
        self._pinned[entry] -= 1
        if not self._pinned[entry]:
            del self._pinned[entry]

    def free_entry(self) -> int | None:
        """Return a ring entry that may be overwritten, or None if there is no such entry."""
        fetched = self.buffer.fetched
        taken = {entry for slot, entry in self._unread.items() if not fetched[slot]}
        taken.update(self._pinned, self._borrowers, self._bases.values())
        taken.add(self.buffer.latest[1])
        if self.recoverable:
            taken.add(self._settled)
        return next((entry for entry in range(self.buffer.shape.ring) if entry not in taken), None)
