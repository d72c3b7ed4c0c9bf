"""Runs on data in LEAF's format: a client holds what one of its users does."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgefl
from edgefl import Clock, Data, Fleet, Model, Stop, Training
from edgefl.results.record import Record

from ..unit.leaf_files import write_leaf
from .runs import experiment


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("sent140", Model(name="lstm-sent140", args={"embedding": 8, "hidden": 4})),
        pytest.param("femnist", Model(name="mlp", args={"hidden": [8]}), marks=pytest.mark.slow),
    ],
)
def test_a_run_on_natural_clients(kind: str, model: Model, tmp_path: Path) -> None:
    write_leaf(tmp_path / "data", kind, users=8)
    wanted = experiment(
        data=Data(name="leaf", path=str(tmp_path / "data"), partition="natural"),
        fleet=Fleet(devices={"pixel-4": 8}, network="none"),
        model=model,
        training=Training(epochs=1, batch_size=4),
        clock=Clock(kind="virtual", workers=1),
        stop=Stop(versions=4),
    )
    figures = edgefl.run(wanted, tmp_path / "run").summary()
    assert figures["versions"] == 4
    with Record(tmp_path / "run") as record:
        assert sorted(row.examples for row in record.clients) == [4 + user for user in range(8)]
