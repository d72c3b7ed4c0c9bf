"""Phones that share the link of a cell, in real runs under both clocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl import Clock, Fleet, Stop
from edgefl.experiment import Cells
from edgefl.results.record import Record

from .runs import experiment
from .test_dynamics import profile


def declared(kind: str, cells: Cells, folder: Path, device: str = "pixel-4") -> tuple[np.ndarray, ...]:
    """Downloads, uploads and bytes of the whole trips of three rounds of four phones."""
    run = experiment(
        fleet=Fleet(devices={device: 4}, network="none", cells=cells),
        clock=Clock(kind="wall") if kind == "wall" else Clock(kind="virtual", workers=2),
        strategy={"name": "fedavg", "cohort": 4},
        stop=Stop(versions=3),
    )
    edgefl.run(run, folder)
    with Record(folder) as record:
        done = ~np.isnan(record.trips["arrived_s"])
        columns = ("down_declared_s", "up_declared_s", "down_bytes")
        return tuple(record.trips[name][done] for name in columns)


@pytest.mark.parametrize("kind", ["wall", "virtual"])
def test_a_round_shares_its_cell(kind: str, tmp_path: Path) -> None:
    slow = profile(tmp_path, train=0.004)  # so that the wall clock can keep up with it
    down, up, sizes = declared(kind, Cells(downlink_mbps=0.4), tmp_path / "run", slow)
    alone_s = sizes[0] * 8 / 0.4e6  # this network counts no headers
    assert (up < 1e-9).all()  # no limit of their own, none of the cell
    assert down.size == 12
    if kind == "virtual":
        np.testing.assert_allclose(down, 4 * alone_s)
    else:  # phones are told one after another, and a busy host lets one be alone for a while
        assert alone_s * (1 - 1e-9) <= down.min() <= down.max() <= 4 * alone_s * (1 + 1e-9)
        assert down.max() > 3 * alone_s  # but not in each of three rounds


def test_more_cells_share_less(tmp_path: Path) -> None:
    one, four = (
        declared("virtual", Cells(count=count, uplink_mbps=0.4, downlink_mbps=0.4), tmp_path / str(count))[0]
        for count in (1, 4)
    )
    assert np.median(one) == pytest.approx(4 * np.median(four))
