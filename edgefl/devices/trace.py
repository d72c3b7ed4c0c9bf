"""Replaying a recorded link: Mahimahi's packet-delivery traces.

A trace is text, one time in whole milliseconds a line, ascending: each is an opportunity to deliver one
packet. Several packets in one millisecond are as many lines. After its last line a trace begins anew, the
last time being its length (Winstein et al., NSDI 2013; mm-link(1)).
"""

from __future__ import annotations

import functools
import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edgefl.errors import ProfileError

OPPORTUNITY_BYTES = 1504
"""Bytes that one opportunity delivers: an Ethernet packet of 1500 bytes and Mahimahi's header of 4."""
MOST_LINES = 10_000_000


class Trace(NamedTuple):
    """Opportunities of one period, and how long it is.

    >>> trace = Trace((1, 1, 4), 4)                       # 3 packets in each 4 ms
    >>> [round(trace.delivers_s(0.0, n * 1504) * 1e3) for n in (1, 2, 3, 4, 6)]
    [1, 1, 4, 5, 8]
    """

    at_ms: Sequence[int]
    period_ms: int

    @property
    def rate_mbps(self) -> float:
        """The mean rate, 10⁶ bit/s."""
        return len(self.at_ms) * OPPORTUNITY_BYTES * 8 / (self.period_ms * 1e3)

    def delivers_s(self, start_s: float, nbytes: float) -> float:
        """Seconds from ``start_s``, counted from the trace's first beginning, until that much is through.

        An opportunity at the very start counts; nothing takes no time.
        """
        packets = math.ceil(nbytes / OPPORTUNITY_BYTES * (1.0 - 1e-12))
        if packets <= 0:
            return 0.0
        turn, phase_ms = divmod(start_s * 1e3, self.period_ms)
        more, at = divmod(bisect_left(self.at_ms, phase_ms) + packets - 1, len(self.at_ms))
        return max(0.0, ((turn + more) * self.period_ms + self.at_ms[at]) / 1e3 - start_s)


@functools.cache
def read_trace(path: str) -> Trace:
    """The trace in a file. `ProfileError`, one line, where it is not one."""
    try:
        lines = Path(path).read_text(encoding="ascii").split()
    except (OSError, ValueError) as error:
        why = "not text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise ProfileError(f"trace {path!r} cannot be read: {why}") from None
    if not 0 < len(lines) <= MOST_LINES:
        raise ProfileError(f"trace {path!r}: got {len(lines)} lines; allowed: 1 to {MOST_LINES}")
    times_ms = array("q")
    for number, line in enumerate(lines, start=1):
        at_ms = int(line) if line.isdecimal() and len(line) < 16 else -1
        if at_ms < (times_ms[-1] if times_ms else 0):
            allowed = "whole milliseconds, none before the line above"
            raise ProfileError(f"trace {path!r}, line {number}: got {line[:40]!r}; allowed: {allowed}")
        times_ms.append(at_ms)
    if times_ms[-1] < 1:
        raise ProfileError(f"trace {path!r}: its last time is {times_ms[-1]} ms; allowed: at least 1")
    return Trace(times_ms, times_ms[-1])
