"""FedAvg: synchronous averaging (McMahan et al. 2017, arXiv:1602.05629)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgefl.errors import ConfigError
from edgefl.strategies.base import Update, View
from edgefl.strategies.rounds import Round, Rounds


@dataclass(frozen=True, kw_only=True)
class FedAvg(Rounds):
    """w ← w + η_g Σ_i p_i·Δ_i over a round's cohort, p_i ∝ examples, or 1/n.

    >>> FedAvg(cohort=10, over_selection=1.3).members(clients=100)
    13
    """

    weighting: Literal["examples", "uniform"] = "examples"
    """A client counts by the examples that it trains on, or as every other."""
    replacement: bool = False
    """Members are drawn with replacement: one that is drawn twice trains once and counts twice. McMahan draws
    without; the FedAvg that DeFedAvg compares itself with (Wang 2024, eqs. 2 and 3) with, and uniformly."""

    def check(self, clients: int) -> None:
        super().check(clients)
        if self.replacement and (self.over_selection != 1.0 or self.vectors or self.server_vectors):
            raise ConfigError(
                "strategy.replacement must be false with strategy.over_selection above 1, and for strategies "
                "whose clients or server keep vectors, got true"
            )

    def draw(self, state: Round, view: View, free: Sequence[int], count: int) -> Sequence[int]:
        if not self.replacement:
            return super().draw(state, view, free, count)
        here = sorted({*view.idle, *view.running, *state.copies})
        return [here[int(index)] for index in view.rng.integers(len(here), size=count)] if here else []

    def max_weight(self, clients: int) -> float | None:
        return 1.0 / self.size(clients) if self.weighting == "uniform" and not self.replacement else None

    @property
    def samples(self) -> bool:
        return self.over_selection == 1.0 and not self.replacement and type(self).draw is FedAvg.draw

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        total = sum(update.examples for update in updates)
        if self.weighting == "uniform" or total == 0:
            return [1.0 / len(updates)] * len(updates)
        return [update.examples / total for update in updates]
