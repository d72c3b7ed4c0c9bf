"""The agreement of one experiment's two runs: under the wall clock, and under the virtual one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgefl.results.record import Record


class Agreement(NamedTuple):
    """A wall run's trips beside the virtual run's, in emulated seconds."""

    trips: int
    """Trips that arrived in both runs; they are told by client and number."""
    missing: int
    """Trips that arrived in one of them alone."""
    planned_alike: bool
    """Each of them was to take the same time in both."""
    round_error: float
    """The wall run's worst trip as its server saw it: ``|achieved / declared − 1|``."""
    round_error_median: float
    off_s: float
    """The furthest that an arrival was from the virtual one."""
    off_share: float
    """The furthest, over the time until then."""
    early_s: float
    """The furthest that an arrival or a trip's end was before its virtual time; 0 or less: never."""
    unexplained_s: float
    """The furthest that an arrival was beyond the lateness of its client's trips and pauses."""
    inverted: int
    """Pairs of trips that arrived in the other order; one that did not arrive comes after all that did."""
    inverted_gap_s: float
    """The furthest apart that such a pair was under the virtual clock."""
    stale_otherwise: int
    """Trips whose staleness is another."""
    staleness_moved: float
    """Versions by which a trip has to be moved to make the distributions of staleness the same, on average."""


def agreement(wall: Record, virtual: Record) -> Agreement:
    """Compare two runs of one experiment.

    The wall clock's run is late by what its machine makes it late; nothing else may be different. Two
    arrivals that are closer than that may change places, and with them a staleness may change by one.
    """
    ours, theirs = _arrived(wall), _arrived(virtual)
    both = sorted(ours.keys() & theirs.keys())
    wall_columns, virtual_columns = (np.array([table[key] for key in both]).T for table in (ours, theirs))
    sent_s, at_s, declared_s, stale = wall_columns
    start_s, due_s, planned_s, due_stale = virtual_columns
    late_s = at_s - sent_s - declared_s
    rounds = np.abs(late_s / declared_s)
    off_s = np.abs(at_s - due_s)
    changed = np.triu(np.sign(np.subtract.outer(at_s, at_s)) * np.sign(np.subtract.outer(due_s, due_s)) < 0)
    apart_s = np.abs(np.subtract.outer(due_s, due_s))[changed]
    either = sorted(ours.keys() | theirs.keys())
    wall_s, virtual_s = (
        np.array([table[key][1] if key in table else np.inf for key in either]) for table in (ours, theirs)
    )
    return Agreement(
        trips=len(both),
        missing=len(ours.keys() ^ theirs.keys()),
        planned_alike=bool((declared_s == planned_s).all()),
        round_error=float(rounds.max()),
        round_error_median=float(np.median(rounds)),
        off_s=float(off_s.max()),
        off_share=float((off_s / due_s).max()),
        early_s=float(max((due_s - at_s).max(), -late_s.min())),
        unexplained_s=float((off_s - _lateness(both, sent_s, at_s, late_s, start_s)).max()),
        inverted=int((np.less.outer(wall_s, wall_s) & np.greater.outer(virtual_s, virtual_s)).sum()),
        inverted_gap_s=float(apart_s.max(initial=0.0)),
        stale_otherwise=int((stale != due_stale).sum()),
        staleness_moved=float(np.abs(np.sort(stale) - np.sort(due_stale)).mean()),
    )


def _lateness(
    trips: list[tuple[int, int]],
    sent_s: NDArray[np.float64],
    at_s: NDArray[np.float64],
    late_s: NDArray[np.float64],
    start_s: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Seconds until each arrival: its client's late start, its late trips, the pauses between them.

    ``trips`` are ordered by client and number. Under the virtual clock a client's next trip begins as its
    last one arrives.
    """
    summed_s = np.empty(len(trips))
    for row, (client, _) in enumerate(trips):
        first = row == 0 or trips[row - 1][0] != client
        before_s = 0.0 if first else summed_s[row - 1]
        pause_s = sent_s[row] - (start_s[row] if first else at_s[row - 1])
        summed_s[row] = before_s + pause_s + late_s[row]
    return summed_s


def _arrived(record: Record) -> dict[tuple[int, int], tuple[float, float, float, float]]:
    """Trips that arrived, by client and number: sent, arrived, declared seconds, staleness."""
    trips = record.trips
    rows = zip(*(trips[name].tolist() for name in _COLUMNS), strict=True)
    return {(int(client), int(trip)): tuple(rest) for client, trip, *rest in rows if not np.isnan(rest[1])}


_COLUMNS = ("client", "trip", "sent_s", "arrived_s", "trip_declared_s", "staleness")
