"""A control group's CPU quota, corrected by the CPU time that its process has really used."""

from __future__ import annotations

import contextlib

from edgefl.limits.account import Account
from edgefl.limits.hierarchy import NoGroup, Place, figures, write
from edgefl.limits.target import Target

PERIOD_US = 10_000
"""Shorter periods lose much of the quota (measured at 5 ms: 10 to 19%)."""
LEAST_QUOTA_US = 1_000
"""The kernel's."""
LONGEST_PERIOD_US = 1_000_000
"""The kernel's."""
MOST_CORRECTION = 0.5
"""Of the share, in one turn."""
WORTHWHILE = 0.02
"""A quota that is off by less stays: a new one wipes the debt of the old and hands out a period's worth."""
HALF_BURST_NS = 1_300_000
"""The kernel takes a process off its core at a tick, every 4 ms for most, and makes it pay in the periods
after. So whenever it runs it is ahead: by so much on average (measured on Linux 6.18)."""
BURSTS_A_TURN = 80
"""In a shorter turn, where in its bursts a process is says more than what the quota does."""


class CpuGroup:
    """The CPU quota of one control group."""

    def __init__(self, place: Place) -> None:
        self._folder, self._version = place

    def limit(self, quota_us: int, period_us: int) -> None:
        """Allow ``quota_us`` of CPU time in each ``period_us`` of wall time."""
        if self._version == 2:
            write(self._folder / "cpu.max", f"{quota_us} {period_us}")
        else:
            write(self._folder / "cpu.cfs_period_us", str(period_us))
            write(self._folder / "cpu.cfs_quota_us", str(quota_us))

    def lift(self) -> None:
        """Allow everything."""
        if self._version == 2:
            write(self._folder / "cpu.max", "max")
        else:
            write(self._folder / "cpu.cfs_quota_us", "-1")

    def throttled(self) -> int:
        """In how many periods the quota was used up."""
        return figures(self._folder / "cpu.stat").get("nr_throttled", 0)


class Quota:
    """Holds a process to its share by the quota of the group that it is in.

    The kernel's own error is corrected from what the process has really used.
    """

    def __init__(self, target: Target, account: Account, place: Place) -> None:
        self.target, self.account = target, account
        self._group = CpuGroup(place)
        self._period_us = period(account.share)
        self._quota_us = 0

    def turn(self, now_ns: int) -> int:
        """Look and correct the quota; returns when to look again. ProcessLookupError once it is gone."""
        ahead_ns = self.look(now_ns)
        share = self.account.share
        turn_ns = int(BURSTS_A_TURN * HALF_BURST_NS / share)
        most = MOST_CORRECTION * share
        wanted = share - min(max(ahead_ns / turn_ns, -most), most)
        if wanted * self._period_us < LEAST_QUOTA_US:
            self._period_us = period(wanted)
        quota_us = max(LEAST_QUOTA_US, round(wanted * self._period_us))
        if abs(quota_us - self._quota_us) > WORTHWHILE * self._quota_us:
            self._group.limit(quota_us, self._period_us)
            self._quota_us = quota_us
        return now_ns + turn_ns

    def look(self, now_ns: int) -> float:
        """By how much the process is ahead, ns. ProcessLookupError once it is gone."""
        return self.account.ahead_ns(now_ns, self.target.cpu_ns())

    def renew(self, account: Account) -> bool:
        """Another share from now on; whether to look at once: here at the next turn."""
        self.account = account
        return False

    def close(self) -> None:
        """Let the process run on for good."""
        with contextlib.suppress(NoGroup):  # the group may be gone with its process
            self._group.lift()
        self.target.close()


def period(share: float) -> int:
    """Length of a period for ``share`` cores, µs: such that its quota is not below the kernel's least.

    >>> period(0.5), period(0.05)
    (10000, 30000)
    """
    least = LEAST_QUOTA_US / share
    return int(min(max(PERIOD_US, 1.5 * least), LONGEST_PERIOD_US))
