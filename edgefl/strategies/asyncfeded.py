"""AsyncFedED: steps by Euclidean distance, and adaptive local work (Wang et al. 2022, arXiv:2205.13797)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from edgefl.experiment import NonNegative, Positive
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import Client, Step, Until, Update, View


@dataclass
class LocalSteps:
    """K_i: the local steps of each client's next trip, and of its first."""

    next: list[int]
    first: list[int]


@dataclass(frozen=True, kw_only=True)
class AsyncFedED(Asynchronous):
    """w ← w + η_i·Δ_i on every arrival, with η_i = λ/(γ_i + ε) and γ_i = ‖w_n − w_k‖/‖Δ_i‖.

    γ_i measures how far the model has moved since client i downloaded it, in lengths of its update. The
    client's next trip has K_i ← K_i + ⌊(γ̄ − γ_i)·κ⌋ local steps, at least one, so that staleness is
    driven towards γ̄. Its first has what ``[training]`` asks for. λ, ε, γ̄ and κ are tuned for each data set
    in the paper; K_i has no upper bound there.

    >>> strategy = AsyncFedED(lam=2.0, epsilon=0.5)
    >>> strategy.rate(norm=2.0, distance=3.0)
    1.0
    """

    measures: ClassVar[bool] = True

    lam: Positive = 1.0
    """λ."""
    epsilon: Positive = 1.0
    """ε."""
    target: NonNegative = 3.0
    """γ̄."""
    kappa: NonNegative = 1.0
    """κ, local steps; 0: every trip has what ``[training]`` asks for."""
    max_growth: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """The most by which a client's first number of steps may grow."""

    def max_held(self, clients: int) -> int:
        return 1

    def begin(self, devices: Sequence[Client]) -> LocalSteps:
        steps = [max(1, device.steps) for device in devices]
        return LocalSteps(list(steps), steps)

    def until(self, state: LocalSteps, client: int, view: View) -> Until | None:
        return Until(steps=state.next[client]) if self.kappa else None

    def staleness(self, norm: float, distance: float) -> float:
        """γ of an update of this norm, made from a model at this distance."""
        return distance / norm if norm else math.inf if distance else 0.0

    def rate(self, norm: float, distance: float) -> float:
        """η of such an update."""
        return self.lam / (self.staleness(norm, distance) + self.epsilon)

    def arrive(self, state: LocalSteps, update: Update, view: View) -> Sequence[Update]:
        change = (self.target - self.staleness(update.norm, update.distance)) * self.kappa
        most = self.max_growth * state.first[update.client]
        state.next[update.client] = math.floor(min(most, max(1.0, state.next[update.client] + change)))
        return super().arrive(state, update, view)

    def step(self, state: LocalSteps, view: View) -> Step | None:
        if not view.held:
            return None
        update = view.held[0]
        return Step((update,), (self.rate(update.norm, update.distance),))
