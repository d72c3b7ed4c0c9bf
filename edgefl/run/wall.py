"""The wall clock's timeline: clients are throttled for real, and what they say happens when they say it.

A client that goes offline with a task that it does not finish first has left when its process says that it
gave the task up: until then it may still write into its slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from edgefl.core.events import Failed, Joined, Left, Ticked
from edgefl.devices.fleet import joins_at_s
from edgefl.parameters.buffer import TripPhase
from edgefl.run import control, messages
from edgefl.run.clock import JOIN, LEAVE, TICK, Due
from edgefl.run.durability import WriteAhead
from edgefl.run.gate import GivenBack
from edgefl.run.peers import Peer
from edgefl.run.timeline import Delivery, Happening, Order, Restored, Timeline

AT_ONCE = 16
"""Tasks that are sent together at most: the client that waits for the first one must not wait long."""


@dataclass(eq=False)
class WallTimeline(Timeline):
    """Gives tasks to the clients' own processes, a few at once, and knows who comes and goes by itself.

    Each task wakes a client, which may take the server's processor, and acknowledges its last update.
    """

    ahead: WriteAhead

    def __post_init__(self) -> None:
        self._tasks: list[messages.Task] = []
        self._coming: set[int] = set()
        self._leaving: dict[int, str] = {}
        """Clients that have been told to give their task up, and why they go."""

    def expect(self) -> None:
        for client in range(len(self.core.devices)):
            self.peers.expect(control.CLIENT, client)

    def start(self) -> None:
        for peer in self.peers.of(control.CLIENT):
            if self.dynamics is None or peer.number not in self.dynamics:
                self._comes(peer.number, joins_at_s(self.experiment, peer.number))

    def give(self, task: messages.Task) -> None:
        self.aggregator.leases[task.task].holder = task.client
        self._tasks.append(task)
        if len(self._tasks) == AT_ONCE:
            self.flush()

    def flush(self) -> None:
        tasks, self._tasks = self._tasks, []
        if tasks:
            self.ahead.secure()
        for task in tasks:
            peer = self.peers.get(control.CLIENT, task.client)
            if peer is not None and task.task in self.aggregator.leases:
                frames = self.gate.transport.model_frames(task.entry)
                if self.gate.send(peer, task, frames) and frames:
                    self.aggregator.fetched(task.slot)

    def phase(self, task: int) -> int:
        fetched = self.aggregator.buffer.fetched[self.aggregator.leases[task].slot]
        return fetched or TripPhase.DOWN

    def cancel(self, client: int, task: int) -> None:
        self.flush()
        peer = self.peers.get(control.CLIENT, client)
        if peer is not None:
            self.gate.send(peer, messages.Cancel(task))

    def heard(self, said: messages.Done | messages.TaskResult | GivenBack) -> Iterator[Happening]:
        """One that was told to give it up goes right before it would arrive."""
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

    @property
    def expected(self) -> int:
        return len(self._coming)

    def ready(self, peer: Peer) -> Iterator[Happening]:
        client = peer.number
        if peer.role != control.CLIENT:
            return
        if self.dynamics is None or client not in self.dynamics:
            yield from self._join(client, 0.0)
        elif self.dynamics.move(client).comes:
            self._comes(client, self.dynamics.move(client).at_s)

    def departed(self, peer: Peer, end: control.Departed, *, given_up: bool) -> Iterator[Happening]:
        if peer.role == control.CLIENT:
            self._leaving.pop(peer.number, None)
            yield Left(peer.number, self.clock.now_s(), end.reason)

    def declares_death(self, end: control.Departed) -> bool:
        if end.role != control.CLIENT or self.dynamics is None or end.peer not in self.dynamics:
            return False
        move = self.dynamics.move(end.peer)
        return move.why == "died" and move.at_s <= self.clock.now_s()

    def wait_ms(self) -> int:
        if self.aggregator.deferred is not None:
            return 1  # a client that has fetched its model, and so made room for the sum, says nothing
        head = self.agenda.head
        if head is None:
            return 1000
        left_ms = (head.at_s - self.clock.now_s()) * self.clock.time_scale * 1000
        return 1000 if left_ms >= 1000 else max(0, int(left_ms) + 1)

    def due(self) -> Iterator[Happening]:
        self._follow()
        while (due := self.agenda.head) is not None and due.at_s <= self.clock.now_s():
            self.agenda.take()
            if due.kind == TICK:
                yield Ticked(self.clock.now_s())
            elif due.kind == JOIN:
                dynamics, client = self.dynamics, due.client
                if dynamics is None or client not in dynamics or dynamics.move(client) == (due.at_s, "back"):
                    self._coming.discard(client)
                    yield from self._join(client, due.at_s)
            else:
                yield from self._go(due)
            self._follow()

    def _follow(self) -> None:
        if self.dynamics is None:
            return
        for client in self.dynamics.moved():
            move = self.dynamics.move(client)
            if move.comes:
                self._comes(client, move.at_s)
            elif move.why != "died" and move.at_s < math.inf:  # a process that dies sees to that itself
                self.agenda.enter(Due(move.at_s, LEAVE, client))

    def _comes(self, client: int, at_s: float) -> None:
        if at_s < math.inf:
            self._coming.add(client)
            self.agenda.enter(Due(at_s, JOIN, client))

    def _join(self, client: int, at_s: float) -> Iterator[Happening]:
        peer = self.peers.get(control.CLIENT, client)
        if peer is not None and peer.ready and self.core.stopped is None:
            yield Joined(client, max(at_s, self.clock.now_s()))

    def _go(self, due: Due) -> Iterator[Happening]:
        assert self.dynamics is not None
        client, core, move = due.client, self.core, self.dynamics.move(due.client)
        if move.comes or move.at_s != due.at_s or core.stopped is not None or client in self._leaving:
            return
        if move.why != "offline":
            self.store.incident(self.clock.now_s(), client, move.why, "as declared")
        task = core.task_of(client)
        if task is None or self.dynamics.finishes(client):
            yield Left(client, self.clock.now_s(), move.why, finishes=task is not None)
        else:
            self._leaving[client] = move.why
            self.cancel(client, task)

    def restore(self, restored: Restored, order: Order) -> Iterator[Happening]:
        """The processes of before are gone, and their tasks with them.

        Those without a task go first: nobody is left to be started in the place of one that had a task.
        """
        core = self.core
        for client in (*sorted(core.idle), *sorted(core.resting), *sorted(core.running)):
            yield Left(client, self.clock.now_s(), "interrupted")
