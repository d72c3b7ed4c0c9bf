"""AsySG: asynchronous stochastic gradient (Lian et al. 2015, NeurIPS, arXiv:1506.08272)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgefl.strategies.base import Update, View
from edgefl.strategies.buffered import Buffered


@dataclass(frozen=True, kw_only=True)
class AsySG(Buffered):
    """w ← w − γ Σ_m g_m over a buffer of M stale gradients: AsySG-con, Algorithm 1.

    With ``training.steps = 1`` an update is −η_ℓ·g, so γ = server_lr · training.lr. Gradients are summed, not
    averaged. Unlike in the paper, clients may take several local steps; whole updates are then summed.
    """

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        return [1.0] * len(updates)
