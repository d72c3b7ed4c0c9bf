"""The claim that the staleness of FedBuff's updates falls as the buffer size K increases (Nguyen 2022)."""

from __future__ import annotations

import math
from statistics import fmean

from edgefl.lab.mutants import STALENESS
from edgefl.lab.study import UNSETTLED, Curves, Finding, verdict

FEDBUFF = "FedBuff, K = 10"
HALVES = 0.1
"""Tolerance for the claim that mean staleness is halved when K doubles: the ratio of the two means may differ
from 2 by this much. If buffers wrongly held K + 1 updates, the ratios would be 1.83 and 1.91."""
BUFFERS = {5: "FedBuff, K = 5", 10: FEDBUFF, 20: "FedBuff, K = 20"}


def claims(curves: Curves) -> list[Finding]:
    """Judge how staleness depends on K."""
    means = {size: fmean(curves.staleness(label)) for size, label in BUFFERS.items()}
    # In a run with few trips, it can happen that no update is stale.
    halves = [means[one] / means[two] if means[two] > 0.0 else math.nan for one, two in ((5, 10), (10, 20))]
    known = all(map(math.isfinite, halves))
    note = ", ".join(f"K = {size}: {mean:.1f}" for size, mean in means.items())
    return [
        Finding(
            "staleness halves when K doubles",
            "appendix A",
            "2.0×, 2.0×",
            ", ".join(f"{ratio:.2f}×" for ratio in halves) if known else "not settled",
            verdict(all(abs(ratio - 2.0) <= HALVES for ratio in halves)) if known else "out of reach",
            note if known else f"{note}; {UNSETTLED}",
            tuple(BUFFERS.values()),
            family=STALENESS,
        )
    ]
