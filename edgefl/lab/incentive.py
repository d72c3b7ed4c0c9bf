"""Measures the gain of a client that slows itself down (Ma 2024, equation 9).

This module also tests whether each client gets its weight p_i of equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from edgefl.lab.convergence import Ratio, judged, worst
from edgefl.lab.influence import FAST_ONES, FEDSTALEWEIGHT, Outcome, Shares, simulate
from edgefl.lab.study import Finding
from edgefl.strategies.base import Client
from edgefl.strategies.fedstaleweight import FedStaleWeight

RULES: tuple[Literal["immediate", "after-step"], ...] = ("immediate", "after-step")
SIZE = 5
"""The buffer size b."""
SKIP = 200
"""Number of versions at the start that are ignored, because slow clients have not yet sent an update."""


def utility(
    rate: float, groups: Sequence[tuple[float, int]], size: int, *, again: bool
) -> tuple[float, float]:
    """Return u and ∂u/∂r of equation 9 for a client with the given ``rate``.

    Both are expected values over the other ``size`` − 1 updates in a buffer. The clients of these updates are
    drawn with probability proportional to their rates, with replacement if ``again`` is True. ``groups``
    contains the rate and the number of clients of each group of other clients.

    >>> u, slope = utility(1.0, [(1.0, 3)], 2, again=True)  # C = 1, D = 2 and A = 3: 1/(1 + 2 + 2 + 3)
    >>> u, slope
    (0.125, 0.03125)
    """
    others = sum(each * count for each, count in groups)  # A of equation 9
    u = slope = 0.0
    for picked in product(range(len(groups)), repeat=size - 1):
        left, chance = [count for _, count in groups], 1.0
        for at in picked:
            chance *= left[at] * groups[at][0] / sum(n * r for n, (r, _) in zip(left, groups, strict=True))
            left[at] -= 0 if again else 1
        inverse = sum(1.0 / groups[at][0] for at in picked)  # C of equation 9
        rest = sum((others - groups[at][0]) / groups[at][0] for at in picked)  # D of equation 9
        below = inverse * rate**2 + (size + rest) * rate + others
        u += chance * rate / below
        slope += chance * (others - inverse * rate**2) / below**2
    return u, slope


def throttling(quick: bool = False) -> Finding:
    """Slow one fast client down, and compare its share of the weight and the share's slope with equation 9.

    The rates r_i are the observed rates of updates, because a client that waits for the next version (restart
    rule "after-step") sends fewer updates than it could. Under this rule, the updates in a buffer come from
    different clients. The prediction draws these clients one after another, which is an approximation.
    """
    versions, seeds = (1_500, range(1, 2)) if quick else (4_000, range(1, 11))
    factors = (1.0, 4.0) if quick else (1.0, 1.5, 2.0, 4.0)
    found: dict[str, list[list[float]]] = {rule: [] for rule in RULES}
    slopes: dict[str, list[float]] = {rule: [] for rule in RULES}
    kept = []
    for seed in seeds:
        for rule in RULES:
            strategy = FedStaleWeight(buffer_size=SIZE, restart=rule)
            runs = [simulate(strategy, versions, seed, slowed=factor, skip=SKIP) for factor in factors]
            seen = [float(run.share[0]) / len(FEDSTALEWEIGHT) / SIZE for run in runs]
            rates = [_rates(run) for run in runs]
            found[rule].append([u / _expected(rate, rule)[0] for u, rate in zip(seen, rates, strict=True)])
            full, last = rates[0], rates[-1]
            between = [_expected([r, *full[1:]], rule)[1] for r in np.linspace(last[0], full[0], 9)]
            slopes[rule].append((seen[0] - seen[-1]) / (full[0] - last[0]) / float(np.mean(between)))
            kept.append(seen[-1] / seen[0])
    left = ", ".join(f"{rule} {np.mean(kept[at :: len(RULES)]):.2f}×" for at, rule in enumerate(RULES))
    return judged(
        "u of a client that throttles itself, and ∂u/∂r, under both restart rules",
        "Ma 2024, section 4.2.1, equation 9",
        "∂u/∂r = (A − C·r²)/(C·r² + (b + D)·r + A)², above 0",
        [
            worst("u, immediate", found["immediate"], 0.05),
            worst("u, after-step", found["after-step"], 0.1),
            *(Ratio(f"∂u/∂r, {rule}", slopes[rule], 0.2) for rule in RULES),
        ],
        f"{', '.join(f'{by:g}' for by in factors)} times slower; u at a quarter of the speed: {left}; n = 15",
        min(map(min, slopes.values())) > 0.0,
    )


def _rates(run: Outcome) -> list[float]:
    """Return updates per version: of client 0, and the means of the other fast and of the slow clients."""
    counts = np.bincount(run.client, minlength=len(FEDSTALEWEIGHT)) / run.versions
    fast, slow = counts[1 : len(FAST_ONES)], counts[len(FAST_ONES) :]
    return [float(counts[0]), float(fast.mean()), float(slow.mean())]


def _expected(rates: Sequence[float], rule: str) -> tuple[float, float]:
    own, fast, slow = rates
    groups = ((fast, len(FAST_ONES) - 1), (slow, len(FEDSTALEWEIGHT) - len(FAST_ONES)))
    return utility(own, groups, SIZE, again=rule == "immediate")


@dataclass(frozen=True, kw_only=True)
class Targeted(FedStaleWeight):
    """FedStaleWeight with target weights p_i proportional to 1, 2, 3, … for clients 0, 5, 10, 1, 6, …

    In this order, two fast clients (0 to 9) are followed by one slow client (10 to 14), so both the fast and
    the slow clients get small and large weights.
    """

    def importance(self, devices: Sequence[Client]) -> Sequence[float]:
        return [float(p) for p in target(len(devices)) / len(devices)]


def target(clients: int) -> Shares:
    """Return n·p_i for each client i, where p_i are the target weights of `Targeted`.

    >>> (3.5 * target(6)).tolist()
    [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]
    """
    order = np.arange(clients).reshape(3, -1).T.ravel()
    found = np.empty(clients)
    found[order] = np.arange(1, clients + 1)
    return np.asarray(found / found.mean())


def any_target(quick: bool = False) -> Finding:
    """Test whether each client's weight is its target p_i if targets are unequal and unrelated to the rates.

    Weights are not normalised inside a buffer.
    """
    versions, seeds = (1_500, (1,)) if quick else (4_000, (1, 2, 3))
    how: dict[str, Any] = {"buffer_size": SIZE, "normalize": "running", "max_step": 1e9}
    rows = []
    for seed in seeds:
        row: list[float] = []
        for rule in RULES:
            run = simulate(Targeted(restart=rule, **how), versions, seed, skip=SKIP)
            row += (run.applied() / target(len(FEDSTALEWEIGHT))).tolist()
        rows.append(row)
    return judged(
        "each client gets the weight p_i, for any p_i, under both restart rules",
        "Ma 2024, equation 1, with equations 7 and 8",
        "p_i of the weight, which is 1 per version",
        [worst("weight/p_i, worst client", rows, 0.05)],
        "p_i from 1/120 to 15/120, n = 15; not normalised inside a buffer",
    )
