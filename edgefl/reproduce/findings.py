"""A claim of a paper, what was found, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from edgefl.report.comparison import estimate

Verdict = Literal["reproduced", "not reproduced", "out of reach"]


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


def sooner(mine: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``mine`` is less in every seed; NaN, for never, is more than any number.

    >>> sooner([1.0, 2.0], [3.0, math.nan]), sooner([1.0, math.nan], [3.0, 4.0])
    (True, False)
    """
    pairs = zip(mine, other, strict=True)
    return all(not math.isnan(a) and (math.isnan(b) or a < b) for a, b in pairs)


def share(values: Sequence[float]) -> str:
    """Accuracies over seeds, in per cent: mean ± half the 95% interval.

    >>> share([0.90, 0.91, 0.92])
    '91.0 ±2.5%'
    """
    found = estimate(values)
    return f"{found.mean:.1%}" if found.half is None else f"{found.mean * 100:.1f} ±{found.half * 100:.1f}%"


def times(values: Sequence[float], base: Sequence[float]) -> str:
    """How many times more than ``base``: the ratio of means; "never" where some run did not get there.

    >>> times([300.0, 500.0], [100.0, 100.0]), times([math.nan, 2.0], [1.0, 1.0])
    ('4.0×', 'never')
    """
    if any(math.isnan(value) for value in (*values, *base)):
        return "never"
    return f"{sum(values) / sum(base):.1f}×"
