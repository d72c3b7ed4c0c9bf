"""AsyncFedED: step sizes from Euclidean distances and adaptive numbers of local steps.

Wang et al. 2022, arXiv:2205.13797.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from edgefl.experiment import NonNegative, Positive
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import Client, Step, Until, Update, View


@dataclass(frozen=True, kw_only=True)
class AsyncFedED(Asynchronous):
    """w ← w + η_i·Δ_i on every arrival, with η_i = λ/(γ_i + ε) and γ_i = ‖w_n − w_k‖/‖Δ_i‖.

    γ_i is the distance that the global model has moved since client i downloaded it, divided by the norm of
    the client's update. The client's next trip has K_i ← K_i + ⌊(γ̄ − γ_i)·κ⌋ local steps, but at least one;
    this drives γ_i towards γ̄. The first trip has as many steps as ``[training]`` sets. The paper tunes λ, ε,
    γ̄ and κ for each data set and does not bound K_i.

    >>> strategy = AsyncFedED(lam=2.0, epsilon=0.5)
    >>> strategy.rate(norm=2.0, distance=3.0)
    1.0
    """

    measures: ClassVar[bool] = True

    lam: Positive = 1.0
    """λ: numerator of the step size η_i."""
    epsilon: Positive = 1.0
    """ε: constant added to the staleness γ_i, so that the step size η_i is at most λ/ε."""
    target: NonNegative = 3.0
    """γ̄: target of the staleness γ_i."""
    kappa: NonNegative = 1.0
    """κ: number of local steps added for each unit by which the staleness γ_i is below its target γ̄; if
    κ = 0, every trip has as many steps as ``[training]`` sets."""
    max_growth: Annotated[float, msgspec.Meta(ge=1)] = 10.0
    """Upper bound on the number of local steps, as a multiple of the steps of the client's first trip."""

    def max_held(self, clients: int) -> int:
        return 1

    def begin(self, devices: Sequence[Client]) -> list[int]:
        """Return K_i, the number of local steps in each client's next trip."""
        return [max(1, device.steps) for device in devices]

    def until(self, state: list[int], client: int, view: View) -> Until | None:
        return Until(steps=state[client]) if self.kappa else None

    def staleness(self, norm: float, distance: float) -> float:
        """Return the staleness γ of an update with this L2 norm.

        ``distance`` is the L2 distance from the update's base version to the current model.
        """
        return distance / norm if norm else math.inf if distance else 0.0

    def rate(self, norm: float, distance: float) -> float:
        """Return the step size η for an update with this ``norm`` and ``distance`` (see `staleness`)."""
        return self.lam / (self.staleness(norm, distance) + self.epsilon)

    def arrive(self, state: list[int], update: Update, view: View) -> Sequence[Update]:
        change = (self.target - self.staleness(update.norm, update.distance)) * self.kappa
        most = self.max_growth * max(1, view.devices[update.client].steps)
        state[update.client] = math.floor(min(most, max(1.0, state[update.client] + change)))
        return super().arrive(state, update, view)

    def step(self, state: list[int], view: View) -> Step | None:
        if not view.held:
            return None
        update = view.held[0]
        return Step((update,), (self.rate(update.norm, update.distance),))
