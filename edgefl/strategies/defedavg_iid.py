"""DeFedAvg-IID: delayed averaging for clients with like data (Wang et al. 2024, arXiv:2402.11198)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgefl.strategies.base import Update, View
from edgefl.strategies.buffered import Buffered


@dataclass(frozen=True, kw_only=True)
class DeFedAvgIID(Buffered):
    """w ← w + (η/n) Σ_i Δ_i over the first n = ``buffer_size`` updates to finish, stale or not (Algorithm 2).

    A client starts again at once, from the newest model.
    """

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        return [1.0 / len(updates)] * len(updates)
