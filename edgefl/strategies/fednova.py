"""FedNova: averaging normalised by local steps (Wang et al. 2020, arXiv:2007.07481)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgefl.sequences import added
from edgefl.strategies.base import Update, View
from edgefl.strategies.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedNova(FedAvg):
    """w ← w + η_g · τ_eff · Σ_i p_i·Δ_i/τ_i, where client i makes τ_i local steps and τ_eff = Σ_i p_i·τ_i.

    This is the form of the algorithm for plain SGD, where the normaliser ‖a_i‖₁ is the number of steps.
    """

    def max_weight(self, clients: int) -> float | None:
        return None

    def own_weight(self, examples: int, steps: int) -> float | None:
        if type(self).weights is not FedNova.weights:
            return None
        return (examples if self.weighting == "examples" else 1.0) / max(1, steps)

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        shares = super().weights(state, updates, view)
        steps = [max(1, update.steps) for update in updates]
        mean = added(share * count for share, count in zip(shares, steps, strict=True))
        return [share * mean / count for share, count in zip(shares, steps, strict=True)]
