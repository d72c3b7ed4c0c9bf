"""Whole runs: what the record must say whatever the algorithm, transport and end of the run."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl import ConfigError, Fleet, Server, Stop, kernels
from edgefl.experiment import Cells
from edgefl.results.record import Record
from edgefl.results.run_folder import Result

from .runs import Command, experiment, summary

slow = pytest.mark.slow
RUNS = [
    pytest.param({"name": "fedavg", "cohort": 3, "over_selection": 1.4}, "shm", id="fedavg"),
    pytest.param({"name": "fedasync"}, "wire", id="fedasync-wire"),
    pytest.param(
        {"name": "fedbuff", "buffer_size": 2, "arrival_process": "constant", "arrival_rate_per_s": 400.0},
        "shm",
        id="arrivals",
    ),
    pytest.param({"name": "favano", "participants": 3, "interval_s": 0.03}, "wire", id="favano", marks=slow),
    pytest.param({"name": "fedprox", "cohort": 3, "mu": 0.1}, "shm", id="fedprox", marks=slow),
    pytest.param({"name": "fedavgm", "cohort": 3, "momentum": 0.9}, "shm", id="fedavgm", marks=slow),
    pytest.param(
        {"name": "fedbuff", "buffer_size": 2, "concurrency": 4, "momentum": 0.5}, "shm", id="few", marks=slow
    ),
]


def check_record(folder: Path) -> Record:
    """The invariants of every finished run."""
    record, figures = Record(folder), summary(folder)
    trips = record.trips
    arrived = ~np.isnan(trips["arrived_s"])
    assert figures["integrity"]["checksum_mismatches"] == 0
    assert figures["integrity"]["version_mismatches"] == 0
    applied = trips["fate"] == "applied"
    assert applied.any()
    assert (trips["checksum_sent"][applied] == trips["checksum_seen"][applied]).all()
    assert (trips["trained_version"][arrived] == trips["base_version"][arrived]).all()
    assert (trips["staleness"][applied] >= 0).all()
    assert (trips["compute_s"][arrived] > 0).all()
    # work is never done before the device could have done it, but for the float in the sum
    late = trips["trip_achieved_s"][arrived] - trips["trip_declared_s"][arrived]
    assert late.min() > -1e-6
    assert sorted(record.versions["version"]) == list(range(1, len(record.versions["version"]) + 1))
    assert [row.version for row in record.evaluations][-1] == figures["versions"]
    assert len(figures["model_sha256"]) == 64
    for name in ("report.html", "trace.json", "experiment.toml", "checkpoints/final.safetensors"):
        assert (folder / name).stat().st_size > 0
    return record


@pytest.mark.parametrize(("strategy", "transport"), RUNS)
def test_every_strategy_runs(strategy: dict[str, object], transport: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wanted = experiment(strategy=strategy, server=Server(transport=transport), stop=Stop(versions=6))
    assert edgefl.run(wanted, folder).summary()["versions"] == 6
    assert check_record(folder).meta.transport == transport


def test_a_run_in_a_thread_of_the_users_whose_first_buffer_changes_the_model(tmp_path: Path) -> None:
    """A notebook's or a server's thread: no signal handlers, and the result is used from another one."""
    found: list[Result] = []
    folder = tmp_path / "run"
    wanted = experiment(strategy={"name": "fedstaleweight", "buffer_size": 3}, stop=Stop(versions=1))
    thread = threading.Thread(target=lambda: found.append(edgefl.run(wanted, folder)))
    thread.start()
    thread.join()
    assert found[0].summary()["versions"] == len(found[0].record.versions["version"]) == 1
    found.clear()
    evaluations = check_record(folder).evaluations
    assert [row.version for row in evaluations] == [0, 1]
    assert evaluations[0].loss != evaluations[1].loss
    # It is over: it is neither run into again nor resumed.
    with pytest.raises(ConfigError, match="run: holds a run, expected a new or empty folder"):
        edgefl.run(wanted, folder)
    Command("resume", str(folder)).ends(2, "this run is over")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"strategy": {"name": "fedbuff", "buffer_size": 7}}, "strategy.buffer_size must be at most"),
        ({"strategy": {"name": "fedbuf"}}, "did you mean 'fedbuff'"),
        ({"fleet": Fleet(devices={"pixel4": 3})}, "did you mean 'pixel-4'"),
        *(
            ({"fleet": Fleet(devices={"pixel-4": 2}, **fields)}, says)
            for fields, says in (
                ({"cells": Cells()}, "fleet.cells: give uplink_mbps, downlink_mbps, or both"),
                ({"cells": Cells(count=0, uplink_mbps=1)}, "fleet.cells.count: must be a whole number"),
                ({"cells": Cells(uplink_mbps=-1)}, "fleet.cells.uplink_mbps: must be"),
                ({"cells": Cells(uplink_mbps=1), "thermal": True}, "not together with fleet.thermal"),
                ({"cells": Cells(uplink_mbps=1), "battery": True}, "not together with fleet.battery"),
            )
        ),
        (
            {
                "fleet": Fleet(devices={"pixel-4": 4}, cells=Cells(uplink_mbps=1)),
                "strategy": {"name": "favano"},
            },
            "fleet.cells: not together with strategy 'favano'",
        ),
        ({"server": Server(backend="cud")}, "did you mean 'cuda'"),
        pytest.param(
            {"server": Server(backend="cuda")},
            "kernel back end 'cuda' is not there",
            marks=pytest.mark.skipif(kernels.backends()["cuda"] == "ok", reason="a CUDA device is here"),
        ),
        ({"server": Server(update_format="int4")}, "server.update_format: must be 'bfloat16' or 'float16'"),
        ({"data": edgefl.Data(name="mnist", path="/nowhere")}, "mnist"),
        ({"data": edgefl.Data(partition="by-device", labels={"watch-a7": [12]})}, "12"),
    ],
)
def test_refused_at_the_start(change: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        edgefl.run(experiment(**change), tmp_path / "run")
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
