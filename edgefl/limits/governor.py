"""What looks after throttled processes: each when it is due, in one thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from edgefl.limits.account import Account
from edgefl.limits.hierarchy import NoGroup
from edgefl.limits.pacing import set_time_slice, set_timer_slack

LATE_NS = 50_000
"""Who is due within this is looked after now."""


def be_prompt() -> None:
    """Have this thread run as soon as it wakes, as far as this user may: who is late stops nobody in time.

    It computes for some microseconds at a time, so nobody misses them.
    """
    set_timer_slack()
    set_time_slice()
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # without privileges the short slice must do
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


class Governed(Protocol):
    """One process under a throttle."""

    account: Account

    def turn(self, now_ns: int) -> int:
        """Look after it; returns when to look again. ProcessLookupError once it is gone."""

    def renew(self, account: Account) -> bool:
        """Another share from now on; whether to look at once."""

    def close(self) -> None:
        """Let it run on for good."""


class Rota:
    """Who is to be looked after when, soonest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Governed]] = []
        self._order = itertools.count()
        self._entry: dict[Governed, int] = {}
        """Each member's entry that counts; others in the heap are of before."""
        self.trouble: dict[Governed, str] = {}
        """Who could not be looked after any more although it lives, and why."""

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, governed: Governed) -> bool:
        return governed in self._entry

    def add(self, governed: Governed, at_ns: int) -> None:
        """Look after it from ``at_ns`` on; if it is there already, then and not when it was planned."""
        number = next(self._order)
        self._entry[governed] = number
        heapq.heappush(self._heap, (at_ns, number, governed))

    def drop(self, governed: Governed) -> None:
        """Look after it no more; it is not closed."""
        self._entry.pop(governed, None)
        self.trouble.pop(governed, None)

    def run_due(self, now_ns: int) -> int | None:
        """Look after all that are due; returns when the next one is."""
        while self._heap:
            at_ns, number, governed = self._heap[0]
            if self._entry.get(governed) != number:
                heapq.heappop(self._heap)
            elif at_ns > now_ns + LATE_NS:
                return at_ns
            else:
                heapq.heappop(self._heap)
                try:
                    self.add(governed, max(governed.turn(now_ns), now_ns + LATE_NS + 1))
                except ProcessLookupError:
                    del self._entry[governed]
                except (OSError, NoGroup) as error:
                    del self._entry[governed]
                    self.trouble[governed] = str(error)
        return None


class Governor:
    """A thread with a `Rota`. It starts with the first process and ends with the last."""

    def __init__(self) -> None:
        self._rota = Rota()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, governed: Governed) -> None:
        with self._changed:
            self._rota.add(governed, time.monotonic_ns())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="edgefl-governor", daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, governed: Governed) -> None:
        """Look after it no more; waits for the thread's end if it was the last."""
        with self._changed:
            self._rota.drop(governed)
            last = self._thread if not len(self._rota) else None
            self._changed.notify()
        if last is not None and last is not threading.current_thread():
            last.join()

    def look(self, look: Callable[[int], object]) -> None:
        """Read a process's clock between the governor's own looks; a process that is gone is left alone."""
        with self._changed, contextlib.suppress(ProcessLookupError):
            look(time.monotonic_ns())

    def trouble(self, governed: Governed) -> str:
        """Why a process that lives is not looked after any more; empty if it is."""
        return self._rota.trouble.get(governed, "")

    def _run(self) -> None:
        be_prompt()
        with self._changed:
            while len(self._rota):
                due_ns = self._rota.run_due(time.monotonic_ns())
                if due_ns is None:
                    break
                self._changed.wait(max(0.0, (due_ns - time.monotonic_ns()) * 1e-9))
            self._thread = None
