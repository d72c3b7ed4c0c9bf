"""Verdicts on races of algorithms over seeds: a paper's ratio of costs against ours."""

from __future__ import annotations

import math
from typing import Literal

from scipy.special import stdtr, stdtrit

from edgefl.results.statistics import CostRatio, Estimate

Verdict = Literal[
    "reproduced", "holds", "smaller", "not reproduced", "not settled", "same runs", "out of reach"
]
"""``holds``: some mutant of the arm is reproduced too (`edgefl.lab.verdicts`)."""

SAME_SIZE = 0.5
"""The share of a paper's effect, on the scale of logarithms, from which on ours counts as of its size."""


def p_value(found: Estimate, seeds: int) -> float:
    """One-sided p-value that a mean over seeds is above 0 by chance (Student's t); 1 for a single seed.

    >>> p_value(Estimate(1.0, 1.0), seeds=3), p_value(Estimate(2.0, None), seeds=1)
    (0.025, 1.0)
    """
    if found.half is None or not math.isfinite(found.half):
        return 1.0
    if found.half == 0.0:
        return float(found.mean <= 0.0)
    t = found.mean / found.half * stdtrit(seeds - 1, 0.975)
    return round(float(stdtr(seeds - 1, -t)), 12)


def p_of_ratio(found: CostRatio | None, seeds: int) -> float:
    """The one-sided p-value that the ratio is above 1 by chance, on logarithms.

    A run that ended before the target counts with its end, as in the interval: then the p-value is a bound.

    >>> p_of_ratio(CostRatio(2.0, 1.0, 4.0), seeds=3), p_of_ratio(None, seeds=3)
    (0.025, 1.0)
    """
    if found is None or found.low <= 0.0:
        return 1.0
    half = math.log(found.mean / found.low) if found.low < found.mean or found.high > found.mean else 0.0
    return p_value(Estimate(math.log(found.mean), half), seeds)


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
