"""Statistics of runs over seeds: estimates, p-values, and a learning curve's cost of reaching a target.

Accuracy can vary by several percentage points from one evaluation to the next, so the evaluation that first
reaches a target depends on chance and on the number of evaluations. Therefore, curves are sampled at equal
intervals, smoothed over `WINDOW` evaluations, and compared seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

WINDOW = 5
"""Each point of a smoothed curve is the mean of this many evaluations."""
Over = Literal["trips", "at_s", "version"]
"""Unit of a run's cost up to an evaluation: client trips, emulated seconds, or versions."""
Points = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean over seeds, and half the width of its 95% interval (None for one seed)."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        """Format the mean, and half the width of its interval with two significant digits.

        The mean has as many decimal places as the interval. If there is no interval, the mean has four
        significant digits.

        >>> print(Estimate(35.7512, None), Estimate(35.7512, 6.04), Estimate(0.04379, 0.0281), sep="; ")
        35.75; 35.8 ±6.0; 0.044 ±0.028
        """
        if self.half is None or not 1e-4 * abs(self.mean) < self.half < math.inf:
            return f"{self.mean:.4g}" + ("" if self.half is None else f" ±{self.half:.2g}")
        return self.at(f".{max(0, 1 - math.floor(math.log10(self.half)))}f")

    def at(self, digits: str) -> str:
        """Format the mean and half the width of its interval with the format ``digits``, such as ``.1f``."""
        return format(self.mean, digits) + ("" if self.half is None else f" ±{format(self.half, digits)}")


NONE = Estimate(math.nan, None)
"""The estimate of a metric that is missing in all runs."""


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean, and half the width of its 95% interval (Student's t).

    >>> str(estimate([1.0, 2.0, 3.0])), str(estimate([0.5]))
    ('2.0 ±2.5', '0.5')
    """
    x = np.array(values, dtype=np.float64)
    mean = float(x.mean())
    if len(x) < 2 or not np.isfinite(mean):
        return Estimate(mean, None)
    return Estimate(mean, float(half_95(x)))


def half_95(values: Points) -> Points:
    """Return half the width of the 95% interval of the mean over the first axis (Student's t)."""
    count, differences = len(values), values - values[0]  # exactly 0 if all values are equal
    half: Points = stdtrit(count - 1, 0.975) * differences.std(axis=0, ddof=1) / math.sqrt(count)
    return half


def share(value: Estimate) -> str:
    """Format an estimate of a share as a percentage."""
    if not np.isfinite(value.mean):
        return "–"
    return f"{value.mean:.1%}" if value.half is None else f"{value.mean * 100:.1f} ±{value.half * 100:.1f}%"


def points(found: Estimate) -> str:
    """Return a difference of shares as text, in percentage points.

    >>> points(Estimate(0.021, 0.004)), points(Estimate(-0.01, None))
    ('+2.1 ±0.4 points', '-1.0 points')
    """
    half = "" if found.half is None else f" ±{found.half * 100:.1f}"
    return f"{found.mean * 100:+.1f}{half} points"


def difference(mine: Sequence[float], other: Sequence[float]) -> Estimate:
    """Return the mean over seeds of the difference ``mine`` minus ``other``, with its 95% interval."""
    return estimate([a - b for a, b in zip(mine, other, strict=True)])


def higher(found: Estimate) -> bool:
    """Return True if the 95% interval of a difference is above 0; False for a single seed.

    >>> higher(difference([0.9, 0.8, 0.9], [0.7, 0.6, 0.7])), higher(difference([0.9, 0.6], [0.7, 0.7]))
    (True, False)
    """
    return found.half is not None and found.mean - found.half > 0.0


def p_value(found: Estimate, seeds: int) -> float:
    """Return the one-sided p-value for the claim that a mean over seeds is above 0 (Student's t).

    The p-value is 1 for a single seed.

    >>> p_value(Estimate(1.0, 1.0), seeds=3), p_value(Estimate(2.0, None), seeds=1)
    (0.025, 1.0)
    """
    if found.half is None or not math.isfinite(found.half):
        return 1.0
    if found.half == 0.0:
        return float(found.mean <= 0.0)
    t = found.mean / found.half * stdtrit(seeds - 1, 0.975)
    return round(float(stdtr(seeds - 1, -t)), 12)


