"""Result of a run of phones: measurements of each phone, and the verdict on the enforcement error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edgefl.errors import RunError
from edgefl.host import verdict
from edgefl.host.fidelity import MINOR_PART, RESOLUTION_WALL_S
from edgefl.host.verdict import MEAN_MAX, Conditions, HeldVerdict
from edgefl.programs.phone import HeldPhone

MIN_CPU_S = 0.05
"""Minimum CPU seconds for judging a phone's rate. With less CPU time, one time slice more or less
changes the rate by several percent."""


class WayResult(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a phone's link. A transmission is a busy period. Times are in emulated seconds."""

    bytes: int
    transmissions: int
    """Number of measured transmissions; those delayed by the receiver are left out."""
    declared_s: float
    achieved_s: float
    """Sums of the declared (``declared_s``) and the achieved durations of the measured transmissions. A
    transmission lasts from the entry of its first byte to the arrival of its last byte."""
    median_error: float | None
    """Median of achieved/declared − 1 over the measured transmissions."""


class PhoneResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one phone. Times and rates are in wall seconds, except for those of links."""

    phone: int
    device: str
    network: str
    command: tuple[str, ...]
    exit_code: int
    """Exit code as in a shell: 128 + n if signal n ended the command."""
    why: str
    """Reason why the emulation ended the phone; "" if it did not."""
    wall_s: float
    """Run time, excluding absences."""
    cpu_s: float
    wanting_s: float
    """Part of ``wall_s`` during which the phone ran or waited for a core."""
    declared_share: float
    """CPU seconds on this host that the phone's profile allows per second during which the phone ran or
    waited for a core."""
    achieved_share: float | None
    """CPU seconds that the phone used per second during which it ran or waited for a core; None if no CPU
    time was measured."""
    limit_mib: float | None
    peak_mib: float
    stops: int
    uncounted_s: float = 0.0
    """Upper estimate of the CPU time that is missing from ``cpu_s`` because it was used by children that
    no process waited for."""
    connections: int
    refused: int
    broken: int
    energy_j: float | None
    """Energy drawn from the battery, in joules; None if the profile lacks the data for it."""
    up: WayResult
    down: WayResult

    @property
    def uncounted(self) -> str:
        """Reason why the phone's CPU rate cannot be judged; "" if it can."""
        missing = self.uncounted_s / max(self.cpu_s, MIN_CPU_S)
        if missing <= MEAN_MAX:
            return ""
        return (
            f"phone {self.phone}: a process ignores SIGCHLD or has set SA_NOCLDWAIT, so the CPU time of its "
            f"children is lost: up to {missing:.0%} of what was counted; control groups (as root, or "
            "delegated) count it"
        )

    @property
    def cpu_error(self) -> float | None:
        """Measured divided by declared computing time, minus 1; None if the phone is not judged.

        A value above 0 means slower than declared.
        """
        minor = self.cpu_s / self.declared_share < MINOR_PART * self.wall_s
        if self.achieved_share is None or self.cpu_s < MIN_CPU_S or minor or self.uncounted:
            return None
        return self.declared_share / self.achieved_share - 1.0


class ModelError(NamedTuple):
    """Error of the time model: 90% of real devices run the code within ``factor`` of the emulated speed."""

    code: str
    device: str
    factor: float


PAUSE_SPREAD = 1.25
"""Error factor for the effect of pauses: 90% of programs that are repeatedly stopped and resumed do as much
work per CPU second as without pauses, within this factor. On two virtual machines, cores that had been idle
were slower by a factor of 1.0 to 1.35."""


def model_errors(held: Sequence[HeldPhone], *, pauses: bool) -> tuple[ModelError, ...]:
    """Return the model error of each class of code and device.

    If there are ``pauses``, during which the host's cores may go idle, the error includes `PAUSE_SPREAD`; the
    two errors are assumed to be independent.
    """
    spread = math.log(PAUSE_SPREAD) if pauses else 0.0
    found = [
        ModelError(one.phone.like, one.device.id, math.exp(math.hypot(math.log(one.error_factor), spread)))
        for one in held
        if one.error_factor is not None
    ]
    return tuple(dict.fromkeys(found))


