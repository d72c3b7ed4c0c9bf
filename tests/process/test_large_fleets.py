"""Many registered phones of which few train: memory is bounded, and no event looks at all of them."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from edgefl import Clock, Data, Evaluation, Fleet, Model, Stop, Training

from .runs import Command, experiment, summary

LOADER = """
import numpy as np

def load(spec, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((100_000, 8), dtype=np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return x, y, x[:500], y[:500]
"""
BASE_MIB = 600
"""All processes of a run on a small fleet, and room to spare."""
MIB_PER_CLIENT = 1 / 256


def most_mib(command: Command) -> float:
    """The largest sum of the family's proportional shares of memory that was seen until the run ended."""
    most = 0.0
    while command.process.poll() is None:
        held = 0.0
        for process in command.family():
            try:
                held += process.memory_full_info().pss / 2**20
            except psutil.Error:  # it has just ended
                continue
        most = max(most, held)
        time.sleep(0.2)  # between two looks; nothing depends on it
    return most


@pytest.mark.parametrize(
    "clients", [5_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_many_phones_few_of_which_train(clients: int, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(LOADER)
    wanted = experiment(
        fleet=Fleet(devices={"pixel-4": clients // 2, "moto-g4": clients - clients // 2}, network="lte"),
        data=Data(name="many:load"),
        model=Model(args={"hidden": [16]}),
        training=Training(steps=1),
        strategy={"name": "fedstaleweight", "concurrency": 1000, "buffer_size": 10, "restart": "new-version"},
        clock=Clock(kind="virtual", workers=2),
        evaluation=Evaluation(every_versions=1000),
        stop=Stop(trips=2000),
    )
    command = Command.run(wanted, tmp_path / "run")
    held_mib = most_mib(command)
    command.ends()
    found = summary(tmp_path / "run")
    assert found["clients"] == clients
    assert found["client_trips"] >= 2000
    assert 0 < held_mib < BASE_MIB + clients * MIB_PER_CLIENT
