"""FedBuff: buffered asynchronous aggregation (Nguyen et al. 2022, AISTATS, arXiv:2106.06639)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgefl.errors import ConfigError
from edgefl.experiment import Decay, NonNegative, Positive
from edgefl.kernels.steps import ServerOptimizer
from edgefl.strategies.base import Privacy, Update, View
from edgefl.strategies.buffered import Buffered


@dataclass(frozen=True, kw_only=True)
class FedBuff(Buffered):
    """w ← w + η_g · (1/K) Σ_j s(τ_j)·Δ_j over a buffer of K, with s(τ) = (1 + τ)^−exponent.

    Algorithm 1, line 13, divides by K, and B.2 takes the weighted sum and not the weighted average, so a
    buffer of stale updates makes a smaller step; ``normalize`` divides by Σ s(τ_j) instead.

    >>> FedBuff(buffer_size=2).size(clients=24)
    2
    """

    exponent: NonNegative = 0.5
    """Of s(τ): 0 counts every update alike, however stale."""
    normalize: bool = False
    """Divide by Σ s(τ_j) instead of K."""
    momentum: Decay = 0.0
    """Momentum of the server's SGD."""
    clip_norm: Positive | None = None
    """L of the private form: an update counts as Δ_j·min(1, L/‖Δ_j‖) (line 9)."""
    noise_multiplier: NonNegative = 0.0
    """σ of the private form: DP-FTRL's tree over the versions (lines 3, 14 and 15; Kairouz et al. 2021) adds
    noise of deviation σ·L/K a node to the step, since one update can change it by L/K at most."""

    def check(self, clients: int) -> None:
        super().check(clients)
        if self.clip_norm is None and self.noise_multiplier:
            raise ConfigError(
                "strategy.noise_multiplier must go with a strategy.clip_norm, got "
                f"{self.noise_multiplier:g} without one"
            )
        if self.clip_norm is not None and self.normalize:
            raise ConfigError(
                "strategy.normalize must be false with a strategy.clip_norm (an update could weigh more than "
                "1/K), got true"
            )

    def privacy(self, clients: int) -> Privacy | None:
        if self.clip_norm is None:
            return None
        return Privacy(self.clip_norm, self.noise_multiplier * self.clip_norm / self.size(clients))

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr, momentum=self.momentum)

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        scale = [(1.0 + update.staleness) ** -self.exponent for update in updates]
        total = sum(scale) if self.normalize else len(updates)
        return [one / total for one in scale]
