"""Closed-loop pacing: do the real work, then wait until the device would have done it.

A trip is a sequence of phases (download, compute, upload). Each phase is scheduled to start when the previous
phase was *scheduled* to end, so errors do not accumulate. The reported times are clock readings: if work took
longer than on the device, ``achieved_s`` is above ``declared_s``.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import struct
import time
from collections.abc import Callable

import msgspec

Wait = Callable[[int], None]
"""Function that waits until ``time.monotonic_ns()`` is at least the given value. It may raise an exception to
cancel the trip."""

Clock = Callable[[], int]

Takes = Callable[[float], float]
"""Function that returns the emulated seconds that the device takes for an amount of work, or infinity if the
device never finishes."""

_PR_SET_TIMERSLACK = 29

NEVER_NS = 2.0**62  # over a century, so that a wait until this time ends only if it is cancelled

AHEAD_NS = 50_000_000  # wall time by which the work of a phase may be ahead of the device


def set_timer_slack(slack_ns: int = 1) -> bool:
    """Set the maximum delay with which Linux wakes this thread. Linux's own default is 50 µs.

    Return True if Linux accepted it.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return int(prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(slack_ns), 0, 0, 0)) == 0


def set_time_slice(slice_ns: int = 100_000) -> None:
    """Ask Linux (6.12 or newer) for time slices of ``slice_ns``, so that this thread is woken promptly.

    A value of 0 restores the default. Older versions ignore the request.
    """
    number = {"x86_64": 314, "aarch64": 274, "riscv64": 274}.get(platform.machine())
    # struct sched_attr: size, policy (SCHED_OTHER), flags, nice, priority, runtime, deadline, period
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # kept unchanged
    attributes = struct.pack("<IIQiIQQQ", 48, 0, 0, nice, 0, slice_ns, 0, 0)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


class Pauses:
    """Pauses between repetitions of a task, such as a reading or a checkpoint, so that the task takes only a
    limited share of the time.

    A pause is ``ratio`` times the duration of the task. If the whole host stands still during a repetition,
    its duration includes that time. So the shorter of the last two durations is used.

    >>> pauses = Pauses(10.0)
    >>> pauses.after(2.0), pauses.after(300.0), pauses.after(3.0)
    (20.0, 20.0, 30.0)
    """

    def __init__(self, ratio: float) -> None:
        self._ratio, self._before = ratio, math.inf

    def after(self, took: float) -> float:
        """Return the pause after a repetition of this duration, in the same unit."""
        shorter, self._before = min(took, self._before), took
        return self._ratio * shorter


def wait_until(deadline_ns: int) -> None:
    """Sleep until the monotonic clock reads ``deadline_ns``, without returning early and without spinning."""
    while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns * 1e-9)


class PhaseTime(msgspec.Struct, frozen=True):
    """The declared and the measured time of one phase, in emulated seconds."""

    work: float
    declared_s: float
    """Time that the device needs for the work: lead + work / rate."""
    achieved_s: float
    """Measured time from the end of the previous phase (or the start of the trip) to this phase's end."""
    lateness_s: float
    """Time from the scheduled end of the phase to its real end; 0 if the phase was not late."""

    def then(self, after: PhaseTime) -> PhaseTime:
        """Merge this phase and the next phase, ``after``, into one."""
        return PhaseTime(
            self.work + after.work,
            self.declared_s + after.declared_s,
            self.achieved_s + after.achieved_s,
            after.lateness_s,
        )


class Phase:
    """One paced part of a trip; created by `Pacer.phase`."""

    __slots__ = ("_ended", "_lead_s", "_pacer", "_rate", "_start_ns", "_takes", "work")

    def __init__(
        self, pacer: Pacer, start_ns: float, rate_per_s: float, lead_s: float, takes: Takes | None
    ) -> None:
        self._pacer, self._start_ns, self._rate = pacer, start_ns, rate_per_s
        self._lead_s, self._takes = lead_s, takes
        self._ended, self.work = False, 0.0

    def _takes_s(self, work: float) -> float:
        return self._lead_s + (work / self._rate if self._takes is None else self._takes(work))

    def due_ns(self, work: float) -> float:
        """Return the time on the monotonic clock, in ns, at which the device would have done ``work``."""
        return self._start_ns + self._takes_s(work) * self._pacer.ns_per_emulated_s

    def lead(self) -> None:
        """Wait until the lead time (a link's delay) has passed; the pacer records how long the wait took."""
        if self._lead_s > 0.0:
            self._pacer.lead(self._start_ns, self._lead_s)

    def done(self, work: float) -> None:
        """Record additional ``work`` (seconds or bytes), and wait until the device would have done it.

        Work may be ahead of the device by up to `AHEAD_NS`. Otherwise, each short step would cause a wake-up
        (20 sleeps of 3 ms doubled the CPU time of the work between them). `end` waits for the remaining time.
        """
        self._add(work)
        self._pacer.hold(self.due_ns(self.work), AHEAD_NS)

    def end(self, work: float = 0.0) -> PhaseTime:
        """Record additional ``work``, wait until the device would have done it, and return the times."""
        self._add(work)
        self._ended = True
        pacer, declared_s = self._pacer, self._takes_s(self.work)
        due_ns = self._start_ns + declared_s * pacer.ns_per_emulated_s
        return pacer.close(self.work, declared_s, due_ns, pacer.hold(due_ns))

    def _add(self, work: float) -> None:
        if self._ended:
            raise ValueError("done() and end() cannot be called on a phase that has ended")
        if not 0.0 <= work < math.inf:
            raise ValueError(f"work must be finite and at least 0 (got {work})")
        self.work += work


