"""CPU time that a process was allowed, against what it has used: what every throttle steers by."""

from __future__ import annotations

import math
from typing import NamedTuple


class Achieved(NamedTuple):
    """What a throttle has let its process have."""

    wall_s: float
    cpu_s: float
    declared_cpu_s: float
    """The share, over all that time."""

    @property
    def error(self) -> float:
        """Used over declared, less 1: above 0 is faster than declared; NaN before anything was declared."""
        return self.cpu_s / self.declared_cpu_s - 1.0 if self.declared_cpu_s > 0 else math.nan


class Account:
    """CPU time allowed is the integral of ``share`` over wall time; used is what a clock says.

    A process that does not want to run leaves some of it. At most ``most_saved_ns`` are kept for later, as a
    slow core does not become fast because it has slept.

    >>> account = Account(share=0.25, now_ns=0, used_ns=0, most_saved_ns=1_000)
    >>> account.ahead_ns(4_000, 1_500)            # used 1.5 µs where 1 µs was allowed
    500.0
    >>> account.ahead_ns(1_000_000, 1_500)        # slept: of 250 µs one is kept
    -1000
    """

    def __init__(self, share: float, now_ns: int, used_ns: int, most_saved_ns: float = math.inf) -> None:
        self.share = checked_share(share)
        self.most_saved_ns = most_saved_ns
        self._began_ns = self.at_ns = now_ns
        self._used_before_ns = self.used_ns = used_ns
        self._declared_ns = 0.0
        self._allowed_ns = 0.0

    def ahead_ns(self, now_ns: int, used_ns: int) -> float:
        """By how much the process is ahead of its share (below 0: behind), given what it has used by now."""
        granted = self.share * (now_ns - self.at_ns)
        self.at_ns, self.used_ns = now_ns, used_ns
        self._declared_ns += granted
        used = used_ns - self._used_before_ns
        self._allowed_ns = min(self._allowed_ns + granted, used + self.most_saved_ns)
        return used - self._allowed_ns

    def achieved(self) -> Achieved:
        """What was used and declared when the account was last looked at."""
        return Achieved(
            wall_s=(self.at_ns - self._began_ns) / 1e9,
            cpu_s=(self.used_ns - self._used_before_ns) / 1e9,
            declared_cpu_s=self._declared_ns / 1e9,
        )


def checked_share(share: float) -> float:
    """``share`` if it is one: cores of this host, above 0 (1.5 is one core and a half)."""
    if not 0 < share < math.inf:
        raise ValueError(f"share must be a finite number of cores above 0 (got {share})")
    return share
