"""Tests of the writer and the reader of the record."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from edgefl.core.events import Arrived, Evaluated, Event, Failed, Joined, Left, Summed, Ticked
from edgefl.errors import ConfigError, FolderError, RunError
from edgefl.results.record import Record
from edgefl.results.rows import Aggregation, CostRow, MemoryUse, TripRow
from edgefl.results.store import Store
from tests.reports import client, evaluation, trip, version

EVENTS: list[Event] = [
    Joined(client=3, at_s=0.0),
    Arrived(client=3, task=0, base_version=0, examples=10, steps=5, loss=0.25, at_s=1.5),
    Failed(client=3, task=1, at_s=2.0, reason="cancelled"),
    Summed(version=1, at_s=2.5, bad=(0,)),
    Ticked(at_s=3.0),
    Left(client=3, at_s=4.0, reason="gone"),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path) as store:
        yield store


def test_events_are_read_typed_and_in_order(store: Store, tmp_path: Path) -> None:
    assert [store.journal(event) for event in EVENTS] == [1, 2, 3, 4, 5, 6]
    store.commit()
    assert list(store.replay()) == list(enumerate(EVENTS, 1))
    with Record(tmp_path) as record:
        assert list(record.events()) == list(enumerate(EVENTS, 1))


def test_readers_see_rows_only_after_their_commit(store: Store, tmp_path: Path) -> None:
    store.journal(EVENTS[0])
    store.trip(trip(0))
    with Record(tmp_path) as before:
        assert before.trips["task"].size == 0
        store.commit()
        assert before.trips["task"].tolist() == []  # a reader sees one state of the record
    with Record(tmp_path) as after:
        assert after.trips["task"].tolist() == [0]


def test_every_field_of_a_trip_is_kept(store: Store, tmp_path: Path) -> None:
    row = TripRow(
        task=7, client=2, base_version=4, trip=1, sent_s=1.25, received_s=1.5, arrived_s=9.75, staleness=3,
        reason="late", examples=60, steps=5, loss=0.5, trained_version=4, down_bytes=1 << 40, up_bytes=12,
        down_s=0.25, compute_s=8.0, up_s=0.25, down_declared_s=0.25, compute_declared_s=8.0,
        up_declared_s=0.25, trip_declared_s=8.5, trip_achieved_s=8.5, work_s=8.0, busy_s=7.0, lateness_s=1e-4,
        cpu_s=0.5, peak_mib=13.5, process_grew_mib=1.5, checksum_sent=2**64 - 1, checksum_seen=2**63,
    )  # fmt: skip
    store.trip(row)
    store.commit()
    with Record(tmp_path) as record:
        assert record.trip(7) == row
        assert record.trips["checksum_sent"].tolist() == [2**64 - 1]
        assert record.trips["checksum_seen"].dtype == np.uint64
        with pytest.raises(KeyError, match="task 8"):
            record.trip(8)
        with pytest.raises(KeyError, match="no column 'speed'; available: task"):
            record.trips["speed"]


def test_missing_values_of_a_column_have_one_representation(store: Store, tmp_path: Path) -> None:
    store.trip(trip(0, loss=math.nan))
    store.commit()
    with Record(tmp_path) as record:
        trips = record.trips
        assert math.isnan(trips["loss"][0])
        assert math.isnan(trips["arrived_s"][0])
        assert (trips["staleness"][0], trips["fate"][0], trips["checksum_sent"][0]) == (-1, "", 0)
        with pytest.raises(ValueError, match="read-only"):
            trips["task"][0] = 1


def test_fate_and_weight_are_added_to_a_trip_that_is_already_written(store: Store, tmp_path: Path) -> None:
    for task in range(4):
        store.trip(trip(task, arrived_s=1.0))
    store.commit()
    store.applied(5, [0, 1, 0], [0.25, 0.5, 0.125])
    store.released(0, "applied")
    store.commit()
    store.applied(6, [1], [1.0])
    store.released(1, "applied")
    store.released(2, "dropped", "not finite")
    store.commit()
    with Record(tmp_path) as record:
        trips = record.trips
        assert trips["fate"].tolist() == ["applied", "applied", "dropped", ""]
        assert trips["weight"][:2].tolist() == [0.375, 1.5]
        assert np.isnan(trips["weight"][2:]).all()
        assert trips["applied_version"].tolist() == [5, 5, -1, -1]
        assert trips["uses"].tolist() == [1, 2, 0, 0]
        assert trips["reason"].tolist() == ["", "", "not finite", ""]
        sums = [(v, t.tolist(), w.tolist()) for v, t, w in record.sums()]
        assert sums == [(5, [0, 1, 0], [0.25, 0.5, 0.125]), (6, [1], [1.0])]


def test_an_error_names_the_wrong_argument(store: Store) -> None:
    with pytest.raises(ValueError, match=r"fate must be one of applied.*got 'eaten'"):
        store.released(0, "eaten")
    with pytest.raises(ValueError, match="got 1 weights for 2 tasks"):
        store.applied(1, [1, 2], [0.5])
    with pytest.raises(TypeError, match="meta field 'colour' not found; available: "):
        store.set_meta(colour="red")
    with pytest.raises(TypeError, match="meta field 'seed'"):
        store.set_meta(seed="one")
    with pytest.raises(ValueError, match="after_seq must be from 0 to 0"):
        store.truncate(1)


def test_meta_fields_are_kept_with_their_types(store: Store, tmp_path: Path) -> None:
    store.set_meta(
        strategy="fedbuff", seed=3, time_scale=2, memory=MemoryUse(server_mib=5.0, clients_mib={7: 1.5}),
        aggregation=Aggregation(backend="c", bytes=1 << 50), steal=math.nan,
    )  # fmt: skip
    store.set_meta(seed=4)
    store.commit()
    with Record(tmp_path) as record:
        meta = record.meta
    assert (meta.strategy, meta.seed, meta.time_scale) == ("fedbuff", 4, 2.0)
    assert meta.memory.clients_mib == {7: 1.5}
    assert meta.aggregation.bytes == 1 << 50
    assert meta.steal is None


def test_rows_of_the_other_tables_are_kept(store: Store, tmp_path: Path) -> None:
    clients = [client(0, "pi-4", 2.5, 1, 2), client(1)]
    store.clients(clients)
    store.version(version(1, 2.0, updates=5))
    row = evaluation(1, 2.0, correct=(1, 0), total=(1, 1))
    store.evaluation(row)
    store.evaluation(evaluation(2, accuracy=math.nan, loss=math.inf))
    store.incident(1.0, None, "malformed", "17 bytes")
    store.incident(2.0, 1, "death")
    store.cost("sum", 0.5)
    store.cost("sum", 0.25, 3)
    store.sync()
    store.cost("sum", 1.0)
    store.sync()
    with Record(tmp_path) as record:
        assert record.clients == clients
        assert record.versions["updates"].tolist() == [5]
        assert record.evaluations[0] == row
        assert math.isnan(record.evaluations[1].accuracy)
        assert record.evaluations[1].loss == math.inf
        assert [(i.id, i.client, i.kind, i.detail) for i in record.incidents] == [
            (1, None, "malformed", "17 bytes"),
            (2, 1, "death", ""),
        ]
        assert record.costs == [CostRow(stage="sum", seconds=1.75, calls=5)]


def dump(folder: Path) -> list[str]:
    with sqlite3.connect(f"file:{folder}/record.sqlite?mode=ro", uri=True) as db:
        lines = [line for line in db.iterdump() if '"incidents"' not in line and '"costs"' not in line]
    db.close()
    return lines


def arrive(store: Store, k: int) -> None:
    store.journal(Arrived(client=0, task=k, base_version=k, examples=1, steps=1, loss=0.0, at_s=k))
    store.trip(trip(k, arrived_s=float(k)))


def act(store: Store, first: int, last: int) -> None:
    """Write a run: task k arrives with event 2k+1; with event 2k+2 tasks k−1 and k make version k+1."""
    for k in range(first, last):
        arrive(store, k)
        tasks = [k] if k == 0 else [k - 1, k]
        store.applied(k + 1, tasks, [0.5] * len(tasks))
        store.version(version(k + 1, float(k), updates=len(tasks)))
        store.journal(Summed(version=k + 1, at_s=k))
        if k:
            store.released(k - 1, "applied")
        store.evaluation(evaluation(k + 1, float(k), trips=k))
        store.commit()


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 6, 12])
def test_a_truncated_record_equals_one_that_ended_at_that_event(tmp_path: Path, cut: int) -> None:
    with Store(tmp_path) as long:
        act(long, 0, 6)
        long.incident(1.0, 0, "death")
        long.journal(Ticked(at_s=9.0))  # never committed
        long.truncate(cut)
        assert long.seq == cut
    other = tmp_path / "short"
    other.mkdir()
    with Store(other) as short:
        act(short, 0, cut // 2)
        if cut % 2:
            arrive(short, cut // 2)
    assert dump(tmp_path) == dump(other)
    with Record(tmp_path) as record:
        assert [row.kind for row in record.incidents] == ["death"]


def test_truncation_before_version_1_keeps_the_evaluation_of_version_0(store: Store, tmp_path: Path) -> None:
    store.evaluation(evaluation(0))
    store.journal(Evaluated(version=0, at_s=0.0, accuracy=0.1))
    store.journal(Ticked(at_s=9.0))
    store.truncate(1)
    store.commit()
    with Record(tmp_path) as record:
        assert [row.version for row in record.evaluations] == [0]


def test_a_reopened_record_continues_where_it_ended(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        act(store, 0, 2)
    with Store(tmp_path) as store:
        assert store.seq == 4
        act(store, 2, 4)
    whole = tmp_path / "whole"
    whole.mkdir()
    with Store(whole) as store:
        act(store, 0, 4)
    assert dump(tmp_path) == dump(whole)


@pytest.mark.parametrize("closed", [False, True])
def test_a_writer_does_not_wait_for_a_reader(closed: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """SQLite's timeout is set to a week, so a writer that waited for the reader would not end in time."""
    monkeypatch.setattr("edgefl.results.store.WAIT_MS", 7 * 86_400_000)

    def write() -> None:
        with Store(tmp_path) as store:
            for client in range(3):
                store.journal(Joined(client=client, at_s=0.0))
                store.sync()

    first = Store(tmp_path)
    first.journal(Joined(client=9, at_s=0.0))
    first.sync()
    if closed:
        first.close()
    with Record(tmp_path) as reader:
        assert len(list(reader.events())) == 1
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(timeout=120.0)
        assert not writer.is_alive(), "the writer waits for the reader"
        if not closed:
            assert len(list(reader.events())) == 1, "the reader sees a later state"
            first.close(commit=False)
    with Record(tmp_path) as record:
        assert len(list(record.events())) == 4


