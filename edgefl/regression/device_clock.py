"""Device time of one call, and waiting until the device would be there.

    device time = max(t_model, t_cpu) + blocked + transfers

t_model is counted FLOP over the device's rate, t_cpu the process's CPU time times the device's slowdown.
Pacing by the first alone would hide code that became slow, since it fits into the wait. Computing is waited
out where the function sends something, and where it ends.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import NamedTuple

from edgefl.limits.pacing import wait_until

_SCHEDSTAT = Path("/proc/self/schedstat")


class Usage(NamedTuple):
    """What this process has used, or used in between."""

    wall_ns: int
    cpu_ns: int
    runnable_ns: int
    """It could have run and had no core; 0 where the system does not tell."""
    gave_up: int
    """Times it gave up its core to wait for something."""

    @classmethod
    def now(cls) -> Usage:
        gave_up = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        return cls(time.monotonic_ns(), cpu_ns(), _runnable_ns(), gave_up)

    def since(self, before: Usage) -> Usage:
        """What was used from then to now."""
        return Usage(*(now - then for now, then in zip(self, before, strict=True)))


class CallTimes(NamedTuple):
    """One call, in emulated seconds."""

    blocked_s: float
    radio_s: float
    declared_s: float
    """What it takes the device."""
    achieved_s: float
    """What it took here, as the clock reads."""


class DeviceClock:
    """Keeps one call, which begins now, at the device's pace.

    ``slowdown`` is emulated seconds for one CPU second of this host; ``time_scale`` is wall seconds for one
    emulated second, 0 does not wait.
    """

    def __init__(self, slowdown: float, time_scale: float) -> None:
        self._slowdown = slowdown
        self._time_scale = time_scale
        self._radio_s = 0.0
        self._away_ns = 0
        """Wall time of the waits for the device."""
        self._waits = 0
        self._began = Usage.now()

    def now_s(self) -> float:
        """What the call has taken the device so far."""
        cpu_ns = Usage.now().since(self._began).cpu_ns
        return cpu_ns / 1e9 * self._slowdown + self._radio_s

    def transfer(self, seconds: float) -> None:
        """Wait out what has been computed, then a transfer."""
        due_s = self.now_s() + seconds
        self._radio_s += seconds
        self._wait(due_s)

    def end(self, model_s: float) -> CallTimes:
        """The call is over; its FLOP take the device ``model_s``."""
        used = Usage.now().since(self._began)
        # Who never gave up its core was not blocked: what is left of the wall time is the clocks' error.
        idle_ns = used.wall_ns - used.cpu_ns - used.runnable_ns - self._away_ns
        blocked_s = max(0, idle_ns) / 1e9 if used.gave_up > self._waits else 0.0
        declared_s = max(model_s, used.cpu_ns / 1e9 * self._slowdown) + blocked_s + self._radio_s
        self._wait(declared_s)
        took_s = (time.monotonic_ns() - self._began.wall_ns) / 1e9
        achieved_s = took_s / self._time_scale if self._time_scale else took_s
        return CallTimes(blocked_s, self._radio_s, declared_s, achieved_s)

    def _wait(self, due_s: float) -> None:
        if not self._time_scale:
            return
        before = Usage.now()
        wait_until(self._began.wall_ns + round(due_s * self._time_scale * 1e9))
        waited = Usage.now().since(before)
        self._away_ns += waited.wall_ns - waited.cpu_ns - waited.runnable_ns
        self._waits += waited.gave_up


def cpu_ns() -> int:
    """CPU time of this process so far, with that of children that have ended and been waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time_ns() + round((ended.ru_utime + ended.ru_stime) * 1e9)


def _runnable_ns() -> int:
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