def discovery_limit(ps: Sequence[float], share: float) -> float:
    """Return the largest p-value that passes Benjamini and Hochberg's (1995) correction; -1 if none does.

    ``share`` is the false discovery rate.

    >>> discovery_limit([0.001, 0.02, 0.024, 0.2], 0.05), discovery_limit([0.9], 0.05)
    (0.024, -1.0)
    """
    steps = (p for rank, p in enumerate(sorted(ps), 1) if p <= rank / len(ps) * share)
    return max(steps, default=-1.0)


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return the mean of each ``window`` consecutive values.

    >>> smoothed([1.0, 2.0, 3.0, 10.0], window=3)
    [2.0, 5.0]
    """
    return [fmean(values[at : at + window]) for at in range(len(values) - window + 1)]


def filled(
    at: Sequence[float], costs: Sequence[float], accuracies: Sequence[float], period: float
) -> tuple[list[float], list[float]]:
    """Return costs and accuracies with one evaluation per ``period``; accuracies are carried forward.

    A run whose versions are further apart than the period, for example a run with rounds, has fewer
    evaluations. Without the added ones, the same window would cover a longer time than in other runs.
    ``at`` holds the time of each evaluation, in the unit of ``period``.

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
    """Return the cost at which the smoothed accuracy first reaches ``target``; NaN if it does not.

    The curve is linear between points. Costs are also averaged over the window.

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


class LearningCurve(NamedTuple):
    """A run's accuracy (or another metric to be maximised) over its cost, one value per evaluation."""

    costs: list[float]
    accuracies: list[float]
    periodic: tuple[list[float], list[float]]
    """Costs and accuracies with one evaluation for each evaluation period of the experiment, as returned by
    `filled`. If the experiment sets no period, they are ``costs`` and ``accuracies``."""
    window: int = WINDOW
    """Number of evaluations that are averaged in each point of the smoothed curve."""

    def reached(self, target: float) -> float:
        """Return the cost at which the smoothed accuracy reached ``target``; NaN if it did not.

        A run with ``stop.accuracy`` stops when the mean of its last evaluations reaches the target. Its
        periodic curve may then stay just below the target, so the run's own evaluations are used instead.
        """
        passed = passage(*self.periodic, target, self.window)
        return passage(self.costs, self.accuracies, target, self.window) if math.isnan(passed) else passed

    def at_once(self, target: float) -> bool:
        """Return True if the first smoothed value, a mean of several evaluations, already reaches the target.

        The time at which the metric passed the target is then unknown, and is probably before the middle of
        the first window.
        """
        return self.window > 1 and any(
            y >= target - 1e-9 for y in smoothed(self.periodic[1], self.window)[:1]
        )

    @property
    def end(self) -> float:
        """The cost at the end of the smoothed curve; 0 for a curve without points."""
        return max(smoothed(self.periodic[0], self.window), default=0.0)


def area(costs: Sequence[float], accuracies: Sequence[float], budget: float) -> float:
    """Return the mean accuracy of a piecewise linear curve up to the cost ``budget``.

    A curve that ends earlier keeps its last value.

    >>> area([0.0, 10.0], [0.0, 0.5], budget=20.0)
    0.375
    """
    end = np.interp(budget, costs, accuracies)
    x = np.append(np.minimum(costs, budget), budget)
    y = np.append(np.where(np.less_equal(costs, budget), accuracies, end), end)
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / budget)


def ratio_digits(value: float) -> str:
    """Format a ratio with two decimal places, or with two significant digits if it is below 0.1.

    >>> [ratio_digits(value) for value in (0.0, 0.004, 0.0996, 0.1, 1234.5)]
    ['0.00', '0.0040', '0.10', '0.10', '1234.50']
    """
    return format(value, "#.2g" if 0.0 < value < 0.1 else ".2f")


class CostRatio(NamedTuple):
    """The ratio of two costs, paired by seed: the geometric mean over seeds, and its 95% interval."""

    mean: float
    low: float
    high: float
    """If the interval is open on one side, ``low`` is 0 or ``high`` is infinity."""
    at_least: bool = False
    """True if the mean is a lower bound, because a run in the numerator did not reach the target."""
    at_most: bool = False
    """True if the mean is an upper bound, because a run in the denominator did not reach the target."""

    def __str__(self) -> str:
        """Return the ratio as text.

        ``<`` or ``>`` marks a mean that is only a bound. An end of the interval at 0 or infinity is omitted.

        >>> print(CostRatio(2.0, 1.6, 2.6), CostRatio(0.5, 0.0, 0.7, at_most=True), sep=", ")
        2.0× (1.6 to 2.6), < 0.5× (0.7 or less)
        >>> print(CostRatio(3.0, 0.0, math.inf), CostRatio(3.0, 0.0, math.inf, at_most=True), sep=", ")
        3.0×, < 3.0×
        >>> print(CostRatio(0.004, 0.003, 0.006))
        0.0040× (0.003 to 0.006)
        """
        mean = format(self.mean, ".1f" if self.mean >= 0.05 else "#.2g")
        return self._text(mean, f"{self.low:.2g}", f"{self.high:.2g}")

    def for_tables(self) -> str:
        """Return the ratio as text, with numbers as in tables (`ratio_digits`).

        >>> print(CostRatio(2.0, 1.6, 2.6).for_tables())
        2.00× (1.60 to 2.60)
        """
        return self._text(ratio_digits(self.mean), ratio_digits(self.low), ratio_digits(self.high))

    def _text(self, mean: str, low: str, high: str) -> str:
        above, below = self.low > 0.0, math.isfinite(self.high)
        sign = "> " if self.at_least else "< " if self.at_most else ""
        interval = f" ({low} to {high})" if below else f" ({low} or more)" if above else ""
        interval = f" ({high} or less)" if below and not above else interval
        return f"{sign}{mean}×{interval}"


