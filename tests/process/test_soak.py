"""Long proofs, run by `make soak`: thousands of trips, hundreds of processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl import Fleet, Model, Stop, Training
from edgefl.results.record import Record

from .runs import experiment, summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_five_thousand_trips_arrive_as_they_were_sent(transport: str, tmp_path: Path) -> None:
    wanted = experiment(
        fleet=Fleet(devices={"pixel-4": 12, "pixel-3": 12}, network="fios", join_spread_s=1.0),
        model=Model(args={"hidden": [100]}),
        training=Training(steps=2),
        server=edgefl.Server(transport=transport),
        strategy={"name": "fedstaleweight", "buffer_size": 5, "restart": "immediate"},
        stop=Stop(trips=5000),
    )
    edgefl.run(wanted, tmp_path / "run")
    record, figures = Record(tmp_path / "run"), summary(tmp_path / "run")
    trips = record.trips
    applied = trips["fate"] == "applied"
    assert figures["client_trips"] >= 5000
    assert applied.sum() >= 4990
    assert (trips["checksum_sent"][applied] == trips["checksum_seen"][applied]).all()
    assert len(np.unique(trips["checksum_sent"][applied])) == applied.sum()  # no update twice, none empty
    assert figures["integrity"] == {
        "checked": int(applied.sum()),
        "checksum_mismatches": 0,
        "version_mismatches": 0,
    }
    assert (trips["trained_version"][applied] == trips["base_version"][applied]).all()
    assert figures["dropped_updates"] == 0
    assert figures["incidents"] == {}


def test_three_hundred_phones_start_and_finish(tmp_path: Path) -> None:
    wanted = experiment(
        fleet=Fleet(devices={"pixel-3a": 100, "pi-4": 100, "moto-g4": 100}, network="lte"),
        strategy={"name": "fedbuff", "buffer_size": 10},
        stop=Stop(trips=600),
    )
    figures = edgefl.run(wanted, tmp_path / "run").summary()
    assert figures["clients"] == figures["processes"] == 300
    assert figures["client_trips"] >= 600
    assert figures["memory"]["per_process_mib"] <= 25.0
    clients = Record(tmp_path / "run").trips["client"]
    assert len(np.unique(clients)) == 300  # everyone took part
