"""kill -9 of each process of a run, and a full disk: one clear line, nothing left, the run can be resumed."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import psutil
import pytest

from edgefl import Checkpoint, Experiment, Stop
from edgefl.results.record import Record
from tests.process.runs import Command, experiment, summary, versions_of, wait_for_versions


def long_run() -> Experiment:
    return experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=0.2))


pytestmark = pytest.mark.timeout(300)


def running(folder: Path, wanted: Experiment | None = None) -> Command:
    """The run in this folder, begun or resumed, once it has made some versions more.

    One run is disturbed again and again: what each disturbance leaves is what the next start resumes.
    """
    more = versions_of(folder) + 4
    command = Command.run(wanted, folder) if wanted else Command("resume", str(folder))
    wait_for_versions(folder, more, command)
    return command


def check_every_update_counted_once(folder: Path) -> None:
    """An interrupted run's summary says that nothing was lost or counted twice on the way."""
    more = versions_of(folder)
    again = running(folder)
    again.interrupt()
    again.ends(130, f"edgefl resume {folder}")
    figures = summary(folder)
    assert figures["status"] == "interrupted"
    assert figures["versions"] > more
    assert figures["trips"]["applied"] == 3 * figures["versions"]
    assert figures["integrity"]["checksum_mismatches"] == 0
    tasks = Record(folder).trips["task"]
    assert len(set(tasks)) == len(tasks)


def test_a_killed_process_ends_the_run_with_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = running(folder, long_run())
    for victim in ("edgefl-server", "edgefl-zygote"):
        command.child(victim).kill()
        command.ends(1, f"edgefl resume {folder}")
        command = running(folder)
    family = command.family()
    assert len(family) >= 9  # zygote, server, evaluator, six clients
    command.process.kill()
    command.finish()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    check_every_update_counted_once(folder)


@pytest.mark.parametrize("every_s", [0.2, 1e6], ids=["later", "before its first regular checkpoint"])
def test_a_run_that_is_killed_whole_can_be_resumed(every_s: float, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wanted = experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=every_s))
    command = running(folder, wanted)
    command.kill_group()
    command.finish()
    check_every_update_counted_once(folder)


def test_a_full_disk_ends_the_run_with_one_line_that_says_how_to_carry_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = running(folder, long_run())
    for writer in ("server", "supervisor"):
        pid = command.child("edgefl-server").pid if writer == "server" else command.process.pid
        # The kernel refuses this process's every further byte, as it does when there is no room.
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        if writer == "supervisor":
            command.interrupt()
        err = command.ends(1)
        assert err.endswith(f"; carry on with: edgefl resume {folder}\n")
        assert "cannot be written: " in err.splitlines()[-1]
        command = running(folder)
    command.interrupt()
    command.interrupt()  # ends it at once
    command.ends(130)
    check_every_update_counted_once(folder)


def test_a_terminal_that_goes_away_interrupts(tmp_path: Path) -> None:
    """As when a connection breaks: the whole foreground group hears of it."""
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would pass their deafness on
    try:
        command = running(folder, long_run())
    finally:
        signal.signal(signal.SIGHUP, before)
    os.killpg(command.process.pid, signal.SIGHUP)
    command.ends(130)
    assert summary(folder)["status"] == "interrupted"
