"""A claim of a paper, what was found, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from edgefl.results.comparison import estimate

Verdict = Literal["reproduced", "not reproduced", "out of reach"]

TOO_SHORT = "runs ended before this was settled: more stop.trips"
"""Beside the verdict of `first` that it is out of reach."""


class Finding(NamedTuple):
    """One claim, judged."""

    claim: str
    source: str
    """Where the paper says so."""
    paper: str
    """The paper's figure."""
    ours: str
    verdict: Verdict
    note: str = ""


def verdict(holds: bool) -> Verdict:
    """In words."""
    return "reproduced" if holds else "not reproduced"


def above(mine: Sequence[float], other: Sequence[float], margin: float = 0.0) -> bool:
    """Whether ``mine`` exceeds ``other`` by more than ``margin`` in the mean over seeds, and in each seed.

    Seeds are paired: with three of them an interval of the mean is wide, but three of three is 1 in 8 by
    chance, and the mean says how much.

    >>> above([0.9, 0.8, 0.9], [0.7, 0.7, 0.8]), above([0.9, 0.6, 0.9], [0.7, 0.7, 0.8])
    (True, False)
    """
    pairs = list(zip(mine, other, strict=True))
    return bool(pairs) and all(a - b > margin for a, b in pairs)


def first(
    mine: Sequence[float], other: Sequence[float], mine_end: Sequence[float], other_end: Sequence[float]
) -> Verdict:
    """Whether ``mine`` was there first in every seed; "out of reach" where a run ended too soon to tell.

    What it took each of them, NaN where it did not get there, and where its run ended.

    >>> nan = math.nan
    >>> first([1.0, 2.0], [3.0, nan], [9.0, 9.0], [9.0, 9.0]), first([nan], [3.0], [9.0], [9.0])
    ('reproduced', 'not reproduced')
    >>> first([nan], [nan], [9.0], [9.0]), first([2.0], [nan], [9.0], [1.0])
    ('out of reach', 'out of reach')
    >>> first([nan], [3.0], [2.0], [9.0])
    'out of reach'
    """
    settled = True
    for a, b, a_end, b_end in zip(mine, other, mine_end, other_end, strict=True):
        if b <= a or (math.isnan(a) and b <= a_end):
            return "not reproduced"
        settled = settled and (a < b or (math.isnan(b) and a <= b_end))
    return "reproduced" if settled else "out of reach"


def share(values: Sequence[float]) -> str:
    """Accuracies over seeds, in per cent: mean ± half the 95% interval.

    >>> share([0.90, 0.91, 0.92])
    '91.0 ±2.5%'
    """
    found = estimate(values)
    return f"{found.mean:.1%}" if found.half is None else f"{found.mean * 100:.1f} ±{found.half * 100:.1f}%"


def times(values: Sequence[float], base: Sequence[float]) -> str:
    """How many times more than ``base``: the ratio of means, or in how many runs there is none.

    >>> times([300.0, 500.0], [100.0, 100.0]), times([math.nan, 2.0], [1.0, 1.0])
    ('4.0×', 'not there in 1 of 2 seeds, against 0 of 2')
    """
    missed, mine = (sum(map(math.isnan, row)) for row in (values, base))
    if missed or mine:
        return f"not there in {missed} of {len(values)} seeds, against {mine} of {len(base)}"
    return f"{sum(values) / sum(base):.1f}×"
