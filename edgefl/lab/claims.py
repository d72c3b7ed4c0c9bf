"""Claims about races: one algorithm costs a factor more than another until a target accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from edgefl.lab.study import LAST, UNSETTLED, Curves, Finding, Verdict, share, verdict
from edgefl.results.statistics import CostRatio, Over, difference, higher, p_of_ratio, p_value, points, ratio

COSTS: dict[Over, str] = {"trips": "client trips", "at_s": "emulated seconds", "version": "versions"}


SAME_SIZE = 0.5
"""Share of a paper's effect, on a log scale, from which ours counts as equally large."""


@dataclass(frozen=True)
class Race:
    """A claim that ``other`` costs more than ``mine`` until the target of ``mine``."""

    mine: str
    other: str
    source: str
    """Place of the claim in the paper."""
    paper: str
    """Figures in the paper."""
    size: float | tuple[float, float] | None = None
    """The paper's ratio, or its costs of ``other`` and ``mine``; None: the ratio is only above 1."""
    over: Over = "trips"

    @property
    def ratio(self) -> float | None:
        """The paper's ratio; ours must reach its square root, half of it on a log scale."""
        return self.size[0] / self.size[1] if isinstance(self.size, tuple) else self.size

    def finding(self, curves: Curves) -> Finding:
        """Judge the claim by these runs."""
        target = curves.target(self.mine)
        ours, theirs = (_cost(curves.reached(label, target, self.over)) for label in (self.mine, self.other))
        found = curves.race(self.mine, self.other, target, self.over)
        says = judged(found, self.ratio)
        return Finding(
            f"{self.mine} takes fewer {COSTS[self.over]} to {target:.0%} than {self.other}",
            self.source,
            self.paper,
            f"{ours} against {theirs}: {found or 'not settled'}",
            says,
            UNSETTLED if says == "out of reach" else "",
            (self.mine,),
            (self.other,),
            p_of_ratio(found, len(curves.ended(self.mine, self.over))),
        )


def gain(
    curves: Curves,
    mine: str,
    other: str,
    cited: tuple[str, str, str],
    *,
    margin: float = 0.0,
    last: int = LAST,
) -> Finding:
    """Judge the claim that the accuracy of ``mine`` is above that of ``other`` less ``margin``.

    ``cited`` are the claim, its place in the paper, and the paper's figure; ``last`` is as in
    `Curves.accuracy`.
    """
    ours, theirs = (curves.accuracy(label, last) for label in (mine, other))
    found = difference(ours, theirs)
    above = found._replace(mean=found.mean + margin)
    return Finding(
        *cited,
        f"{share(ours)} against {share(theirs)}: {points(found)}",
        verdict(higher(above)),
        "",
        (mine,),
        (other,),
        p_value(above, len(ours)),
    )


def growing_lead(curves: Curves, what: str, source: str, paper: str, many: Race, few: Race) -> Finding:
    """Judge the claim that the lead is larger in ``many`` than in ``few``, paired by seed."""
    lead = []
    for race in (many, few):
        target = curves.target(race.mine)
        other, mine = (curves.reached(label, target, race.over) for label in (race.other, race.mine))
        lead.append([theirs / ours for theirs, ours in zip(other, mine, strict=True)])
    large, small = lead
    found = None if any(map(math.isnan, (*large, *small))) else ratio(large, small, large, small)
    note = "" if found else UNSETTLED
    return Finding(
        what,
        source,
        paper,
        f"{found or 'not settled'}",
        judged(found, None),
        note,
        (many.mine, few.mine),
        (many.other, few.other),
        p_of_ratio(found, len(large)),
    )


def judged(found: CostRatio | None, paper: float | None) -> Verdict:
    """Judge the claim that another algorithm costs ``paper`` times as much (None: the paper only says more).

    It is reproduced if our whole interval lies above 1 and our mean reaches half of the paper's effect on a
    log scale (√paper), smaller if only the former holds, and "out of reach" if a run ended too early to
    judge.

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


def _cost(reached: Sequence[float]) -> str:
    """Format the mean cost of the runs that reached the target, and how many did not.

    >>> _cost([3.0, 5.0]), _cost([math.nan, 1250.0]), _cost([math.nan])
    ('4', '1,250 (1 of 2 did not reach it)', 'never')
    """
    there = [each for each in reached if not math.isnan(each)]
    if not there:
        return "never"
    mean = fmean(there)
    text = f"{mean:,.0f}" if mean >= 1000 else f"{mean:.3g}"
    missed = len(reached) - len(there)
    return f"{text} ({missed} of {len(reached)} did not reach it)" if missed else text
