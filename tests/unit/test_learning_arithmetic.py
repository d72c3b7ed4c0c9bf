"""Devices, precisions and layouts: what is asked for is what the layers get, and it is the same each time."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import edgefl
from edgefl import Clock, Fleet, Stop, config
from edgefl.errors import ConfigError
from edgefl.experiment import Training
from edgefl.learning.arithmetic import Arithmetic
from edgefl.learning.flat import FlatModel
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer, evaluate

RULE = LocalRule(steps=4, batch_size=8, momentum=0.9, prox_mu=0.1)


class Probe(nn.Conv2d):
    """A convolution that remembers what it was given and what it gave."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 4, 3)
        self.seen: set[tuple[torch.dtype, bool]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = super().forward(x)
        self.seen.add((given.dtype, given.is_contiguous(memory_format=torch.channels_last)))
        return given


def network(channels: int, dropout: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            Probe(channels),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.BatchNorm1d(144),
            nn.Linear(144, 3),
        )


def trained(
    channels: int = 1, *, dropout: float = 0.0, moved: bool = False, **choices: Any
) -> tuple[FlatModel, float]:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((24, channels, 8, 8)).astype(np.float32)
    flat = FlatModel(network(channels, dropout))
    trainer = Trainer(flat, arithmetic=Arithmetic(**choices))
    y = rng.integers(0, 3, 24)
    if moved:
        trainer.run(x, y, RULE, np.random.default_rng(1))  # before, as the zygote does
        flat.load(FlatModel(network(channels, dropout)).array)
        flat.move(torch.device("cpu"))
    loss = trainer.run(x, y, RULE, np.random.default_rng(3)).loss
    return flat, loss + evaluate(flat, x, y, 3).loss


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_layers_get_what_was_asked_for(channels: int, precision: str, memory_format: str) -> None:
    choices = {"precision": precision, "memory_format": memory_format}
    flat, loss = trained(channels, **choices)
    exact, right = trained(channels)
    seen = flat.module[0].seen
    assert (getattr(torch, precision), memory_format == "channels_last") in seen
    assert {dtype for dtype, _ in seen} == {getattr(torch, precision), torch.float32}  # evaluation
    assert flat.array.dtype == np.float32
    assert loss == pytest.approx(right, rel=0.02)
    np.testing.assert_allclose(flat.array, exact.array, atol=0.02)
    once, twice = (trained(channels, dropout=0.3, **choices)[0].array.tobytes() for _ in range(2))
    assert once == twice
    if precision == "bfloat16":
        assert flat.array.tobytes() != exact.array.tobytes()


def test_a_model_that_was_moved_trains_to_the_same_bits() -> None:
    """The way to a GPU and back, walked on the CPU: a copy of the vector, brought there and fetched."""
    here, loss = trained(dropout=0.3)
    there, its_loss = trained(dropout=0.3, moved=True)
    assert there.vector.data_ptr() != there.array.ctypes.data
    assert there.array.tobytes() == here.array.tobytes()
    assert its_loss == loss
    assert all(tensor.data_ptr() != 0 for tensor in copy.deepcopy(there.module).parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"training\.device: must be 'cpu' here \(.+\), got 'cuda'"):
        Arithmetic.of(Training(device="cuda")).check()


def test_phones_have_no_gpu() -> None:
    tables: dict[str, Any] = {"fleet": Fleet(devices={"pixel-4": 2}), "stop": Stop(versions=1)}
    tables["training"] = Training(device="cuda")
    config.validate(edgefl.Experiment(**tables))
    with pytest.raises(ConfigError, match=r"training\.device: must be 'cpu' where clock\.kind = 'wall'"):
        config.validate(edgefl.Experiment(**tables, clock=Clock(kind="wall")))
