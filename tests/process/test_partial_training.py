"""A task that ends at an instant: the client sends what it has, as far as its device's pace allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl import Clock, Fleet, Model, Stop, Training
from edgefl.devices import load_device
from edgefl.results.record import Record, TripRow

from .runs import experiment

INTERVAL_S, STEPS = 0.3, 30


@pytest.mark.parametrize("kind", ["virtual", "wall"])
def test_training_ends_at_the_polls_after_the_steps_that_the_device_made(kind: Any, tmp_path: Path) -> None:
    """Under either clock: a step takes what the profile says, and the one that is not finished is lost."""
    wanted = experiment(
        fleet=Fleet(devices={"pixel-4": 2, "moto-g4": 2}, network="none"),
        model=Model(args={"hidden": [256, 256]}),
        training=Training(steps=STEPS),
        strategy={"name": "favano", "participants": 2, "interval_s": INTERVAL_S},
        clock=Clock(kind=kind),
        stop=Stop(versions=8),
    )
    edgefl.run(wanted, tmp_path / "run")
    with Record(tmp_path / "run") as record:
        done = record.trips["fate"] == "applied"
        trips = {name: record.trips[name][done] for name in TripRow.__struct_fields__}
        published_s = np.append(0.0, record.versions["at_s"])
    # A task is decided on after its version was published and before it is sent, which a busy host does late,
    # and what it may take from then on ends at a poll.
    earliest_s = published_s[trips["base_version"]] + trips["compute_declared_s"]
    latest_s = trips["sent_s"] + trips["compute_declared_s"]
    polls = np.floor(latest_s / INTERVAL_S + 1e-6)
    assert (polls * INTERVAL_S >= earliest_s - 1e-6).all()
    if kind == "virtual":
        np.testing.assert_allclose(latest_s, polls * INTERVAL_S, atol=1e-6)
    step_flop = (trips["flops"] / np.maximum(trips["steps"], 1)).max()
    for client, steps, flops, declared_s in zip(
        *(trips[name].tolist() for name in ("client", "steps", "flops", "compute_declared_s")), strict=True
    ):
        rate = load_device("pixel-4" if client < 2 else "moto-g4").train_flop_per_s
        # Of the average step: the last of an epoch is smaller.
        fitting = declared_s / ((flops / steps if steps else step_flop) / rate)
        assert steps == STEPS <= fitting + 1e-6 or fitting - 1.1 < steps <= fitting + 0.1
    assert trips["steps"].min() < STEPS == trips["steps"].max()
    assert (trips["trip_achieved_s"] > trips["trip_declared_s"] - 1e-6).all()
