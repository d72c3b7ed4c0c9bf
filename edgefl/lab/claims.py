"""The claims in a study's file, and checks of the verdicts on all claims of a study.

A race is the claim that one algorithm reaches a target accuracy at a lower cost than another. A gain is the
claim that the accuracy of one algorithm is higher than that of another. A lead is the claim that the
advantage of one algorithm over another is larger in one race than in another race.

An arm is one of the algorithms that a study compares; a mutant is a deliberately wrong version of an arm.
`examined` guards the verdicts of a study against errors. A claim counts as reproduced only if no mutant of
the arm gets that verdict. Runs of two arms that are equal bit for bit are not treated as two results. A claim
is not settled if the tuned step size of its arm is at the border of the grid that was tried. The
Benjamini–Hochberg correction limits the share of false claims among the claims that hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from edgefl.lab.mutants import MUTANTS, Mutant
from edgefl.lab.study import (
    HOLDING,
    LAST,
    QUICK,
    UNSETTLED,
    Arm,
    Curves,
    Finding,
    Study,
    Verdict,
    share,
    verdict,
)
from edgefl.results.statistics import (
    CostRatio,
    Over,
    difference,
    discovery_limit,
    higher,
    p_of_ratio,
    p_value,
    points,
    ratio,
)

COSTS: dict[Over, str] = {"trips": "client trips", "at_s": "emulated seconds", "version": "versions"}


SAME_SIZE = 0.5
"""Our cost ratio confirms the paper's ratio if its logarithm is at least this fraction of the logarithm of
the paper's ratio."""


@dataclass(frozen=True)
class Race:
    """A claim that the arm ``mine`` reaches its target accuracy at a lower cost than the arm ``other``."""

    mine: str
    other: str
    source: str
    """Place in the paper where the claim is made."""
    paper: str
    """The numbers that the paper gives for this claim, as text."""
    size: float | tuple[float, float] | None = None
    """The cost ratio in the paper, or the costs of ``other`` and ``mine`` in the paper; None if the paper
    claims only that the ratio is above 1."""
    over: Over = "trips"

    @property
    def ratio(self) -> float | None:
        """The cost ratio in the paper. Our ratio must be at least the square root of this ratio."""
        return self.size[0] / self.size[1] if isinstance(self.size, tuple) else self.size

    def finding(self, curves: Curves) -> Finding:
        """Judge the claim by the runs in ``curves``."""
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


@dataclass(frozen=True)
class Gain:
    """A claim that the accuracy of the arm ``mine`` is above that of the arm ``other`` minus ``margin``."""

    mine: str
    other: str
    claim: str
    source: str
    paper: str
    """The result in the paper, as text."""
    margin: float = 0.0
    last: int = LAST
    """Number of evaluations at the end of a run over which accuracy is averaged (0: all evaluations)."""
    note: str = ""
    family: str = ""

    def finding(self, curves: Curves) -> Finding:
        ours, theirs = (curves.accuracy(label, self.last) for label in (self.mine, self.other))
        found = difference(ours, theirs)
        above = found._replace(mean=found.mean + self.margin)
        return Finding(
            self.claim,
            self.source,
            self.paper,
            f"{share(ours)} against {share(theirs)}: {points(found)}",
            verdict(higher(above)),
            self.note,
            (self.mine,),
            (self.other,),
            p_value(above, len(ours)),
            family=self.family,
        )


