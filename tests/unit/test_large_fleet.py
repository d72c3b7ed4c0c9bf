"""Tests that a registered client takes a few bytes of memory in each process."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.core.ledger import Ledger
from edgefl.devices.fleet import KnownClients, Trips, fleet_of
from edgefl.experiment import Clock, Data, Experiment, Fleet, Model, Stop
from edgefl.lab.workloads import IdleWorkload
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.learning.partition import Parts, hold_out, partition
from edgefl.run.clock import JOIN, TICK, Agenda, Due

MANY = 20_000


def wanted(clients: int, network: str = "wifi") -> Experiment:
    return Experiment(
        fleet=Fleet(devices={"pixel-4": clients // 2, "moto-g4": clients - clients // 2}, network=network),
        model=Model(name="idle", args={"parameters": 10}),
        clock=Clock(kind="virtual"),
        stop=Stop(versions=1),
    )


def bytes_each(make: Callable[[], object]) -> float:
    """Return the bytes per client of the object that ``make`` returns."""
    make()  # imports and caches
    tracemalloc.start()
    try:
        kept = make()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del kept
    return held / MANY


def test_the_cores_ledger_needs_less_than_32_bytes_per_client() -> None:
    def books() -> Ledger:
        made = Ledger(range(MANY), seed=1)  # type: ignore[arg-type]  # only their number counts
        for client in range(MANY):
            made.connect(client)
        return made

    assert bytes_each(books) < 32


def test_a_fleet_stores_only_profiles_and_computes_facts_about_clients_on_request() -> None:
    assert bytes_each(lambda: fleet_of(wanted(MANY))) < 0.1
    infos = fleet_of(wanted(5))
    assert [(info.client, info.profile) for info in infos] == [
        (0, "pixel-4"), (1, "pixel-4"), (2, "moto-g4"), (3, "moto-g4"), (4, "moto-g4")
    ]  # fmt: skip
    work = BatchWork(fixed=StepWork(), per_example=StepWork(matmul_flop=1e9))
    trips = Trips(wanted(MANY), fleet_of(wanted(MANY)), range(1, MANY + 1), work, 4000, 4000)
    known = KnownClients(trips)
    assert (len(known), known[7].examples, known[-1].profile) == (MANY, 8, "moto-g4")
    assert known[7] is known[7]
    plan = trips.in_series(7)
    assert (known[7].down_s, known[7].compute_s, known[7].up_s) == (plan.down_s, plan.compute_s, plan.up_s)


def test_the_zygotes_message_has_less_than_40_bytes_per_client() -> None:
    experiment = wanted(MANY)
    message = IdleWorkload(experiment, fleet_of(experiment), Path()).prepared()
    assert len(msgspec.msgpack.encode(message)) / MANY < 40


def test_the_examples_of_a_client_need_less_than_48_bytes() -> None:
    labels = np.arange(MANY) % 10

    def split() -> tuple[Parts, Parts]:
        return hold_out(partition(Data(), labels, range(MANY), 10, seed=0), 0.0, seed=0)  # type: ignore[arg-type]

    assert bytes_each(split) < 48


def test_the_agenda_takes_events_from_an_iterator_one_by_one() -> None:
    agenda, asked = Agenda(), itertools.count()
    agenda.follow(Due(float(next(asked)), JOIN, client) for client in range(MANY))
    agenda.add(Due(1.0, TICK))
    taken: list[Any] = [agenda.pop() for _ in range(4)]
    assert [(due.at_s, due.kind) for due in taken] == [(0.0, JOIN), (1.0, TICK), (1.0, JOIN), (2.0, JOIN)]
    assert next(asked) == 4
