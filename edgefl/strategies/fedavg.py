"""FedAvg: synchronous averaging (McMahan et al. 2017, arXiv:1602.05629)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgefl.strategies.base import Update, View
from edgefl.strategies.rounds import Rounds


@dataclass(frozen=True, kw_only=True)
class FedAvg(Rounds):
    """w ← w + η_g Σ_i p_i·Δ_i over a round's cohort, p_i ∝ examples, or 1/n.

    >>> FedAvg(cohort=10, over_selection=1.3).members(clients=100)
    13
    """

    weighting: Literal["examples", "uniform"] = "examples"
    """A client counts by the examples that it trains on, or as every other."""

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        total = sum(update.examples for update in updates)
        if self.weighting == "uniform" or total == 0:
            return [1.0 / len(updates)] * len(updates)
        return [update.examples / total for update in updates]
