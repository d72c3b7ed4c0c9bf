"""Limits the errors of a study's verdicts: mutants, equal runs, borders of grids, multiple testing.

A claim counts as reproduced only if no mutant of its arm gets that verdict. Runs that equal another arm's bit
for bit are no separate result. An arm whose tuned step is at the border of its grid settles nothing. The
Benjamini–Hochberg correction limits the share of false claims among those that hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edgefl.lab.mutants import MUTANTS, Mutant
from edgefl.lab.study import HOLDING, QUICK, Arm, Curves, Finding, Study
from edgefl.results.statistics import discovery_limit

FALSE_DISCOVERIES = 0.05
"""Expected share of false claims among those that survive the correction."""


def examined(
    study: Study, curves: Curves, out: Path, *, mutants: bool, say: Callable[[str], None], quiet: bool = True
) -> list[Finding]:
    """Judge the study's claims by these runs, and by runs of the mutants if requested.

    Mutants are run only for claims that would be reproduced. Raises like `Study.run`.
    """
    findings = corrected([_settled(one, study, curves) for one in study.judge(curves)])
    if not (mutants or curves.settings == QUICK):
        return findings
    for (mine, mutant), places in _to_be_tried(study, curves.settings, findings).items():
        arms = {label: mutated(study.arm(label), mutant) for label in mine}
        wrong = study.run(out, curves.settings, arms=list(arms.values()), say=say, quiet=quiet)
        replaced = {label: wrong.records[arm.label] for label, arm in arms.items()}
        if all(curves.hashes(label) == wrong.hashes(arm.label) for label, arm in arms.items()):
            continue  # with these settings the mutant is the same algorithm
        judged = study.judge(Curves({**curves.records, **replaced}, curves.settings))
        for place in places:
            tried = {**findings[place].mutants, mutant.label: judged[place].verdict}
            findings[place] = findings[place]._replace(mutants=tried)
    return [_distinguished(one) for one in findings]


def mutated(arm: Arm, mutant: Mutant) -> Arm:
    """Return the arm with the mutant as its strategy and the same steps."""
    label = f"{arm.label} [{mutant.label}]"
    return replace(
        arm, label=label, changes=(*arm.changes, *mutant.changes), steps_of=arm.steps_of or arm.label
    )


def mutants_of(finding: Finding, study: Study, settings: str) -> Sequence[Mutant]:
    """Return the mutants of a claim's arms."""
    strategy = study.experiment(study.arm(finding.mine[0]), 1, settings).strategy["name"]
    return MUTANTS.get(finding.family or strategy, ())


def _to_be_tried(
    study: Study, settings: str, findings: Sequence[Finding]
) -> Mapping[tuple[tuple[str, ...], Mutant], list[int]]:
    """Map arms and the mutant that replaces them to the places of claims that would be reproduced."""
    places: dict[tuple[tuple[str, ...], Mutant], list[int]] = {}
    for place, one in enumerate(findings):
        if one.verdict == "reproduced" and one.mine:
            for mutant in mutants_of(one, study, settings):
                places.setdefault((one.mine, mutant), []).append(place)
    return places


def _settled(finding: Finding, study: Study, curves: Curves) -> Finding:
    """Return the finding, revised if its runs equal another arm's or its step sizes are at the edge of their
    grid."""
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
    """Apply the correction of Benjamini and Hochberg (1995) over all claims with a p-value.

    >>> ps = (0.001, 0.02, 0.024, 0.2, None)
    >>> [one.survives for one in corrected([Finding("", "", "", "", "reproduced", p=p) for p in ps])]
    [True, True, True, False, None]
    """
    limit = discovery_limit([one.p for one in findings if one.p is not None], FALSE_DISCOVERIES)
    return [one if one.p is None else one._replace(survives=one.p <= limit) for one in findings]


def correction(findings: Sequence[Finding]) -> str:
    """Return a sentence on the effect of the correction; "" without p-values."""
    holding = [one for one in findings if one.survives is not None and one.verdict in HOLDING]
    if not (count := sum(one.p is not None for one in findings)):
        return ""
    lost = [one.claim for one in holding if not one.survives]
    return (
        f"Benjamini–Hochberg at {FALSE_DISCOVERIES:.0%} over {count} claims with a p-value: "
        f"{len(holding) - len(lost)} of {len(holding)} that hold survive"
        + (f"; not: {', '.join(lost)}." if lost else ".")
    )
