"""The log of acknowledged updates that clients write for fault tests, and its comparison with a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.core.events import Arrived
from edgefl.lab.outcome import Acknowledged, log_problems, read_log
from edgefl.results.rows import TripRow
from edgefl.results.store import Store
from edgefl.run.client import WITNESS, Witness


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two clients log two trips each, of which the first was acknowledged."""
    path = tmp_path / "log"
    monkeypatch.setenv(WITNESS, str(path))
    for client in (0, 1):
        witness = Witness(client)
        witness.next_task()
        witness.done(client, 2**64 - 1 - client)
        witness.next_task()
        witness.done(2 + client, 7)
    return path


def record(folder: Path, *tasks: int, checksum: int = 2**64 - 1) -> Path:
    with Store(folder) as store:
        for task in tasks:
            facts = {"base_version": 0, "examples": 1, "steps": 1, "loss": 0.0, "at_s": 1.0}
            store.journal(Arrived(client=task, task=task, **facts))
            sent = checksum - task
            store.trip(
                TripRow(task=task, client=task, base_version=0, trip=0, sent_s=0.0, checksum_sent=sent)
            )
    return folder


def test_the_log_names_acknowledged_updates(log: Path) -> None:
    assert read_log(log) == [Acknowledged(0, 0, 2**64 - 1), Acknowledged(1, 1, 2**64 - 2)]


def test_lost_repeated_and_altered_updates_are_problems(tmp_path: Path, log: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "lost", "twice", "other")]
    for folder in folders:
        folder.mkdir()
    whole, lost, twice, other = folders
    assert log_problems(log, record(whole, 0, 1)) == []
    assert log_problems(log, record(lost, 0)) == [f"{Acknowledged(1, 1, 2**64 - 2)} is lost"]
    assert log_problems(log, record(twice, 0, 1, 1)) == ["task 1 of client 1 arrived 2 times"]
    assert len(log_problems(log, record(other, 0, 1, checksum=3))) == 2


def test_without_the_variable_no_log_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WITNESS, raising=False)
    monkeypatch.chdir(tmp_path)
    Witness(0).done(0, 1)
    assert list(tmp_path.iterdir()) == []
