"""FedBuff: buffered asynchronous aggregation (Nguyen et al. 2022, AISTATS, arXiv:2106.06639)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgefl.experiment import Decay, NonNegative
from edgefl.kernels.steps import ServerOptimizer
from edgefl.strategies.base import Update, View
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

    def max_weight(self, clients: int) -> float | None:
        return None if self.normalize else 1.0 / self.size(clients)

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr, momentum=self.momentum)

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        scale = [(1.0 + update.staleness) ** -self.exponent for update in updates]
        total = sum(scale) if self.normalize else len(updates)
        return [one / total for one in scale]