class ProgramsResult(NamedTuple):
    """All phones' results, and the verdict on the enforcement error."""

    phones: tuple[PhoneResult, ...]
    time_scale: float
    seed: int
    wall_s: float
    throttle: str
    memory: str
    held: HeldVerdict
    model_errors: tuple[ModelError, ...] = ()
    """Errors of the devices' models for the code that the phones run; empty if all shares were given, or if
    the phones' computing was not limited."""
    awake: bool = False
    """True if this host's cores were kept from going idle."""

    @property
    def valid(self) -> bool:
        return self.held.valid

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why the result is INVALID."""
        return self.held.reasons

    @property
    def unjudged(self) -> str:
        """Why the CPU limit was not judged; "" if it was judged, or if the result is INVALID."""
        if not self.valid or self.held.median_abs_error is not None:
            return ""
        if self.throttle == "off":
            return "the phones' computing was not limited, and they hardly sent anything"
        return "the phones hardly computed or sent anything"

    @property
    def exit_code(self) -> int:
        """The first nonzero exit code in the order of the phones; 0 if all are 0."""
        return next((phone.exit_code for phone in self.phones if phone.exit_code), 0)

    def cpu_error(self, phone: PhoneResult) -> float | None:
        """Return `PhoneResult.cpu_error`; None if the phones' computing was not limited."""
        return None if self.throttle == "off" else phone.cpu_error

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        fidelity = {
            "valid": self.held.valid,
            "median_abs_error": self.held.median_abs_error,
            "p95_abs_error": self.held.p95_abs_error,
            "reasons": list(self.held.reasons),
            "conditions": msgspec.to_builtins(self.held.conditions),
        }
        return {
            "programs": len(self.phones),
            "exit_code": self.exit_code,
            "seed": self.seed,
            "time_scale": self.time_scale,
            "wall_s": self.wall_s,
            "throttle": self.throttle,
            "memory": self.memory,
            "awake": self.awake,
            "fidelity": fidelity,
            **({"model_errors": [one._asdict() for one in self.model_errors]} if self.model_errors else {}),
            "phones": [{**msgspec.to_builtins(one), "cpu_error": self.cpu_error(one)} for one in self.phones],
        }


class UnwrittenRecord(RunError):
    """The record cannot be written, for example because the disk is full; ``result`` is complete."""

    def __init__(self, why: str, result: ProgramsResult) -> None:
        super().__init__(why)
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        """Make `pickle` use the constructor: `multiprocessing` passes exceptions between processes."""
        return type(self), (str(self), self.result)


def way_result(nbytes: int, declared_s: Sequence[float], achieved_s: Sequence[float]) -> WayResult:
    """Summarise the transmissions in one direction."""
    errors = [took / due - 1.0 for due, took in zip(declared_s, achieved_s, strict=True) if due > 0]
    return WayResult(
        bytes=nbytes,
        transmissions=len(declared_s),
        declared_s=math.fsum(declared_s),
        achieved_s=math.fsum(achieved_s),
        median_error=float(np.median(errors)) if errors else None,
    )


def judge(
    phones: Sequence[PhoneResult],
    transmissions: Sequence[tuple[float, float]],
    time_scale: float,
    conditions: Conditions,
    doubts: Sequence[str] = (),
) -> HeldVerdict:
    """Judge the enforcement error. ``doubts`` holds reasons for INVALID that are already known.

    Two kinds of errors are judged: each phone's computing error, and the error of each transmission that was
    declared to last at least 5 ms of wall time (``transmissions``: declared and achieved emulated seconds).

    >>> judge([], [(1.0, 1.01), (2.0, 2.02)], 1.0, Conditions()).median_abs_error
    0.01...
    """
    cpu = [one.cpu_error for one in phones if one.cpu_error is not None]
    sent = [(due, took) for due, took in transmissions if due * time_scale >= RESOLUTION_WALL_S]
    of_links = [took / due - 1.0 for due, took in sent]
    uncounted = [one.uncounted for one in phones if one.uncounted]
    more = f" (and {len(uncounted) - 1} more)" if len(uncounted) > 1 else ""
    due_s, took_s = (math.fsum(side) for side in zip(*sent, strict=True)) if sent else (0.0, 0.0)
    sums = {
        "computing": float(np.mean(cpu)) if cpu else None,
        "transmissions": took_s / due_s - 1.0 if sent else None,
    }
    doubts = [*doubts, *(why + more for why in uncounted[:1])]
    held = verdict.judge([cpu, of_links], sums, conditions, doubts)
    return held._replace(reasons=conditions.with_causes(held.reasons))
