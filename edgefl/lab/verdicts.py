"""The power and the error rate of a study's verdicts: mutants, equal runs, borders of grids, one correction.

A claim counts as reproduced only if no mutant of the arm that it is about gets that verdict. Runs that equal
another arm's bit for bit are no result of their own. An arm whose tuned step is at the border of its grid
settles nothing. Over all claims of a study the Benjamini–Hochberg correction limits the share of
false ones among those that hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edgefl.lab.mutants import MUTANTS, Mutant
from edgefl.lab.study import HOLDING, QUICK, Arm, Curves, Finding, Study
from edgefl.results.statistics import discovery_limit

FALSE_DISCOVERIES = 0.05
"""The expected share of false ones among the claims that survive the correction."""


def examined(
    study: Study, curves: Curves, out: Path, *, mutants: bool, say: Callable[[str], None], quiet: bool = True
) -> list[Finding]:
    """Judge the study's claims by these runs, and make the runs of the mutants if asked to.

    Mutants are run only for claims that would be reproduced. Raises as `Study.run` does.
    """
    findings = corrected([_settled(one, study, curves) for one in study.judge(curves)])
    if not (mutants or curves.settings == QUICK):
        return findings
    for (mine, mutant), places in _to_be_tried(study, curves.settings, findings).items():
        arms = {label: mutated(study.arm(label), mutant) for label in mine}
        wrong = study.run(out, curves.settings, arms=list(arms.values()), say=say, quiet=quiet)
        replaced = {label: wrong.records[arm.label] for label, arm in arms.items()}
        if all(curves.hashes(label) == wrong.hashes(arm.label) for label, arm in arms.items()):
            continue  # under these settings it is no other algorithm
        judged = study.judge(Curves({**curves.records, **replaced}, curves.settings))
        for place in places:
            tried = {**findings[place].mutants, mutant.label: judged[place].verdict}
            findings[place] = findings[place]._replace(mutants=tried)
    return [_distinguished(one) for one in findings]


def mutated(arm: Arm, mutant: Mutant) -> Arm:
    """The arm with the mutant in place of its strategy; it has the arm's steps."""
    label = f"{arm.label} [{mutant.label}]"
    return replace(
        arm, label=label, changes=(*arm.changes, *mutant.changes), steps_of=arm.steps_of or arm.label
    )


def mutants_of(finding: Finding, study: Study, settings: str) -> Sequence[Mutant]:
    """The mutants of the arms that a claim is about."""
    strategy = study.experiment(study.arm(finding.mine[0]), 1, settings).strategy["name"]
    return MUTANTS.get(finding.family or strategy, ())


def _to_be_tried(
    study: Study, settings: str, findings: Sequence[Finding]
) -> Mapping[tuple[tuple[str, ...], Mutant], list[int]]:
    """By arms and the mutant that replaces them, the claims about these arms that would be reproduced."""
    places: dict[tuple[tuple[str, ...], Mutant], list[int]] = {}
    for place, one in enumerate(findings):
        if one.verdict == "reproduced" and one.mine:
            for mutant in mutants_of(one, study, settings):
                places.setdefault((one.mine, mutant), []).append(place)
    return places


def _settled(finding: Finding, study: Study, curves: Curves) -> Finding:
    """The finding, unless its runs are another arm's or its steps are at a border."""
    arms, labels = (*finding.mine, *finding.others), list(curves.records)
    twins = {label: curves.twin(label) for label in arms}
    later = {one: other for one, other in twins.items() if other and labels.index(other) < labels.index(one)}
    if copies := [f"{one}'s are {other}'s" for one, other in later.items()]:
        note = f"runs equal bit for bit, not a result of its own: {', '.join(copies)}"
        return finding._replace(verdict="same runs", note=note, p=None)
    borders = study.borders(curves.settings)
    if at := [f"{label} ({', '.join(borders[label])})" for label in arms if label in borders]:
        note = f"best at the border of its grid: {', '.join(at)}; otherwise {finding.verdict}"
        return finding._replace(verdict="not settled", note="; ".join(filter(None, (finding.note, note))))
    return finding


def _distinguished(finding: Finding) -> Finding:
    weak = finding.verdict == "reproduced" and finding.undistinguished
    return finding._replace(verdict="holds") if weak else finding


def corrected(findings: Sequence[Finding]) -> list[Finding]:
    """Benjamini and Hochberg's correction (1995) over all claims with a p-value.

    >>> ps = (0.001, 0.02, 0.024, 0.2, None)
    >>> [one.survives for one in corrected([Finding("", "", "", "", "reproduced", p=p) for p in ps])]
    [True, True, True, False, None]
    """
    limit = discovery_limit([one.p for one in findings if one.p is not None], FALSE_DISCOVERIES)
    return [one if one.p is None else one._replace(survives=one.p <= limit) for one in findings]


def correction(findings: Sequence[Finding]) -> str:
    """A sentence on what the correction leaves; "" where no claim has a p-value."""
    holding = [one for one in findings if one.survives is not None and one.verdict in HOLDING]
    if not (count := sum(one.p is not None for one in findings)):
        return ""
    lost = [one.claim for one in holding if not one.survives]
    return (
        f"Benjamini–Hochberg at {FALSE_DISCOVERIES:.0%} over {count} claims with a p-value: "
        f"{len(holding) - len(lost)} of {len(holding)} that hold survive"
        + (f"; not: {', '.join(lost)}." if lost else ".")
    )
