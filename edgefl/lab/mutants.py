"""Mutants: deliberately wrong implementations of strategies, which test the verdicts of `edgefl reproduce`.

A mutant replaces the arm (the algorithm) that a claim is about, with the same settings, step sizes and seeds.
If the claim gets the same verdict with a mutant, the claim does not show that the arm is correct
(`edgefl.lab.claims`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgefl.strategies.base import Step, Update, View
from edgefl.strategies.defedavg_iid import DeFedAvgIID
from edgefl.strategies.defedavg_niid import Buffers, DeFedAvgNIID
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import Expectation, FedStaleWeight


class Mutant(NamedTuple):
    """A wrong implementation, described by changes to the settings of an arm (an algorithm in a study)."""

    label: str
    changes: tuple[str, ...]
    """Assignments in the form that ``edgefl run --set`` accepts."""


def _one(weights: Sequence[float], kept: int) -> list[float]:
    """Return weights that assign the total weight to the update with the index ``kept``."""
    return [sum(weights) if at == kept else 0.0 for at in range(len(weights))]


class _DividesTwice:
    """A mixin that divides the sum of n updates by n² instead of n."""

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        right = super().weights(state, updates, view)  # type: ignore[misc]
        return [weight / len(updates) for weight in right]


class _FirstUpdateOnly:
    """A mixin that gives the weight of all updates to the first update."""

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        return _one(super().weights(state, updates, view), 0)  # type: ignore[misc]


# ---- FedStaleWeight --------------------------------------------------------------------------------


class SquaredWeights(FedStaleWeight):
    """Uses the weight α² instead of α."""

    def raw(self, staleness: float, size: int) -> float:
        return super().raw(staleness, size) ** 2


class FourthRootWeights(FedStaleWeight):
    """Uses the weight α^¼ instead of α."""

    def raw(self, staleness: float, size: int) -> float:
        return math.sqrt(math.sqrt(super().raw(staleness, size)))


class OnlyTheStalest(FedStaleWeight):
    """Gives the weight of the whole buffer to the stalest update, which has the largest weight α."""

    def weights(self, state: Expectation, updates: Sequence[Update], view: View) -> Sequence[float]:
        right = super().weights(state, updates, view)
        return _one(right, right.index(max(right)))


class BenchWeights(FedStaleWeight):
    """Uses the weights of the published benchmark, b·E[τ]/n, which omit the + 1 and the newest staleness."""

    def raw(self, staleness: float, size: int) -> float:
        return size * staleness

    def arrive(self, state: Expectation, update: Update, view: View) -> Sequence[Update]:
        older = state.credit.get(update.client)
        state.credit[update.client] = float(update.staleness)
        if older is not None:
            super().arrive(state, update._replace(staleness=int(older)), view)
        return ()

    def weights(self, state: Expectation, updates: Sequence[Update], view: View) -> Sequence[float]:
        fresh = not any(state.average.mean([update.client for update in updates]).tolist())
        return [0.0] * len(updates) if fresh else super().weights(state, updates, view)


# ---- FedBuff ---------------------------------------------------------------------------------------


class GrowingWeights(FedBuff):
    """Uses the weight (1 + τ)^exponent instead of s(τ) = (1 + τ)^−exponent."""

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        right = super().weights(state, updates, view)
        pairs = zip(right, updates, strict=True)
        return [weight * (1.0 + update.staleness) ** (2 * self.exponent) for weight, update in pairs]


class DividesByKTwice(_DividesTwice, FedBuff):
    """Divides the sum of K updates by K² instead of K."""


class FirstOfTheBuffer(_FirstUpdateOnly, FedBuff):
    """Gives the weight of the whole buffer to the first update."""


class OneMoreInTheBuffer(FedBuff):
    """Makes a version from K + 1 updates instead of K."""

    def size(self, clients: int) -> int:
        return super().size(clients) + 1


class TenInTheBuffer(FedBuff):
    """Makes a version from ten updates, for any K."""

    def size(self, clients: int) -> int:
        return 10


# ---- DeFedAvg --------------------------------------------------------------------------------------


class CountsOnce(DeFedAvgNIID):
    """Counts a client only once even if it is drawn twice."""

    def _average(self, updates: Sequence[Update]) -> Step:
        return super()._average(list({update.task: update for update in updates}.values()))


class DrawsTheReady(DeFedAvgNIID):
    """Draws clients with a full send buffer first, and therefore fast clients more often than slow ones."""

    def draw(self, state: Buffers, view: View, present: Sequence[int], count: int) -> list[int]:
        ready = list(state.latest)[:count]
        return ready + super().draw(state, view, present, count - len(ready))


class DrawsTheFirstHalf(DeFedAvgNIID):
    """Never draws the second half of the clients."""

    def draw(self, state: Buffers, view: View, present: Sequence[int], count: int) -> list[int]:
        return super().draw(state, view, present[: max(1, len(present) // 2)], count)


class AveragesTwice(DeFedAvgNIID):
    """Divides the sum of n updates by n² instead of n."""

    def _average(self, updates: Sequence[Update]) -> Step:
        right = super()._average(updates)
        return right._replace(weights=[weight / len(updates) for weight in right.weights])


class DividesByNTwice(_DividesTwice, DeFedAvgIID):
    """Divides the sum of n updates by n² instead of n."""


class FirstToFinish(_FirstUpdateOnly, DeFedAvgIID):
    """Gives the weight of all n updates to the first update."""


def _class(label: str, kind: type) -> Mutant:
    return Mutant(label, (f'strategy.name="{__name__}:{kind.__name__}"',))


STALENESS = "staleness"
"""Key in `MUTANTS` for claims about the effect of the buffer size K on staleness."""
PRIVATE = "private"
"""Key in `MUTANTS` for claims about FedBuff with noise that the server adds: no weight may exceed 1/K."""
_EVERY_AGE, _TWICE = Mutant("no s(τ)", ("strategy.exponent=0",)), _class("1/K²", DividesByKTwice)
MUTANTS: Mapping[str, tuple[Mutant, ...]] = {
    "fedstaleweight": (
        _class("α²", SquaredWeights),
        _class("α^¼", FourthRootWeights),
        Mutant("last staleness only", ("strategy.window=1",)),
        _class("only the stalest update", OnlyTheStalest),
        _class("the published bench's weights", BenchWeights),
    ),
    "fedbuff": (
        _EVERY_AGE,
        _class("1/s(τ)", GrowingWeights),
        _TWICE,
        _class("only the first update", FirstOfTheBuffer),
    ),
    "defedavg-niid": (
        _class("drawn twice counts once", CountsOnce),
        _class("draws the ready first", DrawsTheReady),
        _class("draws the first half", DrawsTheFirstHalf),
        _class("1/n²", AveragesTwice),
    ),
    "defedavg-iid": (
        Mutant("clients wait for the step", ("strategy.restart=after-step",)),
        _class("1/n²", DividesByNTwice),
        _class("only the first update", FirstToFinish),
    ),
    STALENESS: (_class("K + 1", OneMoreInTheBuffer), _class("10 whatever K", TenInTheBuffer)),
    PRIVATE: (_EVERY_AGE, _TWICE),
}
"""Mutants, keyed by the strategy that a claim is about, or by the `Finding.family` of the claim."""
