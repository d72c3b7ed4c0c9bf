"""Tests of heat, battery, availability and deaths of phones in real runs, and that both clocks agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import edgefl
from benchmarks.two_clocks import Agreement, agreement
from edgefl import Clock, Fleet, Model, Stop, Training
from edgefl.core.events import Arrived, Died, Joined, Left
from edgefl.errors import ConfigError
from edgefl.experiment import Churn
from edgefl.results.record import Record
from edgefl.run.supervisor import resume

from .runs import experiment

PROFILE = """
id = "{name}"
name = "A phone that gets hot and empty fast"
class = "budget"
[cpu.rate_gflops]
train = {train}
[thermal]
ambient_c = 25
r_c_per_w = 10
tau_s = 0.5
busy_w = 4
trips = [{{ temp_c = 45, freq_scale = 0.5 }}]
[battery]
capacity_mah = 0.3
voltage_v = 4
idle_ma = 50
min_soc = 0.2
charge_w = 20
[sources]
"cpu.rate_gflops" = "assumed: a test"
thermal = "assumed: a test"
battery = "assumed: a test"
"""
FATES = {"applied", "discarded", "dropped", "lost"}


def profile(folder: Path, name: str = "hot", train: float = 0.02) -> str:
    path = folder / f"{name}.toml"
    path.write_text(PROFILE.format(name=name, train=train))
    return str(path)


def fleet(folder: Path, clients: int = 6, train: float = 0.02, **fields: Any) -> Fleet:
    return Fleet(devices={profile(folder, train=train): clients}, network="fios", **fields)


def wanted(kind: str, of: Fleet, **changes: Any) -> edgefl.Experiment:
    clock = Clock(kind=kind, workers=2)
    return experiment(**{"fleet": of, "clock": clock, "training": Training(steps=12), **changes})


def events_of(folder: Path, *types: type) -> list[Any]:
    with Record(folder) as record:
        return [event for _, event in record.events() if isinstance(event, types)]


CHURN = Churn(mean_online_s=0.8, mean_offline_s=0.3, die_per_trip=0.1)


def check_every_task_has_one_fate(folder: Path, figures: dict[str, Any], online: float = 0.2) -> None:
    """Check the fates of all tasks, and that clients were online for a larger share than ``online``."""
    assert figures["integrity"]["checksum_mismatches"] == 0
    there = figures["availability"]
    assert online < there["online_share"] < 1
    assert there["left"] == sum(there["reasons"].values()) >= there["returned"] > 0
    with Record(folder) as record:
        fates, reasons = record.trips["fate"].tolist(), record.trips["reason"].tolist()
    assert len(fates) == sum(figures["trips"].values())
    assert set(fates) - {""} <= FATES
    assert fates.count("") <= 6  # trips that the end of the run cut off
    lost = [reason for fate, reason in zip(fates, reasons, strict=True) if fate == "lost"]
    assert len(lost) == figures["trips"]["lost"]
    assert set(lost) <= {"offline", "battery", "died", "signal 9"}


def test_declared_deaths_kill_the_clients_processes(tmp_path: Path) -> None:
    deadly = msgspec.structs.replace(CHURN, die_per_trip=0.3)
    of = fleet(tmp_path, thermal=True, battery=True, churn=deadly, rejoin_s=0.2)
    figures = edgefl.run(wanted("wall", of, stop=Stop(versions=15)), tmp_path / "run").summary()
    assert figures["versions"] == 15
    check_every_task_has_one_fate(tmp_path / "run", figures, online=0.0)  # real starts take time
    killed = [event for event in events_of(tmp_path / "run", Died) if event.reason == "signal 9"]
    assert figures["incidents"]["death"] == len(killed)
    assert killed


@pytest.mark.parametrize("kind", ["wall", "virtual"])
def test_a_phone_that_overheats_slows_down_by_its_factor(kind: str, tmp_path: Path) -> None:
    exact = {"units": "identical", "variation": 0.0, "phase": "aligned"}
    of = Fleet(devices={profile(tmp_path, train=0.004): 2}, network="none", thermal=True, **exact)
    run = wanted(kind, of, strategy={"name": "fedasync"}, stop=Stop(trips=16))
    edgefl.run(run, tmp_path / "run")
    with Record(tmp_path / "run") as record:
        trips = record.trips
        done = ~np.isnan(trips["arrived_s"])
        speed = trips["work_s"][done] / trips["compute_declared_s"][done]
        declared, took = trips["trip_declared_s"][done], trips["trip_achieved_s"][done]
        first, last = trips["trip"][done] == 0, trips["trip"][done] >= 4
    # At 45 °C a phone dissipates 2 W. Speed 1 takes 4 W and speed 0.5 takes 1 W, so a phone computes at speed
    # 1 for a third of the time, and its mean speed is 2/3. A phone cools if a busy host delays its next trip.
    assert (speed[first] > speed[last].min() * 1.1).all()
    assert (speed[last] >= 2 / 3 * (1 - 1e-9)).all()
    if kind == "virtual":
        np.testing.assert_allclose(speed[last], 2 / 3, rtol=1e-6)
    assert (took >= declared * (1 - 1e-6)).all()


def test_clients_come_and_go_at_the_same_times_under_both_clocks(tmp_path: Path) -> None:
    windows = [{"intervals_s": [[0.3 * at + 0.5, 0.3 * at + 1.4]], "period_s": 2.4} for at in range(4)]
    (tmp_path / "a.json").write_text(json.dumps(windows))
    of = fleet(tmp_path, clients=4, train=0.006, availability=str(tmp_path / "a.json"))
    instants: dict[str, list[tuple[int, str, float]]] = {}
    for kind in ("virtual", "wall"):
        run = wanted(kind, of, strategy={"name": "fedasync"}, stop=Stop(emulated_s=7.5))
        assert edgefl.run(run, tmp_path / kind).summary()["versions"] > 0
        moves = events_of(tmp_path / kind, Joined, Left)
        assert moves[0].at_s >= 0.5
        instants[kind] = sorted((move.client, type(move).__name__, move.at_s) for move in moves)
    declared = {
        (client, name): [at_s for c, n, at_s in instants["virtual"] if (c, n) == (client, name)]
        for client, name, _ in instants["virtual"]
    }
    assert {len(times) >= 3 for times in declared.values()} == {True}
    for (client, name), times in declared.items():
        assert np.allclose(np.diff(times), 2.4)
        found = [at_s for c, n, at_s in instants["wall"] if (c, n) == (client, name)]
        assert len(found) >= len(times) - 1
        for at_s, due_s in zip(found, times, strict=False):
            assert at_s >= due_s - 1e-9


def test_phones_that_are_never_online_together_still_make_versions(tmp_path: Path) -> None:
    windows = [{"intervals_s": [[4.0 * at, 4.0 * at + 3.0]], "period_s": 24.0} for at in range(6)]
    (tmp_path / "a.json").write_text(json.dumps(windows))
    of = fleet(tmp_path, availability=str(tmp_path / "a.json"))
    run = wanted("virtual", of, strategy={"name": "fedavg", "cohort": 3}, stop=Stop(versions=4))
    figures = edgefl.run(run, tmp_path / "run").summary()
    assert figures["versions"] == 4
    online: set[int] = set()
    for event in events_of(tmp_path / "run", Joined, Left, Arrived):
        if isinstance(event, Arrived):
            assert event.client in online
        else:
            (online.add if isinstance(event, Joined) else online.remove)(event.client)
        assert len(online) <= 1


def test_a_run_whose_windows_are_too_short_for_any_trip_ends(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"intervals_s": [[0.0, 0.001]], "period_s": 1.0}]))
    of = fleet(tmp_path, clients=3, availability=str(tmp_path / "a.json"))
    figures = edgefl.run(wanted("virtual", of), tmp_path / "run").summary()
    assert figures["versions"] == 0
    assert figures["stop_reason"].startswith("no progress: 131 tasks in a row were lost")
    assert figures["no_progress"] == "131 tasks in a row were lost with their clients"


PHONES = Fleet(
    devices={"pixel-4": 4, "pixel-3": 4, "pi-4": 4, "moto-g4": 4}, network="lte", join_spread_s=1.0
)


def both(folder: Path) -> Agreement:
    for kind in ("wall", "virtual"):
        wanted = experiment(
            fleet=PHONES,
            model=Model(args={"hidden": [16]}, flops_per_example=2e7),
            training=Training(steps=2),
            strategy={"name": "fedbuff", "buffer_size": 5},
            clock=Clock(kind=kind, time_scale=1.0) if kind == "wall" else Clock(kind=kind, workers=2),
            stop=Stop(trips=110),
        )
        edgefl.run(wanted, folder / kind)
    with Record(folder / "wall") as wall, Record(folder / "virtual") as virtual:
        return agreement(wall, virtual)


def test_both_clocks_give_the_same_trips(tmp_path: Path) -> None:
    found = both(tmp_path)
    assert found.planned_alike
    assert found.trips > 55
    # A phone's next trip starts at once. So the wall clock may lag only by the delays of its host in each
    # trip, and by the time that the server takes between two trips.
    assert found.unexplained_s < 1e-9
    assert found.early_s < 1e-9
    # At the end, one run may have counted a trip that the other had not.
    assert found.missing <= 2 * (1 + found.inverted)
    assert found.inverted_gap_s <= 2 * found.off_s
    # If two arrivals swap, the staleness of both changes, and so do the next base versions of both phones.
    assert found.stale_otherwise <= 4 * found.inverted
    assert found.staleness_moved <= 4 * found.inverted / found.trips


@pytest.mark.parametrize("kind", ["virtual", "wall"])
def test_a_run_whose_phones_have_all_died_ends_with_its_results(tmp_path: Path, kind: str) -> None:
    of = fleet(tmp_path, churn=Churn(die_per_trip=0.2), on_death="drop")
    figures = edgefl.run(wanted(kind, of, stop=Stop(versions=1000)), tmp_path / "run").summary()
    assert (figures["status"], figures["stop_reason"]) == ("done", "too few clients are left: 0 of 6")
    assert 0 < figures["versions"] < 1000
    assert figures["trips"]["lost"] == 6
    assert (tmp_path / "run" / "report.html").exists()
    with pytest.raises(ConfigError, match="nothing to resume"):
        resume(tmp_path / "run")
