"""Tests that a run whose servers are killed at any failpoint keeps each acknowledged update exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgefl import Checkpoint, Experiment, Server, Stop
from edgefl.lab.outcome import log_problems, read_log
from edgefl.lab.verify import verify
from edgefl.results.record import Record
from edgefl.run.client import WITNESS
from tests.process.disturbed import killed
from tests.process.runs import PATIENCE_S, Command, experiment, incidents

pytestmark = pytest.mark.timeout(300)
PLACES = ("commit", "committed", "sum", "summed", "published")


def wanted(versions: int = 25, **server: Any) -> Experiment:
    return experiment(
        strategy={"name": "fedbuff", "buffer_size": 3, "momentum": 0.5},
        server=Server(heartbeat_s=PATIENCE_S, **server),
        checkpoint=Checkpoint(every_s=1e6),
        stop=Stop(versions=versions),
    )


@pytest.mark.parametrize(
    "server",
    [
        pytest.param({}, id="shm"),
        pytest.param({"transport": "wire", "update_format": "int8"}, id="wire, int8", marks=pytest.mark.slow),
    ],
)
def test_servers_killed_at_each_failpoint_lose_and_repeat_no_update(
    server: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, account = tmp_path / "run", tmp_path / "account"
    monkeypatch.setenv(WITNESS, str(account))
    # A commit has at most six updates, one from each client, which make two sums. Two failpoints wait for
    # four commits (eight sums) each, and three wait for three sums each, so 25 sums are enough.
    points = [f"{name}:0:{3 if name in ('commit', 'committed') else 2}" for name in PLACES]
    assert killed(wanted(**server), folder, points, monkeypatch) == len(points)
    assert log_problems(account, folder) == []
    assert len(read_log(account)) > 40
    with Record(folder) as record:
        assert (record.trips["fate"] == "applied").sum() == 75
    assert verify(folder).versions == 25


def test_a_version_before_its_commit_counts_as_progress(tmp_path: Path) -> None:
    # The third server makes two versions and is killed before it commits their rows.
    folder = tmp_path / "run"
    deaths = {"EDGEFL_FAILPOINTS": "commit:0:0,committed:1:0,published:2:1"}
    Command.run(wanted(8), folder, environment=deaths).ends()
    assert len(incidents(folder, "restart")) == 3
    assert verify(folder).versions == 8


@pytest.mark.slow
def test_servers_that_make_no_progress_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    deaths = {"EDGEFL_FAILPOINTS": "commit:0:7,commit:1:0,commit:2:0"}
    often = "the server process ended early (signal 9), 3 times in a row without a new version"
    Command.run(wanted(), folder, environment=deaths).ends(
        1, f"{often}; carry on with: edgefl resume {folder}"
    )
    Command("resume", str(folder), "--accept-invalid").ends()
    assert verify(folder).versions == 25
