"""Phones that share the link of a cell, in real runs under both clocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl import Clock, Fleet, Stop
from edgefl.experiment import Cells, Churn
from edgefl.results.record import Record
from edgefl.run.verify import verify

from .runs import experiment
from .test_dynamics import profile


def wanted(
    kind: str, cells: Cells | None, workers: int = 2, device: str = "pixel-4", **changes: object
) -> edgefl.Experiment:
    fields = {"cells": cells, **changes.pop("fleet", {})}  # type: ignore[dict-item]
    given = {
        "fleet": Fleet(devices={device: 4}, network="none", **fields),
        "clock": Clock(kind="wall") if kind == "wall" else Clock(kind="virtual", workers=workers),
        "strategy": {"name": "fedavg", "cohort": 4},
        "stop": Stop(versions=3),
    }
    return experiment(**{**given, **changes})


def transfers(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with Record(folder) as record:
        trips = record.trips
        done = ~np.isnan(trips["arrived_s"])
        return trips["down_declared_s"][done], trips["up_declared_s"][done], trips["client"][done]


@pytest.mark.parametrize("kind", ["wall", "virtual"])
def test_a_round_shares_its_cell(kind: str, tmp_path: Path) -> None:
    slow = profile(tmp_path, train=0.004)  # so that the wall clock can keep up with it
    edgefl.run(wanted(kind, Cells(downlink_mbps=0.4), device=slow), tmp_path / "run")
    with Record(tmp_path / "run") as record:
        size = int(record.trips["down_bytes"][0])
    down, up, _ = transfers(tmp_path / "run")
    alone_s = size * 8 / 0.4e6  # this network counts no headers
    assert (up < 1e-9).all()  # no limit of their own, none of the cell
    assert down.size == 12
    if kind == "virtual":
        np.testing.assert_allclose(down, 4 * alone_s)
    else:  # phones are told one after another, and a busy host lets one be alone for a while
        assert alone_s * (1 - 1e-9) <= down.min() <= down.max() <= 4 * alone_s * (1 + 1e-9)
        assert down.max() > 3 * alone_s  # but not in each of three rounds


def test_more_cells_share_less(tmp_path: Path) -> None:
    for count in (1, 4):
        run = wanted("virtual", Cells(count=count, uplink_mbps=0.4, downlink_mbps=0.4))
        edgefl.run(run, tmp_path / str(count))
    medians = [np.median(transfers(tmp_path / str(count))[0]) for count in (1, 4)]
    assert medians[0] == pytest.approx(4 * medians[1])


@pytest.mark.parametrize("on_leave", ["lose", pytest.param("finish", marks=pytest.mark.slow)])
def test_same_bits_for_any_number_of_workers(on_leave: str, tmp_path: Path) -> None:
    churn = Churn(mean_online_s=1.0, mean_offline_s=0.3, die_per_trip=0.1)
    fleet = {"churn": churn, "rejoin_s": 0.1, "on_leave": on_leave}
    found = set()
    for workers in (1, 3):
        run = wanted(
            "virtual",
            Cells(count=2, uplink_mbps=1.0, downlink_mbps=2.0),
            workers,
            fleet=fleet,
            strategy={"name": "fedasync", "max_staleness": 1},  # it cancels trips, which frees their share
            stop=Stop(versions=25),
        )
        figures = edgefl.run(run, tmp_path / str(workers)).summary()
        assert figures["versions"] == 25
        assert figures["trips"]["lost"] > 0
        assert figures["trips"]["discarded"] > 0
        found.add((figures["model_sha256"], figures["emulated_s"], figures["trips"]["lost"]))
    assert len(found) == 1
    assert verify(tmp_path / "1").model_sha256 == figures["model_sha256"]


@pytest.mark.parametrize(
    ("cells", "fleet", "says"),
    [
        ({}, {}, "give uplink_mbps, downlink_mbps, or both"),
        ({"count": 0, "uplink_mbps": 1}, {}, "fleet.cells.count: must be a whole number"),
        ({"uplink_mbps": -1}, {}, "fleet.cells.uplink_mbps: must be"),
        ({"uplink_mbps": 1}, {"thermal": True}, "not together with fleet.thermal"),
        ({"uplink_mbps": 1}, {"battery": True}, "not together with fleet.battery"),
    ],
)
def test_cells_that_cannot_be_are_refused(
    cells: dict[str, float], fleet: dict[str, bool], says: str, tmp_path: Path
) -> None:
    tables = {"devices": {"pixel-4": 2}, "cells": cells, **fleet}
    run = edgefl.Experiment(fleet=tables, stop=Stop(versions=1))  # type: ignore[arg-type]
    with pytest.raises(edgefl.ConfigError, match=says):
        edgefl.run(run, tmp_path / "run")


def test_tasks_that_end_at_an_instant_are_refused_in_cells(tmp_path: Path) -> None:
    run = wanted("virtual", Cells(uplink_mbps=1.0), strategy={"name": "favano"})
    with pytest.raises(edgefl.ConfigError, match=r"fleet\.cells: not together with strategy 'favano'"):
        edgefl.run(run, tmp_path / "run")
