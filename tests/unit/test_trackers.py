"""Tests of the export of a run to experiment trackers, and of errors if that is not possible."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shell import Shell

from edgefl import Experiment, Fleet, Stop, config
from edgefl.errors import ConfigError, RunError
from edgefl.results import trackers
from edgefl.results.result import Result
from edgefl.results.run_folder import EXPERIMENT_FILE
from edgefl.results.store import Store
from edgefl.results.summary import write_summary
from edgefl.results.trackers import TRACKERS
from tests.reports import write_run

REASON = "needs {0}: pip install 'edgefl[{0}]'"
PLAIN = Experiment(fleet=Fleet(devices={"pi-4": 4}), stop=Stop(versions=3), seed=7)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "runs" / "one")
    (folder / EXPERIMENT_FILE).write_text(config.dump(config.validate(PLAIN)))
    write_summary(folder)
    return folder


Export = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def export(run: Path) -> Export:
    """Runs `edgefl export RUN --track NAME` in a new process, which ends the tracker's threads."""

    def export(name: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "edgefl", "export", str(run), "--track", name]
        environment = os.environ | {"HOME": str(run.parent)} | variables
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return export


def test_tensorboards_events_are_the_evaluations_at_their_emulated_seconds(run: Path, export: Export) -> None:
    pytest.importorskip("tensorboard", reason=REASON.format("tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # a second export adds nothing
        done = export("tensorboard")
        assert done.returncode == 0
        assert f"tensorboard: {run / 'tensorboard'} (tensorboard --logdir {run.parent})" in done.stderr
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    curve = Result(run).evaluations()
    events = found.Scalars("accuracy")
    assert [event.step for event in events] == curve["version"].tolist()
    assert [event.value for event in events] == pytest.approx(curve["accuracy"].tolist())
    passed = [event.wall_time - events[0].wall_time for event in events]
    assert passed == pytest.approx((curve["at_s"] - curve["at_s"][0]).tolist(), abs=1e-3)
    assert found.Scalars("run/client_trips")[0].value == Result(run).summary()["client_trips"]


def test_mlflow_has_metrics_and_settings_and_a_second_export_adds_nothing(
    run: Path, export: Export, tmp_path: Path
) -> None:
    pytest.importorskip("mlflow", reason=REASON.format("mlflow"))
    place = {"MLFLOW_TRACKING_URI": f"file://{tmp_path / 'mlflow'}", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for _ in range(2):
        done = export("mlflow", **place)
        assert done.returncode == 0
        assert "mlflow: MLflow's experiment 'edgefl' at file://" in done.stderr
    (metric,) = tmp_path.glob("mlflow/*/*/metrics/accuracy")
    curve = Result(run).evaluations()
    rows = [line.split() for line in metric.read_text().splitlines()]
    assert [int(row[2]) for row in rows] == curve["version"].tolist()
    assert [float(row[1]) for row in rows] == pytest.approx(curve["accuracy"].tolist())
    (seed,) = tmp_path.glob("mlflow/*/*/params/seed")
    assert seed.read_text() == "7"


def test_a_server_that_does_not_answer_is_an_error_with_the_command_to_try_again(
    run: Path, export: Export
) -> None:
    pytest.importorskip("mlflow", reason=REASON.format("mlflow"))
    retry = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = export("mlflow", MLFLOW_TRACKING_URI="http://127.0.0.1:9", **retry)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("edgefl: mlflow: ")
    assert last.endswith(f"the run is complete; to try again: edgefl export {run} --track mlflow")


def test_wandb_offline_writes_its_files_to_the_run_folder(run: Path, export: Export) -> None:
    pytest.importorskip("wandb", reason=REASON.format("wandb"))
    done = export("wandb", WANDB_MODE="offline")
    assert done.returncode == 0
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"accuracy" in content
    assert b"emulated_s" in content


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    (file := tmp_path / "e.toml").write_text(config.dump(PLAIN))
    out = tmp_path / "out"
    for command in ("run", "sweep"):
        error = edgefl.refuses(2, command, str(file), "--out", str(out), "--track", name)
        assert error == f"tracker '{name}' is not installed: pip install 'edgefl[{name}]'"
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--track", "wanbd"], "tracker 'wanbd' not found; did you mean 'wandb'"),
        (["--track", "tensorboard", "--csv"], "--csv, --parquet and --track: give only one of them"),
        (["--track", "tensorboard", "--out", "x"], "--out: has no effect with --track"),
    ],
)
def test_invalid_options_of_the_export_are_refused(
    arguments: list[str], words: str, run: Path, edgefl: Shell
) -> None:
    if "tensorboard" in arguments:
        pytest.importorskip("tensorboard", reason=REASON.format("tensorboard"))
    assert words in edgefl.refuses(2, "export", str(run), *arguments)


def test_an_error_of_a_tracker_contains_the_command_to_try_again(run: Path) -> None:
    pytest.importorskip("tensorboard", reason=REASON.format("tensorboard"))
    (run / "tensorboard").write_text("")  # a file at the place of the events' folder
    with pytest.raises(RunError, match=f"^tensorboard: .*edgefl export {run} --track tensorboard$"):
        Result(run).track("tensorboard")


def test_an_error_of_a_sweeps_export_contains_the_sweeps_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: trackers.Copied) -> str:
        raise OSError("no answer")

    monkeypatch.setattr(trackers, "require", lambda _: None)
    monkeypatch.setitem(TRACKERS, "wandb", fails)
    for group, folder in ((None, run), ("sweep", run.parents[1])):
        with pytest.raises(RunError, match=f"no answer; .*edgefl export {folder} --track wandb$"):
            trackers.track(run, "wandb", group)


def test_the_settings_are_those_on_record_if_the_experiments_file_was_edited_or_lost(run: Path) -> None:
    with Store(run) as store:
        store.set_meta(toml=(run / EXPERIMENT_FILE).read_text())
    (run / EXPERIMENT_FILE).write_text("seed = 8\n")
    assert trackers._read(run, None).settings["seed"] == 7
    (run / EXPERIMENT_FILE).unlink()
    assert trackers._read(run, None).settings["seed"] == 7


def test_an_interrupted_run_is_refused(run: Path) -> None:
    with Store(run) as store:
        store.set_meta(status="interrupted")
    with pytest.raises(ConfigError, match=f"the run has not ended; edgefl resume {run} continues it"):
        trackers._read(run, None)


def test_a_run_has_one_identity_and_one_name_whatever_path_leads_to_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    copies = [trackers._read(path, None) for path in (run, tmp_path / "link", run / ".." / run.name, Path())]
    assert {(copy.identity, copy.name) for copy in copies} == {(copies[0].identity, "one")}