def ratio(
    other: Sequence[float], mine: Sequence[float], other_end: Sequence[float], mine_end: Sequence[float]
) -> CostRatio | None:
    """Return the ratio of the cost of ``other`` to the cost of ``mine``, paired by seed.

    ``other`` and ``mine`` are the costs of reaching the target (NaN if it was not reached); ``other_end`` and
    ``mine_end`` are the total costs of the runs. If a run did not reach the target, its total cost is used,
    and the ratio is a bound. If a run ended too early to give even a bound, or if a cost is 0 (the first
    model already reached the target), return None. The interval is computed from the logarithms (Student's
    t). It is open on any side on which the ratio has no bound, and on both sides for a single seed.

    >>> nan = math.nan
    >>> print(ratio([4.0, 4.4, 3.6], [2.0, 2.0, 2.0], [9.0] * 3, [9.0] * 3))
    2.0× (1.6 to 2.6)
    >>> print(ratio([nan, nan], [2.0, 2.0], [9.0, 9.0], [9.0, 9.0]))
    > 4.5× (4.5 or more)
    >>> ratio([nan], [5.0], [3.0], [9.0]) is None  # the other run might have been first
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
        if there <= 0.0 or here <= 0.0:
            return None
        logs.append(math.log(there / here))
    if at_least and at_most:
        return None
    found = estimate(logs)
    half = math.inf if found.half is None else found.half
    low = 0.0 if at_most else math.exp(found.mean - half)
    high = math.inf if at_least or half == math.inf else math.exp(min(700.0, found.mean + half))
    return CostRatio(math.exp(found.mean), low, high, at_least, at_most)


def p_of_ratio(found: CostRatio | None, seeds: int) -> float:
    """Return the one-sided p-value for the claim that a ratio is above 1.

    If the ratio is only a bound, so is the p-value. It is 1 if there is no ratio, or if the lower end of its
    interval is 0.

    >>> p_of_ratio(CostRatio(2.0, 1.0, 4.0), seeds=3), p_of_ratio(None, seeds=3)
    (0.025, 1.0)
    """
    if found is None or found.low <= 0.0:
        return 1.0
    half = math.log(found.mean / found.low) if found.low < found.mean or found.high > found.mean else 0.0
    return p_value(Estimate(math.log(found.mean), half), seeds)


def summary_curve(
    seeds: Sequence[Points], band: str = "interval", *, share: bool = False
) -> tuple[Points, Points, Points, Points]:
    """Return the values of x and, at each of them, the mean over seeds and both edges of the band.

    The band is the 95% interval of the mean or, if ``band`` is "range", the range of the seeds. Each seed's
    curve is an array with the rows x and y. The mean curve ends where the longest curve ends; shorter curves
    keep their last value. If the values are a ``share``, the interval is clipped to [0, 1].

    >>> a, b = np.array([[0.0, 2.0], [0.0, 1.0]]), np.array([[0.0, 1.0, 3.0], [0.5, 0.5, 0.5]])
    >>> [part.tolist() for part in summary_curve([a, b], "range")]
    [[0.0, 1.0, 2.0, 3.0], [0.25, 0.5, 0.75, 0.75], [0.0, 0.5, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0]]
    """
    x = np.unique(np.concatenate([seed[0] for seed in seeds]))
    x = x[x >= max(seed[0][0] for seed in seeds)]
    values = np.array([np.interp(x, *seed) for seed in seeds])
    mean = values.mean(axis=0)
    if band == "range" or len(seeds) == 1:
        return x, mean, values.min(axis=0), values.max(axis=0)
    half = half_95(values)
    low, high = mean - half, mean + half
    return (x, mean, np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)) if share else (x, mean, low, high)
