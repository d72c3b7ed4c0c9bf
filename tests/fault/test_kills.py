"""Clients that fail in every way, kill -9 of each process, a full disk: counted, one line, nothing left."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgefl import Checkpoint, Experiment, Fleet, Server, Stop
from edgefl.lab.outcome import log_problems, read_log
from edgefl.results.record import Record
from edgefl.run.client import WITNESS
from tests.process.runs import (
    DEVICES,
    PATIENCE_S,
    Command,
    experiment,
    incidents,
    needs_groups,
    summary,
    versions_of,
    wait_for,
    wait_for_versions,
)


def long_run() -> Experiment:
    return experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=0.2))


pytestmark = pytest.mark.timeout(300)


def running(folder: Path, wanted: Experiment | None = None) -> Command:
    """The run in this folder, begun or resumed, once it has made some versions more.

    One run is disturbed again and again: what each disturbance leaves is what the next start resumes.
    """
    more, seen = versions_of(folder) + 4, {WITNESS: str(account_of(folder))}
    if wanted is None:
        command = Command("resume", str(folder), environment=seen)
    else:
        command = Command.run(wanted, folder, environment=seen)
    wait_for_versions(folder, more, command)
    assert not (folder / "summary.json").exists()  # one of an earlier end would not be this run's
    return command


def account_of(folder: Path) -> Path:
    """Where the run's clients say what was acknowledged."""
    return folder.parent / "account"


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


def test_what_was_acknowledged_outlives_a_kill_of_each_process(tmp_path: Path) -> None:
    """Server and zygote are replaced within the run; of one whose supervisor is killed nothing is left."""
    folder = tmp_path / "run"
    command = running(folder, experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=1e6)))
    killed: list[str] = []
    for more, name in ((4, "server"), (8, "server"), (4, "zygote"), (8, "server")):
        more += versions_of(folder)
        command.child(f"edgefl-{name}").kill()
        killed.append(f"the {name}")
        wait_for(lambda: len(incidents(folder, "restart")) == len(killed), "it was replaced", command)
        wait_for_versions(folder, more, command)
    assert [row.detail.split(" was")[0] for row in incidents(folder, "restart")] == killed
    family = command.family()
    assert len(family) >= 9  # zygote, server, evaluator, six clients
    command.process.kill()
    command.finish()
    psutil.wait_procs(family)  # which the test's own time limit sees to
    check_every_update_counted_once(folder)
    assert len(read_log(account_of(folder))) > 50
    assert log_problems(account_of(folder), folder) == []
    assert summary(folder)["incidents"]["restart"] == 4


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_in_order_with_its_own_exit_code(number: int, code: int, tmp_path: Path) -> None:
    """The whole foreground group gets a SIGHUP from the shell and one from the kernel; SIGTERM comes once."""
    folder = tmp_path / "run"
    command = running(folder, long_run())
    for _ in range(2 if number == signal.SIGHUP else 1):
        os.killpg(command.process.pid, number)
        time.sleep(0.001)  # two that are pending are one
    command.ends(code)
    assert summary(folder)["status"] == "interrupted"


HANG_S = 5.0
"""Who is silent for so long is taken for one that hangs: on a busy host others may be, too."""
EVERYONE = {"name": "fedavg", "cohort": 6}
"""A run that can only end if each client delivers, however far ahead the others would be."""
FAILURES = {
    "stale:0:1": "version",
    "rubbish:1:1": "malformed",
    "die:2:1": "death",
    "leave:3:1": "failed",
    "nan:4:1": "non-finite",
    "alter:5:1": "checksum",
}
"""One of each kind, each client its own, in its second trip; what the record calls it."""


def finished(wanted: Any, folder: Path, failpoints: str) -> Record:
    """The record of a run in which this fails and which ends well."""
    Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": failpoints}).ends()
    return Record(folder)


