"""Claims of figure 4 in Nguyen 2022: FedBuff's accuracy at equal ε, after one pass over all clients."""

from __future__ import annotations

from edgefl.lab.claims import gain
from edgefl.lab.mutants import PRIVATE
from edgefl.lab.study import Curves, Finding

FEDBUFF, FTRL, SGD = "FedBuff, DP-FTRL", "FedAvgM, DP-FTRL", "FedAvgM, DP-SGD"
MARGIN = 0.02
"""Largest deficit in accuracy at which an algorithm still counts as competitive with the other one."""


def claims(curves: Curves) -> list[Finding]:
    """Judge claims about the final accuracies of FedBuff and FedAvgM at the same ε, paired by seed."""
    findings = []
    for mine, other, epsilon, claim, margin in (
        (FEDBUFF, SGD, 24, "ahead", 0.0),
        (FEDBUFF, FTRL, 24, "ahead", 0.0),
        (FEDBUFF, SGD, 12, "competitive", MARGIN),
        (FEDBUFF, FTRL, 12, "ahead", 0.0),
        (FEDBUFF, SGD, 6, "competitive", MARGIN),
        (FEDBUFF, FTRL, 6, "ahead", 0.0),
    ):
        what = f"{mine}: final accuracy beside {other} at ε = {epsilon}"
        cited, note = (what, "figures 4 and 8", claim), f"competitive: no more than {MARGIN:.0%} below"
        found = gain(curves, _name(mine, epsilon), _name(other, epsilon), cited, margin=margin)
        findings.append(found._replace(note=note if margin else "", family=PRIVATE))
    return findings


def _name(label: str, epsilon: int) -> str:
    return f"{label}, ε = {epsilon}"
