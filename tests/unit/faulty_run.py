"""A run over a simulated network that drops, repeats, delays and reorders messages.

All parts of the server and each client's `Connection` are real, but queues replace the sockets and the tests
advance the clock. All elements of an update have the same known value.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_world import CountingStore
from run_parts import SIZE, Hand, Parts, done, experiment
from test_run_virtual import FixedTrips

from edgefl import kernels
from edgefl.core.events import Sum
from edgefl.experiment import Experiment, Server, Stop
from edgefl.parameters.buffer import SlotState
from edgefl.run import connection, control, messages
from edgefl.run.connection import Cancelled, Connection
from edgefl.run.control import CLIENT
from edgefl.run.engine import Engine, WriteAhead
from edgefl.run.gate import Refusal, ResendRequest
from edgefl.run.slots import Lease
from edgefl.run.timeline import Delivery, TimelineEvent
from edgefl.run.wall import WallTimeline
from edgefl.zeromq.sockets import Frame

CLIENTS = 12
HEARTBEAT_S = 6.0
TICK_S = 0.25
STALL_S = 600.0
"""Emulated seconds without a new version after which the run is considered stalled."""
FAULT = 0.2
"""Probability of each fault: a message is dropped or, if not, repeated; each copy is delayed or, if not,
overtaken."""


class Broken(AssertionError):
    """Raised if an update is counted twice or written into another task's slot, or if the run stalls."""


class Network:
    """Carries messages, and drops, repeats, delays or reorders some at random."""

    def __init__(self, hand: Hand) -> None:
        self._draw, self._hand = random.Random(1), hand
        self._order = itertools.count()
        self._heap: list[tuple[float, int, bytes | None, Any]] = []
        self.sent = 0
        self.faults: Counter[str] = Counter()

    def send(self, to: bytes | None, what: object) -> None:
        """Send a message to the peer named ``to``, or to the server if ``to`` is None."""
        draw, at_s = self._draw.random, self._hand.at
        self.sent += 1
        if draw() < FAULT:
            self.faults["dropped"] += 1
            return
        copies = 1 + (draw() < FAULT)
        self.faults["repeated"] += copies - 1
        for _ in range(copies):
            late_s = 0.0
            if draw() < FAULT:
                self.faults["delayed"] += 1
                late_s = HEARTBEAT_S * draw()
            elif draw() < FAULT:
                self.faults["overtaken"] += 1
                late_s = 2 * TICK_S * draw()
            heapq.heappush(self._heap, (at_s + late_s, next(self._order), to, what))

    def arrived(self) -> Iterator[tuple[bytes | None, Any]]:
        while self._heap and self._heap[0][0] <= self._hand.at:
            _, _, to, what = heapq.heappop(self._heap)
            yield to, what


class Line:
    """A peer's connection to the network, which replaces its socket."""

    network: Network
    lines: dict[bytes, Line]

    def __init__(self, address: str, name: bytes, password: str, server: int) -> None:
        self._name = name
        self.inbox: list[Sequence[Frame]] = []
        self.lines[name] = self

    def watch(self, fd: int) -> None: ...

    def wait(self, timeout_ms: int) -> bool:
        return False

    def receive(self, timeout_ms: int = 0) -> Sequence[Frame] | None:
        return self.inbox.pop(0) if self.inbox else None

    def send(self, frames: Sequence[Frame]) -> None:
        self.network.send(None, (self._name, [bytes(frame) for frame in frames]))


@dataclass
class Client:
    """A client's process with its real connection, whose training is only a wait."""

    connection: Connection
    task: messages.Task | None = None
    finish_s: float = 0.0


