"""Time used by this process: wall time, CPU time, and the time for which it waited for a core."""

from __future__ import annotations

import resource
import time
from typing import NamedTuple

from edgefl.host.process import thread_schedule


def cpu_ns() -> int:
    """Return the CPU time of this process and of the children that it has reaped, in nanoseconds."""
    return time.process_time_ns() + children_ns()


def children_ns() -> int:
    """Return the CPU time of the children that this process has reaped, in nanoseconds."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round((ended.ru_utime + ended.ru_stime) * 1e9)


class ProcessUsage(NamedTuple):
    """Time used by this process so far, or between two moments."""

    wall_ns: int
    cpu_ns: int
    runnable_ns: int
    """Time during which the process was runnable but had no core; 0 if the system does not report it."""
    gave_up: int
    """Number of times that the process gave up its core to wait."""

    @classmethod
    def now(cls) -> ProcessUsage:
        gave_up = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        schedule = thread_schedule("self")
        runnable_ns = 0 if schedule is None else schedule.waited_ns
        return cls(time.monotonic_ns(), cpu_ns(), runnable_ns, gave_up)

    def since(self, before: ProcessUsage) -> ProcessUsage:
        return ProcessUsage(*(now - then for now, then in zip(self, before, strict=True)))
