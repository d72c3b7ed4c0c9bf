"""How far the emulation was from what it declared, and whether that may be believed.

The error of a quantity on one trip is ``achieved/declared - 1`` in seconds, both for the same work: +0.1
says the client took a tenth longer than its device. (Of a rate e the error in seconds is 1/(1+e) - 1: the
same to first order, and for a client that is too slow the larger of the two.) Declared seconds are the
plan's; achieved seconds are differences of clock readings.

The headline pools the computing error and the whole-trip error of every trip, each quantity only where
its declared time is at least 5 ms on the wall: below that the clock and the scheduler are measured, not
the emulation. Transfers are reported by quantity beside it; they are in the headline through the trip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

QUANTITIES = ("compute", "down", "up", "trip")
HEADLINE = ("compute", "trip")
RESOLUTION_WALL_S = 0.005
MEDIAN_MAX = 0.05
P95_MAX = 0.20
LOAD_MAX = 0.9
STEAL_MAX = 0.02

Seconds = npt.NDArray[np.float64]


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """The error of one quantity over many trips. ``None`` where nothing could be measured."""

    measured: int
    """Trips on which it was long enough to measure."""
    median_error: float | None
    """Signed: above 0 is slower than declared."""
    median_abs_error: float | None
    p95_abs_error: float | None


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """What the emulation is worth. Not ``valid`` says INVALID, and ``reasons`` say why."""

    valid: bool
    median_abs_error: float | None
    p95_abs_error: float | None
    reasons: tuple[str, ...]
    trips: int
    by_quantity: dict[str, Quantity]
    by_profile: dict[str, Quantity]
    """The headline's errors of each device profile."""
    p95_lateness_s: float | None
    """Emulated seconds by which phases ended after their scheduled moment."""
    load: float | None
    steal: float | None

    def __str__(self) -> str:
        """One line for people.

        >>> print(assess([], {}, {}))
        INVALID: no trip was measured
        """
        if not self.valid:
            return f"INVALID: {'; '.join(self.reasons)}"
        assert self.median_abs_error is not None
        assert self.p95_abs_error is not None
        return (
            f"median error {self.median_abs_error:.2%}, 95% of errors below {self.p95_abs_error:.2%}, "
            f"{self.trips} trips"
        )


def assess(
    profiles: Sequence[str],
    declared_s: Mapping[str, npt.ArrayLike],
    achieved_s: Mapping[str, npt.ArrayLike],
    *,
    time_scale: float = 1.0,
    lateness_s: npt.ArrayLike | None = None,
    load: float | None = None,
    steal: float | None = None,
) -> Fidelity:
    """Judge a run from its finished trips.

    ``profiles`` names each trip's device profile; ``declared_s`` and ``achieved_s`` hold, for each of
    ``compute``, ``down``, ``up`` and ``trip``, float64 arrays of the same length in emulated seconds.
    ``lateness_s`` are the phases' latenesses, of any length. ``load`` is the share of the host's cores the
    fleet asked for, ``steal`` the share of time the hypervisor took; None where unknown. ValueError if a
    quantity is missing or lengths differ.

    >>> one = {"compute": [1.0], "down": [0.1], "up": [0.1], "trip": [1.2]}
    >>> assess(["pixel-4"], one, one).valid
    True
    """
    trips = len(profiles)
    errors: dict[str, Seconds] = {}
    reasons: list[str] = []
    for quantity in QUANTITIES if trips else ():
        declared, achieved = _column(declared_s, quantity, trips), _column(achieved_s, quantity, trips)
        if not (np.isfinite(declared).all() and np.isfinite(achieved).all()):
            reasons.append(f"a {quantity} time is not finite")
            declared = np.where(np.isfinite(declared) & np.isfinite(achieved), declared, 0.0)
        long_enough = declared * time_scale >= RESOLUTION_WALL_S
        errors[quantity] = np.full(trips, np.nan)
        np.divide(achieved, declared, out=errors[quantity], where=long_enough)
        errors[quantity] -= 1.0

    headline = np.concatenate([errors[q] for q in HEADLINE]) if trips else np.empty(0)
    names = np.asarray(list(profiles) * len(HEADLINE), dtype=np.str_)
    whole = _summary(headline)
    if not trips:
        reasons.append("no trip was measured")
    elif not whole.measured:
        reasons.append(f"no trip took {RESOLUTION_WALL_S * 1e3:g} ms on the wall, too short to measure")
    _limit(reasons, "median error", whole.median_abs_error, MEDIAN_MAX)
    _limit(reasons, "95th percentile of errors", whole.p95_abs_error, P95_MAX)
    _limit(reasons, "host load", load, LOAD_MAX)
    _limit(reasons, "time stolen by the hypervisor", steal, STEAL_MAX)
    late = np.asarray([] if lateness_s is None else lateness_s, dtype=np.float64)
    return Fidelity(
        valid=not reasons,
        median_abs_error=whole.median_abs_error,
        p95_abs_error=whole.p95_abs_error,
        reasons=tuple(reasons),
        trips=trips,
        by_quantity={quantity: _summary(found) for quantity, found in errors.items()},
        by_profile={str(name): _summary(headline[names == name]) for name in sorted(set(profiles))},
        p95_lateness_s=float(np.percentile(late, 95)) if late.size else None,
        load=load,
        steal=steal,
    )