@dataclass(frozen=True)
class Lead:
    """A claim that the ratio of two arms' costs is larger in the race ``many`` than in the race ``few``.

    The cost is the number of client trips to the target accuracy. The ratios are paired by seed.
    """

    claim: str
    source: str
    paper: str
    many: tuple[str, str]
    """Labels of the two arms of the race: the arm that is ahead, and the other arm."""
    few: tuple[str, str]
    only: tuple[str, ...] = ()
    """Names of the settings to which the claim applies; if empty, it applies to all settings."""

    def finding(self, curves: Curves) -> Finding:
        lead = []
        for mine, other in (self.many, self.few):
            target = curves.target(mine)
            ours, theirs = (curves.reached(label, target, "trips") for label in (mine, other))
            pairs = zip(theirs, ours, strict=True)
            lead.append([there / here if here else math.nan for there, here in pairs])
        large, small = lead
        found = None if any(map(math.isnan, (*large, *small))) else ratio(large, small, large, small)
        return Finding(
            self.claim,
            self.source,
            self.paper,
            f"{found or 'not settled'}",
            judged(found, None),
            "" if found else UNSETTLED,
            (self.many[0], self.few[0]),
            (self.many[1], self.few[1]),
            p_of_ratio(found, len(large)),
        )


def judged(found: CostRatio | None, paper: float | None) -> Verdict:
    """Judge the claim that another algorithm costs ``paper`` times as much (None: the paper gives no factor).

    The verdict is "reproduced" if our whole confidence interval lies above 1 and our mean is at least √paper
    (half of the paper's effect on a log scale), "smaller" if only the interval lies above 1, and
    "out of reach" if a run ended too early to judge the claim.

    >>> judged(CostRatio(1.2, 1.1, 1.3), 5.7), judged(CostRatio(4.6, 3.1, 6.9), 5.7)
    ('smaller', 'reproduced')
    >>> judged(CostRatio(1.2, 0.8, 1.8), 1.2)
    'not reproduced'
    >>> judged(None, 2.0), judged(CostRatio(2.0, 1.5, math.inf, at_least=True), 9.0)
    ('out of reach', 'out of reach')
    >>> [judged(CostRatio(mean, 0.0, 12.0, at_most=True), 5.7) for mean in (7.2, 2.0)]
    ['out of reach', 'not reproduced']
    """
    if found is None:
        return "out of reach"
    if found.low <= 1.0:
        is_open = found.at_least and found.mean > 1.0
        if found.at_most:
            # The mean is an upper bound, so the lower end is unknown. The interval is symmetric on a log
            # scale: if the bound were exact, the lower end would be mean² / high.
            is_open = found.mean**2 / found.high > 1.0
        return "out of reach" if is_open else "not reproduced"
    if paper is None or math.log(found.mean) >= SAME_SIZE * math.log(paper):
        return "reproduced"
    return "out of reach" if found.at_least else "smaller"


def _cost(reached: Sequence[float]) -> str:
    """Format the mean cost of the runs that reached the target, and the number of runs that did not.

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


FALSE_DISCOVERIES = 0.05
"""Largest expected share of false claims among the claims that survive the correction."""


def examined(
    study: Study, curves: Curves, out: Path, *, mutants: bool, say: Callable[[str], None], quiet: bool = True
) -> list[Finding]:
    """Judge the claims of a study by the runs in ``curves``, and, if ``mutants`` is True, by runs of mutants.

    Mutants are run only for claims that would otherwise be "reproduced"; with the settings `QUICK`, mutants
    are always run for these claims. Raises the same errors as `Study.run`.
    """
    findings = corrected([_settled(one, study, curves) for one in study.judge(curves)])
    if not (mutants or curves.settings == QUICK):
        return findings
    for (mine, mutant), places in _to_be_tried(study, curves.settings, findings).items():
        arms = {label: mutated(study.arm(label), mutant) for label in mine}
        wrong = study.run(out, curves.settings, arms=list(arms.values()), say=say, quiet=quiet)
        replaced = {label: wrong.records[arm.label] for label, arm in arms.items()}
        if all(curves.hashes(label) == wrong.hashes(arm.label) for label, arm in arms.items()):
            continue  # under these settings the mutant behaves like the correct algorithm
        judged = study.judge(Curves({**curves.records, **replaced}, curves.settings))
        for place in places:
            tried = {**findings[place].mutants, mutant.label: judged[place].verdict}
            findings[place] = findings[place]._replace(mutants=tried)
    return [_distinguished(one) for one in findings]


def mutated(arm: Arm, mutant: Mutant) -> Arm:
    """Return a copy of the arm that runs the mutant as its strategy, with the arm's tuned step sizes."""
    label = f"{arm.label} [{mutant.label}]"
    return replace(
        arm, label=label, changes=(*arm.changes, *mutant.changes), steps_of=arm.steps_of or arm.label
    )


