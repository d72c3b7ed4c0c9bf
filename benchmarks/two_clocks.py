"""Run one experiment on 16 phones under the wall clock and the virtual clock, and compare each trip.

    python benchmarks/two_clocks.py [--trips 400] [--repetitions 3]

Under the wall clock, the host delays the run. The benchmark prints the errors of the trips' durations, as in
the fidelity report, and how the runs differ in arrival times, order of arrivals, and staleness.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import edgefl
from edgefl.core.core import OVER
from edgefl.results.record import Record

Floats = NDArray[np.float64]
COLUMNS = ("client", "trip", "sent_s", "arrived_s", "trip_declared_s", "staleness")


class Agreement(NamedTuple):
    """Differences between the trips of a wall-clock run and of a virtual run; times are emulated seconds."""

    trips: int
    """Trips that arrived in both runs, matched by client and trip number."""
    missing: int
    """Trips that arrived in only one of the runs."""
    planned_alike: bool
    """True if every trip has the same declared duration in both runs."""
    round_error: float
    """Largest error ``|achieved / declared − 1|`` of a trip's duration in the wall-clock run, as measured by
    the server."""
    round_error_median: float
    off_s: float
    """Largest difference between a trip's arrival times in the two runs."""
    off_share: float
    """Largest difference between a trip's arrival times in the two runs, divided by the virtual one."""
    early_s: float
    """Largest time by which a trip arrived earlier than in the virtual run, or was shorter than declared; 0
    or less if there is no such trip."""
    unexplained_s: float
    """Largest part of a trip's difference in arrival time that the client's delays do not explain."""
    inverted: int
    """Number of pairs of trips whose order of arrival differs between the runs. A trip that is missing in a
    run is regarded as the last to arrive there."""
    inverted_gap_s: float
    """Largest time between the virtual arrivals of two trips whose order differs between the runs."""
    stale_otherwise: int
    """Number of trips whose staleness differs between the runs."""
    staleness_moved: float
    """Mean absolute difference, in versions, between the sorted staleness values of the two runs."""


def agreement(wall: Record, virtual: Record) -> Agreement:
    """Compare two runs of one experiment.

    The wall-clock run should differ only by the delays of the host. Two arrivals may be swapped if the time
    between them is shorter than these delays, which may change their staleness by one.
    """
    ours, theirs = _arrived(wall), _arrived(virtual)
    both, either = sorted(ours.keys() & theirs.keys()), sorted(ours.keys() | theirs.keys())
    sent_s, at_s, declared_s, stale = np.array([ours[key] for key in both]).T
    start_s, due_s, planned_s, due_stale = np.array([theirs[key] for key in both]).T
    late_s, off_s = at_s - sent_s - declared_s, np.abs(at_s - due_s)
    rounds = np.abs(late_s / declared_s)
    first = np.array([i == 0 or both[i - 1][0] != client for i, (client, _) in enumerate(both)])
    pause_s = sent_s - np.where(first, start_s, np.roll(at_s, 1))
    changed = np.triu(np.subtract.outer(at_s, at_s) * np.subtract.outer(due_s, due_s) < 0)
    wall_s, virtual_s = (
        np.array([table[key][1] if key in table else np.inf for key in either]) for table in (ours, theirs)
    )
    return Agreement(
        trips=len(both),
        missing=len(either) - len(both),
        planned_alike=bool((declared_s == planned_s).all()),
        round_error=float(rounds.max()),
        round_error_median=float(np.median(rounds)),
        off_s=float(off_s.max()),
        off_share=float((off_s / due_s).max()),
        early_s=float(max((due_s - at_s).max(), -late_s.min())),
        unexplained_s=float((off_s - _since_first(late_s + pause_s, first)).max()),
        inverted=int((np.less.outer(wall_s, wall_s) & np.greater.outer(virtual_s, virtual_s)).sum()),
        inverted_gap_s=float(np.abs(np.subtract.outer(due_s, due_s))[changed].max(initial=0.0)),
        stale_otherwise=int((stale != due_stale).sum()),
        staleness_moved=float(np.abs(np.sort(stale) - np.sort(due_stale)).mean()),
    )


def _since_first(values: Floats, first: NDArray[np.bool_]) -> Floats:
    """Return running sums of ``values`` that restart at each client's first trip.

    Under the virtual clock, a client starts a trip when its previous trip arrives. Under the wall clock, a
    trip therefore arrives later by the sum of the delay of the client's first start, the delays of its trips
    so far, and the pauses between them.
    """
    parts = np.split(values, np.flatnonzero(first)[1:])
    return np.concatenate([np.cumsum(part) for part in parts])


def _arrived(record: Record) -> dict[tuple[int, int], tuple[float, float, float, float]]:
    """Return each arrived trip's start time, arrival time and declared duration in seconds, and its
    staleness, keyed by (client, trip number).

    Trips that were discarded because the run had ended are left out: how many of them arrive depends on how
    long the server takes to exit.
    """
    trips = record.trips
    rows = zip(trips["reason"].tolist(), *(trips[name].tolist() for name in COLUMNS), strict=True)
    return {
        (int(client), int(trip)): tuple(rest)
        for reason, client, trip, *rest in rows
        if reason != OVER and not np.isnan(rest[1])
    }


def experiment(kind: str, trips: int) -> edgefl.Experiment:
    return edgefl.Experiment(
        name=f"two-clocks-{kind}",
        seed=1,
        fleet=edgefl.Fleet(
            devices={"pixel-4": 4, "pixel-3": 4, "pi-4": 4, "moto-g4": 4}, network="lte", join_spread_s=1.0
        ),
        data=edgefl.Data(name="digits"),
        model=edgefl.Model(args={"hidden": [16]}, flops_per_example=3e7),
        training=edgefl.Training(steps=2),
        strategy={"name": "fedbuff", "buffer_size": 5},
        clock=edgefl.Clock(kind=kind, time_scale=1.0),
        evaluation=edgefl.Evaluation(every_versions=1000),
        stop=edgefl.Stop(trips=trips),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare both clocks on the same trips.")
    parser.add_argument("--trips", type=int, default=400)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    for _ in range(given.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            took_s = {}
            for kind in ("wall", "virtual"):
                result = edgefl.run(experiment(kind, given.trips), Path(folder) / kind)
                took_s[kind] = result.summary()["wall_s"]
            with Record(Path(folder) / "wall") as wall, Record(Path(folder) / "virtual") as virtual:
                found = agreement(wall, virtual)
        print(f"the wall-clock run took {took_s['wall']:.1f} s, the virtual run {took_s['virtual']:.1f} s")
        print("  " + ", ".join(f"{name} {value:.6g}" for name, value in found._asdict().items()), flush=True)


if __name__ == "__main__":
    main()
