"""Strategies in which the server polls clients at fixed intervals, while they train."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgefl.experiment import Count, Positive
from edgefl.strategies.base import Client, Step, Strategy, Until, Update, View, check_fits


@dataclass
class Polls:
    """The clients of each poll, which are drawn in advance, and the poll at which each client's task ends."""

    next: int = 1
    """Index of the next poll; poll k happens at the time k · ``interval_s``."""
    drawn: dict[int, frozenset[int]] = field(default_factory=dict)
    """Clients drawn for each poll, keyed by the index of the poll."""
    due: dict[int, int] = field(default_factory=dict)
    """Index of the poll at which each client's task ends."""
    taken: list[Update] = field(default_factory=list)
    """Updates of the current poll that are not summed yet; their clients may already train again."""


@dataclass(frozen=True, kw_only=True)
class Polled(Strategy):
    """w ← (w + Σ_{i∈S} u_i)/(s + 1) at the times k·``interval_s``, with a uniform sample S of s clients.

    u_i is the update of client i, which a subclass defines. Samples are drawn in advance, so the end of each
    task is known when it starts, and the speed of the device determines the number of steps until then. A
    poll omits sampled clients that are disconnected.
    """

    upload: ClassVar[Literal["delta", "model"]] = "model"
    lockstep: ClassVar[bool] = True

    participants: Count | None = None
    """s: number of clients per poll; default 10, or the whole fleet if it is smaller."""
    interval_s: Positive = 10.0
    """Time between two polls, in emulated seconds."""

    def size(self, clients: int) -> int:
        """Return s, the number of clients per poll, for a fleet of ``clients``."""
        return self.participants or min(10, clients)

    def check(self, clients: int) -> None:
        check_fits("participants", self.participants, clients)

    def slots(self, clients: int) -> int:
        """Return the number of update slots, one per client: no client trains while its update is held."""
        return clients

    def begin(self, devices: Sequence[Client]) -> Polls:
        return Polls()

    def assign(self, state: Polls, view: View) -> Sequence[int]:
        waiting = {update.client for update in view.held}
        return [client for client in view.idle if client not in waiting]

    def until(self, state: Polls, client: int, view: View) -> Until:
        poll = self.first_poll(state, view)
        while client not in self.sample(state, poll, view):
            poll += 1
        state.due[client] = poll
        return Until(poll * self.interval_s)

    def first_poll(self, state: Polls, view: View) -> int:
        """Return the index of the first poll that may include a client that starts now."""
        return max(state.next + bool(state.taken), math.floor(view.now_s / self.interval_s) + 1)

    def lost(self, state: Polls, client: int, view: View) -> None:
        if client not in view.running:
            state.due.pop(client, None)

    def step(self, state: Polls, view: View) -> Step | None:
        while state.next * self.interval_s <= view.now_s:
            drawn = self.sample(state, state.next, view)
            members = {client for client in drawn if state.due.get(client) == state.next}
            if any(client in view.running for client in members):
                return None
            if held := [update for update in view.held if update.client in members]:
                return self.average(held)
            self.close(state)
        return None

    def close(self, state: Polls) -> None:
        """Finish the current poll and advance to the next poll."""
        del state.drawn[state.next]
        state.next, state.taken = state.next + 1, []

    def average(self, updates: Collection[Update]) -> Step:
        """Return the step that averages these updates with the current model."""
        share = 1.0 / (len(updates) + 1)
        by_client = sorted(updates, key=lambda update: update.client)
        return Step(by_client, [share] * len(updates), base_scale=share)

    def stepped(self, state: Polls, step: Step, view: View) -> None:
        self.close(state)

    def wake_s(self, state: Polls, view: View) -> float | None:
        return state.next * self.interval_s

    def sample(self, state: Polls, poll: int, view: View) -> frozenset[int]:
        """Return the clients of a poll. Polls are always drawn in order: earlier polls, if not yet drawn, are
        drawn first."""
        for number in range(max(state.drawn, default=state.next - 1) + 1, poll + 1):
            clients = len(view.devices)
            drawn = view.rng.choice(clients, self.size(clients), replace=False, shuffle=False)
            state.drawn[number] = frozenset(drawn.tolist())
        return state.drawn[poll]
