"""Kills of processes in runs with secure aggregation change no bits and lose no update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl import Server, Stop
from edgefl.lab.verify import verify

from .disturbed import check_every_kill_was_certain, killed
from .runs import Command, experiment, incidents, summary, virtual, wait_for_versions
from .test_secure import MASKED, PAIRS, PRIVATE, ROUNDS, SLOW, TRUSTED, WALL, made

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"server": MASKED}, id="masks", marks=SLOW),
        pytest.param({"server": TRUSTED}, id="trusted", marks=SLOW),
        pytest.param({"server": MASKED, **PRIVATE}, id="private masks"),
        pytest.param(
            {"server": PAIRS, "strategy": {**ROUNDS, "over_selection": 1.5}}, id="pairwise", marks=SLOW
        ),
    ],
)
def test_servers_killed_around_sums_give_the_same_bits(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated request gets the same answer, and no recomputed update is refused."""
    wanted = virtual(stop=Stop(versions=12), **changes)
    calm = made(wanted, tmp_path / "calm")
    points = ["sum:0:2", "summed:1:3", "published:2:2", "event:3:12"]
    folder = tmp_path / "killed"
    assert killed(wanted, folder, points, monkeypatch) == len(points)
    check_every_kill_was_certain(folder, points)
    assert incidents(folder, "refused") == []
    assert summary(folder)["model_sha256"] == calm["model_sha256"]


@pytest.mark.parametrize(
    ("server", "place"), [pytest.param(MASKED, "asked", marks=SLOW), (MASKED, "saved"), (TRUSTED, "saved")]
)
def test_killed_holders_are_started_again(server: Server, place: str, tmp_path: Path) -> None:
    """A restarted holder sends the answer that it saved but did not send, so no sum is refused."""
    command = Command.run(
        experiment(server=server, stop=Stop(versions=8)),
        tmp_path,
        environment={"EDGEFL_FAILPOINTS": f"{place}:0:3"},
    )
    assert f"killed at failpoint {place}" in command.ends()
    assert (summary(tmp_path)["versions"], summary(tmp_path)["dropped_updates"]) == (8, 0)
    assert verify(tmp_path).versions == 8


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="masks", marks=SLOW),
        pytest.param(PRIVATE, id="private masks"),
        pytest.param({"server": PAIRS, "strategy": ROUNDS}, id="pairwise", marks=SLOW),
    ],
)
def test_a_server_killed_under_the_wall_clock_loses_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    """The server is killed between a sum and its publication. The next server must make the same sum, since
    no other sum is allowed.

    Mutant: the update that completed the buffer is not recorded before the sum.
    """
    wanted = experiment(**{"server": MASKED, "stop": Stop(versions=8), **changes})
    Command.run(wanted, tmp_path, environment={"EDGEFL_FAILPOINTS": "summed:0:4"}).ends()
    found = summary(tmp_path)
    assert (found["versions"], found["dropped_updates"]) == (8, 0)
    assert len(incidents(tmp_path, "restart")) == 1
    assert incidents(tmp_path, "refused") == []


@pytest.mark.parametrize(
    ("server", "strategy"), [WALL[0], pytest.param(*WALL[1], marks=SLOW)], ids=["masks", "pairwise"]
)
def test_a_killed_run_is_resumed_under_the_wall_clock(
    server: Server, strategy: dict[str, Any], tmp_path: Path
) -> None:
    """Only two things may be refused: updates whose sum was released after the checkpoint, and rounds that
    lost half of their members because the kill ended their trips."""
    folder = tmp_path / "run"
    often, end = edgefl.Checkpoint(every_s=0.1), Stop(versions=100)
    wanted = experiment(server=server, strategy=strategy, checkpoint=often, stop=end)
    command = Command.run(wanted, folder)
    wait_for_versions(folder, 5, command)
    command.kill_group()
    command.finish()
    Command("resume", str(folder), "--accept-invalid").ends()
    assert summary(folder)["versions"] == 100
    refusals = incidents(folder, "refused")
    assert summary(folder)["dropped_updates"] == len(refusals)
    reasons = ("another sum", "clients uploaded; at least 3 are required")
    assert all(row.detail.endswith(reasons) for row in refusals)
