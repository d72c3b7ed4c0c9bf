"""Tests of whole runs and their folders, for different algorithms, data sets, transports and ends of runs."""

from __future__ import annotations

import functools
import operator
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl import (
    Checkpoint,
    Clock,
    ConfigError,
    Data,
    Fleet,
    Model,
    RunError,
    Server,
    Stop,
    Training,
    kernels,
)
from edgefl.devices.fleet import fleet_of
from edgefl.experiment import Growth
from edgefl.host.process import start_process
from edgefl.results import run_folder
from edgefl.results.record import Record
from edgefl.results.result import Result
from edgefl.results.rows import TripRow
from edgefl.results.store import Store
from edgefl.run import supervisor
from edgefl.run.workload import Workload
from edgefl.strategies import resolve
from tests import reports

from ..unit.leaf_files import write_leaf
from .runs import Command, experiment, summary, wait_for_versions
from .warm import Undrawn

RUNS = [
    pytest.param({"name": "fedavg", "cohort": 3, "over_selection": 1.4}, "shm", id="fedavg"),
    pytest.param({"name": "asyncfeded", "max_growth": 2}, "wire", id="asyncfeded-wire"),
    pytest.param(
        {"name": "fedbuff", "buffer_size": 2, "arrival_process": "constant", "arrival_rate_per_s": 400.0},
        "shm",
        id="arrivals",
    ),
]


def check_record(folder: Path) -> Record:
    """Check what must be true of the record of every finished run; return the record."""
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
    # no trip ends earlier than the device could have finished it, except for rounding errors of the sum
    late = trips["trip_achieved_s"][arrived] - trips["trip_declared_s"][arrived]
    assert late.min() > -1e-6
    assert sorted(record.versions["version"]) == list(range(1, len(record.versions["version"]) + 1))
    assert [row.version for row in record.evaluations][-1] == figures["versions"]
    assert len(figures["model_sha256"]) == 64
    for name in ("report.html", "trace.json", "experiment.toml", "checkpoints/final.safetensors"):
        assert (folder / name).stat().st_size > 0
    return record


