"""Races of algorithms over seeds: smoothed passages, paired ratios with intervals, and the verdict on both.

A curve of accuracies swings by percents from one evaluation to the next, so a race is not decided by the
first evaluation that touches the target: both curves are measured at equal periods, smoothed over `WINDOW`
of them, and compared seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np

from edgefl.results import compare

Verdict = Literal["reproduced", "smaller", "not reproduced", "out of reach"]

WINDOW = 5
"""Evaluations whose mean is one point of a smoothed curve."""
SAME_SIZE = 0.5
"""The share of a paper's effect, on the scale of logarithms, from which on ours counts as of its size."""


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The means over each ``window`` values in a row.

    >>> smoothed([1.0, 2.0, 3.0, 10.0], window=3)
    [2.0, 5.0]
    """
    return [fmean(values[at : at + window]) for at in range(len(values) - window + 1)]


def filled(
    at: Sequence[float], costs: Sequence[float], accuracies: Sequence[float], period: float
) -> tuple[list[float], list[float]]:
    """Costs and accuracies as if a model had been measured once a ``period`` until the next one was.

    Where versions are further apart than evaluations are asked for, as rounds are, there is one evaluation
    for each, and a window over so many would be wider than another's. ``at`` is where each was made.

    >>> filled([0, 10, 40], [0, 100, 400], [0.1, 0.2, 0.5], period=10)
    ([0, 100, 200.0, 300.0, 400], [0.1, 0.2, 0.2, 0.2, 0.5])
    """
    x, y = list(costs[:1]), list(accuracies[:1])
    for before in range(len(at) - 1):
        parts = max(1, round((at[before + 1] - at[before]) / period))
        step = (costs[before + 1] - costs[before]) / parts
        x += [costs[before] + part * step for part in range(1, parts)]
        y += [accuracies[before]] * (parts - 1)
        x.append(costs[before + 1])
        y.append(accuracies[before + 1])
    return x, y


def passage(
    costs: Sequence[float], accuracies: Sequence[float], target: float, window: int = WINDOW
) -> float:
    """The cost at which the smoothed accuracy first reaches ``target``; NaN where it does not.

    Between two points the curve is a straight line. Costs are smoothed as accuracies are, so that a window
    stands for its middle, however far apart evaluations are.

    >>> passage([0, 10, 20, 30], [0.0, 0.2, 0.4, 0.6], 0.3, window=1)
    15.0
    >>> passage([0, 10, 20, 30], [0.0, 0.9, 0.0, 0.3], 0.5, window=3)
    nan
    """
    points = list(zip(smoothed(costs, window), smoothed(accuracies, window), strict=True))
    for at, (cost, accuracy) in enumerate(points):
        if accuracy >= target - 1e-9:
            if at == 0:
                return cost
            before, lower = points[at - 1]
            return before + (cost - before) * min(1.0, (target - lower) / (accuracy - lower))
    return math.nan


def area(costs: Sequence[float], accuracies: Sequence[float], budget: float) -> float:
    """The mean accuracy over a budget: the area under the curve, which stays as it is after its end.

    >>> area([0.0, 10.0], [0.0, 0.5], budget=20.0)
    0.375
    """
    x = np.append(np.minimum(costs, budget), budget)
    y = np.append(accuracies, accuracies[-1])
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / budget)


class CostRatio(NamedTuple):
    """A cost over another of the same seed: geometric mean over seeds, and its 95% interval."""

    mean: float
    low: float
    high: float
    """0 and infinity where the interval is open on that side."""
    at_least: bool = False
    """In some seed the other was not there when its run ended: that one counts with its end."""

    def __str__(self) -> str:
        """The mean, or a bound on it, and the interval where there is one.

        >>> print(CostRatio(2.0, 1.6, 2.6), CostRatio(0.5, 0.0, 0.7), CostRatio(3.0, 0.0, math.inf), sep=", ")
        2.0× (1.6 to 2.6), < 0.5× (0.7 or less), 3.0×
        """
        above, below = self.low > 0.0, math.isfinite(self.high)
        sign, interval = "> " if self.at_least else "", ""
        if above and below:
            interval = f" ({self.low:.2g} to {self.high:.2g})"
        elif above:
            interval = f" ({self.low:.2g} or more)"
        elif below:
            sign, interval = "< ", f" ({self.high:.2g} or less)"
        return f"{sign}{self.mean:.1f}×{interval}"


def ratio(
    other: Sequence[float], mine: Sequence[float], other_end: Sequence[float], mine_end: Sequence[float]
) -> CostRatio | None:
    """The cost of the ``other`` over that of ``mine``, paired over seeds; None where a run ended too soon.

    Given is what it took each of them, NaN where it did not get there, and where its run ended: there it
    counts with its end, and the ratio is a bound. The interval is Student's t on the logarithms, open on the
    side that nobody has seen, and on both for one seed.

    >>> nan = math.nan
    >>> print(ratio([4.0, 4.4, 3.6], [2.0, 2.0, 2.0], [9.0] * 3, [9.0] * 3))
    2.0× (1.6 to 2.6)
    >>> print(ratio([nan, nan], [2.0, 2.0], [9.0, 9.0], [9.0, 9.0]))
    > 4.5× (4.5 or more)
    >>> ratio([nan], [5.0], [3.0], [9.0]) is None  # the other might have been first
    True
    """
    logs, at_least, at_most = [], False, False
    for there, here, there_end, here_end in zip(other, mine, other_end, mine_end, strict=True):
        if math.isnan(here):
            if math.isnan(there) or here_end < there:
                return None
            here, at_most = here_end, True
        elif math.isnan(there):
            if there_end < here:
                return None
            there, at_least = there_end, True
        logs.append(math.log(there / here))
    if at_least and at_most:
        return None
    found = compare.estimate(logs)
    half = math.inf if found.half is None else found.half
    low = 0.0 if at_most else math.exp(found.mean - half)
    high = math.inf if at_least or half == math.inf else math.exp(min(700.0, found.mean + half))
    return CostRatio(math.exp(found.mean), low, high, at_least)


def judged(found: CostRatio | None, paper: float | None) -> Verdict:
    """The verdict on a claim that the other takes ``paper`` times as much (None: only that it takes more).

    It is reproduced if our interval lies above 1 and our mean has at least half of the paper's effect in
    logarithms (√paper), smaller if only the first holds. "out of reach" is a race that some run ended too
    soon to settle.

    >>> judged(CostRatio(1.2, 1.1, 1.3), 5.7), judged(CostRatio(4.6, 3.1, 6.9), 5.7)
    ('smaller', 'reproduced')
    >>> judged(CostRatio(1.2, 0.8, 1.8), 1.2)
    'not reproduced'
    >>> judged(None, 2.0), judged(CostRatio(2.0, 1.5, math.inf, at_least=True), 9.0)
    ('out of reach', 'out of reach')
    """
    if found is None:
        return "out of reach"
    if found.low <= 1.0:
        return "out of reach" if found.at_least and found.mean > 1.0 else "not reproduced"
    if paper is None or math.log(found.mean) >= SAME_SIZE * math.log(paper):
        return "reproduced"
    return "out of reach" if found.at_least else "smaller"


def difference(mine: Sequence[float], other: Sequence[float]) -> compare.Estimate:
    """The difference of two figures, paired over seeds, with its 95% interval."""
    return compare.estimate([a - b for a, b in zip(mine, other, strict=True)])


def higher(found: compare.Estimate) -> bool:
    """Tells whether a difference's 95% interval lies above 0; never for a single seed.

    >>> higher(difference([0.9, 0.8, 0.9], [0.7, 0.6, 0.7])), higher(difference([0.9, 0.6], [0.7, 0.7]))
    (True, False)
    """
    return found.half is not None and found.mean - found.half > 0.0
