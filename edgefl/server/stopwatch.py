"""Where a process's time goes: one stage at a time, so that stages never overlap and add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Charges all time since the last change to the stage that was on.

    >>> now = iter([0, 5, 7, 10]).__next__
    >>> watch = Stopwatch("wait", now)
    >>> before = watch.to("sum"); _ = watch.to(before); _ = watch.to("sum")
    >>> watch.ns
    {'wait': 8, 'sum': 2}
    """

    def __init__(self, stage: str, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.ns: dict[str, int] = {stage: 0}
        self.calls: dict[str, int] = {stage: 1}
        self._clock_ns = clock_ns
        self._stage = stage
        self.since_ns = clock_ns()
        """When the stage that is on began."""

    def to(self, stage: str) -> str:
        """Start charging ``stage``; returns the stage that was on."""
        now_ns, before, ns = self._clock_ns(), self._stage, self.ns
        ns[before] += now_ns - self.since_ns
        self.since_ns, self._stage = now_ns, stage
        if stage not in ns:
            ns[stage] = self.calls[stage] = 0
        self.calls[stage] += 1
        return before

    def seconds(self, stage: str) -> float:
        """What was charged to ``stage`` so far."""
        return self.ns.get(stage, 0) / 1e9
