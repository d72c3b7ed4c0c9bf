"""The share of plausible fleets in which one setting is ahead of another.

The compute time that a device profile predicts for a real device has an error. ``edgefl sweep --fleets N``
draws that error N times from the profiles' intervals, each time for a whole fleet, and runs every setting on
the same fleets. This module counts the fleets in which a setting reached the target before the baseline,
which is the first setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaincinv

from edgefl.results.statistics import ratio_digits


class Ahead(NamedTuple):
    """The number of fleets in which a setting reached the target before the baseline did.

    The baseline is the first setting; all others are compared with it.
    """

    fleets: int
    ahead: int
    ties: int
    """Number of fleets in which both settings reached the target at the same time."""
    undecided: int
    """Number of fleets in which neither run reached the target, or one ended too early to tell which was
    ahead."""
    ratios: tuple[tuple[float, float], ...]
    """For each decided fleet, bounds on the ratio of this setting's emulated time to the first setting's.

    The lower and the upper bound are equal if both settings reached the target; otherwise one of them is 0 or
    infinity.
    """

    @property
    def decided(self) -> int:
        return self.fleets - self.undecided

    @property
    def share(self) -> float:
        """Share of decided fleets in which the setting is ahead.

        A tie counts as half. The share is NaN if no fleet is decided.
        """
        return (self.ahead + self.ties / 2) / self.decided if self.decided else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of `share` (Jeffreys: beta quantiles, after adding ½ to both counts).

        >>> low, high = Ahead(20, 17, 0, 0, ()).interval
        >>> round(low, 2), round(high, 2)
        (0.65, 0.96)
        """
        won = self.ahead + self.ties / 2
        lost = self.decided - won
        low = 0.0 if won == 0 else float(betaincinv(won + 0.5, lost + 0.5, 0.025))
        high = 1.0 if lost == 0 else float(betaincinv(won + 0.5, lost + 0.5, 0.975))
        return low, high

    @property
    def range_90(self) -> tuple[float, float] | None:
        """A lower bound on the 5th and an upper bound on the 95th percentile of the ratios.

        The percentiles are over the decided fleets. The bounds may be 0 or infinity. The value is None if
        fewer than two fleets are decided.
        """
        if len(self.ratios) < 2:
            return None
        lows, highs = zip(*self.ratios, strict=True)
        # upper bounds above `last` have no effect on the percentile
        last = sorted(highs)[math.ceil(0.95 * (len(highs) - 1))]
        high = math.inf if math.isinf(last) else float(np.percentile(np.minimum(highs, last), 95))
        return float(np.percentile(lows, 5)), high

    def __str__(self) -> str:
        """Return the share and its interval.

        >>> print(Ahead(20, 17, 0, 0, ()), Ahead(20, 0, 0, 20, ()), Ahead(20, 9, 0, 2, ()), sep="; ")
        85% (65 to 96); undecided; 50% (28 to 72), 2 undecided
        """
        if not self.decided:
            return "undecided"
        low, high = self.interval
        left = f", {self.undecided} undecided" if self.undecided else ""
        return f"{self.share:.0%} ({low * 100:.0f} to {high * 100:.0f}){left}"

    def builtins(self) -> dict[str, Any]:
        """Return the counts, the share and the intervals for JSON."""
        low, high = self.interval
        return {
            "fleets": self.fleets,
            "ahead": self.ahead,
            "ties": self.ties,
            "undecided": self.undecided,
            "share": self.share if self.decided else None,
            "low_95": low if self.decided else None,
            "high_95": high if self.decided else None,
            "ratio_90": None if (ends := self.range_90) is None else [finite(end) for end in ends],
        }


def finite(end: float) -> float | None:
    """Return one end of a range, or None if the end is 0 or infinity, because the range is then open."""
    return end if 0.0 < end < math.inf else None


TITLE = "Over plausible fleets"
HEADS = ("Run", ">Ahead in (95% interval)", ">Time ÷ first row's, in 90% of fleets", ">Fleets")


