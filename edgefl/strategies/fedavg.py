"""FedAvg: synchronous averaging (McMahan et al. 2017, arXiv:1602.05629)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgefl.ascending import Changed
from edgefl.errors import ConfigError
from edgefl.strategies.base import Sampling, Update, View
from edgefl.strategies.rounds import Round, Rounds

FEWEST = 40
"""Clients of a mean Poisson cohort: one of nobody then has a chance of e⁻⁴⁰, and δ no share in it."""


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
    cohorts: Literal["fixed", "poisson"] = "fixed"
    """``poisson``: each client is drawn for a round or not, by itself, with the chance cohort/fleet, and an
    update counts 1/cohort however many there are. For that draw noise hides most (docs/privacy.md)."""

    def check(self, clients: int) -> None:
        super().check(clients)
        if self.replacement and (self.over_selection != 1.0 or self.vectors or self.server_vectors):
            raise ConfigError(
                "strategy.replacement must be false with strategy.over_selection above 1, and for strategies "
                "whose clients or server keep vectors, got true"
            )

        if self.cohorts == "poisson":
            plain = (self.weighting, self.over_selection, self.replacement) == ("uniform", 1.0, False)
            if not plain or self.vectors or self.server_vectors or self.size(clients) < FEWEST:
                raise ConfigError(
                    "strategy.cohorts must be 'fixed' unless weighting = 'uniform', without over_selection, "
                    f"replacement and vectors, and for a strategy.cohort below {FEWEST}, got 'poisson'"
                )

    def _most(self, clients: int) -> int:
        """The largest round: with Poisson's cohorts 9 deviations above the mean, which none is."""
        size = self.size(clients)
        return size if self.cohorts == "fixed" else min(clients, math.ceil(size + 9 * math.sqrt(size)))

    def max_held(self, clients: int) -> int:
        return self._most(clients)

    def max_training(self, clients: int) -> int:
        return super().max_training(clients) if self.cohorts == "fixed" else self._most(clients)

    def wanted(self, view: View) -> int:
        clients = len(view.devices)
        if self.cohorts == "fixed":
            return self.size(clients)
        return max(1, min(self._most(clients), int(view.rng.binomial(clients, self.size(clients) / clients))))

    def draw(self, state: Round, view: View, free: Sequence[int], count: int) -> Sequence[int]:
        if not self.replacement:
            return super().draw(state, view, free, count)
        others = {*view.running, *state.copies}
        here = Changed(view.idle, (), [client for client in others if client not in view.idle])
        return [here[index] for index in view.rng.integers(len(here), size=count).tolist()] if here else []

    def max_weight(self, clients: int) -> float | None:
        return 1.0 / self.size(clients) if self.weighting == "uniform" and not self.replacement else None

    def sampling(self, clients: int) -> Sampling | None:
        if self.over_selection > 1.0 or self.replacement or type(self).draw is not FedAvg.draw:
            return None
        return Sampling(self.size(clients) / clients, self.cohorts == "poisson")

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        total = sum(update.examples for update in updates)
        if self.weighting == "uniform" or total == 0:
            size = len(updates) if self.cohorts == "fixed" else self.size(len(view.devices))
            return [1.0 / size] * len(updates)
        return [update.examples / total for update in updates]
