"""Errors of the emulation relative to its declared times, and the verdict on a run (docs/fidelity.md).

A trip is a client's work for one task: download, training and upload. The error of a quantity on one trip is
``achieved/declared - 1``. The achieved seconds are measured by the client or, for ``round``, by the server;
the declared seconds are those planned for the same work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from edgefl.host import verdict
from edgefl.host.verdict import MEAN_MAX, MEDIAN_MAX, P95_MAX, Conditions

QUANTITIES = ("compute", "down", "up", "delay", "trip", "round")
MAY_LACK = ("delay", "round")
"""Quantities that a trip may lack; their value is then NaN."""
PHASES = {"compute": "training", "down": "download", "up": "upload"}
SUMMED = {"trip": "trips", "round": "trips as the server saw them"}
"""Quantities whose sums are judged, for the fleet and for each device."""
RESOLUTION_WALL_S = 0.005
MINOR_PART = 0.05
"""Training that takes a smaller fraction of its trip than this is judged only as a part of the trip: even if
it took twice as long, the time of the trip would change by less than `MEDIAN_MAX`."""
PHASE_WALL_S = 0.002
"""Wall seconds by which a busy host may delay a wake-up. Phase errors up to this size cause no warning."""
Seconds = npt.NDArray[np.float64]


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one quantity over the trips in which it was measured.

    Times are in emulated seconds. If the quantity was not measured in any trip, the errors are None.
    """

    measured: int = 0
    declared_s: float = 0.0
    achieved_s: float = 0.0
    mean_error: float | None = None
    """Relative error of the totals: total ``achieved_s`` / total ``declared_s`` - 1."""
    median_error: float | None = None
    """Median of the signed errors; a value above 0 means slower than declared."""
    median_abs_error: float | None = None
    p95_abs_error: float | None = None


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one phase (see `PHASES`) in the trips of one device profile."""

    device: str
    phase: str
    median_error: float
    """Median of the signed errors; a value above 0 means slower than declared."""
    median_abs_error: float
    p95_abs_error: float
    median_wall_s: float
    p95_wall_s: float
    """95th percentile of the absolute error, in wall seconds."""

    @property
    def excess(self) -> float:
        """The larger of the median and the 95th percentile of the absolute errors, each divided by its bound.

        An error of up to `PHASE_WALL_S` is treated as 0. A value above 1 causes a warning.
        """
        return max(
            self.median_abs_error / MEDIAN_MAX * (self.median_wall_s > PHASE_WALL_S),
            self.p95_abs_error / P95_MAX * (self.p95_wall_s > PHASE_WALL_S),
        )

    def __str__(self) -> str:
        p95 = f"p95 {self.p95_abs_error:.1%}"
        return f"{PHASES[self.phase]} of {self.device}: median {self.median_error:+.1%}, {p95}"


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a run. If ``valid`` is False, the run is INVALID for the listed ``reasons``."""

    valid: bool
    median_abs_error: float | None
    p95_abs_error: float | None
    reasons: tuple[str, ...]
    trips: int
    by_quantity: dict[str, Quantity]
    by_device: dict[str, dict[str, Quantity]]
    worst: Phase | None
    """The phase and device with the largest errors relative to the bounds; None if no phase was measured."""
    warnings: tuple[str, ...]
    """Phases with errors above the bounds. A warning alone does not make a run INVALID."""
    p95_lateness_s: float | None
    """95th percentile of the time by which trips ended later than scheduled, in emulated seconds."""
    max_lateness_s: float | None
    conditions: Conditions


