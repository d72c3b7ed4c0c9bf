"""SIGSTOP and SIGCONT: a process that knows nothing of it is stopped whenever it is ahead of its share."""

from __future__ import annotations

import math

from edgefl.limits.account import Account
from edgefl.limits.target import Target

SLICE_NS = 2_000_000
"""CPU time that a process runs at a stretch."""
SHORTEST_NS = 100_000
"""It runs at least so long, and has stood still so long when its clock is read: a signal takes some 20 µs."""
LEAST_GAIN = 0.05
"""Of a core: how fast a process is held to get ahead at least, so that one with more threads is found out."""
IDLE = 0.1
"""A process that used less than this of half a slice in its last run may be asleep: it is asked."""


class Duty:
    """Stops the process half a slice ahead of its share and lets it go on half a slice behind.

    A duty cycle in fixed slots is wrong by what each signal is late (measured: +63% at a tenth of a core).
    This one steers by the CPU time that the process has really used, so that what it ran too long in one
    slice it stands still longer after it: the error is that of one slice, whatever the time. While a process
    runs, the kernel brings its clock up to date at ticks only, milliseconds apart; so it is let run for as
    long as it may if it has the core to itself, and its clock is read when it stands still.
    """

    def __init__(self, target: Target, account: Account, slice_ns: int = SLICE_NS) -> None:
        if slice_ns < 2 * SHORTEST_NS:
            raise ValueError(f"slice_ns must be at least {2 * SHORTEST_NS} (got {slice_ns})")
        self.target = target
        self._half_ns = slice_ns / 2
        self._idle = False
        self.renew(account)

    def renew(self, account: Account) -> bool:
        """Another share from now on; whether to look at once. The account's last reading is exact."""
        self.account = account
        self._plan(account.at_ns, account.used_ns, 0.0)
        return True

    def turn(self, now_ns: int) -> int:
        """Look, stop or let go; returns when to look again. ProcessLookupError once it is gone."""
        if self.target.stopped:
            return self._stopped(now_ns)
        if now_ns < self._stop_ns:
            return self._stop_ns
        if self._idle and self.target.sleeps():  # stopping it would only disturb its waiting
            used_ns = self.target.cpu_ns()
            self._plan(now_ns, used_ns, self.account.ahead_ns(now_ns, used_ns))
            return self._stop_ns
        self.target.stop()
        return now_ns + SHORTEST_NS

    def _stopped(self, now_ns: int) -> int:
        used_ns = self.target.cpu_ns()
        ahead_ns = self.account.ahead_ns(now_ns, used_ns)
        wait_ns = (ahead_ns + self._half_ns) / self.account.share
        if wait_ns > SHORTEST_NS:
            return now_ns + int(wait_ns)
        self._idle = used_ns - self._went_at_ns < IDLE * self._half_ns
        self.target.go()
        self._plan(now_ns, used_ns, ahead_ns)
        return self._stop_ns

    def _plan(self, now_ns: int, used_ns: int, ahead_ns: float) -> None:
        """It runs from now on, until it is half a slice ahead if it has the core to itself."""
        share = self.account.share
        gains = max(math.floor(share) + 1.0 - share, LEAST_GAIN)
        self._went_at_ns = used_ns
        self._stop_ns = now_ns + max(SHORTEST_NS, int((self._half_ns - ahead_ns) / gains))

    def close(self) -> None:
        """Let the process run on for good."""
        self.target.close()
