"""Emulated time on the wall clock, and things to do at a later instant."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable


class WallClock:
    """Emulated seconds since the start, at ``time_scale`` wall seconds each.

    >>> clock = WallClock(time_scale=2.0, monotonic=iter([10.0, 14.0]).__next__)
    >>> clock.start(); clock.now_s()
    2.0
    """

    def __init__(
        self,
        time_scale: float,
        *,
        emulated_s: float = 0.0,
        wall_s: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.time_scale = time_scale
        self._emulated_s = emulated_s
        self._wall_s = wall_s
        self._monotonic = monotonic
        self._started: float | None = None

    def start(self) -> None:
        """Let emulated time run. Before this it stands at its first value."""
        self._started = self._monotonic()

    def now_s(self) -> float:
        """Emulated seconds since the start of the run, interruptions left out."""
        return self._emulated_s + self._elapsed() / self.time_scale

    def wall_s(self) -> float:
        """Wall seconds since the start of the run, interruptions left out."""
        return self._wall_s + self._elapsed()

    def _elapsed(self) -> float:
        return 0.0 if self._started is None else self._monotonic() - self._started


class Alarms:
    """Callbacks at instants of the monotonic clock; those due at once run in the order they were set."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run ``callback`` once, ``seconds`` from now."""
        heapq.heappush(self._heap, (self._monotonic() + seconds, next(self._order), callback))

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run ``callback`` each ``seconds`` from now on."""

        def again() -> None:
            callback()
            self.after(seconds, again)

        self.after(seconds, again)

    def wait_ms(self, most: int = 1000) -> int:
        """Milliseconds until the next alarm, rounded up, at most ``most``."""
        if not self._heap:
            return most
        left_ms = (self._heap[0][0] - self._monotonic()) * 1000
        return most if left_ms >= most else max(0, int(left_ms) + 1)

    def run_due(self) -> None:
        """Run every alarm whose instant has come."""
        now = self._monotonic()
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
