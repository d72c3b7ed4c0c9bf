"""Whole runs: what the record must say whatever the algorithm, transport and end of the run."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl import ConfigError, Fleet, Server, Stop, kernels
from edgefl.results.record import Record
from edgefl.results.run_folder import Result

from .runs import Command, experiment, summary, wait_for_versions

STRATEGIES = [
    {"name": "fedavg", "cohort": 3, "over_selection": 1.4},
    {"name": "fedprox", "cohort": 3, "mu": 0.1},
    {"name": "fedavgm", "cohort": 3, "momentum": 0.9},
    {"name": "fedasync"},
    {"name": "fedbuff", "buffer_size": 2, "concurrency": 4, "momentum": 0.5},
    {"name": "fedstaleweight", "buffer_size": 3},
    {"name": "favano", "participants": 3, "interval_s": 0.03},
    {"name": "fedbuff", "buffer_size": 2, "arrival_process": "constant", "arrival_rate_per_s": 400.0},
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


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: "-".join(map(str, s.values())))
def test_every_strategy_runs(strategy: dict[str, object], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = edgefl.run(experiment(strategy=strategy, stop=Stop(versions=6)), folder)
    assert result.summary()["versions"] == 6
    check_record(folder)


@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_transports(transport: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    edgefl.run(experiment(server=Server(transport=transport)), folder)
    assert check_record(folder).meta.transport == transport


def test_the_first_buffer_changes_the_model(tmp_path: Path) -> None:
    kinds = []
    for versions in (1, 2):
        folder = tmp_path / str(versions)
        wanted = experiment(
            strategy={"name": "fedstaleweight", "buffer_size": 3}, stop=Stop(versions=versions)
        )
        kinds.append(edgefl.run(wanted, folder).model())
    first, second = kinds
    evaluations = Record(tmp_path / "1").evaluations
    assert [row.version for row in evaluations] == [0, 1]
    assert evaluations[0].loss != evaluations[1].loss
    assert any((first[name] != second[name]).any() for name in first)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"strategy": {"name": "fedbuff", "buffer_size": 7}}, "strategy.buffer_size must be at most"),
        ({"strategy": {"name": "fedbuf"}}, "did you mean 'fedbuff'"),
        ({"fleet": Fleet(devices={"pixel4": 3})}, "did you mean 'pixel-4'"),
        ({"server": Server(backend="cud")}, "did you mean 'cuda'"),
        pytest.param(
            {"server": Server(backend="cuda")},
            "kernel back end 'cuda' is not there",
            marks=pytest.mark.skipif(kernels.backends()["cuda"] == "ok", reason="a CUDA device is here"),
        ),
        ({"data": edgefl.Data(name="mnist", path="/nowhere")}, "mnist"),
        ({"model": edgefl.Model(name="mlp", args={"width": 3})}, "width"),
        ({"data": edgefl.Data(partition="by-device", labels={"watch-a7": [12]})}, "12"),
    ],
)
def test_refused_at_the_start(change: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        edgefl.run(experiment(**change), tmp_path / "run")
    message = str(caught.value)
    assert says in message
    assert "\n" not in message


def test_interrupt_and_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(experiment(stop=Stop(versions=100_000)), folder)
    wait_for_versions(folder, 5, command)
    command.interrupt()
    code, _, err = command.finish()
    assert code == 130
    assert f"edgefl resume {folder}" in err
    assert "Traceback" not in err
    before = summary(folder)
    assert before["status"] == "interrupted"
    assert before["versions"] >= 5

    again = Command("resume", str(folder))
    wait_for_versions(folder, before["versions"] + 5, again)
    again.interrupt()
    assert again.finish()[0] == 130
    after = summary(folder)
    assert after["versions"] >= before["versions"] + 5
    assert after["integrity"]["checksum_mismatches"] == 0
    trips = Record(folder).trips
    assert len(set(trips["task"])) == len(trips["task"])
    used = np.sort(trips["task"][trips["fate"] == "applied"])
    assert len(used) == 3 * after["versions"]  # each applied once, none lost on the way


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    edgefl.run(experiment(stop=Stop(versions=2)), folder)
    code, _, err = Command("resume", str(folder)).finish()
    assert code == 2
    assert "this run is over" in err


def test_a_run_in_a_thread_of_the_user_s(tmp_path: Path) -> None:
    """A notebook's or a server's thread: no signal handlers, and the result is used from another one."""
    found: list[Result] = []
    wanted = experiment(stop=Stop(versions=2))
    thread = threading.Thread(target=lambda: found.append(edgefl.run(wanted, tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0].summary()["versions"] == 2
    assert len(found[0].record.versions["version"]) == 2
    found.clear()