@pytest.mark.parametrize(("strategy", "transport"), RUNS)
def test_the_record_of_a_run_is_consistent(
    strategy: dict[str, object], transport: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    wanted = experiment(strategy=strategy, server=Server(transport=transport), stop=Stop(versions=6))
    assert edgefl.run(wanted, folder).summary()["versions"] == 6
    assert check_record(folder).meta.transport == transport


def test_a_run_in_another_thread_has_a_remark_and_is_not_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run cannot set signal handlers in that thread, and the main thread uses its result."""
    found: list[Result] = []
    folder = tmp_path / "run"
    strategy: dict[str, object] = {"name": "fedstaleweight", "buffer_size": 3, "form": "derivation"}
    wanted = experiment(strategy=strategy, stop=Stop(versions=1))
    thread = threading.Thread(target=lambda: found.append(edgefl.run(wanted, folder, quiet=False)))
    thread.start()
    thread.join()
    assert found[0].summary()["versions"] == len(found[0].record.versions["version"]) == 1
    found.clear()
    record = check_record(folder)
    assert record.meta.remark == resolve(strategy).remark != ""
    assert f"edgefl: {record.meta.remark}" in capfd.readouterr().err.splitlines()
    assert escape(record.meta.remark) in (folder / "report.html").read_text()
    evaluations = record.evaluations
    assert [row.version for row in evaluations] == [0, 1]
    assert evaluations[0].loss != evaluations[1].loss
    with pytest.raises(ConfigError, match="run holds a run; expected a new or empty folder"):
        edgefl.run(wanted, folder)


def test_files_that_a_power_cut_lost_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Undrawn, "pictures", True)
    folder = tmp_path / "run"
    edgefl.run(experiment(stop=Stop(versions=1)), folder)
    names = ("experiment.toml", "summary.json", "trace.json", "report.html")
    before = {name: (folder / name).read_bytes() for name in names}
    (folder / "experiment.toml").write_bytes(b"")  # only its name had reached the disk
    for name in names[1:]:
        (folder / name).unlink()
    Command("resume", str(folder), "--accept-invalid").ends()
    assert {name: (folder / name).read_bytes() for name in names} == before
    Command("resume", str(folder)).ends(2, "this run is over")
    (folder / "record.sqlite").unlink()
    Command("resume", str(folder)).ends(2, "it has no record.sqlite")
    assert not (folder / "record.sqlite").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"strategy": {"name": "fedbuff", "buffer_size": 7}}, "strategy.buffer_size must be at most"),
        ({"strategy": {"name": "fedbuf"}}, "did you mean 'fedbuff'"),
        ({"fleet": Fleet(devices={"pixel4": 3})}, "did you mean 'pixel-4'"),
        ({"server": Server(backend="cud")}, "did you mean 'cuda'"),
        pytest.param(
            {"server": Server(backend="cuda")},
            "kernel back end 'cuda' is not available",
            marks=pytest.mark.skipif(kernels.backends()["cuda"] == "ok", reason="a CUDA device is here"),
        ),
        ({"server": Server(update_format="int4")}, "server.update_format: must be 'bfloat16' or 'float16'"),
        ({"data": edgefl.Data(name="mnist", path="/nowhere")}, "mnist"),
        ({"data": edgefl.Data(partition="by-device", labels={"watch-a7": [12]})}, "12"),
    ],
)
def test_an_experiment_that_cannot_run_is_refused_in_one_line(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        edgefl.run(experiment(**change), tmp_path / "run")
    message = str(caught.value)
    assert says in message
    assert "\n" not in message


INTERVAL_S, STEPS = 0.3, 30


@pytest.mark.parametrize("kind", ["virtual", "wall"])
def test_training_ends_at_a_poll_with_the_steps_that_the_device_finished(kind: Any, tmp_path: Path) -> None:
    """A step takes the time given by the profile, and a step that is unfinished at the poll is discarded."""
    wanted = experiment(
        # no variation: if the steps of a trip took 2% less time, the trip would have time for another step
        fleet=Fleet(devices={"pixel-4": 2, "nexus-6": 2}, network="none", variation=0.0),
        model=Model(args={"hidden": [256, 256]}),
        training=Training(steps=STEPS, batch_size=1),  # so that all steps of an epoch are equally long
        strategy={"name": "favano", "participants": 2, "interval_s": INTERVAL_S},
        clock=Clock(kind=kind),
        stop=Stop(versions=8),
    )
    edgefl.run(wanted, tmp_path / "run")
    with Record(tmp_path / "run") as record:
        done = record.trips["fate"] == "applied"
        trips = {name: record.trips[name][done] for name in TripRow.__struct_fields__}
        published_s = np.append(0.0, record.versions["at_s"])
        step_s = {row.client: row.step_s for row in record.clients}
    # A task is planned to end at a poll. The server plans it after it publishes the version and before it
    # sends the task, which it may do late on a busy host.
    earliest_s = published_s[trips["base_version"]] + trips["compute_declared_s"]
    latest_s = trips["sent_s"] + trips["compute_declared_s"]
    polls = np.floor(latest_s / INTERVAL_S + 1e-6)
    assert (polls * INTERVAL_S >= earliest_s - 1e-6).all()
    if kind == "virtual":
        np.testing.assert_allclose(latest_s, polls * INTERVAL_S, atol=1e-6)
    for client, steps, work_s, declared_s in zip(
        *(trips[name].tolist() for name in ("client", "steps", "work_s", "compute_declared_s")), strict=True
    ):
        fitting = declared_s / (work_s / steps if steps else step_s[client])
        assert steps == STEPS <= fitting + 1e-6 or fitting - 1.0 - 1e-6 < steps <= fitting + 1e-6
    assert trips["steps"].min() < STEPS == trips["steps"].max()
    assert (trips["trip_achieved_s"] > trips["trip_declared_s"] - 1e-6).all()


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        # The FLOP are declared because torch would import modules for seconds to count those of an LSTM.
        (
            "sent140",
            Model(name="lstm-sent140", args={"embedding": 8, "hidden": 4}, flops_per_example=1e6),
        ),
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


@pytest.mark.parametrize("kind", ["virtual", "wall"])
def test_updates_are_weighted_by_the_examples_of_their_trip(kind: Any, tmp_path: Path) -> None:
    """ASO-Fed's n_k is the number of examples of the client's last update. Before the client's first update,
    it is that of the client's first trip."""
    wanted = experiment(
        fleet=Fleet(devices={"pi-4": 2, "moto-g4": 1}, network="lte", variation=0),
        data=Data(growth=Growth(start=0.1, least_per_trip=0.05, most_per_trip=0.2)),
        training=Training(epochs=2, batch_size=16),
        strategy={"name": "aso-fed", "dynamic_step": False},
        clock=Clock(kind=kind),
        stop=Stop(versions=15),
    )
    found, record = Workload(wanted, fleet_of(wanted), Path()), Record(edgefl.run(wanted, tmp_path).dir)
    first = [len(found._rows_on(client, 0)) for client in range(3)]
    counts, versions = [*first], 0
    for _, (task,), (weight,) in record.sums():
        trip = record.trip(int(task))
        assert trip.examples == len(found._rows_on(trip.client, trip.trip))
        counts[trip.client] = trip.examples
        assert weight == pytest.approx(trip.examples / sum(counts))
        versions += 1
    assert versions == 15
    assert sum(counts) > 2 * sum(first)


def test_a_process_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    fleet = Fleet(devices={"pi-4": 30_000})  # a request larger than the buffer of a socket
    wanted = experiment(fleet=fleet, clock=Clock(kind="virtual", workers=1))
    said = r"^the zygote process ended early \(exit code 1\) while it loaded the data and the model and .*n$"
    with pytest.raises(RunError, match=said):
        supervisor.run(wanted, tmp_path / "run", quiet=True, workload="edgefl.run:Nobody")
    assert not (tmp_path / "run").exists()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "is not empty; expected a new or empty folder"),
        ("file", "is a file or is in use; expected a new or empty folder"),
        ("file/run", "cannot be written"),
        ("/proc/edgefl", "cannot be written"),
    ],
)
def test_an_unusable_folder_is_refused_and_not_changed(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=says) as caught:
        edgefl.run(experiment(), tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "start",
    [
        lambda named: supervisor.run(experiment(), named),
        lambda named: supervisor.run(experiment(), named.parent / "run", base=named),
        supervisor.resume,
    ],
    ids=["a run's", "an experiment's", "one to resume"],
)
def test_a_folder_whose_name_is_not_utf_8_is_refused(start: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"caf\?: the name is not UTF-8; use a folder whose name is UTF-8$"):
        start(tmp_path / os.fsdecode(b"caf\xe9"))
    assert files(tmp_path) == []


