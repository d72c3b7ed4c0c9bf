"""Clocks of emulated time, an `Agenda` of events in emulated time, and `Alarms` in wall time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

TICK, JOIN, ARRIVAL, LEAVE = 0, 1, 2, 3
"""Kinds of agenda entries. Entries with the same time are handled in the order of these numbers. Under the
wall clock, an `ARRIVAL` is the end of a failed trip."""


class WallClock:
    """Clock of emulated time: one emulated second takes ``time_scale`` wall seconds.

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
        """Start the clock; before this call, emulated time keeps its initial value."""
        self._started = self._monotonic()

    def now_s(self) -> float:
        """Return the emulated seconds since the start of the run, excluding interruptions."""
        return self._emulated_s + self._elapsed() / self.time_scale

    def wall_s(self) -> float:
        """Return the wall seconds since the start of the run, excluding interruptions."""
        return self._wall_s + self._elapsed()

    def _elapsed(self) -> float:
        return 0.0 if self._started is None else self._monotonic() - self._started


class VirtualClock(WallClock):
    """A clock whose emulated time is set by the agenda; its wall time is measured on the host."""

    def __init__(self, *, emulated_s: float, wall_s: float) -> None:
        super().__init__(1.0, emulated_s=emulated_s, wall_s=wall_s)
        self._now_s = emulated_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, at_s: float) -> None:
        """Advance time to ``at_s``, if that is later than the current time."""
        self._now_s = max(self._now_s, at_s)


class Alarms:
    """Calls functions at given times of the monotonic clock.

    Callbacks are called in the order of their due times; callbacks that are due at the same time are called
    in the order in which they were added.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, after ``seconds`` seconds."""
        heapq.heappush(self._heap, (self._monotonic() + seconds, next(self._order), callback))

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` every ``seconds`` seconds."""

        def again() -> None:
            callback()
            self.after(seconds, again)

        self.after(seconds, again)

    def wait_ms(self, most: int = 1000) -> int:
        """Return the time until the next alarm in milliseconds, rounded up, but at most ``most``."""
        if not self._heap:
            return most
        left_ms = (self._heap[0][0] - self._monotonic()) * 1000
        return most if left_ms >= most else max(0, int(left_ms) + 1)

    def run_due(self) -> None:
        """Call the callbacks of all alarms that are due."""
        now = self._monotonic()
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()


class Due(NamedTuple):
    """An entry of the agenda. Entries are sorted by time, kind, client and task, in this order."""

    at_s: float
    kind: int
    client: int = -1
    task: int = -1


class Agenda:
    """Priority queue of entries, ordered by time.

    If a second arrival is added for the same task, it replaces the first. A second tick for the same time is
    not added: the core would take it for a timer that fired early and set that timer again, without end.

    >>> agenda = Agenda(); agenda.add(Due(2.0, TICK))
    >>> agenda.add(Due(5.0, ARRIVAL, client=1, task=7)); agenda.add(Due(1.0, ARRIVAL, client=1, task=7))
    >>> [agenda.pop().at_s, agenda.pop().at_s, agenda.head]
    [1.0, 2.0, None]
    """

    def __init__(self) -> None:
        self._heap: list[Due] = []
        self._due_s: dict[int, float] = {}
        self._ticks: set[float] = set()
        self._followed: Iterator[Due] = iter(())
        self._next_followed: Due | None = None

    def follow(self, dues: Iterator[Due]) -> None:
        """Merge the entries of a sorted iterator into the agenda.

        The iterator is advanced only when its current entry is popped.
        """
        self._followed, self._next_followed = dues, next(dues, None)

    def add(self, due: Due) -> None:
        """Add an entry; an arrival replaces an earlier arrival of the same task."""
        if due.kind == ARRIVAL:
            self._due_s[due.task] = due.at_s
        elif due.kind == TICK:
            if due.at_s in self._ticks:
                return
            self._ticks.add(due.at_s)
        heapq.heappush(self._heap, due)

    @property
    def head(self) -> Due | None:
        """The next entry, or None if the agenda is empty."""
        heap = self._heap
        while heap:
            due = heap[0]
            if due.kind != ARRIVAL or self._due_s.get(due.task) == due.at_s:
                return due if self._next_followed is None else min(due, self._next_followed)
            heapq.heappop(heap)
        return self._next_followed

    def pop(self) -> Due:
        """Remove and return the next entry. Raises IndexError if the agenda is empty."""
        due = self.head
        if due is None:
            raise IndexError("the agenda is empty")
        if due is self._next_followed:
            self._next_followed = next(self._followed, None)
            return due
        heapq.heappop(self._heap)
        if due.kind == ARRIVAL:
            del self._due_s[due.task]
        elif due.kind == TICK:
            self._ticks.remove(due.at_s)
        return due
