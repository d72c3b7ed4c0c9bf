"""A run made again from its journal has the same bits, and a record that was touched is found out."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edgefl
from edgefl import Server, Stop
from edgefl.errors import RunError
from edgefl.results.record import IncidentRow, Record
from edgefl.run.verify import verify

from .runs import PATIENCE_S, Command, experiment, summary, versions_of, wait_for, wait_for_versions


def incidents_of(folder: Path) -> list[IncidentRow]:
    """Incidents on record; none while there is no record that can be read."""
    try:
        with Record(folder) as record:
            return record.incidents
    except edgefl.ConfigError:
        return []


def test_a_wall_clock_run_with_an_altered_update_that_was_killed_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wanted = experiment(
        strategy={"name": "fedbuff", "buffer_size": 3, "momentum": 0.5},
        server=Server(update_format="int8", transport="wire", heartbeat_s=PATIENCE_S),
        stop=Stop(versions=100_000),
    )
    command = Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": "alter:2:1"})
    wait_for(lambda: bool(incidents_of(folder)), "an incident", command)
    command.kill_group()
    command.finish()
    more = versions_of(folder) + 6
    again = Command("resume", str(folder))
    wait_for_versions(folder, more, again)
    again.interrupt()
    again.ends(130)
    figures = summary(folder)
    assert figures["incidents"]["checksum"] == 1
    assert figures["integrity"]["version_mismatches"] == 0
    code, out, err = Command("verify", str(folder)).finish()
    assert (code, err) == (0, "")
    assert f"model_sha256 {figures['model_sha256']}" in out


def test_a_virtual_run(finished: Path) -> None:
    told: list[tuple[int, int]] = []
    found = verify(finished, lambda made, of: told.append((made, of)))
    figures = summary(finished)
    assert found.model_sha256 == figures["model_sha256"]
    assert (found.versions, found.updates) == (figures["versions"], figures["client_trips"])
    assert told == [(version, 12) for version in range(1, 13)]


def sql(statement: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with sqlite3.connect(folder / "record.sqlite") as db:
            assert db.execute(statement).rowcount == 1
        db.close()

    return change


def other_model(folder: Path) -> None:
    path = folder / "checkpoints" / "final.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    first = tensors[name].reshape(-1)
    first[0] = np.nextafter(first[0], np.float32(np.inf))
    save_file(tensors, path)


def no_model(folder: Path) -> None:
    (folder / "checkpoints" / "final.safetensors").write_bytes(b"nothing")


def other_seed(folder: Path) -> None:
    path = folder / "experiment.toml"
    text = path.read_text()
    assert "seed = 0" in text
    path.write_text(text.replace("seed = 0", "seed = 1"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (sql("UPDATE trips SET checksum_sent = checksum_sent + 1 WHERE task = 4"), "the update of task 4"),
        (sql("UPDATE trips SET checksum_sent = NULL WHERE task = 4"), "the update of task 4"),
        (
            sql("UPDATE sums SET weights = zeroblob(24) WHERE version = 3"),
            "version 3 is made of other updates",
        ),
        (sql("UPDATE meta SET value = '\"00\"' WHERE key = 'model_sha256'"), "the record says 00"),
        (other_model, "is not that of version 12"),
        (no_model, "cannot be read"),
        (other_seed, "the update of task"),
    ],
)
def test_changes_are_named(finished: Path, tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    change(folder)
    with pytest.raises(RunError, match=says):
        verify(folder)


def test_a_run_that_has_not_ended_is_refused(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    sql("UPDATE meta SET value = '\"running\"' WHERE key = 'status'")(folder)
    with pytest.raises(edgefl.ConfigError, match="this run has not ended"):
        verify(folder)