def test_a_run_that_never_began_leaves_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ConfigError, match="width"):
        edgefl.run(experiment(model=edgefl.Model(args={"width": 3})), folder)
    assert files(tmp_path) == ["run"]
    assert files(folder) == []


def test_a_run_in_progress_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LAST_CHECKPOINT_S", 0.0)
    folder = tmp_path / "run"
    command = Command.run(experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=0.2)), folder)
    wait_for_versions(folder, 3, command)
    with pytest.raises(ConfigError, match="is in use by another edgefl process"):
        supervisor.resume(folder)
    with pytest.raises(ConfigError, match="holds a run"):
        edgefl.run(experiment(), folder)
    command.interrupt()
    command.ends(130)
    with run_folder.held(folder):  # the lock was released
        pass


def cut_before_a_checkpoint(folder: Path) -> None:
    run_folder.begin(folder, Path("/where/modules/are"))
    with Store(folder) as store:
        store.clients([reports.client(0)])
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "journal-0000000000.partial").write_bytes(b"half")


def cut_before_a_transaction(folder: Path) -> None:
    db = sqlite3.connect(folder / "record.sqlite")
    db.execute("PRAGMA journal_mode = WAL")
    db.close()


@pytest.mark.parametrize(
    ("left", "base"),
    [(cut_before_a_checkpoint, Path("/where/modules/are")), (cut_before_a_transaction, None)],
)
def test_files_of_a_run_without_a_checkpoint_are_removed(
    left: Callable[[Path], None], base: Path | None, tmp_path: Path
) -> None:
    (tmp_path / "experiment.toml").touch()
    left(tmp_path)
    assert not run_folder.begun(tmp_path)
    assert run_folder.base_of(tmp_path) == (base or Path.cwd())
    run_folder.clear(tmp_path)
    assert files(tmp_path) == ["experiment.toml"]


def test_a_run_that_fails_early_removes_its_experiment_also_if_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def fail_early() -> None:
        with run_folder.new(folder, ""):
            cut_before_a_checkpoint(folder)
            (folder / "checkpoints" / "locked.partial").mkdir()  # cannot be unlinked
            raise RuntimeError("early")

    with pytest.raises(RuntimeError, match="early"):
        fail_early()
    assert "experiment.toml" not in files(folder)


def test_the_record_is_removed_last_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").touch()
    cut_before_a_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "notes.txt").touch()
    locked = tmp_path / "checkpoints" / "locked.partial"
    locked.mkdir()  # the removal ends here, as if it were killed
    with pytest.raises(OSError, match="locked"):
        run_folder.clear(tmp_path)
    assert run_folder.base_of(tmp_path) == Path("/where/modules/are")
    locked.rmdir()
    run_folder.clear(tmp_path)
    assert files(tmp_path) == ["checkpoints", "experiment.toml"]
    assert files(tmp_path / "checkpoints") == ["notes.txt"]


def test_a_run_that_lost_its_checkpoints_is_not_started_again(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints")
    assert run_folder.begun(folder)
    with Store(folder) as store:
        store.set_meta(status="running")
    with pytest.raises(ConfigError, match="contains no checkpoint to resume from"):
        supervisor.resume(folder)
    (folder / "record.sqlite").write_bytes(b"x" * 10_000)
    with pytest.raises(ConfigError, match="damaged or not a record"):
        supervisor.resume(folder)


def test_a_resume_that_fails_before_the_run_continues_keeps_the_results(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    with Store(folder) as store:
        store.set_meta(status="interrupted")

    def fail(*_: object) -> None:
        raise ConfigError("module 'mine' not found")

    monkeypatch.setattr(supervisor, "resolve", fail)
    with pytest.raises(ConfigError, match="module 'mine' not found"):
        supervisor.resume(folder, quiet=True)
    assert set(run_folder.RESULTS) <= {*files(folder)}


def test_a_child_process_that_still_imports_ignores_stop_signals() -> None:
    child, channel = start_process("edgefl.host.awake", None, dict(os.environ))
    stops = sum(1 << number - 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    for _ in range(3):
        status = dict(
            line.split(":\t") for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
        )
        left_alone = (int(status[which], 16) for which in ("SigBlk", "SigIgn", "SigCgt"))
        assert functools.reduce(operator.or_, left_alone) & stops == stops
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
    channel.close()
    assert child.wait() == 0
