"""One experiment under both clocks: all that differs is what the wall clock's machine was late by."""

from __future__ import annotations

from pathlib import Path

import edgefl
from benchmarks.two_clocks import Agreement, agreement
from edgefl import Clock, Fleet, Model, Stop, Training
from edgefl.results.record import Record

from .runs import experiment

PHONES = Fleet(
    devices={"pixel-4": 4, "pixel-3": 4, "pi-4": 4, "moto-g4": 4}, network="lte", join_spread_s=1.0
)


def both(folder: Path) -> Agreement:
    for kind in ("wall", "virtual"):
        wanted = experiment(
            fleet=PHONES,
            model=Model(args={"hidden": [16]}, flops_per_example=2e7),
            training=Training(steps=2),
            strategy={"name": "fedbuff", "buffer_size": 5},
            clock=Clock(kind=kind, time_scale=1.0) if kind == "wall" else Clock(kind=kind, workers=2),
            stop=Stop(trips=110),
        )
        edgefl.run(wanted, folder / kind)
    with Record(folder / "wall") as wall, Record(folder / "virtual") as virtual:
        return agreement(wall, virtual)


def test_the_virtual_clock_says_what_the_wall_clock_does(tmp_path: Path) -> None:
    found = both(tmp_path)
    assert found.planned_alike
    assert found.trips > 55
    # A phone's trips follow each other at once, so all that the wall clock may be late by is what its machine
    # made each of them late, and what its server took between two of them.
    assert found.unexplained_s < 1e-9
    assert found.early_s < 1e-9
    # At the end, one run may have counted a trip that the other one had not when it stopped.
    assert found.missing <= 2 * (1 + found.inverted)
    assert found.inverted_gap_s <= 2 * found.off_s
    # Two arrivals that change places change the staleness of these two, and the versions that the same two
    # phones start from next.
    assert found.stale_otherwise <= 4 * found.inverted
    assert found.staleness_moved <= 4 * found.inverted / found.trips
