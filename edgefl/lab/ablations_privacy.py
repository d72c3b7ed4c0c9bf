"""FedBuff's figure 4 (Nguyen 2022): accuracy at the same ε after one pass over all clients."""

from __future__ import annotations

from edgefl.lab.study import Curves, Finding, share, verdict
from edgefl.results.statistics import difference, higher, p_value, points

FEDBUFF, FTRL, SGD = "FedBuff, DP-FTRL", "FedAvgM, DP-FTRL", "FedAvgM, DP-SGD"
MARGIN = 0.02
"""Difference in accuracy up to which an algorithm is competitive."""


def claims(curves: Curves) -> list[Finding]:
    """Compare final accuracies, paired by seed."""
    findings = []
    for mine, other, epsilon, claim, margin in (
        (FEDBUFF, SGD, 24, "ahead", 0.0),
        (FEDBUFF, FTRL, 24, "ahead", 0.0),
        (FEDBUFF, SGD, 6, "competitive", MARGIN),
        (FEDBUFF, FTRL, 6, "ahead", 0.0),
    ):
        ours, theirs = (curves.accuracy(_name(label, epsilon)) for label in (mine, other))
        found = difference(ours, theirs)
        holds = higher(found._replace(mean=found.mean + margin))
        findings.append(
            Finding(
                f"{mine}: final accuracy beside {other} at ε = {epsilon}",
                "figures 4 and 8",
                claim,
                f"{share(ours)} against {share(theirs)}: {points(found)}",
                verdict(holds),
                f"competitive: no more than {MARGIN:.0%} below" if margin else "",
                (_name(mine, epsilon),),
                (_name(other, epsilon),),
                p_value(found._replace(mean=found.mean + margin), len(ours)),
            )
        )
    return findings


def _name(label: str, epsilon: int) -> str:
    return f"{label}, ε = {epsilon}"
