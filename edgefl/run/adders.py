"""Sums near the clients: what the server knows of the nodes that hold updates, and what it asks of them.

Each node has an adder (`edgefl.run.adder`): it puts versions where the node's clients find them, sums updates
that lie there, and hands over those that the server needs itself. It has one errand at a time, which another
is given again if it dies. Pure: errands are taken from here and sent, answers are put in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from edgefl.core.events import Sum
from edgefl.errors import WireError
from edgefl.run import messages
from edgefl.run.slots import Aggregator, Lease, PartialSum
from edgefl.run.sockets import Frame

MOST_TRIES = 5
"""An errand that an adder has answered so often, and never with all that is due, is one it cannot do."""


@dataclass(eq=False)
class _Job:
    """An errand, and room for its answer."""

    errand: messages.Errand
    nbytes: int = 0
    body: bytes = b""
    action: Sum | None = None
    """The sum that this is a part of."""
    tasks: Sequence[int] = ()
    lease: Lease | None = None
    """Of the update that is fetched."""
    got: bytearray = field(default_factory=bytearray)
    tries: int = 0


@dataclass(eq=False)
class _NodeState:
    name: str
    has: dict[int, int] = field(default_factory=dict)
    """Version by ring entry, of those that it has or is sent."""
    whole: set[int] = field(default_factory=set)
    """The entries of those that it has."""
    jobs: deque[_Job] = field(default_factory=deque)
    given: int = 0
    """The number of the first of these at its adder; 0 while that has none."""


@dataclass(eq=False)
class Adders:
    """The nodes of a run that sum, by number."""

    _aggregator: Aggregator
    _model: Callable[[int], list[Frame]]
    """Payload frames of a ring entry's model."""
    gone: dict[int, str] = field(default_factory=dict)
    """Held updates that were lost with their node, by task, and how."""

    def __post_init__(self) -> None:
        self._nodes: dict[int, _NodeState] = {}
        self._known = False
        self._number = 0
        self._sum: Sum | None = None
        self._parts: dict[int, PartialSum] = {}

    # ---- which there are ------------------------------------------------------------------------

    def is_there(self, node: int) -> bool:
        """Returns False for a node that is lost."""
        return not self._known or node in self._nodes

    def there(self, names: Mapping[int, str]) -> tuple[list[int], dict[int, str]]:
        """These nodes are there now: returns the new ones, and the names of those that are lost."""
        self._known = True
        new = [node for node in names if node not in self._nodes]
        lost = {node: self._nodes.pop(node).name for node in list(self._nodes) if node not in names}
        lost |= {
            lease.node: str(lease.node)
            for lease in self._aggregator.leases.values()
            if lease.node and lease.node not in names and lease.node not in lost
        }
        self._nodes |= {node: _NodeState(names[node]) for node in new}
        return new, lost

    def held_by(self, nodes: Mapping[int, str]) -> dict[int, Lease]:
        """The updates that only these nodes have, by task."""
        leases = self._aggregator.leases
        return {task: lease for task, lease in leases.items() if lease.node in nodes}

    def lose(self, nodes: Mapping[int, str]) -> None:
        """Count as lost all that these nodes held: a sum of it finds that it is bad."""
        for task, lease in self.held_by(nodes).items():
            self.gone[task] = f"node {nodes[lease.node]} was lost"
            self._aggregator.put(lease, float("nan"))
        self._sum = None

    # ---- what is asked of them ------------------------------------------------------------------

    def has(self, node: int, version: int, entry: int) -> bool:
        """Returns True if the node's clients can start from this version; else it is sent one."""
        if (found := self._nodes.get(node)) is None:
            return False
        if self._aggregator.buffer.entry_version[entry] != version:
            return True  # no task needs it any more: its client finds that it is not there
        if found.has.get(entry) != version:
            found.has[entry] = version
            found.whole.discard(entry)
            found.jobs.append(_Job(messages.Keep(version, entry)))
        return entry in found.whole

    def gathered(self, action: Sum) -> bool:
        """Returns True if all parts of a sum are there that nodes have to make; else asks for them."""
        by_node: dict[int, list[int]] = {}
        for task in action.tasks:
            if node := self._aggregator.leases[task].node:
                by_node.setdefault(node, []).append(task)
        if any(node not in self._nodes for node in by_node):
            return False  # it is told soon which there are
        if action is not self._sum:
            self._sum, self._parts = action, {}
            for node, tasks in by_node.items():
                self._nodes[node].jobs.append(self._add(action, tasks))
        return by_node.keys() <= self._parts.keys()

    def _add(self, action: Sum, tasks: list[int]) -> _Job:
        weights = dict(zip(action.tasks, action.weights, strict=True))
        slots = [self._aggregator.leases[task].slot for task in tasks]
        body = np.array([tasks, slots], np.int64).tobytes()
        body += np.array([weights[task] for task in tasks]).tobytes()
        nbytes = 8 * self._aggregator.buffer.shape.size + 16 * len(tasks)
        return _Job(messages.Add(), nbytes, body, action, tasks)

    def take_parts(self) -> list[PartialSum]:
        """The parts of the sum that is made now."""
        parts, self._sum, self._parts = list(self._parts.values()), None, {}
        return parts

    def elsewhere(self, tasks: Iterable[int]) -> set[int]:
        """Those of these updates that do not lie here."""
        leases = self._aggregator.leases
        return {task for task in tasks if leases[task].node}

    def fetch(self, tasks: Sequence[int]) -> bool:
        """Returns True if these updates lie in their slots here; else has them brought."""
        missing, nbytes = self.elsewhere(tasks), self._aggregator.buffer.shape.update_bytes
        for task in missing:
            lease = self._aggregator.leases[task]
            node = self._nodes.get(lease.node)
            if node is not None and all(job.lease is not lease for job in node.jobs):
                node.jobs.append(_Job(messages.Fetch(task, lease.slot), nbytes, lease=lease))
        return not missing

    # ---- what is said ---------------------------------------------------------------------------

    def errands(self, ready: Callable[[int], bool]) -> Iterator[tuple[int, messages.Errand, Sequence[Frame]]]:
        """Yields what adders that are ``ready`` and have nothing to do are to be told, each by its number."""
        for number, node in self._nodes.items():
            if node.given or not node.jobs or not ready(number):
                continue
            while node.jobs and self._is_stale(node.jobs[0]):
                self._forget(node, node.jobs[0])
            if not node.jobs:
                continue
            job = node.jobs[0]
            frames: list[Frame] = [job.body] if job.body else []
            if isinstance(job.errand, messages.Keep):
                frames = self._model(job.errand.entry)
            self._number += 1
            node.given, job.got = self._number, bytearray()
            yield number, msgspec.structs.replace(job.errand, number=node.given), frames

    def _is_stale(self, job: _Job) -> bool:
        """Returns True for a job whose answer nobody waits for any more."""
        if isinstance(job.errand, messages.Keep):
            return self._aggregator.buffer.entry_version[job.errand.entry] != job.errand.version
        return job.action is not self._sum if isinstance(job.errand, messages.Add) else False

    def _forget(self, node: _NodeState, job: _Job) -> None:
        node.jobs.remove(job)
        if isinstance(job.errand, messages.Keep) and node.has.get(job.errand.entry) == job.errand.version:
            del node.has[job.errand.entry]

    def again(self, number: int) -> None:
        """The adder has heard nothing of its errand, or is another now."""
        if (node := self._nodes.get(number)) is not None:
            node.given = 0

    def piece(self, number: int, piece: messages.Piece, body: Frame) -> bool:
        """Take in the next part of an answer; False for another, which is passed over.

        `WireError` for more than is due.
        """
        node = self._nodes.get(number)
        if node is None or not node.given or piece.number != node.given:
            return False
        job = node.jobs[0]
        if piece.offset != len(job.got):
            return False
        if len(job.got) + len(body) > job.nbytes:
            raise WireError(f"an answer of more than {job.nbytes} bytes")
        job.got += body
        return True

    def answered(self, number: int, said: messages.Answered) -> bool:
        """An errand is done; False for one that was done before."""
        node = self._nodes.get(number)
        if node is None or not node.given or said.number != node.given:
            return False
        job, node.given = node.jobs[0], 0
        job.tries += 1
        if len(job.got) != job.nbytes:
            if job.tries >= MOST_TRIES:
                raise WireError(f"{len(job.got)} bytes of an answer of {job.nbytes}")
            return True
        node.jobs.popleft()
        self._done(number, node, job, said.seconds)
        return True

    def _done(self, number: int, node: _NodeState, job: _Job, seconds: float) -> None:
        match job.errand:
            case messages.Keep(version=version, entry=entry):
                if node.has.get(entry) == version:
                    node.whole.add(entry)
            case messages.Add():
                if job.action is self._sum:  # and not of one that was found to be of a bad update meanwhile
                    self._parts[number] = self._part(job, seconds)
            case messages.Fetch(task=task):
                lease = self._aggregator.leases.get(task)
                if lease is not None and lease is job.lease and lease.node == number:
                    self._aggregator.put(lease, np.frombuffer(job.got, np.uint8))

    def _part(self, job: _Job, seconds: float) -> PartialSum:
        count, size = len(job.tasks), self._aggregator.buffer.shape.size
        numbers = np.frombuffer(job.got, np.float64)
        checksums = numbers[size + count :].view(np.uint64)
        return PartialSum(job.tasks, numbers[:size], numbers[size : size + count], checksums, seconds)
