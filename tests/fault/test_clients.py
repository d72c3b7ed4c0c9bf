"""Clients that fail in every way there is, in real runs: counted, replaced, and nobody else is hurt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from edgefl import Fleet, Server, Stop
from edgefl.results.record import Record
from tests.process.runs import DEVICES, PATIENCE_S, Command, experiment, needs_groups, summary

HANG_S = 5.0
"""Who is silent for so long hangs: long enough that a busy host does not make another so silent."""
EVERYONE = {"name": "fedavg", "cohort": 6}
"""A run that can only end if each client delivers, however far ahead the others would be."""
DEATHS = {"die": "death", "hang": "hang", "rubbish": "malformed", "memory": "oom"}


@pytest.mark.parametrize("failure", DEATHS)
@pytest.mark.parametrize("transport", ["shm", pytest.param("wire", marks=pytest.mark.slow)])
def test_a_client_that_fails_is_replaced(failure: str, transport: str, tmp_path: Path) -> None:
    if failure == "memory" and not sys.platform.startswith("linux"):
        pytest.skip("memory limits are enforced by RLIMIT_DATA, which only Linux has")
    folder = tmp_path / "run"
    server = Server(transport=transport, heartbeat_s=HANG_S if failure == "hang" else PATIENCE_S)
    wanted = experiment(strategy=EVERYONE, server=server, stop=Stop(versions=4))
    environment = {"EDGEFL_FAILPOINTS": f"{failure}:2:1"}
    code, _, err = Command.run(wanted, folder, environment=environment).finish()
    assert code == 0, err
    record = Record(folder)
    incidents = [(row.client, row.kind) for row in record.incidents]
    assert (2, DEATHS[failure]) in incidents
    assert {client for client, _ in incidents} == {2}
    figures = summary(folder)
    assert figures["versions"] == 4
    assert figures["trips"]["lost"] == 1
    assert figures["trips"]["applied"] == 24
    assert figures["integrity"]["checksum_mismatches"] == 0


@pytest.mark.parametrize("mechanism", ["rlimit", "cgroup"])
def test_a_device_out_of_memory_is_killed_and_the_run_goes_on(mechanism: Any, tmp_path: Path) -> None:
    if mechanism == "cgroup":
        needs_groups("memory")
    elif not sys.platform.startswith("linux"):
        pytest.skip("RLIMIT_DATA is enforced on Linux only")
    folder = tmp_path / "run"
    fleet = Fleet(devices={"nexus-6": 4, "moto-g4": 2}, network="fios", memory=mechanism)
    wanted = experiment(
        fleet=fleet,
        strategy=EVERYONE,
        stop=Stop(versions=4),
    )
    code, _, err = Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": "memory:2:1"}).finish()
    assert code == 0, err
    record = Record(folder)
    how = {"rlimit": "an allocation failed", "cgroup": "killed by the kernel"}[mechanism]
    told = f"device out of memory: limit 512 MiB, {how}"
    assert [(row.client, row.kind, row.detail) for row in record.incidents] == [(2, "oom", told)]
    lost = record.trips["fate"] == "lost"
    assert record.trips["reason"][lost].tolist() == [told]
    figures = summary(folder)
    assert (figures["versions"], figures["trips"]["applied"]) == (4, 24)
    assert figures["integrity"]["checksum_mismatches"] == 0
    peaks = record.trips["peak_mib"][~lost]
    assert 0 <= peaks.min() <= peaks.max() < 512


def test_a_limit_that_is_off_kills_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fleet = Fleet(devices=DEVICES, network="fios", memory="off")
    wanted = experiment(fleet=fleet)
    code, _, err = Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": "memory:2:0"}).finish()
    assert code == 0, err
    assert Record(folder).incidents == []


def test_a_dropped_device_stays_away(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fleet = Fleet(devices=DEVICES, network="fios", on_death="drop")
    wanted = experiment(fleet=fleet, stop=Stop(versions=8))
    code, _, err = Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": "die:2:0"}).finish()
    assert code == 0, err
    trips = Record(folder).trips
    assert (trips["client"] == 2).sum() == 1
    assert summary(folder)["trips"]["lost"] == 1


def test_no_one_left_is_an_error_and_not_a_silence(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fleet = Fleet(devices={"pi-zero-2w": 2}, network="fios", on_death="drop")
    wanted = experiment(
        fleet=fleet, strategy={"name": "fedbuff", "buffer_size": 2}, server=Server(heartbeat_s=HANG_S)
    )
    environment = {"EDGEFL_FAILPOINTS": "die:0:0,die:1:0"}
    code, _, err = Command.run(wanted, folder, environment=environment).finish()
    assert code == 1
    assert "no client is training" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("transport", ["shm", "wire"])
@pytest.mark.parametrize(("failure", "kind"), [("nan", "non-finite"), ("alter", "checksum")])
def test_a_bad_update_never_reaches_the_model(
    failure: str, kind: str, transport: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    wanted = experiment(
        strategy=EVERYONE,
        server=Server(transport=transport, heartbeat_s=PATIENCE_S),
        stop=Stop(versions=4),
    )
    code, _, err = Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": f"{failure}:1:0"}).finish()
    assert code == 0, err
    figures, record = summary(folder), Record(folder)
    assert figures["dropped_updates"] == 1
    assert [(row.client, row.kind) for row in record.incidents] == [(1, kind)]
    assert figures["versions"] == 4
    assert all(row.loss < 10 for row in record.evaluations)


@pytest.mark.parametrize(("failure", "kind"), [("stale", "version"), ("leave", "failed")])
def test_a_task_that_fails_is_given_again(failure: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wanted = experiment(strategy=EVERYONE, stop=Stop(versions=4))
    code, _, err = Command.run(wanted, folder, environment={"EDGEFL_FAILPOINTS": f"{failure}:1:0"}).finish()
    assert code == 0, err
    record = Record(folder)
    assert [(row.client, row.kind) for row in record.incidents] == [(1, kind)]
    assert summary(folder)["trips"]["lost"] == 1
    assert summary(folder)["versions"] == 4
