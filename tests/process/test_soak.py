"""Long tests, run by `make soak`: thousands of trips, hundreds of processes, kills for every strategy."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import edgefl
from edgefl import Fleet, Model, Stop, Training
from edgefl.results.record import Record
from edgefl.strategies import names

from .runs import PATIENCE_S, Command, experiment, summary, trips_of, wait_for
from .test_dynamics import CHURN, check_every_task_has_one_fate
from .test_virtual_resume import disturbed, outcome, resumable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("transport", ["shm", "wire"])
def test_five_thousand_updates_arrive_as_they_were_sent(transport: str, tmp_path: Path) -> None:
    wanted = experiment(
        fleet=Fleet(devices={"pixel-4": 12, "pixel-3": 12}, network="fios", join_spread_s=1.0),
        model=Model(args={"hidden": [100]}),
        training=Training(steps=2),
        server=edgefl.Server(transport=transport, heartbeat_s=PATIENCE_S),
        strategy={"name": "fedstaleweight", "buffer_size": 5, "restart": "immediate"},
        stop=Stop(trips=5000),
    )
    edgefl.run(wanted, tmp_path / "run")
    record, figures = Record(tmp_path / "run"), summary(tmp_path / "run")
    trips = record.trips
    applied = trips["fate"] == "applied"
    assert figures["client_trips"] >= 5000
    assert applied.sum() >= 4990
    assert (trips["checksum_sent"][applied] == trips["checksum_seen"][applied]).all()
    # No update was applied twice, and none was empty.
    assert len(np.unique(trips["checksum_sent"][applied])) == applied.sum()
    assert figures["integrity"] == {
        "checked": int(applied.sum()),
        "checksum_mismatches": 0,
        "version_mismatches": 0,
    }
    assert (trips["trained_version"][applied] == trips["base_version"][applied]).all()
    assert figures["dropped_updates"] == 0
    assert figures["incidents"] == {}


def test_three_hundred_phones_start_and_finish(tmp_path: Path) -> None:
    wanted = experiment(
        fleet=Fleet(devices={"pixel-3a": 100, "pi-4": 100, "moto-g4": 100}, network="lte"),
        strategy={"name": "fedbuff", "buffer_size": 10},
        stop=Stop(trips=600),
    )
    figures = edgefl.run(wanted, tmp_path / "run").summary()
    assert figures["clients"] == figures["processes"] == 300
    assert figures["client_trips"] >= 600
    assert figures["memory"]["per_process_mib"] <= 25.0
    clients = Record(tmp_path / "run").trips["client"]
    assert len(np.unique(clients)) == 300  # each client took part


KILLS = 20


def wanted(strategy: str, workers: int, **changes: Any) -> edgefl.Experiment:
    return resumable(
        workers,
        strategy={"name": strategy},
        fleet=Fleet(devices={"pixel-4": 7, "moto-g4": 5}, network="lte", join_spread_s=3.0),
        **{"stop": Stop(trips=2500), **changes},
    )


@pytest.mark.parametrize("strategy", names())
def test_twenty_kills_of_the_server_change_no_bits(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for workers in (1, 8):
        edgefl.run(wanted(strategy, workers), tmp_path / f"calm-{workers}")
    draw = np.random.default_rng(1)
    points = [f"event:0:{draw.integers(1, 250)}" for _ in range(KILLS)]
    found = disturbed(wanted(strategy, 2), tmp_path / "killed", points, monkeypatch)
    assert found == outcome(tmp_path / "calm-1") == outcome(tmp_path / "calm-8")


@pytest.mark.parametrize("strategy", names())
def test_kills_of_workers_change_no_bits(strategy: str, tmp_path: Path) -> None:
    work = {"model": Model(args={"hidden": [200]}), "training": Training(steps=30), "stop": Stop(trips=5000)}
    edgefl.run(wanted(strategy, 1, **work), tmp_path / "calm")
    command = Command.run(wanted(strategy, 2, **work), tmp_path / "killed")
    draw, killed = np.random.default_rng(2), list[int]()
    for _ in range(KILLS):
        # Kills are 40 trips apart to hit different tasks: a task that ends three workers ends its client.
        _wait_for_trips(tmp_path / "killed", 40, command)
        time.sleep(float(draw.uniform(0.0, 0.05)))
        killed.append(_kill_one(command, killed, draw))
    command.ends()
    # The last kill may happen after the end of the run and is then not recorded.
    assert summary(tmp_path / "killed")["incidents"]["death"] >= KILLS - 1
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "calm")


def _wait_for_trips(folder: Path, more: int, command: Command) -> None:
    before = trips_of(folder)
    wait_for(lambda: trips_of(folder) >= before + more, f"{before + more} trips", command)


def _kill_one(command: Command, killed: list[int], draw: np.random.Generator) -> int:
    """Kill a running worker as soon as there is one; return its process id."""
    while command.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            running = [each for each in command.named("edgefl-worker") if each.pid not in killed]
            if running:
                chosen = running[int(draw.integers(len(running)))]
                chosen.kill()
                return chosen.pid
    raise AssertionError(f"the run ended before its last kill: {command.finish()}")


@pytest.mark.parametrize(
    "strategy",
    [*("aso-fed", "asyncfeded", "ca2fl", "feddyn", "fedfix", "mifa", "pisces", "quafl", "safa", "scaffold")],
)
def test_no_strategy_stops_or_depends_on_workers_under_churn(strategy: str, tmp_path: Path) -> None:
    interval = {"interval_s": 0.3} if strategy in ("fedfix", "quafl") else {}
    phones = Fleet(
        devices={"pixel-4": 4, "moto-g4": 2}, network="lte", join_spread_s=1.0, churn=CHURN, rejoin_s=0.2
    )
    for workers in (1, 4):
        run = resumable(workers, strategy={"name": strategy, **interval}, fleet=phones, stop=Stop(trips=400))
        figures = edgefl.run(run, tmp_path / str(workers)).summary()
        check_every_task_has_one_fate(tmp_path / str(workers), figures)
        assert figures["versions"] >= 5
    assert outcome(tmp_path / "1") == outcome(tmp_path / "4")
