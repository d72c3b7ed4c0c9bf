"""Tests of ``edgefl exec --awake``, whose process keeps the cores busy at the lowest priority."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

from edgefl.errors import ConfigError, RunError
from edgefl.host import awake
from edgefl.host.awake import check_awake, one_thread_per_core, yield_to_sessions
from edgefl.host.capacity import UsageMeter
from edgefl.programs import start

from .runs import Command, options, phone


def child() -> psutil.Process:
    return next(one for one in psutil.Process().children() if one.name() == "edgefl-awake")


def pinned_threads(process: psutil.Process) -> set[tuple[int, int]]:
    """Return the scheduling policy and the CPU of each thread that is bound to one CPU."""
    threads = [one.id for one in process.threads() if one.id != process.pid]
    cpus = {thread: os.sched_getaffinity(thread) for thread in threads}
    return {(os.sched_getscheduler(thread), min(found)) for thread, found in cpus.items() if len(found) == 1}


def test_each_core_has_a_thread_of_the_lowest_priority_whose_time_is_not_counted_as_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle_times_s: list[float] = []
    usage = UsageMeter.usage

    def noted(meter: UsageMeter, idle_s: float = 0.0) -> dict[str, float | None]:
        idle_times_s.append(idle_s)
        return usage(meter, idle_s)

    monkeypatch.setattr(UsageMeter, "usage", noted)
    wanted = {(os.SCHED_IDLE, cpu) for cpu in one_thread_per_core()}
    with start([phone("sleep", "1000")], options(awake=True)) as running:
        process = child()
        while pinned_threads(process) != wanted or not (took_s := sum(process.cpu_times()[:2])):
            running.turn(0.05)
        assert os.getsid(process.pid) == process.pid
        running.kill()
        running.wait()
    assert not process.is_running()
    assert idle_times_s[0] >= took_s > 0.0
    result = running.result()
    assert result.awake
    assert result.summary()["awake"] is True


def test_a_run_whose_awake_process_ended_early_is_invalid() -> None:
    with start([phone("sleep", "1000")], options(awake=True)) as running:
        process = child()
        process.kill()
        while process.status() != psutil.STATUS_ZOMBIE:
            running.turn(0.05)
        running.kill()
        running.wait()
    assert "the process that keeps the host's cores busy ended early" in running.result().reasons


def test_it_does_not_outlive_a_killed_edgefl() -> None:
    command = Command(
        "exec", "--awake", "--share", "0.3", "--device", "moto-g4", "--", "sh", "-c", "echo; sleep 300"
    )
    assert command.process.stdout is not None
    command.process.stdout.readline()
    assert command.child("edgefl-awake").is_running()
    command.process.kill()
    command.finish()  # the fixture finds what is left


def test_one_cpu_of_each_core_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (4, "0,4"), (5, "1,5")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5, 7})
    assert one_thread_per_core(tmp_path) == [0, 1, 7]  # CPU 7 has no topology file


def test_it_cannot_be_combined_with_the_throttle_cgroup() -> None:
    with pytest.raises(ConfigError, match=r"^awake: cannot be combined with the throttle cgroup"):
        check_awake("cgroup")


def test_it_cannot_be_combined_with_a_quota_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "cpu_quota", lambda: 1.5)
    with pytest.raises(ConfigError, match=r"^awake: .* control groups limit the CPU time to 1\.5 cores"):
        start([phone("true")], options(awake=True))


REFUSED = """
import os

def refuse(pid, policy, param, set_scheduler=os.sched_setscheduler):
    if policy == os.SCHED_IDLE:
        raise OSError(22, "Invalid argument")
    set_scheduler(pid, policy, param)

os.sched_setscheduler = refuse
"""


def test_a_refused_priority_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RunError, match="failed to start"), start([phone("true")], options(awake=True)):
        pass
    said = r"edgefl: awake: CPU \d+ refused a thread of the lowest priority: Invalid argument\n"
    assert re.fullmatch(said, capfd.readouterr().err)


def test_a_priority_that_linux_refuses_temporarily_is_requested_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def write(path: Path, text: str) -> None:
        written.append(text)
        if len(written) < 3:
            raise BlockingIOError

    monkeypatch.setattr(Path, "write_text", write)
    yield_to_sessions()
    assert written == ["19"] * 3
    monkeypatch.undo()
    yield_to_sessions(tmp_path / "missing" / "autogroup")  # a system without autogroups
