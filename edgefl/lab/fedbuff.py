"""Claims about FedBuff other than the time to a target accuracy (Nguyen 2022, section 5).

FedBuff's lead over synchronous algorithms grows with concurrency, and the staleness of its updates falls as
the buffer size K increases.
"""

from __future__ import annotations

import math
from statistics import fmean

from edgefl.lab.ablations_fedbuff import FEW, lead_grows
from edgefl.lab.claims import Race
from edgefl.lab.mutants import STALENESS
from edgefl.lab.study import UNSETTLED, Curves, Finding, verdict

FEDBUFF, AVGM = "FedBuff, K = 10", "FedAvgM"
FULL = "1000"
"""Name of the settings with which a run is as large as in the paper."""
HALVES = 0.1
"""Largest allowed difference between a ratio of mean staleness and 2. If buffers wrongly held K + 1 updates,
the ratios would be 1.83 and 1.91."""
BUFFERS = {5: "FedBuff, K = 5", 10: FEDBUFF, 20: "FedBuff, K = 20"}


def claims(curves: Curves) -> list[Finding]:
    """Judge the claim of figure 3 (only with the settings `FULL`), and how staleness depends on K."""
    findings = []
    if curves.settings == FULL:
        many, few = (Race(f"{FEDBUFF}{end}", f"{AVGM}{end}", "", "") for end in ("", f", {FEW}"))
        findings.append(lead_grows(curves, many, few))
    means = {size: fmean(curves.staleness(label)) for size, label in BUFFERS.items()}
    # With few trips, no update may be stale.
    halves = [means[one] / means[two] if means[two] > 0.0 else math.nan for one, two in ((5, 10), (10, 20))]
    known = all(map(math.isfinite, halves))
    note = ", ".join(f"K = {size}: {mean:.1f}" for size, mean in means.items())
    findings.append(
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
    )
    return findings