class Pacer:
    """Paces the trips of one client against absolute deadlines.

    ``time_scale`` is the number of wall seconds per emulated second. Work at a rate of ``inf`` takes no time.

    >>> now = [0]
    >>> def wait(deadline_ns): now[0] = max(now[0], deadline_ns)
    >>> pacer = Pacer(time_scale=2.0, wait=wait, clock=lambda: now[0])
    >>> pacer.begin(0)
    >>> phase = pacer.phase(rate_per_s=1.0)
    >>> phase.done(0.5)                          # half an emulated second of work
    >>> phase.end()
    PhaseTime(work=0.5, declared_s=0.5, achieved_s=0.5, lateness_s=0.0)
    >>> now[0]                                   # takes one wall second at time_scale 2
    1000000000
    """

    def __init__(
        self, *, time_scale: float, wait: Wait = wait_until, clock: Clock = time.monotonic_ns
    ) -> None:
        if not (time_scale > 0 and math.isfinite(time_scale)):
            raise ValueError(f"time_scale must be finite and above 0 (got {time_scale})")
        self.time_scale, self.ns_per_emulated_s = time_scale, time_scale * 1e9
        self._wait, self._clock = wait, clock
        self._cursor_ns: float | None = None  # the scheduled start of the next phase
        self._last_ns = 0  # the real end of the previous phase
        self.delay_declared_s = self.delay_s = 0.0  # sums of the declared and the measured leads of this trip

    def begin(self, at_ns: int) -> None:
        """Start a trip. The message that requested it was received at ``at_ns`` on the monotonic clock."""
        self.delay_declared_s = self.delay_s = 0.0
        self._cursor_ns = float(at_ns)
        self._last_ns = at_ns

    def phase(self, rate_per_s: float, lead_s: float = 0.0, takes: Takes | None = None) -> Phase:
        """Start the next phase.

        No work is done during the first ``lead_s`` emulated seconds. After that, work is done at
        ``rate_per_s``; if ``takes`` is given, it determines the time that the work takes.
        """
        if not rate_per_s > 0:
            raise ValueError(f"rate_per_s must be above 0 (got {rate_per_s})")
        if not 0.0 <= lead_s < math.inf:
            raise ValueError(f"lead_s must be finite and at least 0 (got {lead_s})")
        if self._cursor_ns is None:
            raise ValueError("phase() was called before begin()")
        return Phase(self, self._cursor_ns, rate_per_s, lead_s, takes)

    def lead(self, start_ns: float, lead_s: float) -> None:
        """Wait for the start of a phase's work, which is ``lead_s`` emulated seconds after ``start_ns``."""
        now_ns = self.hold(start_ns + lead_s * self.ns_per_emulated_s)
        self.delay_declared_s += lead_s
        self.delay_s += (now_ns - self._last_ns) / self.ns_per_emulated_s

    def hold(self, due_ns: float, ahead_ns: int = 0) -> int:
        """Wait until ``due_ns`` if it is more than ``ahead_ns`` away; return the last clock reading."""
        now_ns = self._clock()
        if due_ns > now_ns + ahead_ns:
            self._wait(math.ceil(min(due_ns, NEVER_NS)))
            now_ns = self._clock()
        return now_ns

    def close(self, work: float, declared_s: float, due_ns: float, now_ns: int) -> PhaseTime:
        """Record that the current phase ended at ``now_ns``, and schedule the next one for ``due_ns``."""
        achieved_s = (now_ns - self._last_ns) / self.ns_per_emulated_s
        lateness_s = (now_ns - due_ns) / self.ns_per_emulated_s
        self._cursor_ns, self._last_ns = due_ns, now_ns
        return PhaseTime(work, declared_s, achieved_s, lateness_s if lateness_s > 0.0 else 0.0)
