"""How much clients were there, from a journal written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.core.events import Arrived, Event, Joined, Left, Summed
from edgefl.results.record import ClientRow, Record
from edgefl.results.store import Store
from edgefl.results.summary import attendance_of


def found(folder: Path, *events: Event, clients: int = 2, emulated_s: float = 10.0) -> dict[str, object]:
    with Store(folder) as store:
        store.clients(
            [
                ClientRow(client=client, profile="pi-4", network="wifi", examples=10)
                for client in range(clients)
            ]
        )
        for event in events:
            store.journal(event)
        store.sync()
    with Record(folder) as record:
        return attendance_of(record, emulated_s)


def test_time_between_joining_and_leaving_counts(tmp_path: Path) -> None:
    assert found(
        tmp_path,
        Joined(0, 0.0),
        Joined(1, 4.0),
        Arrived(0, 0, 0, 10, 5, 0.5, 5.0),
        Left(0, 6.0, "offline", finishes=True),
        Summed(1, 6.5),
        Joined(0, 9.0),
        Left(1, 9.5, "battery"),
    ) == {
        "online_share": pytest.approx((6 + 1 + 5.5) / 20),
        "left": 2,
        "returned": 1,
        "reasons": {"battery": 1, "offline": 1},
    }


def test_leaving_twice_counts_the_time_once(tmp_path: Path) -> None:
    there = found(
        tmp_path, Joined(0, 0.0), Left(0, 5.0, "offline", finishes=True), Left(0, 7.0, "died"), clients=1
    )
    assert (there["online_share"], there["left"]) == (0.5, 2)


def test_nobody_ever_joined(tmp_path: Path) -> None:
    assert found(tmp_path)["online_share"] == 0.0


def test_a_run_that_took_no_time_has_no_share(tmp_path: Path) -> None:
    assert found(tmp_path, Joined(0, 0.0), emulated_s=0.0)["online_share"] is None
