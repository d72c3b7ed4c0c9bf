"""Synchronous strategies: a cohort is drawn, trained from one version, and summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from edgefl.ascending import Changed, drawn
from edgefl.errors import ConfigError
from edgefl.experiment import Count, NonNegative
from edgefl.strategies.base import Client, Step, Strategy, Update, View


@dataclass
class Round:
    """One round: who was drawn, and how far each is."""

    version: int = -1
    """The version that the members train from; −1 before the first round."""
    drawn: list[int] = field(default_factory=list)
    """Members that could not start yet: still giving up a task of the round before."""
    running: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    size: int = 0
    """Updates that it waits for."""
    copies: dict[int, int] = field(default_factory=dict)
    """By member, how often it was drawn."""


@dataclass(frozen=True, kw_only=True)
class Rounds(Strategy):
    """Each round draws members uniformly, without replacement unless a subclass draws otherwise (`draw`),
    from the connected clients and steps when ``cohort`` of them have delivered; whoever is later is cancelled
    or discarded.

    A member that is lost is replaced by another draw. A subclass says what each update weighs (`weights`).
    """

    cohort: Count | None = None
    """Updates in a round; by default 10, or what the fleet has if it is smaller."""
    over_selection: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    """Members drawn for each update that is waited for (Bonawitz et al. 2019 use 1.3)."""
    gather_s: NonNegative = 10.0
    """Emulated seconds that the first round waits for the whole fleet, so that no early comer is favoured."""

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        """The weight of each update of a round."""
        raise NotImplementedError

    def draw(self, state: Round, view: View, free: Sequence[int], count: int) -> Sequence[int]:
        """So many members, from those that are ``free``; one that is drawn twice counts twice."""
        return drawn(free, count, view.rng)

    def wanted(self, view: View) -> int:
        """The updates that a round which begins waits for; a subclass may draw their number."""
        return self.size(len(view.devices))

    def size(self, clients: int) -> int:
        """Updates in a round, for a fleet of so many clients."""
        return self.cohort or max(1, min(10, int(clients / self.over_selection)))

    def members(self, clients: int) -> int:
        """Members drawn for a round: ⌈over_selection · cohort⌉."""
        return math.ceil(round(self.over_selection * self.size(clients), 9))

    def check(self, clients: int) -> None:
        if self.cohort is not None and self.cohort > clients:
            raise ConfigError(
                f"strategy.cohort must be at most the fleet's {clients} clients, got {self.cohort}"
            )
        if self.members(clients) > clients:
            raise ConfigError(
                f"strategy.over_selection × strategy.cohort must be at most the fleet's {clients} clients, "
                f"got {self.over_selection:g} × {self.size(clients)} = {self.members(clients)}"
            )

    def max_held(self, clients: int) -> int:
        return self.size(clients)

    @property
    def lockstep(self) -> bool:
        return True

    def max_training(self, clients: int) -> int:
        """A round's members, and as many again that are still giving up a task of the round before."""
        return min(clients, self.members(clients) * (1 if self.over_selection == 1.0 else 2))

    def begin(self, devices: Sequence[Client]) -> Round:
        return Round()

    def assign(self, state: Round, view: View) -> Sequence[int]:
        clients = len(view.devices)
        if state.version != view.version:
            connected = len(view.idle) + view.training
            if state.version < 0 and connected < clients and view.now_s < self.gather_s:
                return ()
            state.version, state.drawn, state.size = view.version, [], self.wanted(view)
            state.running.clear()
            state.done.clear()
            state.copies.clear()
        missing = math.ceil(round(self.over_selection * state.size, 9)) - sum(state.copies.values())
        if missing <= 0 and not state.drawn:
            return ()
        idle, running = view.idle, view.running
        for client in [client for client in state.drawn if client not in idle and client not in running]:
            state.drawn.remove(client)
            del state.copies[client]
        if missing > 0:
            others = [client for client in running if client not in state.copies]
            for client in self.draw(state, view, Changed(idle, state.copies, others), missing):
                if client not in state.copies:
                    state.drawn.append(client)
                state.copies[client] = state.copies.get(client, 0) + 1
        room = self.max_training(clients) - view.training
        start = [client for client in state.drawn if client in idle][:room]
        if start:
            state.running.update(start)
            state.drawn = [client for client in state.drawn if client not in state.running]
        return start

    def arrive(self, state: Round, update: Update, view: View) -> Sequence[Update]:
        late = update.base_version != view.version or update.client not in state.running
        if late or len(state.done) >= state.size:
            if update.client in state.running:
                state.running.remove(update.client)
                del state.copies[update.client]
            return (update,)
        state.running.remove(update.client)
        state.done.add(update.client)
        return ()

    def lost(self, state: Round, client: int, view: View) -> None:
        if client in state.running or client in state.done:
            del state.copies[client]
        state.running.discard(client)
        state.done.discard(client)

    def cancel(self, state: Round, view: View) -> Sequence[int]:
        return [client for client in view.running if view.trained_from(client) < view.version]

    def step(self, state: Round, view: View) -> Step | None:
        size = state.size - sum(count - 1 for count in state.copies.values())
        if state.version != view.version or len(view.held) < size:
            return None
        order = sorted(view.held[:size], key=lambda update: update.client)
        updates = [update for update in order for _ in range(state.copies[update.client])]
        return Step(updates, self.weights(state, updates, view))

    def wake_s(self, state: Round, view: View) -> float | None:
        return self.gather_s if state.version < 0 else None
