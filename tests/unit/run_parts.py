"""The server's parts with a fake socket: tests write its incoming messages and read the outgoing ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from edgefl import kernels
from edgefl.core import Core
from edgefl.experiment import Experiment, Fleet, Privacy, Stop, Training
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.privacy.mechanism import Mechanism
from edgefl.privacy.source import Seeded
from edgefl.results.store import Store
from edgefl.run import control, messages
from edgefl.run.aggregator import Aggregator
from edgefl.run.clock import Alarms, WallClock
from edgefl.run.engine import Engine
from edgefl.run.evaluation import EvaluationQueue
from edgefl.run.gate import Checked, Gate
from edgefl.run.peers import Peer, PeerLifecycle, Peers
from edgefl.run.progress import Gauge, Stopwatch
from edgefl.run.slots import Lease
from edgefl.run.timeline import TimelineEvent
from edgefl.run.transport import SERVER_ENDS
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import fleet
from edgefl.zeromq.sockets import Frame, Full, Unreachable
from tests.wire_samples import DONE

SIZE = 8


class Hand:
    """A monotonic clock that a test sets."""

    def __init__(self, at: float = 100.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class FakeSocket:
    """A socket that keeps its messages in lists. It cannot send to the peers in ``full`` and ``gone``."""

    secret = "of the run"

    def __init__(self) -> None:
        self.incoming: list[tuple[bytes, Sequence[Frame]]] = []
        self.sent: list[tuple[bytes, Sequence[Frame]]] = []
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.called: list[bytes] = []
        self.no_descriptors = ""
        self.waited_ms: list[int] = []
        self.network: dict[str, int] = {}

    def connect(self, name: bytes) -> None:
        assert name not in self.called, "ZeroMQ would end the process"
        self.called.append(name)

    def disconnect(self, name: bytes) -> None:
        self.gone.add(name)

    def refused(self) -> str:
        return self.no_descriptors

    def wait(self, timeout_ms: int) -> bool:
        self.waited_ms.append(timeout_ms)
        return False

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        incoming, self.incoming = self.incoming, []
        yield from incoming

    def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        if peer in self.full:
            raise Full
        if peer in self.gone:
            raise Unreachable
        self.sent.append((peer, frames))

    def sent_to(self, peer: Peer) -> list[messages.FromServer]:
        """Return the messages to this peer since the last call."""
        found = [
            messages.decode_from_server(frames[0]) for name, frames in self.sent if name == peer.identity
        ]
        self.sent = [item for item in self.sent if item[0] != peer.identity]
        return found


def experiment(**fleet_fields: object) -> Experiment:
    return Experiment(
        fleet=Fleet(devices={"pixel-4": 3}, network="wifi", **fleet_fields),  # type: ignore[arg-type]
        training=Training(steps=2),
        strategy={"name": "fedbuff", "buffer_size": 2},
        stop=Stop(versions=3),
    )


class Parts:
    """Core, buffer, record and gate of a run with ``clients`` clients; subclasses add a timeline."""

    def __init__(
        self,
        folder: Path,
        *,
        clients: int = 3,
        transport: str = "shm",
        stop: Stop | None = None,
        kept: int = 0,
        every: int = 10,
        privacy: Privacy | None = None,
    ) -> None:
        """``kept``: how many numbers each client keeps; ``every``: how many versions per evaluation."""
        self.hand = Hand()
        self.socket = FakeSocket()
        strategy = FedBuff(buffer_size=2)
        keeping = {"clients": clients, "kept": kept} if kept else {}
        self.buffer = ParameterBuffer.create(Shape(SIZE, 6, strategy.slots(clients), **keeping))
        self.buffer.publish(version=0, entry=0)
        self.core = Core(strategy, fleet(clients, 60), 1, stop or Stop(versions=3), every, privacy)
        self.aggregator = Aggregator(self.buffer, strategy.optimizer())
        if privacy is not None:
            self.aggregator.privacy = Mechanism(privacy, 0.5, Seeded(1))
        self.store = Store(folder)
        self.peers = Peers(self.hand, self.socket)  # type: ignore[arg-type]
        self.watch = Stopwatch("test")
        self.gauge = Gauge.__new__(Gauge)
        self.costs: list[int] = []
        self.gauge.cost = self.costs.append  # type: ignore[method-assign]
        self.gate = Gate(
            self.socket,  # type: ignore[arg-type]
            SERVER_ENDS[transport](self.buffer),
            self.peers,
            self.aggregator,
            self.gauge,
            self.watch,
        )
        self.evaluation = EvaluationQueue(self.aggregator, self.gate, self.peers)
        self.sent: list[Any] = []
        """The messages to the supervisor."""
        self.alarms = Alarms(self.hand)
        self.clock = WallClock(1.0, monotonic=self.hand)
        self._tasks = itertools.count()

    def lifecycle_of(self, wanted: Experiment, clock: WallClock) -> PeerLifecycle:
        channel: Any = SimpleNamespace(send=self.sent.append)
        return PeerLifecycle(self.peers, wanted, self.store, clock, self.alarms, channel)

    def close(self) -> None:
        self.store.close()
        self.buffer.close()

    def peer(self, role: control.Role, number: int, *, ready: bool = True) -> Peer:
        made = self.peers.expect(role, number)
        made.ready = ready
        return made

    def the(self, role: control.Role, number: int) -> Peer:
        """Return this peer, which must exist."""
        found = self.peers.get(role, number)
        assert found is not None
        return found

    def lease(self, client: int, holder: int) -> tuple[int, Lease]:
        """Lease a slot for a new task of this client, which the peer ``holder`` computes."""
        task = next(self._tasks)
        lease = self.aggregator.lease(task=task, client=client, version=0)
        lease.holder = holder
        return task, lease

    def order(self, client: int) -> messages.Tasks:
        """Return the message with a new task of this client, leased to the client itself."""
        task, lease = self.lease(client, holder=client)
        return messages.Tasks(
            [messages.Task(client, task, 0, 0, lease.entry, lease.slot, None, None, order=task)]
        )

    def written(self, task: int, lease: Lease) -> int:
        """Write an update into the slot; return the update's checksum."""
        update = self.buffer.slot(lease.slot)
        update[:] = np.arange(SIZE)
        checksum = kernels.checksum(update)
        self.buffer.written(lease.slot, task=task, checksum=checksum)
        return checksum

    def say(
        self, peer: Peer, message: messages.FromClient | messages.TaskResult | bytes, *payload: Frame
    ) -> None:
        """Let the server receive a message from this peer."""
        if isinstance(message, messages.TaskResult):
            message = messages.Trained([message])
        header = message if isinstance(message, bytes) else messages.encode(message)
        self.socket.incoming.append((peer.identity, [header, *payload]))

    def received(self) -> list[tuple[Peer, Checked]]:
        return list(self.gate.receive())


def take(engine: Engine, events: Iterator[TimelineEvent]) -> list[TimelineEvent]:
    """Pass each event to the engine as it comes; return all of them."""
    taken = []
    for event in events:
        engine.handle(event)
        taken.append(event)
    return taken


def ready(peer: Peer, /, **changed: Any) -> messages.Ready:
    """Return this peer's first message."""
    password = control.password(FakeSocket.secret, peer.identity)
    first = messages.Ready(peer.number, peer.epoch, peer.role, password)
    return msgspec.structs.replace(first, **changed)


def done(task: int, lease: Lease, checksum: int, **changed: object) -> messages.TaskResult:
    """Return a client's result of its task."""
    fields = {"trained_version": lease.version, "order": lease.order, **changed}
    return msgspec.structs.replace(DONE, task=task, checksum=checksum, **fields)
