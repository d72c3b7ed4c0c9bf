from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from synthetic_record import make

from edgefl.results.record import ClientRow, Record, TripRow
from edgefl.results.store import Store
from edgefl.results.trace import write_events, write_trace

Event = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("trace"), clients=6, trips=300)


def read(path: Path) -> list[Event]:
    document = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    events: list[Event] = document["traceEvents"]
    return events


def check(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """Every event has its fields; on a thread time goes on, and slices are inside one another or apart."""
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X", "i", "C")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        ends: list[float] = []
        for event in slices:
            end = round(event["ts"] + event["dur"], 3)
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)
        assert [e["ts"] for e in slices] == sorted(e["ts"] for e in slices)
    return threads


def test_a_trace_is_well_formed(run: Path) -> None:
    threads = check(read(write_trace(run)))
    assert len(threads) == 6 + 1  # the clients and the versions


def test_each_whole_trip_is_a_slice_with_its_three_parts(run: Path) -> None:
    events = read(write_trace(run))
    named: dict[str, int] = defaultdict(int)
    for event in events:
        if event["ph"] == "X" and not event["name"].startswith("version"):
            named[event["name"].split()[0]] += 1
    assert dict(named) == {"task": 297, "download": 297, "compute": 297, "upload": 297}
    with Record(run) as record:
        row = record.trip(100)
    (event,) = [e for e in events if e["ph"] == "X" and e["name"] == "task 100"]
    assert event["ts"] == pytest.approx(row.sent_s * 1e6, abs=0.001)
    assert event["args"]["staleness"] == row.staleness
    assert event["args"]["weight"] == row.weight
    assert event["args"]["fate"] == "applied"
    assert event["args"]["base_version"] == row.base_version


def test_profiles_are_processes_and_clients_threads(run: Path) -> None:
    events = read(write_trace(run))
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["server", "pixel-4", "pixel-3a", "moto-g4"]
    assert {"client 0", "client 5", "versions", "evaluations"} <= {
        e["args"]["name"] for e in events if e["name"] == "thread_name"
    }


def test_counters_count(run: Path) -> None:
    events = read(write_trace(run))
    held = [e["args"]["updates held"] for e in events if e["ph"] == "C" and e["name"] == "updates held"]
    assert min(held) == 0
    assert max(held) == 5
    version = [e["args"]["version"] for e in events if e["ph"] == "C" and e["name"] == "version"]
    assert version == list(range(59 + 1))
    accuracy = [e["args"]["accuracy"] for e in events if e["ph"] == "C" and e["name"] == "accuracy"]
    assert all(0 <= value <= 1 for value in accuracy)


def test_strange_trips_do_not_break_it(tmp_path: Path) -> None:
    nan = float("nan")
    with Store(tmp_path) as store:
        store.clients([ClientRow(client=0, profile="x", network="wifi", examples=1)])
        store.trip(
            TripRow(
                task=0,
                client=0,
                base_version=0,
                trip=0,
                sent_s=0.0,
                received_s=5.0,
                arrived_s=1.0,
                compute_s=9.0,
            )
        )  # longer parts than the whole
        store.trip(
            TripRow(task=1, client=0, base_version=0, trip=1, sent_s=0.5, arrived_s=2.0)
        )  # sent before the last one arrived
        store.trip(
            TripRow(task=2, client=0, base_version=0, trip=2, sent_s=2.0, fate="lost", loss=nan, weight=nan)
        )
        store.trip(
            TripRow(task=3, client=9, base_version=0, trip=0, sent_s=1.0, arrived_s=1.0)
        )  # a client nobody knows; no length
    events = read(write_trace(tmp_path))
    check(events)
    assert [e["name"] for e in events if e["ph"] == "i"] == ["task 2 lost"]


def test_several_runs_share_a_trace_without_sharing_processes(run: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", clients=2, trips=20, meta={})
    with Record(run) as first, Record(other) as second:
        events = read(write_events(tmp_path / "trace.json", [first, second]))
    check(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(names) == 4 + 3
    assert all(name.startswith("synthetic: ") for name in names.values())
