"""Clients of a run that go bad with the run's own passwords: each costs its task, and nobody else's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import hostile
from edgefl import Server, Stop
from edgefl.results.record import Record
from edgefl.run import supervisor, witness
from tests.process.runs import PATIENCE_S, experiment, summary, virtual
from tests.process.test_virtual_resume import outcome
from tests.raw_caller import sodium

BAD = {"beats": 1, "others": 2, "parts": 3, "ready": 4}
HEARTBEAT_S = 1.5
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="a raw peer waits at an abstract address, which is Linux's"
)
curve = pytest.mark.skipif(sodium() is None, reason="this pyzmq brings no libsodium along")
pytestmark = pytest.mark.timeout(300)


@linux
def test_a_client_that_goes_bad_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setenv(witness.VARIABLE, str(account))
    server = Server(transport=transport, heartbeat_s=HEARTBEAT_S)  # type: ignore[arg-type]
    wanted = experiment(stop=Stop(versions=40), server=server)
    supervisor.run(wanted, folder, quiet=True, workload="tests.fault.faulty_clients:Workload")
    assert witness.problems(account, folder) == []
    figures = summary(folder)
    assert (figures["versions"], figures["trips"]["applied"]) == (40, 120)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_over_faulty_sockets_the_virtual_clock_has_the_same_bits(transport: str, tmp_path: Path) -> None:
    server = Server(transport=transport, heartbeat_s=4 * HEARTBEAT_S)  # type: ignore[arg-type]
    wanted = virtual(server=server, stop=Stop(versions=6))
    supervisor.run(wanted, tmp_path / "calm", quiet=True)
    supervisor.run(wanted, tmp_path / "run", quiet=True, workload="tests.fault.faulty_clients:Workload")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "calm")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "wire", "door"])
def test_a_run_goes_on_while_others_attack_it(transport: str, tmp_path: Path) -> None:
    found = hostile.measure(transport, tmp_path / "run", 10**9, phase_s=5.0, most_s=20.0)
    assert found.verified == 0
    assert found.sent > 100
    assert found.offences > 0
    assert all(rate > 0 for rate in found.rates.values())


@linux
@pytest.mark.slow
@pytest.mark.parametrize("door", [False, pytest.param(True, marks=curve)])
def test_what_a_peer_with_a_password_says_is_refused_and_costs_nobody_else(door: bool) -> None:
    assert hostile.inside(50_000, door=door) > 40_000


@linux
@curve
@pytest.mark.slow
def test_of_strangers_at_a_door_nothing_comes_through() -> None:
    assert hostile.outside(1000) == 0
