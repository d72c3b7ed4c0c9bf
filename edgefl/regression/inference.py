"""What repeated measurements allow one to say: bounds of a median, equivalence, and change.

Repetitions are independent draws; nothing is assumed of their distribution. Resamples come from a seeded
stream, so that the same samples always give the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.seeds import stream

ALPHA = 0.05
LEAST_REPETITIONS = 9
RESAMPLES = 2000

Samples = Sequence[float] | npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A median and the bounds of its bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width as a share of the median; infinite where the median is 0 and it is not.

        >>> Interval(2.0, 1.9, 2.1).half_width
        0.05
        """
        if self.high == self.low:
            return 0.0
        return round((self.high - self.low) / 2 / abs(self.median), 12) if self.median else math.inf


def median_interval(samples: Samples, level: float = 0.90, seed: int = 0) -> Interval:
    """The percentile bootstrap interval of the median (Efron 1979). ValueError for no or not finite samples.

    >>> median_interval([5.0] * 9)
    Interval(median=5.0, low=5.0, high=5.0)
    """
    medians = _resampled_medians(_checked(samples, "samples"), seed)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.median(np.asarray(samples))), float(low), float(high))


def upper_bound(samples: Samples, confidence: float = 0.95, seed: int = 0) -> float:
    """The one-sided bootstrap upper bound of the median: what a budget has to hold.

    >>> upper_bound([1.0, 1.0, 1.1, 1.0, 1.2, 1.0, 1.1, 1.0, 1.0]) <= 1.2
    True
    """
    return float(np.quantile(_resampled_medians(_checked(samples, "samples"), seed), confidence))


def equivalent(ratios: Samples, margin: float, seed: int = 0) -> bool:
    """Two one-sided tests at 5%: the 90% interval of the median ratio lies inside 1 ± ``margin``.

    >>> equivalent([1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 0.99, 1.0, 1.0], margin=0.03)
    True
    >>> equivalent([1.1] * 9, margin=0.03)
    False
    """
    interval = median_interval(ratios, 0.90, seed)
    return 1 - margin <= interval.low and interval.high <= 1 + margin


class Change(NamedTuple):
    """How ``now`` differs from ``before``."""

    before: float
    """Median."""
    now: float
    """Median."""
    p: float
    """Of the two-sided Mann–Whitney test: how likely so different ranks are if nothing changed."""

    @property
    def shift(self) -> float:
        """now / before − 1 of the medians; infinite from 0 to something.

        >>> round(Change(2.0, 2.2, 0.0).shift, 3)
        0.1
        """
        if self.before:
            return self.now / self.before - 1
        return math.copysign(math.inf, self.now) if self.now else 0.0


def change(before: Samples, now: Samples) -> Change:
    """Compare two sets of repetitions (Mann and Whitney 1947). ValueError below 9 repetitions in either."""
    old, new = _checked(before, "before"), _checked(now, "now")
    for name, samples in (("before", old), ("now", new)):
        if len(samples) < LEAST_REPETITIONS:
            raise ValueError(
                f"{name} must hold at least {LEAST_REPETITIONS} repetitions (got {len(samples)})"
            )
    if (old == old[0]).all() and (new == old[0]).all():
        return Change(float(old[0]), float(new[0]), 1.0)
    from scipy.stats import mannwhitneyu  # half a second to import: only where something is compared

    p = float(mannwhitneyu(new, old, alternative="two-sided").pvalue)
    return Change(float(np.median(old)), float(np.median(new)), p)


def holm(p_values: Sequence[float], tests: int | None = None) -> list[float]:
    """Adjusted p-values, Holm's step-down: rejecting those ≤ α keeps the chance of any false alarm ≤ α.

    ``tests`` is how many there are in all where some are not known yet: these count as 1, so what
    is rejected now stays rejected when they are.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    >>> holm([0.01], tests=3)
    [0.03]
    """
    count = max(tests or 0, len(p_values))
    adjusted = [1.0] * len(p_values)
    worst = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (count - place) * p_values[index]))
        adjusted[index] = worst
    return adjusted


def _checked(samples: Samples, name: str) -> npt.NDArray[np.float64]:
    array = np.asarray(samples, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a row of finite numbers (got {samples!r})")
    return array


def _resampled_medians(samples: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    rng = stream(seed, "bootstrap", len(samples))
    medians: npt.NDArray[np.float64] = np.median(rng.choice(samples, (RESAMPLES, len(samples))), axis=1)
    return medians
