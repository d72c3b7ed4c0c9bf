"""Whole runs: what the record must say whatever the algorithm, data, transport and end of the run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl import Clock, ConfigError, Data, Fleet, Model, Server, Stop, Training, kernels
from edgefl.devices import load_device
from edgefl.experiment import Cells
from edgefl.results.record import Record, TripRow
from edgefl.results.run_folder import Result

from ..unit.leaf_files import write_leaf
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


INTERVAL_S, STEPS = 0.3, 30


@pytest.mark.parametrize("kind", ["virtual", "wall"])
def test_training_ends_at_the_polls_after_the_steps_that_the_device_made(kind: Any, tmp_path: Path) -> None:
    """Under either clock: a step takes what the profile says, and the one that is not finished is lost."""
    wanted = experiment(
        fleet=Fleet(devices={"pixel-4": 2, "moto-g4": 2}, network="none"),
        model=Model(args={"hidden": [256, 256]}),
        training=Training(steps=STEPS),
        strategy={"name": "favano", "participants": 2, "interval_s": INTERVAL_S},
        clock=Clock(kind=kind),
        stop=Stop(versions=8),
    )
    edgefl.run(wanted, tmp_path / "run")
    with Record(tmp_path / "run") as record:
        done = record.trips["fate"] == "applied"
        trips = {name: record.trips[name][done] for name in TripRow.__struct_fields__}
        published_s = np.append(0.0, record.versions["at_s"])
    # A task is decided on after its version was published and before it is sent, which a busy host does late,
    # and what it may take from then on ends at a poll.
    earliest_s = published_s[trips["base_version"]] + trips["compute_declared_s"]
    latest_s = trips["sent_s"] + trips["compute_declared_s"]
    polls = np.floor(latest_s / INTERVAL_S + 1e-6)
    assert (polls * INTERVAL_S >= earliest_s - 1e-6).all()
    if kind == "virtual":
        np.testing.assert_allclose(latest_s, polls * INTERVAL_S, atol=1e-6)
    step_flop = (trips["flops"] / np.maximum(trips["steps"], 1)).max()
    for client, steps, flops, declared_s in zip(
        *(trips[name].tolist() for name in ("client", "steps", "flops", "compute_declared_s")), strict=True
    ):
        rate = load_device("pixel-4" if client < 2 else "moto-g4").train_flop_per_s
        # Of the average step: the last of an epoch is smaller.
        fitting = declared_s / ((flops / steps if steps else step_flop) / rate)
        assert steps == STEPS <= fitting + 1e-6 or fitting - 1.1 < steps <= fitting + 0.1
    assert trips["steps"].min() < STEPS == trips["steps"].max()
    assert (trips["trip_achieved_s"] > trips["trip_declared_s"] - 1e-6).all()


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("sent140", Model(name="lstm-sent140", args={"embedding": 8, "hidden": 4})),
        pytest.param("femnist", Model(name="mlp", args={"hidden": [8]}), marks=pytest.mark.slow),
    ],
)
def test_a_run_on_natural_clients(kind: str, model: Model, tmp_path: Path) -> None:
    write_leaf(tmp_path / "data", kind, users=8)
    wanted = experiment(
        data=Data(name="leaf", path=str(tmp_path / "data"), partition="natural"),
        fleet=Fleet(devices={"pixel-4": 8}, network="none"),
        model=model,
        training=Training(epochs=1, batch_size=4),
        clock=Clock(kind="virtual", workers=1),
        stop=Stop(versions=4),
    )
    figures = edgefl.run(wanted, tmp_path / "run").summary()
    assert figures["versions"] == 4
    with Record(tmp_path / "run") as record:
        assert sorted(row.examples for row in record.clients) == [4 + user for user in range(8)]
