"""FedAvg: synchronous averaging (McMahan et al. 2017, arXiv:1602.05629)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgefl.errors import ConfigError
from edgefl.sequences import PatchedSequence
from edgefl.strategies.base import Sampling, Update, View, importance
from edgefl.strategies.rounds import Round, Rounds

MIN_POISSON_COHORT = 40
"""Minimum mean size of a Poisson cohort. With this mean, a cohort is empty with probability e⁻⁴⁰, which is
far below the δ of differential privacy."""

DRAWS_AND_SUMS = (
    *("begin", "assign", "_whole_round", "draw", "size", "members", "round_size", "until"),
    *("arrive", "lost", "cancel", "step", "stepped", "weights"),
)
"""Methods that decide which clients are in a step, and with which weights. If a subclass overrides any of
them, clients may not be drawn uniformly, or the update of one client may change the weights of others. The
subclass must then define `sampling` itself."""


@dataclass(frozen=True, kw_only=True)
class FedAvg(Rounds):
    """w ← w + η_g Σ_i p_i·Δ_i over a cohort of n clients per round.

    The weight p_i is proportional to the client's number of examples, or 1/n.

    >>> FedAvg(cohort=10, over_selection=1.3).members(clients=100)
    13
    """

    weighting: Literal["examples", "uniform"] = "examples"
    """Whether clients are weighted by the number of examples on which they train, or equally."""
    replacement: bool = False
    """Whether the clients of a round are drawn with replacement; a client that is drawn twice trains once and
    counts twice. McMahan et al. draw without replacement; the baseline of DeFedAvg (Wang 2024, eqs. 2 and 3)
    draws with replacement and uses uniform weights."""
    cohorts: Literal["fixed", "poisson"] = "fixed"
    """With ``fixed``, a round has ``cohort`` updates. With ``poisson``, each of the fleet's n clients joins a
    round independently with probability ``cohort``/n, and each update has the weight 1/``cohort``, whatever
    the size of the round. This leads to the lowest ε for the same noise (docs/privacy.md)."""

    def check(self, clients: int) -> None:
        super().check(clients)
        if self.replacement and (self.over_selection != 1.0 or self.vectors or self.server_vectors):
            raise ConfigError(
                "strategy.replacement must be false with strategy.over_selection above 1 and for strategies "
                "with broadcast or server vectors, got true"
            )

        if self.closed and (self.replacement or self.cohorts == "poisson"):
            raise ConfigError(
                "strategy.redraw = false, which pairwise masks need, allows neither strategy.replacement nor "
                "strategy.cohorts = 'poisson'"
            )

        if self.cohorts == "poisson":
            unmet = {
                "weighting = 'uniform'": self.weighting != "uniform",
                "over_selection = 1": self.over_selection != 1.0,
                "replacement = false": self.replacement,
                "a strategy without broadcast or server vectors": bool(self.vectors or self.server_vectors),
                f"a cohort of at least {MIN_POISSON_COHORT} clients (got {self.size(clients)})": (
                    self.size(clients) < MIN_POISSON_COHORT
                ),
            }
            if any(unmet.values()):
                needs = ", ".join(need for need, missing in unmet.items() if missing)
                raise ConfigError(f"strategy.cohorts = 'poisson' also requires {needs}")

    def _max_cohort(self, clients: int) -> int:
        """Return the maximum size of a round; for Poisson cohorts, the mean plus 9 standard deviations."""
        size = self.size(clients)
        return size if self.cohorts == "fixed" else min(clients, math.ceil(size + 9 * math.sqrt(size)))

    def max_held(self, clients: int) -> int:
        return self._max_cohort(clients)

    def max_training(self, clients: int) -> int:
        return super().max_training(clients) if self.cohorts == "fixed" else self._max_cohort(clients)

    def round_size(self, view: View) -> int:
        clients = len(view.devices)
        if self.cohorts == "fixed":
            return self.size(clients)
        drawn = int(view.rng.binomial(clients, self.size(clients) / clients))
        return max(1, min(self._max_cohort(clients), drawn))

    def draw(self, state: Round, view: View, free: Sequence[int], count: int) -> Sequence[int]:
        if not self.replacement:
            return super().draw(state, view, free, count)
        others = {*view.running, *state.copies}
        here = PatchedSequence(view.idle, (), [client for client in others if client not in view.idle])
        return [here[index] for index in view.rng.integers(len(here), size=count).tolist()] if here else []

    def max_weight(self, clients: int) -> float | None:
        bounded = self.weighting == "uniform" and not self.replacement and not self.closed
        return 1.0 / self.size(clients) if bounded else None

    def sampling(self, clients: int) -> Sampling | None:
        own = any(getattr(type(self), name) is not getattr(FedAvg, name) for name in DRAWS_AND_SUMS)
        if self.over_selection > 1.0 or self.replacement or own:
            return None
        if not self.gather_s:  # the first round then consists of the clients that connect first
            return None
        return Sampling(self.size(clients) / clients, self.cohorts == "poisson")

    def own_weight(self, examples: int, steps: int) -> float | None:
        if type(self).weights is not FedAvg.weights:
            return None
        return float(examples) if self.weighting == "examples" else 1.0

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        if self.cohorts == "poisson":
            return [1.0 / self.size(len(view.devices))] * len(updates)
        return importance(self.weighting, updates)
