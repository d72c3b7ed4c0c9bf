"""Synchronous strategies: draw a cohort of clients, let it train from one version, and sum its updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec

from edgefl.errors import ConfigError
from edgefl.experiment import Count, NonNegative
from edgefl.sequences import PatchedSequence, sample
from edgefl.strategies.base import Client, Step, Strategy, Update, View, check_fits


@dataclass
class Round:
    """The members of one round (the clients that take part in it) and their progress."""

    version: int = -1
    """Base version of the round; −1 before the first round."""
    drawn: list[int] = field(default_factory=list)
    """Members that have not started yet, because their cancelled task of the last round has not ended."""
    running: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    size: int = 0
    """Number of updates after which the round ends."""
    copies: dict[int, int] = field(default_factory=dict)
    """Number of times that each member was drawn."""
    again: bool = False
    """Whether the last draw chose a client that has already delivered its update. This may complete the
    round."""


@dataclass(frozen=True, kw_only=True)
class Rounds(Strategy):
    """Draws a round's members uniformly from the connected clients; takes a step after ``cohort`` updates.

    Members are drawn without replacement unless a subclass overrides `draw`. If a member has not delivered
    its update when the server takes the step, its task is cancelled or its update is discarded. A member that
    is lost is replaced by another draw. A subclass defines `weights`.

    With ``redraw = false`` a lost member is not replaced: the members of a round start together, and the step
    follows after ``cohort`` updates, or after the updates of all remaining members if there are fewer.
    """

    lockstep: ClassVar[bool] = True

    cohort: Count | None = None
    """Number of updates per round; default 10, or as many as a smaller fleet allows."""
    over_selection: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    """Ratio of the number of members drawn to the number of updates for which the round waits (1.3 in
    Bonawitz et al. 2019)."""
    redraw: bool = True
    """Whether a lost member is replaced by another draw. Pairwise masks need ``false``, which is then the
    default."""
    gather_s: NonNegative = 10.0
    """Maximum time, in emulated seconds, that the first round waits for the whole fleet to connect. Otherwise
    the clients that connect first would be favoured."""

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        """Return the weight of each update in a round."""
        raise NotImplementedError

    def draw(self, state: Round, view: View, free: Sequence[int], count: int) -> Sequence[int]:
        """Draw ``count`` members from the ``free`` clients; a client that is drawn twice counts twice."""
        return sample(free, count, view.rng)

    def round_size(self, view: View) -> int:
        """Return the number of updates after which the next round ends; a subclass may draw it at random."""
        return self.size(len(view.devices))

    def size(self, clients: int) -> int:
        """Return the number of updates per round, for a fleet of ``clients``."""
        return self.cohort or max(1, min(10, int(clients / self.over_selection)))

    def members(self, clients: int) -> int:
        """Return the number of members per round: ⌈over_selection · cohort⌉."""
        return math.ceil(round(self.over_selection * self.size(clients), 9))

    def check(self, clients: int) -> None:
        check_fits("cohort", self.cohort, clients)
        if self.members(clients) > clients:
            raise ConfigError(
                f"strategy.over_selection × strategy.cohort must be at most the fleet's {clients} clients, "
                f"got {self.over_selection:g} × {self.size(clients)} = {self.members(clients)}"
            )

    def max_held(self, clients: int) -> int:
        return self.size(clients)

    @property
    def closed(self) -> bool:
        return not self.redraw

    def max_training(self, clients: int) -> int:
        """Return the maximum number of clients with a task.

        These are the members of a round. With over-selection, an equal number of other clients may still have
        a cancelled task of the last round.
        """
        return min(clients, self.members(clients) * (1 if self.over_selection == 1.0 else 2))

    def begin(self, devices: Sequence[Client]) -> Round:
        return Round()

    def assign(self, state: Round, view: View) -> Sequence[int]:
        clients = len(view.devices)
        if state.version != view.version:
            connected = len(view.idle) + view.training
            if state.version < 0 and connected < clients and view.now_s < self.gather_s:
                return ()
            state.version, state.drawn, state.size = view.version, [], self.round_size(view)
            state.running.clear()
            state.done.clear()
            state.copies.clear()
        if self.closed:
            return self._whole_round(state, view)
        missing = math.ceil(round(self.over_selection * state.size, 9)) - sum(state.copies.values())
        if missing <= 0 and not state.drawn:
            return ()
        idle, running = view.idle, view.running
        for client in [client for client in state.drawn if client not in idle and client not in running]:
            state.drawn.remove(client)
            del state.copies[client]
        if missing > 0:
            others = [client for client in running if client not in state.copies]
            for client in self.draw(state, view, PatchedSequence(idle, state.copies, others), missing):
                if client not in state.copies:
                    state.drawn.append(client)
                state.again = state.again or client in state.done
                state.copies[client] = state.copies.get(client, 0) + 1
        room = self.max_training(clients) - view.training
        start = [client for client in state.drawn if client in idle][:room]
        if start:
            state.running.update(start)
            state.drawn = [client for client in state.drawn if client not in state.running]
        return start

    def _whole_round(self, state: Round, view: View) -> Sequence[int]:
        """Return all members of the next round, if no round is running and enough clients are idle."""
        clients = len(view.devices)
        count = min(self.members(clients), len(view.idle) + view.training)
        room = self.max_training(clients) - view.training
        if state.copies or count < state.size or count > min(len(view.idle), room):
            return ()
        start = self.draw(state, view, view.idle, count)
        state.copies.update(dict.fromkeys(start, 1))
        state.running.update(start)
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

    def _updates(self, state: Round) -> int:
        """Return the number of updates after which the round ends. A client drawn twice sends only one."""
        size = state.size - sum(state.copies.values()) + len(state.copies)
        return min(size, max(1, len(state.copies))) if self.closed else size

    def _ended(self, state: Round, view: View) -> bool:
        return state.version == view.version and len(view.held) >= self._updates(state)

    def step(self, state: Round, view: View) -> Step | None:
        if not self._ended(state, view):
            return None
        order = sorted(view.held[: self._updates(state)], key=lambda update: update.client)
        updates = [update for update in order for _ in range(state.copies[update.client])]
        return Step(updates, self.weights(state, updates, view))

    def wake_s(self, state: Round, view: View) -> float | None:
        again, state.again = state.again, False
        if again and self._ended(state, view):  # otherwise no event might end the round
            return math.nextafter(view.now_s, math.inf)
        return self.gather_s if state.version < 0 else None
