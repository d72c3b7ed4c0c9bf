"""Tests of misbehaving clients that know the run's passwords: each loses only its own tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl import Server, Stop
from edgefl.lab.outcome import log_problems
from edgefl.results.record import Record
from edgefl.run import supervisor
from edgefl.run.client import WITNESS
from tests.process.runs import PATIENCE_S, experiment, summary, virtual
from tests.process.test_virtual_resume import outcome

BAD = {"beats": 1, "others": 2, "parts": 3, "ready": 4}
HEARTBEAT_S = 1.5
pytestmark = pytest.mark.timeout(300)


def test_a_misbehaving_client_harms_no_other_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_BAD", ",".join(f"{what}:{number}" for what, number in BAD.items()))
    folder = tmp_path / "run"
    wanted = experiment(
        strategy={"name": "fedavg", "cohort": 6}, stop=Stop(versions=2),
        server=Server(transport="wire", heartbeat_s=PATIENCE_S),
    )  # fmt: skip
    supervisor.run(wanted, folder, quiet=True, workload="tests.fault.bad_clients:Workload")
    with Record(folder) as record:
        incidents = sorted((row.client, row.kind) for row in record.incidents)
        applied = record.trips["client"][record.trips["fate"] == "applied"].tolist()
    assert incidents == [(number, "malformed") for number in BAD.values()]
    assert sorted(applied) == sorted([*range(6)] * 2)
    assert summary(folder)["integrity"]["checksum_mismatches"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_over_faulty_sockets_every_update_counts_once(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, folder = tmp_path / "account", tmp_path / "run"
    monkeypatch.setenv(WITNESS, str(account))
    server = Server(transport=transport, heartbeat_s=HEARTBEAT_S)  # type: ignore[arg-type]
    wanted = experiment(stop=Stop(versions=40), server=server)
    supervisor.run(wanted, folder, quiet=True, workload="tests.fault.faulty_clients:Workload")
    assert log_problems(account, folder) == []
    figures = summary(folder)
    assert (figures["versions"], figures["trips"]["applied"]) == (40, 120)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_over_faulty_sockets_the_virtual_clock_gives_the_same_bits(transport: str, tmp_path: Path) -> None:
    server = Server(transport=transport, heartbeat_s=4 * HEARTBEAT_S)  # type: ignore[arg-type]
    wanted = virtual(server=server, stop=Stop(versions=6))
    supervisor.run(wanted, tmp_path / "calm", quiet=True)
    supervisor.run(wanted, tmp_path / "run", quiet=True, workload="tests.fault.faulty_clients:Workload")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "calm")