@dataclass
class Record:
    """Collects a run's finished trips for `assess`.

    >>> record = Record()
    >>> record.add("pi-4", declared_s=(0.1, 1.0, 0.1), achieved_s=(0.1, 1.02, 0.08))
    >>> fidelity = record.assess()
    >>> fidelity.valid, round(fidelity.by_quantity["compute"].median_error, 3)
    (True, 0.02)
    """

    profiles: list[str] = field(default_factory=list)
    declared_s: dict[str, list[float]] = field(default_factory=lambda: {q: [] for q in QUANTITIES})
    achieved_s: dict[str, list[float]] = field(default_factory=lambda: {q: [] for q in QUANTITIES})
    lateness_s: list[float] = field(default_factory=list)

    def add(
        self,
        profile: str,
        *,
        declared_s: tuple[float, float, float],
        achieved_s: tuple[float, float, float],
        lateness_s: float | None = None,
    ) -> None:
        """One trip: (down, compute, up) in emulated seconds; the whole trip is their sum."""
        self.profiles.append(profile)
        for column, (down, compute, up) in ((self.declared_s, declared_s), (self.achieved_s, achieved_s)):
            for quantity, seconds in zip(QUANTITIES, (compute, down, up, down + compute + up), strict=True):
                column[quantity].append(seconds)
        if lateness_s is not None:
            self.lateness_s.append(lateness_s)

    def assess(
        self, *, time_scale: float = 1.0, load: float | None = None, steal: float | None = None
    ) -> Fidelity:
        """What `assess` says of the trips so far."""
        return assess(
            self.profiles,
            self.declared_s,
            self.achieved_s,
            time_scale=time_scale,
            lateness_s=self.lateness_s,
            load=load,
            steal=steal,
        )


def _column(columns: Mapping[str, npt.ArrayLike], quantity: str, trips: int) -> Seconds:
    if quantity not in columns:
        raise ValueError(f"quantity {quantity!r} is missing; all of {', '.join(QUANTITIES)} are needed")
    column = np.asarray(columns[quantity], dtype=np.float64)
    if column.shape != (trips,):
        raise ValueError(f"{quantity} must have shape ({trips},), one a profile name (got {column.shape})")
    return column


def _summary(errors: Seconds) -> Quantity:
    """Medians over the errors that could be measured (not NaN)."""
    known = errors[~np.isnan(errors)]
    if not known.size:
        return Quantity(measured=0, median_error=None, median_abs_error=None, p95_abs_error=None)
    return Quantity(
        measured=int(known.size),
        median_error=float(np.median(known)),
        median_abs_error=float(np.median(np.abs(known))),
        p95_abs_error=float(np.percentile(np.abs(known), 95)),
    )


def _limit(reasons: list[str], what: str, got: float | None, allowed: float) -> None:
    if got is not None and not got <= allowed:
        reasons.append(f"{what} {got:.1%}, at most {allowed:.0%} is allowed")
