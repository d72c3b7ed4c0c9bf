"""Pure functions that compare head and base, given the pairs of processes that `against` measured.

A pair consists of one process of the base and one of the head, with the same memory layout. It yields one
value, log(head's time / base's time). The statistics use one sample per layout, the mean of its values,
because errors within a layout may be correlated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

SURE_OF_GROWTH, SURE_OF_NONE = 0.9985, 0.99
"""One-sided confidence that is needed for REGRESSION (the time has grown), and for OK (it has grown by less
than the tolerance)."""


class ProcessPair(NamedTuple):
    """Measurements of one process of the base and one of the head with the same layout."""

    layout: int
    log_ratio: float
    """log(head's time / base's time)."""
    base_s: float
    """Median time of a call of the base in seconds: CPU time plus blocked time."""
    head_s: float
    """Median time of a call of the head in seconds: CPU time plus blocked time."""
    base_mib: float
    """Peak memory growth during the first call of the base, in MiB."""
    head_mib: float
    """Peak memory growth during the first call of the head, in MiB."""
    base_sent_mib: float
    head_sent_mib: float


class Estimate(NamedTuple):
    """A relative growth and its one-sided bounds."""

    growth: float
    least: float
    """Lower bound, with confidence `SURE_OF_GROWTH`."""
    most: float
    """Upper bound, with confidence `SURE_OF_NONE`."""


def block_ratio(blocks: Iterable[tuple[float, float]]) -> float:
    """Return the interquartile mean of log(head's time / base's time).

    Each block is a pair of the base's time and the head's time. The lowest and the highest quarter of the
    logarithms are left out, because a process may lose its core in the middle of a block.

    >>> round(math.exp(block_ratio([(1.0, 1.1), (1.0, 1.1), (1.0, 1.1), (1.0, 9.0), (9.0, 1.0)])), 4)
    1.1
    """
    logs = sorted(math.log(head / base) for base, head in blocks)
    cut = len(logs) // 4
    return statistics.fmean(logs[cut : len(logs) - cut])


def estimate(pairs: Sequence[ProcessPair]) -> Estimate:
    """Return the relative growth of the time from base to head, over all pairs.

    The bounds follow from Student's t distribution, applied to the means of the layouts.
    """
    from scipy.special import stdtrit  # takes a while to import

    by_layout: dict[int, list[float]] = {}
    for pair in pairs:
        by_layout.setdefault(pair.layout, []).append(pair.log_ratio)
    means = [statistics.fmean(logs) for logs in by_layout.values()]
    middle = statistics.fmean(means)
    if len(means) < 2:
        return Estimate(math.expm1(middle), -math.inf, math.inf)
    error = statistics.stdev(means) / math.sqrt(len(means))
    least, most = (float(stdtrit(len(means) - 1, sure)) * error for sure in (SURE_OF_GROWTH, SURE_OF_NONE))
    return Estimate(*map(math.expm1, (middle, middle - least, min(700.0, middle + most))))


def decide(found: Estimate, tolerance: float) -> Literal["grew", "same", "unknown"]:
    """Return "grew" if the time grew, "same" if it did not, or "unknown" if more pairs are needed.

    The time grew if its growth is at least half the tolerance, and the lower bound is above 0.

    >>> decide(Estimate(0.06, 0.04, 0.08), 0.05), decide(Estimate(0.01, -0.01, 0.03), 0.05)
    ('grew', 'same')
    >>> decide(Estimate(0.06, -0.04, 0.16), 0.05)
    'unknown'
    """
    if found.growth >= tolerance / 2:
        return "grew" if found.least > 0 else "unknown"
    return "same" if found.most < tolerance else "unknown"
