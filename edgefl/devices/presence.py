"""Determines when a client is online, ignoring effects of its own work, such as an empty battery.

A presence combines sources (availability windows, churn, a late join), which depend only on the experiment's
seed and the client. ``on(at_s)`` returns a source's state at a time. If the state changes at exactly this
time, the new state is returned. ``changes_s(at_s)`` returns the first later time at which the state may
change; it is infinite if the state never changes again.

A fleet's availability file is JSON: a list of entries such as ``{"intervals_s": [[0, 3600], [7200, 9000]],
"period_s": 86400}``, in emulated seconds as in profiles. The seed assigns the entries to clients.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np

from edgefl.devices.profiles import availability_faults
from edgefl.devices.schema import Availability
from edgefl.errors import ProfileError
from edgefl.files import read as read_file
from edgefl.seeds import stream

MAX_BYTES = 64 << 20


class Windows:
    """Presence source that is on during given intervals of each period.

    The run starts ``shift_s`` after the start of a period.

    >>> night = Windows([(0.0, 6.0), (22.0, 24.0)], period_s=24.0, shift_s=20.0)
    >>> night.on(0.0), night.changes_s(0.0), night.on(2.0), night.changes_s(2.0)
    (False, 2.0, True, 10.0)
    """

    def __init__(self, intervals_s: Sequence[tuple[float, float]], period_s: float, shift_s: float = 0.0):
        self._period_s, self._shift_s = period_s, shift_s
        self._edges_s: list[float] = []
        for start_s, end_s in intervals_s:
            if self._edges_s and self._edges_s[-1] == start_s:
                self._edges_s[-1] = end_s
            else:
                self._edges_s += [start_s, end_s]
        self._wraps = bool(self._edges_s) and self._edges_s[0] == 0.0 and self._edges_s[-1] == period_s

    def on(self, at_s: float) -> bool:
        return bisect_right(self._edges_s, self._phase(at_s)[1]) % 2 == 1

    def changes_s(self, at_s: float) -> float:
        edges_s = self._edges_s
        if not edges_s or (self._wraps and len(edges_s) == 2):
            return math.inf
        turn, phase_s = self._phase(at_s)
        at = bisect_right(edges_s, phase_s)
        if self._wraps and at == len(edges_s) - 1:  # this online interval wraps past the end of the period
            turn, at = turn + 1, 1
        elif at == len(edges_s):
            turn, at = turn + 1, 0
        instant_s = turn * self._period_s + edges_s[at] - self._shift_s
        return max(instant_s, math.nextafter(at_s, math.inf))

    def _phase(self, at_s: float) -> tuple[int, float]:
        """Return the index of the period, and the time since its start.

        A time just before the edge of an interval is rounded to this edge.
        """
        turn, phase_s = divmod(at_s + self._shift_s, self._period_s)
        late_s = phase_s + 8.0 * math.ulp(abs(at_s) + self._shift_s + self._period_s)
        if late_s >= self._period_s:
            return int(turn) + 1, 0.0
        before = bisect_right(self._edges_s, late_s)
        return int(turn), max(phase_s, self._edges_s[before - 1]) if before else phase_s


class AlternatingRenewal:
    """Presence source that alternates between on and off, each for an exponentially distributed time.

    This is an alternating renewal process, which is on for ``mean_on_s / (mean_on_s + mean_off_s)`` of the
    time on average. Times are drawn from ``rng`` on demand.

    >>> churn = AlternatingRenewal(60.0, 20.0, np.random.default_rng(0))
    >>> churn.on(0.0), round(churn.changes_s(0.0), 1), churn.on(churn.changes_s(0.0))
    (True, 61.2, False)
    """

    def __init__(self, mean_on_s: float, mean_off_s: float, rng: np.random.Generator) -> None:
        self._means_s = (mean_off_s, mean_on_s)
        self._rng = rng
        self._first = bool(rng.random() < mean_on_s / (mean_on_s + mean_off_s))
        self._changes_s: list[float] = []

    def on(self, at_s: float) -> bool:
        return self._first ^ (self._passed(at_s) % 2 == 1)

    def changes_s(self, at_s: float) -> float:
        return self._changes_s[self._passed(at_s)]

    def _passed(self, at_s: float) -> int:
        """Return the number of changes up to ``at_s``. Draw new changes until one is later than ``at_s``."""
        while not self._changes_s or self._changes_s[-1] <= at_s:
            last_s = self._changes_s[-1] if self._changes_s else 0.0
            state = self._first ^ (len(self._changes_s) % 2 == 1)
            lasts_s = float(self._rng.exponential(self._means_s[state]))
            self._changes_s.append(max(last_s + lasts_s, math.nextafter(last_s, math.inf)))
        return bisect_right(self._changes_s, at_s)


def churn(seed: int, client: int, mean_online_s: float, mean_offline_s: float) -> AlternatingRenewal:
    """Return the churn of a client, or of a phone of ``edgefl exec``; it is the same in every process.

    >>> [churn(7, client=0, mean_online_s=60.0, mean_offline_s=20.0).on(100.0) for _ in range(2)]
    [False, False]
    """
    return AlternatingRenewal(mean_online_s, mean_offline_s, stream(seed, "churn", client))


class LateJoin:
    """Presence source that is off before ``start_s`` and on afterwards."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s

    def on(self, at_s: float) -> bool:
        return at_s >= self._start_s

    def changes_s(self, at_s: float) -> float:
        return self._start_s if at_s < self._start_s else math.inf


class Presence:
    """Presence of one client, which is online while all sources are on.

    >>> client = Presence([LateJoin(3.0), Windows([(0.0, 5.0)], period_s=10.0)])
    >>> client.next_online_s(0.0), client.next_offline_s(3.0), client.next_online_s(5.0)
    (3.0, 5.0, 10.0)
    """

    def __init__(self, sources: Sequence[Windows | AlternatingRenewal | LateJoin]) -> None:
        self._sources = tuple(sources)

    def online(self, at_s: float) -> bool:
        """Return True if the client is online at ``at_s``."""
        return all(source.on(at_s) for source in self._sources)

    def next_online_s(self, at_s: float) -> float:
        """Return the first time at or after ``at_s`` when the client is online; infinite if none is found."""
        for _ in range(MAX_CHANGES):
            off = [source for source in self._sources if at_s < math.inf and not source.on(at_s)]
            if not off:
                return at_s
            at_s = max(source.changes_s(at_s) for source in off)
        return math.inf

    def next_offline_s(self, at_s: float) -> float:
        """Return the first time after ``at_s`` at which an online client goes offline."""
        return min((source.changes_s(at_s) for source in self._sources), default=math.inf)


MAX_CHANGES = 100_000  # maximum number of changes in the search for a time at which all sources are on


@functools.cache
def read_availability(path: str) -> tuple[Availability, ...]:
    """Read the entries of an availability file. Raises a one-line `ProfileError` if it is invalid."""
    try:
        entries = msgspec.json.decode(read_file(path, MAX_BYTES), type=tuple[Availability, ...])
    except OSError as error:
        raise ProfileError(f"availability file {path!r} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProfileError(f"availability file {path!r}: {error}") from None
    if not entries:
        raise ProfileError(f"availability file {path!r}: must hold at least one entry, got none")
    for at, entry in enumerate(entries):
        for fault in availability_faults(entry):
            raise ProfileError(f"availability file {path!r}: entry {at}: {fault}")
    return entries
