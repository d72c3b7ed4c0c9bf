"""Phones that get hot, run low, come, go and die, in real runs under both clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import edgefl
from edgefl import Clock, Fleet, Stop, Training
from edgefl.core.events import Arrived, Joined, Left
from edgefl.experiment import Churn
from edgefl.results.record import Record

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


def fleet(folder: Path, clients: int = 6, **fields: Any) -> Fleet:
    return Fleet(devices={profile(folder): clients}, network="fios", **fields)


def wanted(kind: str, of: Fleet, **changes: Any) -> edgefl.Experiment:
    clock = Clock(kind="wall") if kind == "wall" else Clock(kind="virtual", workers=2)
    return experiment(**{"fleet": of, "clock": clock, "training": Training(steps=12), **changes})


def events_of(folder: Path, *types: type) -> list[Any]:
    with Record(folder) as record:
        return [event for _, event in record.events() if isinstance(event, types)]


CHURN = Churn(mean_online_s=0.8, mean_offline_s=0.3, die_per_trip=0.1)


@pytest.mark.parametrize("on_leave", ["lose", "finish"])
def test_same_bits_for_any_number_of_workers(on_leave: str, tmp_path: Path) -> None:
    found = {}
    of = fleet(tmp_path, thermal=True, battery=True, charge=0.5, churn=CHURN, rejoin_s=0.2, on_leave=on_leave)
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        run = wanted("virtual", of, clock=Clock(kind="virtual", workers=workers), stop=Stop(versions=30))
        figures = edgefl.run(run, folder).summary()
        rows = [(type(event).__name__, event.client, event.at_s) for event in events_of(folder, Joined, Left)]
        found[workers] = (figures["model_sha256"], figures["emulated_s"], figures["trips"], rows)
    assert found[1] == found[3]
    reasons = {event.reason for event in events_of(tmp_path / "1", Left)}
    assert reasons == {"offline", "battery", "died"}


@pytest.mark.parametrize("kind", ["wall", "virtual"])
def test_with_all_of_it_every_task_has_one_fate(kind: str, tmp_path: Path) -> None:
    deadly = msgspec.structs.replace(CHURN, die_per_trip=0.3)  # however far each phone gets
    of = fleet(tmp_path, thermal=True, battery=True, churn=deadly, rejoin_s=0.2)
    figures = edgefl.run(wanted(kind, of, stop=Stop(versions=15)), tmp_path / "run").summary()
    assert figures["versions"] == 15
    assert figures["integrity"]["checksum_mismatches"] == 0
    assert figures["incidents"]["death"] >= 1
    there = figures["availability"]
    assert 0.2 < there["online_share"] < 1
    assert there["left"] == sum(there["reasons"].values()) >= there["returned"] > 0
    with Record(tmp_path / "run") as record:
        fates = record.trips["fate"].tolist()
    assert len(fates) == sum(figures["trips"].values())
    assert set(fates) - {""} <= FATES
    assert fates.count("") <= 6  # what ran when the run ended
    assert figures["trips"]["lost"] == sum(
        row.reason in ("offline", "battery", "died", "signal 9") and row.fate == "lost"
        for row in lost_trips(tmp_path / "run")
    )


def lost_trips(folder: Path) -> list[Any]:
    from types import SimpleNamespace

    with Record(folder) as record:
        trips = record.trips
        pairs = zip(trips["fate"].tolist(), trips["reason"].tolist(), strict=True)
        return [SimpleNamespace(fate=fate, reason=reason) for fate, reason in pairs]


@pytest.mark.parametrize("kind", ["wall", "virtual"])
def test_a_phone_that_overheats_slows_down_by_its_factor(kind: str, tmp_path: Path) -> None:
    of = Fleet(devices={profile(tmp_path, train=0.004): 2}, network="none", thermal=True)
    run = wanted(kind, of, strategy={"name": "fedasync"}, stop=Stop(trips=16))
    edgefl.run(run, tmp_path / "run")
    with Record(tmp_path / "run") as record:
        trips = record.trips
        done = ~np.isnan(trips["arrived_s"])
        rate = trips["flops"][done] / trips["compute_declared_s"][done] / 1e9
        declared, took = trips["trip_declared_s"][done], trips["trip_achieved_s"][done]
        first, last = trips["trip"][done] == 0, trips["trip"][done] >= 4
    # At 45 °C half of 4 W get away: the speeds 1 and 0.5 draw 4 and 1 W, so they mix to 2/3. A busy host
    # leaves pauses between trips in which a phone cools; it is never hotter than it would be without.
    assert (rate[first] > rate[last].min() * 1.1).all()
    assert (rate[last] >= 0.004 * 2 / 3 * (1 - 1e-9)).all()
    if kind == "virtual":
        np.testing.assert_allclose(rate[last], 0.004 * 2 / 3, rtol=1e-6)
    assert (took >= declared * (1 - 1e-6)).all()


def test_phones_go_offline_at_the_same_instants_under_both_clocks(tmp_path: Path) -> None:
    windows = [{"intervals_s": [[0.3 * at, 0.3 * at + 0.9]], "period_s": 1.8} for at in range(4)]
    (tmp_path / "a.json").write_text(json.dumps(windows))
    of = fleet(tmp_path, clients=4, availability=str(tmp_path / "a.json"))
    instants: dict[str, list[tuple[int, str, float]]] = {}
    for kind in ("virtual", "wall"):
        run = wanted(kind, of, strategy={"name": "fedasync"}, stop=Stop(emulated_s=6.0))
        edgefl.run(run, tmp_path / kind)
        moves = events_of(tmp_path / kind, Joined, Left)
        instants[kind] = sorted((move.client, type(move).__name__, move.at_s) for move in moves)
    declared = {
        (client, name): [at_s for c, n, at_s in instants["virtual"] if (c, n) == (client, name)]
        for client, name, _ in instants["virtual"]
    }
    assert {len(times) >= 3 for times in declared.values()} == {True}
    for (client, name), times in declared.items():
        assert np.allclose(np.diff(times), 1.8)
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


def test_a_fleet_that_is_away_at_first_waits_for_its_first_phone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"intervals_s": [[1.5, 3.0]], "period_s": 3.0}]))
    of = fleet(tmp_path, clients=3, availability=str(tmp_path / "a.json"))
    for kind in ("wall", "virtual"):
        figures = edgefl.run(wanted(kind, of, stop=Stop(versions=2)), tmp_path / kind).summary()
        assert figures["versions"] == 2
        assert events_of(tmp_path / kind, Joined)[0].at_s >= 1.5


def test_windows_too_short_for_any_trip_end_in_one_line_and_not_never(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"intervals_s": [[0.0, 0.001]], "period_s": 1.0}]))
    of = fleet(tmp_path, clients=3, availability=str(tmp_path / "a.json"))
    figures = edgefl.run(wanted("virtual", of), tmp_path / "run").summary()
    assert figures["versions"] == 0
    assert figures["stop_reason"].startswith("no progress: 131 tasks in a row were lost")


def test_a_client_that_is_declared_to_die_is_really_killed(tmp_path: Path) -> None:
    of = fleet(tmp_path, clients=3, churn=Churn(die_per_trip=0.4))
    run = wanted("wall", of, strategy={"name": "fedasync"}, stop=Stop(trips=12))
    figures = edgefl.run(run, tmp_path / "run").summary()
    left = events_of(tmp_path / "run", Left)
    assert {event.reason for event in left} == {"signal 9"}
    assert figures["incidents"] == {"death": len(left)}
    assert figures["client_trips"] == 12
