"""Who comes and goes under the wall clock: alarms for what the phones do by themselves, and its events.

A phone that comes online joins if its process is there. One that goes offline leaves; if it has a task, and
does not finish it first, its process is told to give it up and has left when it says so: until then it may
still write into its slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from edgefl.core.events import Joined, Left
from edgefl.devices.dynamics import Dynamics
from edgefl.devices.fleet import joins_at_s
from edgefl.experiment import Experiment
from edgefl.run import control, messages
from edgefl.run.clock import Alarms, WallClock
from edgefl.run.engine import Executor
from edgefl.run.peers import Peers


class Attendance:
    """The coming and going of one run's clients."""

    def __init__(
        self,
        experiment: Experiment,
        dynamics: Dynamics | None,
        executor: Executor,
        peers: Peers,
        clock: WallClock,
        alarms: Alarms,
        note: Callable[[int, str, str], None],
    ) -> None:
        self._experiment, self._dynamics, self._executor = experiment, dynamics, executor
        self._peers, self._clock, self._alarms, self._note = peers, clock, alarms, note
        self._coming: set[int] = set()
        self._leaving: dict[int, str] = {}
        """Clients that have been told to give their task up, and why they go."""

    @property
    def expected(self) -> int:
        """Clients that come online at an instant that is known."""
        return len(self._coming)

    def open(self) -> None:
        """The run starts: whoever is online joins, and the others when they are."""
        for peer in self._peers.of(control.CLIENT):
            if self._dynamics is None or peer.number not in self._dynamics:
                self._come_at(peer.number, joins_at_s(self._experiment, peer.number))
        self.follow()

    def welcome(self, client: int) -> None:
        """A process that replaces another is ready."""
        if self._dynamics is None or client not in self._dynamics:
            self._join(client, 0.0)
        elif self._dynamics.move(client).comes:
            self._come_at(client, self._dynamics.move(client).at_s)

    def follow(self) -> None:
        """Set alarms for whatever the phones will do next."""
        if self._dynamics is None:
            return
        for client in self._dynamics.moved():
            move = self._dynamics.move(client)
            if move.comes:
                self._come_at(client, move.at_s)
            elif move.why != "died":  # its process sees to that
                self._after(move.at_s, partial(self._go, client, move.at_s))

    def left(self, client: int, reason: str) -> None:
        """Its process is gone, or has given its task up."""
        self._leaving.pop(client, None)
        self._executor.handle(Left(client, self._clock.now_s(), reason))

    def given_up(self, gone: messages.Gone) -> bool:
        """Whether a client that gave its task back had to, since it has gone offline."""
        reason = self._leaving.get(gone.client)
        if reason is None:
            return False
        self.left(gone.client, reason)
        return True

    def delivers(self, client: int) -> None:
        """Its update arrived: one that was told to give its task up at that moment goes right after."""
        reason = self._leaving.pop(client, None)
        if reason is not None:
            self._executor.handle(Left(client, self._clock.now_s(), reason, finishes=True))

    # ---- at their instants ---------------------------------------------------------------------

    def _come_at(self, client: int, at_s: float) -> None:
        if at_s <= self._clock.now_s():
            self._join(client, at_s)
        elif at_s < math.inf:
            self._coming.add(client)
            self._after(at_s, partial(self._come, client, at_s))

    def _come(self, client: int, at_s: float) -> None:
        if self._dynamics is not None and client in self._dynamics:
            move = self._dynamics.move(client)
            if not move.comes or move.at_s != at_s:
                return
        self._coming.discard(client)
        self._join(client, at_s)

    def _join(self, client: int, at_s: float) -> None:
        peer = self._peers.get(control.CLIENT, client)
        if peer is not None and peer.ready and self._executor.core.stopped is None:
            self._executor.handle(Joined(client, max(at_s, self._clock.now_s())))

    def _go(self, client: int, at_s: float) -> None:
        assert self._dynamics is not None
        core, move = self._executor.core, self._dynamics.move(client)
        if move.comes or move.at_s != at_s or core.stopped is not None or client in self._leaving:
            return
        if move.why != "offline":
            self._note(client, move.why, "as declared")
        task = core.task_of(client)
        if task is None or self._dynamics.finishes(client):
            now_s = max(at_s, self._clock.now_s())
            self._executor.handle(Left(client, now_s, move.why, finishes=task is not None))
        else:
            self._leaving[client] = move.why
            self._executor.outbox.cancel(client, task)

    def _after(self, at_s: float, call: Callable[[], None]) -> None:
        """Call at that emulated instant; by the clock it may be a little before it."""
        if at_s < math.inf:
            wait_s = max(0.0, at_s - self._clock.now_s()) * self._clock.time_scale
            self._alarms.after(wait_s, call)
