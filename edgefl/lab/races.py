"""Verdicts on races of algorithms over seeds: a paper's ratio of costs against ours."""

from __future__ import annotations

import math
from typing import Literal

from edgefl.results.statistics import CostRatio

Verdict = Literal["reproduced", "smaller", "not reproduced", "out of reach"]

SAME_SIZE = 0.5
"""The share of a paper's effect, on the scale of logarithms, from which on ours counts as of its size."""


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
