"""Tests of failpoints: when they kill a process, and how a chaos run arms them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from edgefl import failpoints, seeds
from edgefl.cli import main
from edgefl.lab import chaos

PASSES = """
import pathlib, sys
from edgefl import failpoints
for number in range(9):
    print(number, flush=True)
    if number == 4:
        pathlib.Path(sys.argv[1]).touch()
    failpoints.pass_by("sum")
"""


@pytest.mark.parametrize(("gated", "passes"), [(False, 3), (True, 7)])
def test_a_failpoint_kills_after_its_counted_passes(gated: bool, passes: int, tmp_path: Path) -> None:
    file = tmp_path / "armed"
    points = {
        "EDGEFL_FAILPOINTS": "torn:0:0,sum:1:0,sum:0:2",
        **({failpoints.WHILE: str(file)} if gated else {}),
    }
    command = [sys.executable, "-c", PASSES, str(file)]
    done = subprocess.run(command, env={**os.environ, **points}, capture_output=True, text=True, check=False)
    assert done.returncode == -9
    assert done.stdout.split() == [str(number) for number in range(passes)]
    assert done.stderr == f"{failpoints.SAYS}sum\n"


class _Said:
    """A command with the output ``lines``. Requesting its processes, in order to kill one, fails the test."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def output(self) -> list[str]:
        return self.lines

    def family(self) -> dict[Any, str]:
        raise AssertionError


def test_the_next_failpoint_is_armed_after_the_run_has_recovered(tmp_path: Path) -> None:
    plan = chaos.Plan(file=tmp_path / "none.toml", failpoints=1, only=frozenset({"sum", "torn", "die"}))
    killer = chaos._FailpointKiller(plan, seeds.stream(0, "chaos"), plan.only)
    places = killer.environment(tmp_path / "run")
    armed = Path(places[failpoints.WHILE])
    assert {name for name, _, _ in failpoints.parse(places["EDGEFL_FAILPOINTS"])} == {"sum", "torn"}
    command, there = _Said(), []
    for now_s, place in ((10.0, "sum"), (20.0, "die"), (30.0, "torn")):
        assert killer.turn(cast(Any, command), now_s, [], steady=False) == ""
        command.lines.append(f"{failpoints.SAYS}{place}")
        there.append(armed.exists())
        assert killer.turn(cast(Any, command), now_s, [], steady=False) == place
    assert there == [True, False, False]  # not armed again before the run has recovered
    assert not killer.more


def test_the_process_that_unmasks_sums_has_separate_failpoints(tmp_path: Path) -> None:
    plan = chaos.Plan(file=tmp_path / "none.toml", failpoints=1)
    killer = chaos._FailpointKiller(plan, seeds.stream(0, "chaos"), {"sum", "saved"})
    points = failpoints.parse(killer.environment(tmp_path / "run")["EDGEFL_FAILPOINTS"])
    assert {(name, server) for name, server, _ in points} == {("sum", 0), ("saved", 0)}
    command = _Said()
    for place in ("saved", "sum"):
        assert killer.more
        command.lines.append(f"{failpoints.SAYS}{place}")
        assert killer.turn(cast(Any, command), 1.0, [], steady=False) == place
    assert not killer.more


def test_a_chaos_run_without_a_kill_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: it passed if no failpoint in ``--only`` was reached under the experiment's clock."""
    monkeypatch.setattr(chaos, "adopt_orphans", lambda: None)
    file = tmp_path / "e.toml"
    file.write_text("fleet.devices = { pi-4 = 2 }\nstop.versions = 3\n")
    options = ["--failpoints", "1", "--only", "die", "--out", str(tmp_path / "chaos")]
    assert main(["chaos", str(file), *options]) == 1
    assert "no process was killed" in capsys.readouterr().err
