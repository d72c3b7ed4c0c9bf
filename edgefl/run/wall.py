"""The wall clock's timeline: clients are throttled for real, and what they say happens when they say it.

A client that comes online joins if its process is there. One that goes offline leaves; if it has a task, and
does not finish it first, its process is told to give it up and has left when it says so: until then it may
still write into its slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from edgefl.core import Core
from edgefl.core.events import Failed, Joined, Left, Ticked
from edgefl.devices.dynamics import Dynamics
from edgefl.devices.fleet import joins_at_s
from edgefl.experiment import Experiment
from edgefl.results.store import Store
from edgefl.run import control, messages
from edgefl.run.clock import JOIN, LEAVE, TICK, Agenda, Due, WallClock
from edgefl.run.evaluation import EvaluationQueue
from edgefl.run.gate import Gate, GivenBack
from edgefl.run.peers import Peer, Peers
from edgefl.run.slots import Aggregator
from edgefl.run.timeline import Ahead, Delivery, Happening, Order, Restored

AT_ONCE = 16
"""Tasks that are sent together at most: the client that waits for the first one must not wait long."""


class WallTimeline:
    """Gives tasks to the clients' own processes, and knows who comes and goes by itself.

    Tasks are sent a few at once, when what came in together has been dealt with: each wakes a client, which
    may take the server's processor, and what the server does in one go it finds in its caches.
    """

    def __init__(
        self,
        experiment: Experiment,
        clients: int,
        clock: WallClock,
        core: Core,
        dynamics: Dynamics | None,
        aggregator: Aggregator,
        evaluation: EvaluationQueue,
        peers: Peers,
        gate: Gate,
        store: Store,
    ) -> None:
        self.clock = clock
        self._experiment, self._clients, self._core, self._dynamics = experiment, clients, core, dynamics
        self._aggregator, self._evaluation = aggregator, evaluation
        self._peers, self._gate, self._store = peers, gate, store
        self._agenda = Agenda()
        self._tasks: list[messages.Task] = []
        self._coming: set[int] = set()
        self._leaving: dict[int, str] = {}
        """Clients that have been told to give their task up, and why they go."""

    def expect(self) -> None:
        for client in range(self._clients):
            self._peers.expect(control.CLIENT, client)

    def start(self) -> None:
        for peer in self._peers.of(control.CLIENT):
            if self._dynamics is None or peer.number not in self._dynamics:
                self._comes(peer.number, joins_at_s(self._experiment, peer.number))

    # ---- tasks ---------------------------------------------------------------------------------

    def give(self, task: messages.Task) -> None:
        self._aggregator.leases[task.task].holder = task.client
        self._tasks.append(task)
        if len(self._tasks) == AT_ONCE:
            self.flush()

    def flush(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            peer = self._peers.get(control.CLIENT, task.client)
            if peer is not None and task.task in self._aggregator.leases:
                frames = self._gate.transport.model_frames(task.entry)
                if self._gate.send(peer, task, frames) and frames:
                    self._aggregator.fetched(task.slot)

    def cancel(self, client: int, task: int) -> None:
        self.flush()
        peer = self._peers.get(control.CLIENT, client)
        if peer is not None:
            self._gate.send(peer, messages.Cancel(task))

    def heard(self, said: messages.Done | messages.TaskResult | GivenBack) -> Iterator[Happening]:
        """A client's task has ended; one that was told to give it up goes right before it would arrive."""
        assert not isinstance(said, messages.TaskResult), "no worker serves the wall clock"
        client, now_s = said.client, self.clock.now_s()
        why = self._leaving.pop(client, None)
        if isinstance(said, messages.Done):
            if why is not None:
                yield Left(client, now_s, why, finishes=True)
            yield Delivery(said, now_s)
        elif why is not None:
            yield Left(client, now_s, why)
        else:
            yield Failed(client, said.task, now_s, said.reason)

    # ---- who comes and goes --------------------------------------------------------------------

    @property
    def expected(self) -> int:
        return len(self._coming)

    def ready(self, peer: Peer) -> Iterator[Happening]:
        client = peer.number
        if peer.role != control.CLIENT:
            return
        if self._dynamics is None or client not in self._dynamics:
            yield from self._join(client, 0.0)
        elif self._dynamics.move(client).comes:
            self._comes(client, self._dynamics.move(client).at_s)

    def departed(self, peer: Peer, reason: str, *, given_up: bool) -> Iterator[Happening]:
        if peer.role == control.CLIENT:
            self._leaving.pop(peer.number, None)
            yield Left(peer.number, self.clock.now_s(), reason)

    def wake(self, at_s: float) -> None:
        self._agenda.enter(Due(at_s, TICK))

    def wait_ms(self) -> int:
        if self._aggregator.deferred is not None:
            return 1  # a client that has fetched its model, and so made room for the sum, says nothing
        head = self._agenda.head
        if head is None:
            return 1000
        left_ms = (head.at_s - self.clock.now_s()) * self.clock.time_scale * 1000
        return 1000 if left_ms >= 1000 else max(0, int(left_ms) + 1)

    def due(self) -> Iterator[Happening]:
        self._follow()
        while (due := self._agenda.head) is not None and due.at_s <= self.clock.now_s():
            self._agenda.take()
            if due.kind == TICK:
                yield Ticked(self.clock.now_s())
            elif due.kind == JOIN:
                yield from self._come(due)
            else:
                yield from self._go(due)
            self._follow()

    def _follow(self) -> None:
        """Enter whatever the clients will do next by themselves."""
        if self._dynamics is None:
            return
        for client in self._dynamics.moved():
            move = self._dynamics.move(client)
            if move.comes:
                self._comes(client, move.at_s)
            elif move.why != "died" and move.at_s < math.inf:  # a process that dies sees to that itself
                self._agenda.enter(Due(move.at_s, LEAVE, client))

    def _comes(self, client: int, at_s: float) -> None:
        if at_s < math.inf:
            self._coming.add(client)
            self._agenda.enter(Due(at_s, JOIN, client))

    def _come(self, due: Due) -> Iterator[Happening]:
        if self._dynamics is not None and due.client in self._dynamics:
            move = self._dynamics.move(due.client)
            if not move.comes or move.at_s != due.at_s:
                return
        self._coming.discard(due.client)
        yield from self._join(due.client, due.at_s)

    def _join(self, client: int, at_s: float) -> Iterator[Happening]:
        peer = self._peers.get(control.CLIENT, client)
        if peer is not None and peer.ready and self._core.stopped is None:
            yield Joined(client, max(at_s, self.clock.now_s()))

    def _go(self, due: Due) -> Iterator[Happening]:
        assert self._dynamics is not None
        client, core, move = due.client, self._core, self._dynamics.move(due.client)
        if move.comes or move.at_s != due.at_s or core.stopped is not None or client in self._leaving:
            return
        if move.why != "offline":
            self._store.incident(self.clock.now_s(), client, move.why, "as declared")
        task = core.task_of(client)
        if task is None or self._dynamics.finishes(client):
            yield Left(client, self.clock.now_s(), move.why, finishes=task is not None)
        else:
            self._leaving[client] = move.why
            self.cancel(client, task)

    # ---- stopping and carrying on --------------------------------------------------------------

    def save(self) -> Ahead:
        """Tasks are lost with their clients' processes; versions to be measured are not."""
        return Ahead(entries=self._evaluation.entries)

    def restore(self, restored: Restored, order: Order) -> Iterator[Happening]:
        """The processes of before are gone, and their tasks with them."""
        for client in sorted((*self._core.running, *self._core.idle)):
            yield Left(client, self.clock.now_s(), "interrupted")