def test_a_removed_record_is_not_created_again(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="not found: it was removed"):
        Store(tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_record_is_one_file_with_its_seal_and_readable_in_a_read_only_folder(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.set_meta(strategy="fedbuff")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.sqlite", "record.sqlite-seal"]
    tmp_path.chmod(0o500)
    try:
        with Record(tmp_path) as record:
            assert record.meta.strategy == "fedbuff"
    finally:
        tmp_path.chmod(0o700)


def execute(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("PRAGMA user_version = 99", r"was written by a newer edgefl \(schema 99; this one reads 6\)"),
        ("PRAGMA user_version = 0", "was written by an older edgefl"),
        ("PRAGMA application_id = 1", "is a database of a program other than edgefl"),
        ("DROP TABLE trips", "damaged: no table trips"),
        (b"not a database at all, but long enough to hold a header" * 40, "damaged or not a record"),
        (5000, "damaged"),
    ],
)
def test_a_file_that_is_not_a_record_is_refused_and_stays_unchanged(
    tmp_path: Path, damage: str | bytes | int, message: str
) -> None:
    """``damage`` is an SQL statement, the file's new content, or the length to which the file is cut."""
    with Store(tmp_path) as store:
        act(store, 0, 3)
    path = tmp_path / "record.sqlite"
    if isinstance(damage, str):
        execute(path, damage)
    else:
        path.write_bytes(damage if isinstance(damage, bytes) else path.read_bytes()[:damage])
    before = path.read_bytes()
    for opener in (Record, Store):
        with pytest.raises(ConfigError, match=message) as caught:
            opener(tmp_path)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_a_record_that_sqlite_cannot_open_is_an_error_that_names_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit()
    refused = sqlite3.OperationalError("unable to open database file")
    monkeypatch.setattr(sqlite3, "connect", Mock(side_effect=refused))
    with pytest.raises(ConfigError, match=r"record\.sqlite cannot be read: unable to open database file"):
        Record(tmp_path)


def test_a_missing_record_and_a_damaged_table_are_errors_that_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run's folder: it has no record\.sqlite"):
        Record(tmp_path)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Store(tmp_path / "nowhere")
    with Store(tmp_path) as store:
        store.set_meta(seed=1)
    execute(tmp_path / "record.sqlite", "UPDATE meta SET value = '{'")
    with pytest.raises(ConfigError, match="is damaged: it does not match its seal"):
        Record(tmp_path)
    (tmp_path / "record.sqlite-seal").unlink()
    with Record(tmp_path) as record, pytest.raises(ConfigError, match="is damaged"):
        _ = record.meta


def test_a_failed_commit_keeps_its_rows_for_the_next_commit(tmp_path: Path, store: Store) -> None:
    store._db.execute("PRAGMA max_page_count = 1")  # as if the disk were full
    store.set_meta(toml="x" * 1_000_000)
    with pytest.raises(RunError, match="cannot be written: database or disk is full"):
        store.commit()
    store._db.execute("PRAGMA max_page_count = 100000")
    store.commit()
    with Record(tmp_path) as record:
        assert len(record.meta.toml) == 1_000_000


def test_the_total_weight_of_an_update_has_the_same_bits_whenever_rows_are_committed(
    tmp_path: Path,
) -> None:
    weights = []
    for every in (1, 2, 3, 50):
        folder = tmp_path / str(every)
        folder.mkdir()
        with Store(folder) as store:
            store.trip(trip(0))
            for number in range(1, 40):
                store.applied(number, [0], [1.0 / (3 + number)])
                if number % every == 0:
                    store.commit()
            store.released(0, "applied")
        with Record(folder) as record:
            row = record.trip(0)
            weights.append((row.weight, row.applied_version, row.fate, record.trips["uses"][0]))
    assert set(weights) == {(sum(1.0 / (3 + number) for number in range(1, 40)), 1, "applied", 39)}