def row(label: str, found: Ahead) -> tuple[str, ...]:
    """Return the cells of a setting's row under `HEADS`.

    >>> both, one = (0.9, 0.9), (1.5, math.inf)
    >>> [row("a", Ahead(2, 1, 0, 0, ratios))[2] for ratios in ((both, both), (both, one))]
    ['0.90 to 0.90×', '0.93× or more']
    >>> row("a", Ahead(2, 0, 0, 0, ((0.004, 0.004), (0.004, 0.004))))[2]
    '0.0040 to 0.0040×'
    """
    return label, str(found), _range_text(*found.range_90 or (0.0, math.inf)), f"{found.fleets}"


def _range_text(low: float, high: float) -> str:
    below, above = ratio_digits(low), ratio_digits(high)
    if finite(low) is None:
        return "–" if finite(high) is None else f"{above}× or less"
    return f"{below}× or more" if finite(high) is None else f"{below} to {above}×"


def explained(first: str) -> str:
    """Return the caption of a table with rows from `row`.

    ``first`` is the label of the first row, which holds the setting that the others are compared with.
    """
    return (
        f"Share of fleets in which a run reached the target before {first} did. Each fleet's compute times "
        "are drawn from the device profiles' 90% intervals; links, memory and heat are those of the profiles."
    )


def in_words(label: str, first: str, found: Ahead) -> str:
    """Return a sentence that compares the setting ``label`` with the setting ``first``.

    >>> in_words("fedbuff", "fedavg", Ahead(20, 17, 0, 0, ()))
    'fedbuff is ahead of fedavg in 17 of 20 plausible fleets (95% interval of the share: 65 to 96%).'
    """
    if not found.decided:
        return f"No plausible fleet decides between {label} and {first}."
    low, high = found.interval
    ties = f" and level in {found.ties}" if found.ties else ""
    return (
        f"{label} is ahead of {first} in {found.ahead} of {found.decided} plausible fleets{ties} "
        f"(95% interval of the share: {low * 100:.0f} to {high * 100:.0f}%)."
    )


def ahead(
    other: Sequence[float], mine: Sequence[float], other_end: Sequence[float], mine_end: Sequence[float]
) -> Ahead:
    """Count the fleets in which ``other`` reached the target before ``mine``.

    Each sequence has one entry per fleet. ``other`` and ``mine`` are the emulated seconds that the two
    settings took to reach the target (NaN if a run did not reach it); ``other_end`` and ``mine_end`` are the
    emulated seconds until their runs ended. A run that did not reach the target is behind if it lasted at
    least as long as the other run took to reach the target.

    >>> other, mine = [1.0, 2.0, math.nan, math.nan, 3.0], [2.0, 2.0, 3.0, 9.0, math.nan]
    >>> found = ahead(other, mine, [9.0] * 5, [9.0, 9.0, 9.0, 9.0, 2.0])
    >>> found.ahead, found.ties, found.undecided, found.ratios
    (1, 1, 1, ((0.5, 0.5), (1.0, 1.0), (3.0, inf), (1.0, inf)))
    """
    signs: list[float] = []
    ratios: list[tuple[float, float]] = []
    for there, here, there_end, here_end in zip(other, mine, other_end, mine_end, strict=True):
        if not (math.isnan(there) or math.isnan(here)):
            signs.append(np.sign(here - there))
            ratios.append((there / here, there / here) if here > 0 else (0.0, math.inf))
        elif math.isnan(here) and not math.isnan(there) and here_end >= there:
            signs.append(1.0)
            ratios.append((0.0, there / here_end if here_end > 0 else math.inf))
        elif math.isnan(there) and not math.isnan(here) and there_end >= here:
            signs.append(-1.0)
            ratios.append((there_end / here if here > 0 else 0.0, math.inf))
    count = len(other)
    return Ahead(count, signs.count(1.0), signs.count(0.0), count - len(signs), tuple(ratios))
