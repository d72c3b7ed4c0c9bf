"""Tests of runs with kills, signals, a full disk, and clients that fail in every way."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from edgefl import Checkpoint, Clock, Data, Experiment, Fleet, Model, Server, Stop
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import listed
from edgefl.lab.outcome import log_problems, read_log
from edgefl.programs.options import no_group
from edgefl.results.record import Record
from edgefl.results.store import Store
from edgefl.run.client import WITNESS
from tests.process.runs import (
    DEVICES,
    PATIENCE_S,
    Command,
    experiment,
    incidents,
    summary,
    versions_of,
    wait_for,
    wait_for_versions,
)


def long_run() -> Experiment:
    return experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=0.2))


pytestmark = pytest.mark.timeout(300)


def running(folder: Path, wanted: Experiment | None = None) -> Command:
    """Start the run in this folder, or resume it if ``wanted`` is None, and wait for four more versions."""
    more, seen = versions_of(folder) + 4, {WITNESS: str(account_of(folder))}
    if wanted is None:
        command = Command("resume", str(folder), environment=seen)
    else:
        command = Command.run(wanted, folder, environment=seen)
    wait_for_versions(folder, more, command)
    assert not (folder / "summary.json").exists()  # it would be that of an earlier end
    return command


def account_of(folder: Path) -> Path:
    """Return the file in which the run's clients note acknowledged updates."""
    return folder.parent / "account"


def check_every_update_counted_once(folder: Path) -> None:
    """Resume and interrupt the run; assert that no update was lost or counted twice."""
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


def test_acknowledged_updates_survive_a_kill_of_each_process(tmp_path: Path) -> None:
    """The run replaces its server and zygote. If its supervisor is killed, all its processes end."""
    folder = tmp_path / "run"
    command = running(folder, experiment(stop=Stop(versions=100_000), checkpoint=Checkpoint(every_s=1e6)))
    command.kill_group()  # only the checkpoint of the run's start exists
    command.finish()
    account_of(folder).unlink()  # a kill of all processes loses the updates since the last checkpoint
    command = running(folder)
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
    psutil.wait_procs(family)
    check_every_update_counted_once(folder)
    assert len(read_log(account_of(folder))) > 50
    assert log_problems(account_of(folder), folder) == []
    assert summary(folder)["incidents"]["restart"] == 4


@pytest.mark.parametrize(("name", "clock"), [("server", "wall"), ("zygote", "wall"), ("zygote", "virtual")])
def test_own_code_that_changed_before_a_killed_process_is_replaced_is_reported(
    name: str, clock: Literal["wall", "virtual"], tmp_path: Path
) -> None:
    """Regression: the new process imported the new code, and the record did not show it."""
    folder, mine, link = tmp_path / "run", tmp_path / "mine.py", tmp_path / "fios.toml"
    mine.write_text("from edgefl.strategies.fedbuff import FedBuff as Mine\n")
    link.write_text((bundled_folder() / "networks" / "fios.toml").read_text())
    changes = {
        "strategy": {"name": "mine:Mine", "buffer_size": 3},
        "fleet": Fleet(devices=DEVICES, network=str(link)),
        "clock": Clock(kind=clock),
    }
    command = running(folder, msgspec.structs.replace(long_run(), **changes))
    with Record(folder) as record:
        first = record.meta.code
    for path in (mine, link):
        with path.open("a") as file:
            file.write("# changed\n")
    command.child(f"edgefl-{name}").kill()
    wait_for(lambda: bool(incidents(folder, "restart")), "it was replaced", command)
    command.interrupt()
    command.ends(130)
    with Record(folder) as record:
        (before,) = record.meta.earlier_code
    assert before.code == first
    (row,) = incidents(folder, "code")
    since = f"the run goes on with the new files, from version {before.version} on"
    names = listed(["mine", str(link)])
    assert row.detail.startswith(f"your own files have changed since the run began ({names}): {since}")


@pytest.mark.parametrize(("what", "clock"), [("model", "wall"), ("data", "wall"), ("data", "virtual")])
def test_a_run_ends_if_a_new_zygote_loads_a_model_or_data_of_another_size(
    what: str, clock: Literal["wall", "virtual"], tmp_path: Path
) -> None:
    """Regression: with a larger model, all trips failed; with fewer examples, updates had wrong weights."""
    folder, mine, data = tmp_path / "run", tmp_path / "mine.py", tmp_path / "mine.safetensors"

    def write(hidden: int = 1, examples: int = 120) -> None:
        # Python reuses a compiled file if the source's size and its time of change, in seconds, are the same.
        mine.write_text(
            "from torch import nn\n\ndef make(input_shape, classes):\n"
            f"    return nn.Sequential(nn.Linear(4, {hidden}), nn.Linear({hidden}, classes))\n"
        )
        x, y = np.ones((examples, 4), np.float32), np.arange(examples) % 3
        save_file({"train_x": x, "train_y": y, "test_x": x, "test_y": y}, data)

    write()
    changes = {"data": Data(name="arrays", path=str(data)), "model": Model(name="mine:make")}
    command = running(folder, msgspec.structs.replace(long_run(), clock=Clock(kind=clock), **changes))
    write(**{"model": {"hidden": 22}, "data": {"examples": 60}}[what])
    command.child("edgefl-zygote").kill()
    command.ends(
        1, "the size of your model or of your data has changed: undo the change; carry on with: edge"
    )
    write()
    check_every_update_counted_once(folder)


