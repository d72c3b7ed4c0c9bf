"""A run's folder: refused, held and given up."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgefl
from edgefl import Checkpoint, ConfigError, Stop, run_folder, supervisor

from .runs import Command, experiment, wait_for_versions


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_that_holds_a_run_is_not_run_into_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wanted = experiment(stop=Stop(versions=1))
    before = edgefl.run(wanted, folder).summary()
    with pytest.raises(ConfigError, match="run: holds a run, expected a new or empty folder"):
        edgefl.run(wanted, folder)
    assert edgefl.run(wanted, tmp_path / "other").summary()["versions"] == before["versions"]


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty, expected a new or empty folder"):
        edgefl.run(experiment(), tmp_path)
    assert files(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("name", ["file", "file/run", "/proc/edgefl"])
def test_a_folder_that_cannot_be_made_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        edgefl.run(experiment(), tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("made", [False, True])
def test_nothing_is_left_of_a_run_that_never_began(made: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if made:
        folder.mkdir()
    with pytest.raises(ConfigError):
        edgefl.run(experiment(model=edgefl.Model(args={"width": 3})), folder)
    assert files(tmp_path) == (["run"] if made else [])


def test_a_run_that_is_going_on_is_neither_resumed_nor_run_twice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=0.2)), folder)
    wait_for_versions(folder, 3, command)
    with pytest.raises(ConfigError, match="another edgefl process runs it"):
        supervisor.resume(folder)
    with pytest.raises(ConfigError, match="holds a run"):
        edgefl.run(experiment(), folder)
    command.interrupt()
    assert command.finish()[0] == 130
    with run_folder.held(folder):  # it let go
        pass
