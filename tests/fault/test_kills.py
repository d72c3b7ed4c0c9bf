"""kill -9 of each process of a run, and a full disk: one clear line, nothing left, the run can be resumed."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import psutil
import pytest

from edgefl import Checkpoint, Experiment, Stop
from tests.process.runs import Command, experiment, summary, versions_of, wait_for_versions


def long_run() -> Experiment:
    return experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=0.2))


@pytest.mark.parametrize("victim", ["edgefl-server", "edgefl-zygote"])
def test_a_killed_process_ends_the_run_with_one_line(victim: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(long_run(), folder)
    wait_for_versions(folder, 3, command)
    command.child(victim).kill()
    code, _, err = command.finish()
    assert code == 1
    assert f"edgefl resume {folder}" in err
    assert "Traceback" not in err
    check_resumes(folder)


@pytest.mark.parametrize("whole_group", [False, True], ids=["supervisor", "group"])
def test_a_killed_supervisor_leaves_nothing(whole_group: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(long_run(), folder)
    wait_for_versions(folder, 3, command)
    family = command.family()
    assert len(family) >= 9  # zygote, server, evaluator, six clients
    if whole_group:
        command.kill_group()
    else:
        command.process.kill()
    command.finish()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    check_resumes(folder)


@pytest.mark.parametrize("writer", ["server", "supervisor"])
def test_a_full_disk_ends_the_run_with_one_line_that_says_how_to_carry_on(
    writer: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = Command.run(long_run(), folder)
    wait_for_versions(folder, 3, command)
    pid = command.child("edgefl-server").pid if writer == "server" else command.process.pid
    # The kernel refuses this process's every further byte, as it does when there is no room.
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
    if writer == "supervisor":
        command.interrupt()
    code, _, err = command.finish()
    assert code == 1
    assert err.endswith(f"; carry on with: edgefl resume {folder}\n")
    assert "cannot be written: " in err.splitlines()[-1]
    assert "Traceback" not in err
    check_resumes(folder)


def test_two_interrupts_end_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(long_run(), folder)
    wait_for_versions(folder, 3, command)
    command.interrupt()
    command.interrupt()
    code, _, err = command.finish()
    assert code == 130
    assert "Traceback" not in err


def test_a_terminal_that_goes_away_interrupts(tmp_path: Path) -> None:
    """As when a connection breaks: the whole foreground group hears of it."""
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would pass their deafness on
    try:
        command = Command.run(experiment(stop=Stop(versions=100_000)), folder)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for_versions(folder, 3, command)
    os.killpg(command.process.pid, signal.SIGHUP)
    code, _, err = command.finish()
    assert code == 130, err
    assert summary(folder)["status"] == "interrupted"
    check_resumes(folder)


def test_a_run_can_be_resumed_before_its_first_regular_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=1e6)), folder)
    wait_for_versions(folder, 3, command)
    command.kill_group()
    command.finish()
    check_resumes(folder)


def check_resumes(folder: Path) -> None:
    """The run goes on from its last checkpoint, and every update counts once."""
    more = versions_of(folder) + 5
    again = Command("resume", str(folder))
    wait_for_versions(folder, more, again)
    again.interrupt()
    code, _, err = again.finish()
    assert code == 130, err
    figures = summary(folder)
    assert figures["versions"] >= more
    assert figures["trips"]["applied"] == 3 * figures["versions"]
    assert figures["integrity"]["checksum_mismatches"] == 0