def test_a_run_can_be_resumed_after_a_full_disk_two_interrupts_and_a_kill_of_all_its_processes(
    tmp_path: Path,
) -> None:
    """With a full disk, one line says how to resume the run."""
    folder = tmp_path / "run"
    command = running(folder, long_run())
    for writer in ("server", "supervisor"):
        pid = command.child("edgefl-server").pid if writer == "server" else command.process.pid
        # The kernel refuses all further bytes that this process writes.
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
    with Store(folder) as store:
        store.set_meta(time_scale=1.25)  # as if the host had been busier when the run began
    command = running(folder)
    command.kill_group()
    assert "time_scale 1.25 was given" in "".join(map(str, command.finish()))
    check_every_update_counted_once(folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_its_results_and_its_own_exit_code(
    number: int, code: int, tmp_path: Path
) -> None:
    """A closing terminal sends SIGHUP twice, from the shell and from the kernel."""
    folder = tmp_path / "run"
    command = running(folder, long_run())
    for _ in range(2 if number == signal.SIGHUP else 1):
        os.killpg(command.process.pid, number)
        time.sleep(0.001)  # two pending signals would be merged into one
    command.ends(code)
    assert summary(folder)["status"] == "interrupted"


HANG_S = 5.0
"""Time in seconds without a message after which a client is considered hung. On a busy host, clients that do
not hang may exceed it too."""
EVERYONE = {"name": "fedavg", "cohort": 6}
"""A strategy that needs an update from each of the six clients for every version."""
FAILURES = {
    "stale:0:1": "version",
    "rubbish:1:1": "malformed",
    "die:2:1": "death",
    "leave:3:1": "failed",
    "nan:4:1": "non-finite",
    "alter:5:1": "checksum",
}
"""Maps failpoints to the kinds of the incidents that they cause. Each failpoint is in the second trip of a
different client."""


def finished(wanted: Any, folder: Path, failpoints: str) -> Record:
    """Make a run with these failpoints, which must end with exit code 0; return its record."""
    Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": failpoints}).ends()
    return Record(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is enforced on Linux only")
@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_a_failure_costs_its_task_and_no_bad_update_reaches_the_model(transport: str, tmp_path: Path) -> None:
    """With "shm", memory is limited by rlimit. With "wire", it is limited by a control group if possible."""
    memory = "cgroup" if transport == "wire" and not no_group("memory") else "rlimit"
    wanted = experiment(
        fleet=Fleet(devices=DEVICES, network="fios", memory=memory),
        strategy=EVERYONE,
        server=Server(transport=transport, heartbeat_s=PATIENCE_S),
        stop=Stop(versions=4),
    )
    record = finished(wanted, tmp_path / "run", ",".join((*FAILURES, "memory:5:2")))
    *others, memory_kill = sorted((row.client, row.kind, row.detail) for row in record.incidents)
    assert [row[:2] for row in others] == list(enumerate(FAILURES.values()))
    how = {"rlimit": "an allocation failed", "cgroup": "killed by the kernel"}[memory]
    reason = f"device out of memory: limit 256 MiB, {how}"
    assert memory_kill == (5, "oom", reason)
    assert reason in record.trips["reason"][record.trips["fate"] == "lost"]
    peaks = record.trips["peak_mib"][record.trips["fate"] == "applied"]
    assert 0 <= peaks.min() <= peaks.max() < 256
    figures = summary(tmp_path / "run")
    assert (figures["versions"], figures["trips"]["applied"]) == (4, 24)
    assert (figures["trips"]["lost"], figures["dropped_updates"]) == (5, 2)
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


def test_without_a_memory_limit_no_client_is_killed_and_a_dropped_device_stays_away(tmp_path: Path) -> None:
    fleet = Fleet(devices=DEVICES, network="fios", memory="off", on_death="drop")
    wanted = experiment(fleet=fleet, strategy={"name": "fedavg", "cohort": 5}, stop=Stop(versions=2))
    record = finished(wanted, tmp_path / "run", "memory:1:0,die:2:0")
    assert [(row.client, row.kind) for row in record.incidents if row.kind != "gave-up"] == [(2, "death")]
    assert (record.trips["client"] == 2).sum() == 1
    assert summary(tmp_path / "run")["trips"]["lost"] == 1


def test_a_run_without_clients_left_ends_with_an_error(tmp_path: Path) -> None:
    fleet = Fleet(devices={"pi-zero-2w": 2}, network="fios", on_death="drop")
    wanted = experiment(fleet=fleet, strategy={"name": "fedbuff", "buffer_size": 2})
    environment = {"EDGEFL_FAILPOINTS": "die:0:0,die:1:0"}
    Command.run(wanted, tmp_path / "run", environment=environment).ends(1, "too few clients are left: 0 of 2")
    assert summary(tmp_path / "run")["no_progress"] == "no version was made"
