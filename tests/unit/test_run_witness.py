"""The clients' account of what was acknowledged, held against a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.core.events import Arrived
from edgefl.lab.outcome import Acknowledged, log_problems, read_log
from edgefl.results.rows import TripRow
from edgefl.results.store import Store
from edgefl.run.client import WITNESS, Witness


def account(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two clients with a trip each that was acknowledged; one is in its next, which was not."""
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


def test_an_account_names_what_was_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_log(account(tmp_path / "account", monkeypatch))
    assert found == [Acknowledged(0, 0, 2**64 - 1), Acknowledged(1, 1, 2**64 - 2)]


def test_what_is_lost_taken_twice_or_another_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = account(tmp_path / "account", monkeypatch)
    folders = [tmp_path / name for name in ("whole", "lost", "twice", "other")]
    for folder in folders:
        folder.mkdir()
    whole, lost, twice, other = folders
    assert log_problems(path, record(whole, 0, 1)) == []
    assert log_problems(path, record(lost, 0)) == [f"{Acknowledged(1, 1, 2**64 - 2)} is lost"]
    assert log_problems(path, record(twice, 0, 1, 1)) == ["task 1 of client 1 arrived 2 times"]
    assert len(log_problems(path, record(other, 0, 1, checksum=3))) == 2


def test_nothing_is_written_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WITNESS, raising=False)
    monkeypatch.chdir(tmp_path)
    Witness(0).done(0, 1)
    assert list(tmp_path.iterdir()) == []