def mutants_of(finding: Finding, study: Study, settings: str) -> Sequence[Mutant]:
    """Return the mutants of a claim: wrong versions of the strategy that the claim is about."""
    strategy = study.experiment(study.arm(finding.mine[0]), 1, settings).strategy["name"]
    return MUTANTS.get(finding.family or strategy, ())


def _to_be_tried(
    study: Study, settings: str, findings: Sequence[Finding]
) -> Mapping[tuple[tuple[str, ...], Mutant], list[int]]:
    """Return the indices of the claims that each mutant may refute, keyed by (labels of the arms, mutant).

    Only claims with the verdict "reproduced" are included.
    """
    places: dict[tuple[tuple[str, ...], Mutant], list[int]] = {}
    for place, one in enumerate(findings):
        if one.verdict == "reproduced" and one.mine:
            for mutant in mutants_of(one, study, settings):
                places.setdefault((one.mine, mutant), []).append(place)
    return places


def _settled(finding: Finding, study: Study, curves: Curves) -> Finding:
    """Return the finding, with its verdict revised if necessary.

    The verdict is revised if the runs equal those of another arm, or if a tuned step size is at the border of
    its grid.
    """
    arms, labels = (*finding.mine, *finding.others), list(curves.records)
    twins = {label: curves.twin(label) for label in arms}
    later = {one: other for one, other in twins.items() if other and labels.index(other) < labels.index(one)}
    if copies := [f"{one} and {other}" for one, other in later.items()]:
        note = f"not a separate result, because runs are equal bit for bit: {', '.join(copies)}"
        return finding._replace(verdict="same runs", note=note, p=None)
    borders = study.borders(curves.settings)
    if at := [f"{label} ({', '.join(borders[label])})" for label in arms if label in borders]:
        note = f"the best step size is at its grid's border: {', '.join(at)}; otherwise {finding.verdict}"
        return finding._replace(verdict="not settled", note="; ".join(filter(None, (finding.note, note))))
    return finding


def _distinguished(finding: Finding) -> Finding:
    weak = finding.verdict == "reproduced" and finding.undistinguished
    return finding._replace(verdict="holds") if weak else finding


def corrected(findings: Sequence[Finding]) -> list[Finding]:
    """Apply the correction of Benjamini and Hochberg (1995) to all claims with a p-value.

    >>> ps = (0.001, 0.02, 0.024, 0.2, None)
    >>> [one.survives for one in corrected([Finding("", "", "", "", "reproduced", p=p) for p in ps])]
    [True, True, True, False, None]
    """
    limit = discovery_limit([one.p for one in findings if one.p is not None], FALSE_DISCOVERIES)
    return [one if one.p is None else one._replace(survives=one.p <= limit) for one in findings]


def correction(findings: Sequence[Finding]) -> str:
    """Return a sentence about the effect of the correction, or "" if no claim has a p-value."""
    holding = [one for one in findings if one.survives is not None and one.verdict in HOLDING]
    if not (count := sum(one.p is not None for one in findings)):
        return ""
    lost = [one.claim for one in holding if not one.survives]
    return (
        f"Benjamini–Hochberg at {FALSE_DISCOVERIES:.0%} over {count} claims with a p-value: "
        f"{len(holding) - len(lost)} of {len(holding)} that hold survive"
        + (f"; not: {', '.join(lost)}." if lost else ".")
    )
