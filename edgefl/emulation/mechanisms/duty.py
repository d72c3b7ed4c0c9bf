"""SIGSTOP and SIGCONT: a process that knows nothing of it is stopped whenever it is ahead of its share."""

from __future__ import annotations

from edgefl.emulation.mechanisms.account import Account
from edgefl.emulation.mechanisms.target import Target

SLICE_NS = 2_000_000
"""CPU time that a process runs at a stretch."""
SHORTEST_NS = 100_000
"""Between two looks at a process that runs: waking costs some 20 µs."""


class Duty:
    """Stops the process half a slice ahead of its share and lets it go on half a slice behind.

    A duty cycle in fixed slots is wrong by what each signal is late (measured: +63% at a tenth of a core).
    This one steers by the CPU time that the process has really used, so that what it ran too long in one
    slice it stands still longer after it: the error is that of one slice, whatever the time.
    """

    def __init__(self, target: Target, account: Account, slice_ns: int = SLICE_NS) -> None:
        if slice_ns < 2 * SHORTEST_NS:
            raise ValueError(f"slice_ns must be at least {2 * SHORTEST_NS} (got {slice_ns})")
        self.target, self.account = target, account
        self._half_ns = slice_ns / 2

    def turn(self, now_ns: int) -> int:
        """Look, stop or let go; returns when to look again. ProcessLookupError once it is gone."""
        ahead_ns = self.account.ahead_ns(now_ns, self.target.cpu_ns())
        share = self.account.share
        if ahead_ns >= self._half_ns:
            if not self.target.stopped:
                self.target.stop()
            return now_ns + int((ahead_ns + self._half_ns) / share)
        if self.target.stopped:
            wait_ns = (ahead_ns + self._half_ns) / share
            if wait_ns > SHORTEST_NS:
                return now_ns + int(wait_ns)
            self.target.go()
        # It gains at most as fast as one core lets it; threads beyond one are caught at the next look.
        return now_ns + max(SHORTEST_NS, int((self._half_ns - ahead_ns) / max(1.0 - share, 0.25)))

    def close(self) -> None:
        """Let the process run on for good."""
        self.target.close()