class FaultyRun(Parts):
    """A run whose messages go over a `Network`."""

    def __init__(self, folder: Path, transport: str) -> None:
        super().__init__(folder, clients=CLIENTS, transport=transport, stop=Stop(versions=10**9))
        self.transport, self._draw = transport, random.Random("clients")
        self.store.close()
        (folder / "counted").mkdir()
        self.store = CountingStore(folder / "counted")
        wanted = msgspec.structs.replace(
            experiment(join_spread_s=0.0), server=Server(heartbeat_s=HEARTBEAT_S, transport=transport)
        )
        self.network = Network(self.hand)
        self.socket.send = self.network.send  # type: ignore[method-assign]
        self.lifecycle = self.lifecycle_of(wanted, self.clock)
        self.timeline, self.engine = self.served(wanted)
        self.clients: dict[bytes, Client] = {}
        """The clients' processes, by name."""
        self.values: dict[int, float] = {}
        """The value of each element of a task's update."""
        self.model = 0.0
        """The weighted sum of the applied updates, computed independently of the run."""
        self.reported: set[int] = set()
        """Tasks whose client has sent the result."""
        self.arrivals: set[int] = set()
        self.progress_s = self.hand.at
        self._sum, self.aggregator.sum = self.aggregator.sum, self._watched_sum  # type: ignore[method-assign]

    def served(self, wanted: Experiment) -> tuple[WallTimeline, Engine]:
        """Return the timeline of the wall clock and the engine that applies its events."""
        peers = (self.peers, self.lifecycle, self.gate)
        parts = (self.core, None, self.aggregator, self.evaluation, *peers, self.store)
        trips: Any = FixedTrips([1.0])  # used in private runs only
        ahead = WriteAhead(self.store, self.aggregator, self.watch)
        timeline = WallTimeline(wanted, self.clock, *parts, trips, ahead)
        said_of = (timeline, self.evaluation, self.watch)
        return timeline, Engine(self.core, self.aggregator, self.store, *said_of, write_ahead=ahead)

    def _watched_sum(self, action: Sum, entry: int) -> Any:
        result = self._sum(action, entry)
        if not result.bad:
            self.progress_s = self.hand.at
            self.summed(action)
        return result

    def summed(self, action: Sum) -> None:
        """Add the updates in this sum, which became a version, to the expected model."""
        pairs = zip(action.tasks, action.weights, strict=True)
        self.model += sum(weight * self.values.pop(task) for task, weight in pairs)

    def begin(self) -> None:
        self.timeline.expect()
        self.clock.start()
        self.timeline.start()
        self.alarms.every(self.lifecycle.check_every_s, lambda: self.lifecycle.find_silent(0.0))
        for peer in self.peers.of(CLIENT):
            self.spawn(peer.number, 0)

    def spawn(self, number: int, epoch: int) -> None:
        """Start a client's process."""
        name = control.routing_id(CLIENT, number, epoch)
        password = control.password(self.socket.secret, name)
        spec = control.Spawn(CLIENT, number, epoch, "", password, 0, 1.0)
        client = self.clients[name] = Client(Connection(spec, HEARTBEAT_S, -1))
        client.connection.report(messages.Ready(number, epoch, CLIENT, password))

    def turn(self) -> None:
        """Advance the time by a tick, and let the server and all peers act."""
        self.hand.at += TICK_S
        for to, what in self.network.arrived():
            if to is None:
                self.socket.incoming.append(what)
            elif to in self.clients and to in Line.lines:
                Line.lines[to].inbox.append(what)
        for peer, message in self.gate.receive():
            match message:
                case Refusal(kind=kind, detail=detail):
                    self.lifecycle.expel(peer, kind, detail)
                case messages.Ready():
                    self._take(self.timeline.ready(peer))
                case ResendRequest():
                    self._take(self.timeline.resend(peer))
                case _:
                    self._take(self.timeline.task_ended(message))
        self.engine.retry_sum()
        self._take(self.timeline.due())
        self.alarms.run_due()
        self.timeline.flush()
        orders, self.sent[:] = list(self.sent), []
        for order in orders:
            if isinstance(order, control.Replace):
                self.spawn(order.peer, order.epoch)
                continue
            name = control.routing_id(order.role, order.peer, order.epoch)
            del self.clients[name]
            Line.lines.pop(name, None)
            end = control.Departed(order.role, order.peer, order.epoch, "killed")
            peer = self.lifecycle.departed(end)
            assert peer is not None
            self._take(self.timeline.departed(peer, end))
        for client in list(self.clients.values()):
            self.act(client)
        if self.hand.at - self.progress_s > STALL_S:
            raise Broken(f"no version for {STALL_S:g} s: {len(self.core.idle)} of {CLIENTS} clients are idle")

    def _take(self, events: Iterator[TimelineEvent]) -> None:
        for event in events:
            if isinstance(event, Delivery):
                task = event.result.task
                if task in self.arrivals:
                    raise Broken(f"task {task} arrives twice")
                self.arrivals.add(task)
            self.engine.handle(event)

    def act(self, client: Client) -> None:
        """Let this client poll for a task, train, deliver or cancel, as is due at the current time."""
        connection, task = client.connection, client.task
        connection.beat()
        if task is None:
            if (got := connection.poll()) is None or not isinstance(got[0], messages.Tasks):
                return
            (client.task,) = got[0].tasks
            connection.task = client.task.task
            self.buffer.fetched[client.task.slot] = 1
            client.finish_s = self.hand.at + 5.0 * self._draw.random()
            return
        try:
            connection.check()
        except Cancelled:
            connection.return_task(task, "cancelled")
        else:
            if self.hand.at < client.finish_s:
                return
            self._deliver(connection, task)
        client.task = connection.task = None

    def _deliver(self, connection: Connection, task: messages.Task) -> None:
        value = self.values[task.task] = float(task.task % 8 + 1)
        update = np.full(SIZE, value, dtype=np.float32)
        lease = Lease(task.slot, task.entry, task.client, task.version, order=task.order)
        if self.transport == "shm":
            if (self.buffer.task[task.slot], self.buffer.state[task.slot]) != (task.task, SlotState.LEASED):
                raise Broken(f"task {task.task} writes into a slot of another task or with a complete update")
            self.buffer.slot(task.slot)[:] = update
            checksum = kernels.checksum(self.buffer.slot(task.slot))
            self.buffer.written(task.slot, task=task.task, checksum=checksum)
        else:
            checksum, body = kernels.checksum(update), update.tobytes()
            for start in (0, len(body) // 2):
                chunk = messages.Chunk(task.task, task.slot, start)
                connection.send([messages.encode(chunk), body[start : start + len(body) // 2]])
        self.reported.add(task.task)
        connection.report(messages.Trained([done(task.task, lease, checksum)]))

    def check(self) -> Counter[str]:
        """Check the model and that no task ended twice or was lost. Return the number of tasks per fate."""
        if twice := {task: ends for task, ends in self.store.ends.items() if len(ends) > 1}:
            raise Broken(f"ended twice: {twice}")
        open_ = {
            task
            for task in self.reported
            if task not in self.store.ends and task not in self.aggregator.leases
        }
        if open_:
            raise Broken(f"results were sent, but these tasks have no fate: {open_}")
        model = self.buffer.model(self.buffer.latest[1])
        if not np.allclose(model, self.model, rtol=1e-3):
            raise Broken(f"the model is {model[0]:g}, the updates that were applied make {self.model:g}")
        return Counter(ends[0] for ends in self.store.ends.values())


@contextmanager
def faulty_run(folder: Path, transport: str) -> Iterator[FaultyRun]:
    """Start a run over a `Network`, and replace the sockets and the clock of the clients' connections."""
    made = FaultyRun(folder, transport)
    Line.network, Line.lines = made.network, {}
    clock = SimpleNamespace(monotonic_ns=lambda: int(made.hand.at * 1e9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "PeerSocket", Line)
        patch.setattr(connection, "time", clock)
        try:
            made.begin()
            yield made
        finally:
            made.close()
