"""Who used the host during a run: the run itself, others, the hypervisor; and what a quota took from it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from edgefl.limits.capacity import StealMeter, ThrottleMeter, usable_cores

STAT = Path("/proc/stat")


class Usage(NamedTuple):
    """Shares of the host's cores, or of time; None where the system does not tell."""

    used: float | None
    """Of the cores, by this process and all that it started and has seen end."""
    others: float | None
    """Of the cores, by everybody else."""
    steal: float | None
    """Of the time, by the hypervisor for others."""
    throttled: float | None
    """Of the wall time, in which a core stood still because of a CPU quota around the run."""


class UsageMeter:
    """Measures from when it was made until `usage` is asked; steal and quota between `begin` and `end`.

    >>> meter = UsageMeter()
    >>> meter.begin()
    >>> meter.end()
    >>> usage = meter.usage()
    >>> usage.used is None or usage.used >= 0.0
    True
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._own_s, self._busy_s = _own_cpu_s(), _busy_s()
        self._steal: StealMeter | None = None
        self._throttle: ThrottleMeter | None = None
        self._taken: tuple[float | None, float | None] = (None, None)

    def begin(self) -> None:
        """The phones start."""
        self._steal, self._throttle = StealMeter(), ThrottleMeter()

    def end(self) -> None:
        """The phones have ended."""
        if self._steal is not None and self._throttle is not None:
            self._taken = self._steal.share(), self._throttle.share()

    def usage(self) -> Usage:
        """What was measured; all processes of the run have ended."""
        core_s = (time.monotonic() - self._began_s) * usable_cores()
        own_s = _own_cpu_s() - self._own_s
        now_s, before_s = _busy_s(), self._busy_s
        others = None
        if now_s is not None and before_s is not None and core_s > 0:
            others = max(0.0, now_s - before_s - own_s) / core_s
        return Usage(own_s / core_s if core_s > 0 else None, others, *self._taken)


def _own_cpu_s() -> float:
    """CPU seconds of this process and of its children, theirs too, once they were waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_s() -> float | None:
    """CPU seconds that the host's cores have worked since it started: not idle, not stolen."""
    try:
        with STAT.open("rb") as stat:
            fields = stat.readline().split()
        user, nice, system, _idle, _wait, irq, softirq = (int(field) for field in fields[1:8])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