@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_a_failure_costs_its_task_and_no_bad_update_reaches_the_model(transport: str, tmp_path: Path) -> None:
    server = Server(transport=transport, heartbeat_s=PATIENCE_S)
    wanted = experiment(strategy=EVERYONE, server=server, stop=Stop(versions=4))
    record = finished(wanted, tmp_path / "run", ",".join(FAILURES))
    incidents = sorted((row.client, row.kind) for row in record.incidents)
    assert incidents == list(enumerate(FAILURES.values()))
    figures = summary(tmp_path / "run")
    assert (figures["versions"], figures["trips"]["applied"]) == (4, 24)
    assert (figures["trips"]["lost"], figures["dropped_updates"]) == (4, 2)
    assert figures["integrity"]["version_mismatches"] == 0
    assert all(row.loss < 10 for row in record.evaluations)


def test_a_client_that_hangs_is_replaced(tmp_path: Path) -> None:
    wanted = experiment(strategy=EVERYONE, server=Server(heartbeat_s=HANG_S), stop=Stop(versions=4))
    record = finished(wanted, tmp_path / "run", "hang:2:1")
    assert (2, "hang") in {(row.client, row.kind) for row in record.incidents}
    assert {row.kind for row in record.incidents} == {"hang"}
    figures = summary(tmp_path / "run")
    assert (figures["versions"], figures["trips"]["applied"]) == (4, 24)
    assert 1 <= figures["trips"]["lost"] <= len(record.incidents)
    assert figures["integrity"]["checksum_mismatches"] == 0


@pytest.mark.parametrize("mechanism", ["rlimit", "cgroup"])
def test_a_device_out_of_memory_is_killed_and_the_run_goes_on(mechanism: Any, tmp_path: Path) -> None:
    if mechanism == "cgroup":
        needs_groups("memory")
    elif not sys.platform.startswith("linux"):
        pytest.skip("RLIMIT_DATA is enforced on Linux only")
    fleet = Fleet(devices={"nexus-6": 4, "moto-g4": 2}, network="fios", memory=mechanism)
    wanted = experiment(fleet=fleet, strategy=EVERYONE, stop=Stop(versions=4))
    record = finished(wanted, tmp_path / "run", "memory:2:1")
    how = {"rlimit": "an allocation failed", "cgroup": "killed by the kernel"}[mechanism]
    told = f"device out of memory: limit 512 MiB, {how}"
    assert [(row.client, row.kind, row.detail) for row in record.incidents] == [(2, "oom", told)]
    lost = record.trips["fate"] == "lost"
    assert record.trips["reason"][lost].tolist() == [told]
    figures = summary(tmp_path / "run")
    assert (figures["versions"], figures["trips"]["applied"]) == (4, 24)
    assert figures["integrity"]["checksum_mismatches"] == 0
    peaks = record.trips["peak_mib"][~lost]
    assert 0 <= peaks.min() <= peaks.max() < 512


def test_a_limit_that_is_off_kills_nobody_and_a_dropped_device_stays_away(tmp_path: Path) -> None:
    fleet = Fleet(devices=DEVICES, network="fios", memory="off", on_death="drop")
    record = finished(experiment(fleet=fleet), tmp_path / "run", "memory:1:0,die:2:0")
    assert [(row.client, row.kind) for row in record.incidents if row.kind != "gave-up"] == [(2, "death")]
    assert (record.trips["client"] == 2).sum() == 1
    assert summary(tmp_path / "run")["trips"]["lost"] == 1


def test_no_one_left_is_an_error_and_not_a_silence(tmp_path: Path) -> None:
    fleet = Fleet(devices={"pi-zero-2w": 2}, network="fios", on_death="drop")
    wanted = experiment(fleet=fleet, strategy={"name": "fedbuff", "buffer_size": 2})
    environment = {"EDGEFL_FAILPOINTS": "die:0:0,die:1:0"}
    Command.run(wanted, tmp_path / "run", environment=environment).ends(1, "too few clients are left: 0 of 2")
    assert summary(tmp_path / "run")["no_progress"] == "no version was made"
