"""The one place where a run record's figures are handed to the emulation's judgement of itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.record import Record
from edgefl.report.measures import rounded

_PARTS = {
    "compute": ("compute_declared_s", "compute_s"),
    "down": ("down_declared_s", "down_s"),
    "up": ("up_declared_s", "up_s"),
    "trip": ("trip_declared_s", "trip_achieved_s"),
}
MEDIAN_BAR, P95_BAR = 0.01, 0.03
"""A compute rate off by more than this (median, 95th percentile) makes the run INVALID."""


def fidelity_of(record: Record) -> dict[str, Any]:
    """How far the trips' achieved times were from the declared ones, and whether the run may be believed.

    Relative errors |achieved/declared − 1| of the computing part, and of each part under ``parts``; a
    virtual run is exact by construction. ``valid`` is false with at least one of ``reasons``.
    """
    parts: dict[str, dict[str, Any]] = {}
    for part, (declared_name, achieved_name) in _PARTS.items():
        declared, achieved = record.trips[declared_name], record.trips[achieved_name]
        known = (declared > 0) & np.isfinite(achieved)
        error = np.abs(achieved[known] / declared[known] - 1.0)
        parts[part] = {
            "trips": int(known.sum()),
            "median_abs_error": rounded(float(np.median(error))) if error.size else None,
            "p95_abs_error": rounded(float(np.percentile(error, 95))) if error.size else None,
        }
    compute = parts["compute"]
    reasons = list(record.meta.invalid)
    if not compute["trips"]:
        reasons.append("no trip has both a declared and an achieved compute time")
    else:
        if compute["median_abs_error"] > MEDIAN_BAR:
            reasons.append(
                f"median compute error {compute['median_abs_error']:.2%} is above {MEDIAN_BAR:.0%}"
            )
        if compute["p95_abs_error"] > P95_BAR:
            reasons.append(f"p95 compute error {compute['p95_abs_error']:.2%} is above {P95_BAR:.0%}")
    return {
        "median_abs_error": compute["median_abs_error"],
        "p95_abs_error": compute["p95_abs_error"],
        "valid": not reasons,
        "reasons": reasons,
        "parts": parts,
    }
