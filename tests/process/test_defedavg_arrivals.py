"""Tests that the simulation of DeFedAvg's theory has the same arrivals and versions as a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl import Fleet, Model, Stop, Training
from edgefl.core.events import Arrived
from edgefl.devices.fleet import KnownClients, Trips, fleet_of
from edgefl.lab.delays import FLOP_PER_EXAMPLE
from edgefl.lab.quadratic import play
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.results.record import Record
from edgefl.strategies import resolve

from .runs import virtual

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "defedavg-niid", "participants": 4},
        {"name": "defedavg-niid", "participants": 4, "pause": True},
        {"name": "defedavg-iid", "buffer_size": 4, "overlap": True},
        {"name": "defedavg-iid", "buffer_size": 4},
    ],
    ids=["niid", "niid-pause", "iid", "iid-in-series"],
)
def test_simulated_arrivals_and_versions_are_those_of_a_run(strategy: dict[str, Any], tmp_path: Path) -> None:
    wanted = virtual(
        1,
        fleet=Fleet(devices={"paper-defedavg": 12}, network="defedavg-in-small"),
        strategy=strategy,
        model=Model(args={"hidden": [4]}, flops_per_example=FLOP_PER_EXAMPLE),
        training=Training(steps=4, batch_size=10),
        stop=Stop(versions=10),
    )
    numbers = edgefl.run(wanted, tmp_path / "run").summary()["parameters"]
    with Record(tmp_path / "run") as record:
        examples = record.fleet["examples"].tolist()
        arrived = [event for _, event in record.events() if isinstance(event, Arrived)]
        summed = [(version, tasks.tolist()) for version, tasks, _ in record.sums()]
    rules = resolve(strategy)
    trips = Trips(
        wanted,
        fleet_of(wanted),
        examples,
        BatchWork(fixed=StepWork(), per_example=StepWork(matmul_flop=FLOP_PER_EXAMPLE)),
        4 * numbers,
        4 * numbers,
        transfers_apart=rules.transfers_apart,
    )
    played, _ = play(
        rules,
        KnownClients(trips),
        wanted.stop,
        lambda client, trip: trips.plan(client, trip).total_s,
        wanted.seed,
        train=lambda client, model, trip: model,
    )
    mine = [one for one in played.events if isinstance(one, Arrived)]
    assert len(arrived) > 30
    for events in zip(mine, arrived, strict=True):
        here, there = ((one.client, one.task, one.base_version) for one in events)
        assert here == there
    assert [one.at_s for one in mine] == pytest.approx([one.at_s for one in arrived])
    assert [(order.version, list(order.tasks)) for order, _ in played.sums] == summed
