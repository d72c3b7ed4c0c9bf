"""FedBuff: buffered asynchronous aggregation (Nguyen et al. 2022, AISTATS, arXiv:2106.06639)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgefl.experiment import Decay, NonNegative
from edgefl.kernels.steps import ServerOptimizer
from edgefl.sequences import added
from edgefl.strategies.base import Update, View
from edgefl.strategies.buffered import Buffered


@dataclass(frozen=True, kw_only=True)
class FedBuff(Buffered):
    """w ← w + η_g · (1/K) Σ_j s(τ_j)·Δ_j over a buffer of K updates, with s(τ) = (1 + τ)^−exponent.

    Algorithm 1 (line 13) divides by K, and appendix B.2 uses a weighted sum, not a weighted average, so stale
    updates lead to a smaller step; with ``normalize``, the sum is divided by Σ s(τ_j) instead.

    >>> FedBuff(buffer_size=2).size(clients=24)
    2
    """

    exponent: NonNegative = 0.5
    """Exponent of the staleness discount s(τ); with 0, staleness has no effect."""
    normalize: bool = False
    """Whether the sum is divided by Σ s(τ_j) instead of K."""
    weighting: Literal["uniform", "examples"] = "uniform"
    """With ``examples``, an update from n_j examples has the weight n_j·s(τ_j), and the sum is divided by
    Σ n_j instead of K (appendix C.6.2). With ``uniform``, the number of examples does not matter."""
    momentum: Decay = 0.0
    """Momentum of the server's SGD."""

    def max_weight(self, clients: int) -> float | None:
        bounded = not self.normalize and self.weighting == "uniform"
        return 1.0 / self.size(clients) if bounded else None

    def optimizer(self) -> ServerOptimizer:
        return ServerOptimizer(lr=self.server_lr, momentum=self.momentum)

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        counts = [update.examples if self.weighting == "examples" else 1 for update in updates]
        scale = [
            count * (1.0 + update.staleness) ** -self.exponent
            for count, update in zip(counts, updates, strict=True)
        ]
        total = added(scale) if self.normalize else sum(counts)
        return [one / total for one in scale] if total else [1.0 / len(updates)] * len(updates)