def assess(
    profiles: Sequence[str],
    declared_s: Mapping[str, npt.ArrayLike],
    achieved_s: Mapping[str, npt.ArrayLike],
    *,
    time_scale: float = 1.0,
    lateness_s: npt.ArrayLike | None = None,
    conditions: Conditions | None = None,
    emulates: bool = True,
) -> Fidelity:
    """Judge a run from its finished trips.

    A run without trips is INVALID unless ``emulates`` is False, which means that real devices made all trips.

    ``profiles`` holds each trip's device profile; ``declared_s`` and ``achieved_s`` map each of `QUANTITIES`
    to a float64 array of the same length, in emulated seconds (NaN where a trip lacks one of `MAY_LACK`).
    ``lateness_s`` may have any length. Raises ValueError if a quantity is missing or lengths differ.

    >>> one = dict.fromkeys(QUANTITIES, [1.0])
    >>> assess(["pixel-4"], one, one).valid
    True
    """
    trips, names = len(profiles), np.asarray(list(profiles), dtype=np.str_)
    reasons: list[str] = []
    columns: dict[str, tuple[Seconds, Seconds]] = {}
    for quantity in QUANTITIES if trips else ():
        declared, achieved = _column(declared_s, quantity, trips), _column(achieved_s, quantity, trips)
        finite = np.isfinite(declared) & np.isfinite(achieved)
        absent = np.isnan(declared) | np.isnan(achieved)
        if not (finite | absent).all() or (quantity not in MAY_LACK and absent.any()):
            reasons.append(f"a {quantity} time is not finite")
        measured = finite & (np.where(finite, declared, 0.0) * time_scale >= RESOLUTION_WALL_S)
        columns[quantity] = np.where(measured, declared, np.nan), np.where(measured, achieved, np.nan)

    headline, training = [], Quantity()
    if trips:
        declared, achieved = columns["compute"]
        minor = declared < MINOR_PART * _column(declared_s, "trip", trips)
        considerable = np.where(minor, np.nan, declared), np.where(minor, np.nan, achieved)
        headline = [took / due - 1.0 for due, took in (considerable, columns["trip"])]
        training = _summary(*considerable)
    errors = np.concatenate([*headline, np.empty(0)])
    errors = errors[~np.isnan(errors)]
    by_quantity = {quantity: _summary(*pair) for quantity, pair in columns.items()}
    by_device = {
        str(name): {
            quantity: _summary(declared[names == name], achieved[names == name])
            for quantity, (declared, achieved) in columns.items()
        }
        for name in sorted(set(profiles))
    }
    phases = [
        phase
        for name in by_device
        for quantity in PHASES
        if (phase := _phase(name, quantity, columns[quantity], names == name, time_scale))
    ]
    phases.sort(key=lambda one: (-one.excess, -one.p95_abs_error))
    if not trips and emulates:
        reasons.append("no trip was measured")
    elif trips and not errors.size:
        reasons.append(f"no trip took {RESOLUTION_WALL_S * 1e3:g} ms of wall time: too short to measure")
    sums = {name: by_quantity[what].mean_error for what, name in SUMMED.items() if what in by_quantity}
    sums["training"] = training.mean_error
    held = verdict.judge([errors], sums, conditions or Conditions(), reasons)
    reasons = [*held.reasons, *_worst_device(by_device)]
    lateness = np.asarray([] if lateness_s is None else lateness_s, dtype=np.float64)
    return Fidelity(
        valid=not reasons,
        median_abs_error=held.median_abs_error,
        p95_abs_error=held.p95_abs_error,
        reasons=held.conditions.with_causes(reasons),
        trips=trips,
        by_quantity=by_quantity,
        by_device=by_device,
        worst=phases[0] if phases else None,
        warnings=tuple(
            f"{one}, beyond {MEDIAN_MAX:.0%} or {P95_MAX:.0%}" for one in phases if one.excess > 1
        ),
        p95_lateness_s=float(np.percentile(lateness, 95)) if lateness.size else None,
        max_lateness_s=float(lateness.max()) if lateness.size else None,
        conditions=held.conditions,
    )


def _worst_device(by_device: Mapping[str, Mapping[str, Quantity]]) -> list[str]:
    """Return a list with one line about the device whose total times have the largest error.

    The list is empty if the error is within its bound.
    """
    off = {name: max(abs(of[what].mean_error or 0.0) for what in SUMMED) for name, of in by_device.items()}
    bad = sorted((name for name in off if off[name] > MEAN_MAX), key=lambda name: -off[name])
    more = f" (and {len(bad) - 1} more devices)" if len(bad) > 1 else ""
    lines = (
        line + more
        for device in bad[:1]
        for what, name in SUMMED.items()
        for line in verdict.drift(f"{name} of {device}", by_device[device][what].mean_error)
    )
    return list(lines)[:1]


def _column(columns: Mapping[str, npt.ArrayLike], quantity: str, trips: int) -> Seconds:
    if quantity not in columns:
        raise ValueError(f"quantity {quantity!r} is missing; required: {', '.join(QUANTITIES)}")
    column = np.asarray(columns[quantity], dtype=np.float64)
    if column.shape != (trips,):
        raise ValueError(f"{quantity} must have shape ({trips},), one value per profile (got {column.shape})")
    return column


def _phase(
    device: str,
    phase: str,
    times: tuple[Seconds, Seconds],
    of_device: npt.NDArray[np.bool_],
    time_scale: float,
) -> Phase | None:
    """Return the errors of one phase in a device's trips, or None if no trip has a measurement of the phase.

    ``times`` holds the declared and the achieved seconds of all trips, with NaN where nothing was measured.
    """
    declared, achieved = times
    known = of_device & ~np.isnan(declared)
    if not known.any():
        return None
    off_s = achieved[known] - declared[known]
    error, wall_s = off_s / declared[known], np.abs(off_s) * time_scale
    return Phase(
        device=device,
        phase=phase,
        median_error=float(np.median(error)),
        median_abs_error=float(np.median(np.abs(error))),
        p95_abs_error=float(np.percentile(np.abs(error), 95)),
        median_wall_s=float(np.median(wall_s)),
        p95_wall_s=float(np.percentile(wall_s, 95)),
    )


def _summary(declared: Seconds, achieved: Seconds) -> Quantity:
    """Summarise the errors of a quantity; trips in which it is NaN are excluded."""
    known = ~np.isnan(declared)
    if not known.any():
        return Quantity()
    errors = achieved[known] / declared[known] - 1.0
    declared_s, achieved_s = float(declared[known].sum()), float(achieved[known].sum())
    return Quantity(
        measured=int(known.sum()),
        declared_s=declared_s,
        achieved_s=achieved_s,
        mean_error=achieved_s / declared_s - 1.0,
        median_error=float(np.median(errors)),
        median_abs_error=float(np.median(np.abs(errors))),
        p95_abs_error=float(np.percentile(np.abs(errors), 95)),
    )
