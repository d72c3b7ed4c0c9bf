"""Tests that a Flower app's clients give the same models under edgefl as under Flower."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl import Model, Stop, Training
from edgefl.learning.models import make_model
from edgefl.run import supervisor

from .runs import experiment, virtual

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'edgefl[flower]'")

ROUNDS, LR = 3, 0.1
TESTS = Path(__file__).parents[1]
GIVEN: dict[str, Any] = {
    "model": Model(name="flower_app:Net"),
    "strategy": {"name": "fedavg", "cohort": 6},
    "stop": Stop(versions=ROUNDS),
}


def training(name: str) -> Training:
    return Training(function=f"flower:flower_app:{name}", steps=3, batch_size=16, lr=LR)


def flowers_own(first: dict[str, Any], clients: int) -> dict[str, Any]:
    """Return the model that Flower's own FedAvg makes with the same app, with replies in order of clients."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, Metadata, RecordDict
    from flwr.serverapp.strategy import FedAvg

    from tests.flower_app import app

    strategy, arrays = FedAvg(), ArrayRecord([*first.values()])
    arrays = ArrayRecord({name: arrays[str(i)] for i, name in enumerate(first)})
    for number in range(1, ROUNDS + 1):
        replies = []
        for client in range(clients):
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": LR})})
            sent = Metadata(1, "", 0, client, "", "", time.time(), 60.0, MessageType.TRAIN)
            place = {"partition-id": client, "num-partitions": clients}
            replies.append(app(Message(content, metadata=sent), Context(1, client, place, RecordDict(), {})))
        arrays, _ = strategy.aggregate_train(number, replies)
    return {name: array.numpy() for name, array in arrays.items()}


@pytest.mark.parametrize("name", ["app", "client_fn"])
def test_fedavg_over_a_flower_app_makes_flowers_model(name: str, tmp_path: Path) -> None:
    wanted = virtual(training=training(name), **GIVEN)
    net = make_model(wanted.model, (1, 8, 8), 10, wanted.seed, [TESTS])
    first = {key: tensor.numpy().copy() for key, tensor in net.state_dict().items()}
    result = supervisor.run(wanted, tmp_path / "run", base=TESTS, quiet=True)
    ours, theirs = result.model(), flowers_own(first, 6)
    assert ours.keys() == theirs.keys() - {"norm.num_batches_tracked"}
    for key, array in ours.items():
        np.testing.assert_allclose(array, theirs[key], rtol=1e-6, atol=1e-6)
    assert not np.array_equal(ours["out.weight"], first["out.weight"])
    assert (result.record.metrics["train_loss"] > 0).all()


def test_a_flower_app_trains_under_the_wall_clock(tmp_path: Path) -> None:
    wanted = experiment(training=training("client_fn"), **{**GIVEN, "stop": Stop(versions=1)})
    result = supervisor.run(wanted, tmp_path / "run", base=TESTS, quiet=True)
    figures = result.summary()
    assert (figures["versions"], figures["trips"]["applied"]) == (1, 6)
