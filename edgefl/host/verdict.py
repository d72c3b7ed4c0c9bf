"""The verdict on an emulation: VALID if its timing errors and the load of the host are within bounds.

The same bounds apply to a run, `edgefl exec`, the live view, `edgefl bench` and tests on emulated devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Outcome = Literal["PASS", "FAIL", "INVALID"]
"""Outcome of a comparison with a bound; INVALID if the host's conditions allow no comparison."""

MEDIAN_MAX = 0.05
P95_MAX = 0.20
MEAN_MAX = 0.03
LOAD_MAX = 0.9
"""Maximum load of the host. In measurements, the emulation was up to 11% slower at loads of 70% and more (the
limits on the errors detect this), and 65% slower on an overloaded host."""
STEAL_MAX = 0.02
THROTTLED_MAX = 0.02
STALE_FACTOR = 2.0
OTHERS_NOTED = 0.25
"""If other processes use more than this share of the host, the reasons of a verdict mention them."""
STOLEN, THROTTLED = "time stolen by the hypervisor", "time throttled by a CPU quota around the run"


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions on the host during a run, as shares of CPU time or of wall time; None if unknown."""

    load: float | None = None
    used: float | None = None
    others: float | None = None
    steal: float | None = None
    throttled: float | None = None
    step_cost: float | None = None
    """CPU time of a training step, divided by the CPU time that was measured before the run."""

    @property
    def busy(self) -> list[str]:
        """A list with one line if other processes used more of the host than `OTHERS_NOTED`, else empty."""
        busy = self.others is not None and self.others > OTHERS_NOTED
        return [f"other processes used {self.others:.0%} of the host"] if busy else []

    def with_causes(self, reasons: Sequence[str]) -> tuple[str, ...]:
        """Return the reasons, with likely causes after the first one; if there are no reasons, return ()."""
        return (*reasons[:1], *(self.busy if reasons else ()), *reasons[1:])


UNKNOWN = Conditions()


class HeldVerdict(NamedTuple):
    """Errors of an emulation, and the reasons for calling it INVALID; without reasons, it is VALID."""

    median_abs_error: float | None
    p95_abs_error: float | None
    reasons: tuple[str, ...]
    conditions: Conditions

    @property
    def valid(self) -> bool:
        return not self.reasons


def judge(
    kinds: Iterable[npt.ArrayLike],
    sums: Mapping[str, float | None],
    conditions: Conditions = UNKNOWN,
    doubts: Iterable[str] = (),
) -> HeldVerdict:
    """Judge errors (each is ``achieved/declared - 1``) and the conditions of the host.

    ``kinds`` contains one array of errors for each kind of time, such as compute time; the largest median and
    the largest 95th percentile of all kinds are judged. ``sums`` maps the name of each sum of emulated times
    to its error, or to None if nothing was summed. ``doubts`` contains known reasons for INVALID.

    >>> judge([[0.01, -0.01], [0.3]], {"trips": -0.04}, Conditions(load=0.5)).reasons
    ('median error 30.0%, at most 5% is allowed', '95th percentile of errors 30.0%, at most 20% is allowed', \
'trips took 4.0% less than declared, at most 3% is allowed')
    >>> judge([[]], {}).valid
    True
    """
    sizes = [size for errors in kinds if (size := np.abs(np.asarray(errors, np.float64))).size]
    median = max((float(np.median(size)) for size in sizes), default=None)
    p95 = max((float(np.percentile(size, 95)) for size in sizes), default=None)
    reasons = [
        *doubts,
        *exceeded("median error", median, MEDIAN_MAX),
        *exceeded("95th percentile of errors", p95, P95_MAX),
        *unfit(conditions),
        *(line for name, error in sums.items() for line in drift(name, error)),
    ]
    return HeldVerdict(median, p95, tuple(reasons), conditions)


def unfit(conditions: Conditions) -> list[str]:
    """Return one line for each condition that makes all measurements unusable.

    >>> unfit(Conditions(load=0.5, steal=0.03))
    ['time stolen by the hypervisor 3.0%, at most 2% is allowed']
    """
    reasons = [
        *exceeded("host load", conditions.load, LOAD_MAX),
        *exceeded(STOLEN, conditions.steal, STEAL_MAX),
        *exceeded(THROTTLED, conditions.throttled, THROTTLED_MAX),
    ]
    cost = conditions.step_cost
    if cost is not None and not 1 / STALE_FACTOR <= cost <= STALE_FACTOR:
        took = f"training took {cost:.2g} times the CPU time measured before the run"
        allowed = f"{1 / STALE_FACTOR:g} to {STALE_FACTOR:g} are allowed"
        reasons.append(f"calibration is stale: {took}, {allowed}")
    return reasons


def exceeded(what: str, share: float | None, most: float) -> list[str]:
    """Return a list with one line if a share is above its bound or is NaN; otherwise an empty list."""
    return [] if share is None or share <= most else [f"{what} {share:.1%}, at most {most:.0%} is allowed"]


def drift(what: str, error: float | None) -> list[str]:
    """Return a list with one line if a sum of emulated times is too far from its declared value, else []."""
    if error is None or abs(error) <= MEAN_MAX:
        return []
    longer = "longer" if error > 0 else "less"
    return [f"{what} took {abs(error):.1%} {longer} than declared, at most {MEAN_MAX:.0%} is allowed"]


def outcome(held: bool, doubts: object) -> Outcome:
    """Return INVALID if there are ``doubts``; otherwise PASS if a bound was ``held``, and FAIL if not."""
    return "INVALID" if doubts else "PASS" if held else "FAIL"
