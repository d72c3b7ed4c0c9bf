"""A run's folder: refused, held and given up."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import edgefl
from edgefl import Checkpoint, ConfigError, Stop
from edgefl.results import run_folder
from edgefl.results.store import Store
from edgefl.run import supervisor
from tests.reports import client

from .runs import Command, experiment, wait_for_versions


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "not empty, expected a new or empty folder"),
        ("file", "taken, expected a new or empty folder"),
        ("file/run", "cannot be written"),
        ("/proc/edgefl", "cannot be written"),
    ],
)
def test_a_folder_that_cannot_be_had_is_one_line_and_left_alone(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=says) as caught:
        edgefl.run(experiment(), tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == ["file"]


@pytest.mark.parametrize("made", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nothing_is_left_of_a_run_that_never_began(made: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if made:
        folder.mkdir()
    with pytest.raises(ConfigError, match="width"):
        edgefl.run(experiment(model=edgefl.Model(args={"width": 3})), folder)
    assert files(tmp_path) == (["run"] if made else [])
    assert not made or files(folder) == []


def test_a_run_that_is_going_on_is_neither_resumed_nor_run_twice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=0.2)), folder)
    wait_for_versions(folder, 3, command)
    with pytest.raises(ConfigError, match="another edgefl process runs it"):
        supervisor.resume(folder)
    with pytest.raises(ConfigError, match="holds a run"):
        edgefl.run(experiment(), folder)
    command.interrupt()
    command.ends(130)
    with run_folder.held(folder):  # it let go
        pass


def killed_as_it_began(folder: Path) -> None:
    """As far as a run gets before its first checkpoint."""
    run_folder.begin(folder, Path("/where/modules/are"))
    with Store(folder) as store:
        store.clients([client(0)])
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "journal-0000000000.partial").write_bytes(b"half")


def half_made(folder: Path) -> None:
    """A record that was killed before its first transaction."""
    db = sqlite3.connect(folder / "record.sqlite")
    db.execute("PRAGMA journal_mode = WAL")
    db.close()


@pytest.mark.parametrize(
    ("left", "base"), [(killed_as_it_began, Path("/where/modules/are")), (half_made, None)]
)
def test_what_was_written_too_early_is_cleared(
    left: Callable[[Path], None], base: Path | None, tmp_path: Path
) -> None:
    (tmp_path / "experiment.toml").touch()
    left(tmp_path)
    assert not run_folder.begun(tmp_path)
    assert run_folder.base_of(tmp_path) == (base or Path.cwd())
    run_folder.clear(tmp_path)
    assert files(tmp_path) == ["experiment.toml"]


def test_a_run_that_fails_leaves_no_experiment_whatever_lies_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def fail_early() -> None:
        with run_folder.new(folder, ""):
            killed_as_it_began(folder)
            (folder / "checkpoints" / "locked.partial").mkdir()  # cannot be unlinked
            raise RuntimeError("early")

    with pytest.raises(RuntimeError, match="early"):
        fail_early()
    assert "experiment.toml" not in files(folder)


def test_the_record_is_cleared_last_and_what_another_put_there_stays(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").touch()
    killed_as_it_began(tmp_path)
    (tmp_path / "checkpoints" / "notes.txt").touch()
    locked = tmp_path / "checkpoints" / "locked.partial"
    locked.mkdir()  # it ends here as if it were killed
    with pytest.raises(OSError, match="locked"):
        run_folder.clear(tmp_path)
    assert run_folder.base_of(tmp_path) == Path("/where/modules/are")
    locked.rmdir()
    run_folder.clear(tmp_path)
    assert files(tmp_path) == ["checkpoints", "experiment.toml"]
    assert files(tmp_path / "checkpoints") == ["notes.txt"]


def test_what_has_begun_is_not_begun_again(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints")
    assert run_folder.begun(folder)
    with Store(folder) as store:
        store.set_meta(status="running")
    with pytest.raises(ConfigError, match="holds no checkpoint to resume from"):
        supervisor.resume(folder)
    (folder / "record.sqlite").write_bytes(b"x" * 10_000)
    with pytest.raises(ConfigError, match="damaged or not a record"):
        supervisor.resume(folder)
