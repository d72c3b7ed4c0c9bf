"""Experiments made in Python are checked as those of a file are."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl import config
from edgefl.errors import ConfigError
from edgefl.experiment import Data, Evaluation, Experiment, Fleet, Model, Stop, Training


def test_python_may_give_tables_and_numpy_scalars() -> None:
    given = Experiment(
        fleet={"devices": {"pi-4": np.int64(3)}},
        seed=np.int32(7),
        training=Training(lr=np.float32(0.5), steps=2),
        stop={"accuracy": 1},
        evaluation=Evaluation(every_versions=1),
        strategy={"name": "fedbuff", "shape": (1, 2)},
    )
    found = config.validate(given)
    assert found.fleet == Fleet(devices={"pi-4": 3})
    assert (found.seed, type(found.seed)) == (7, int)
    assert found.training == Training(lr=0.5, steps=2)
    assert found.stop == Stop(accuracy=1.0)
    assert found.strategy == {"name": "fedbuff", "shape": [1, 2]}


PHONE = {"fleet": Fleet(devices={"pi-4": 1}), "stop": Stop(trips=1)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fleet": None}, "fleet.*missing"),
        ({"stop": Stop()}, "stop: no stopping condition"),
        ({"fleet": Fleet(devices={3: 1})}, "fleet.devices: keys must be strings, got 3"),
        ({"strategy": {"f": print}}, "strategy.f: must be a string, .* got a builtin_function_or_method"),
        ({"strategy": {"f": None}}, "strategy.f: must be a string, number, .* got a NoneType"),
        ({"model": Model(args={3: 1})}, "model.args: keys must be strings, got 3"),
        ({"data": Data(path="\udcff")}, r"data.path: must be text that can be encoded as UTF-8, got '/.*"),
        ({"seed": "1"}, "seed: must be a whole number .* got '1'"),
    ],
)
def test_python_gets_the_same_errors(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.validate(Experiment(**PHONE | given))


@pytest.mark.parametrize("setting", [{"momentum": 0.5}, {"lr_normalization": True}])
def test_fednova_is_for_plain_sgd(setting: dict[str, Any]) -> None:
    plain = Experiment(**PHONE, strategy={"name": "fednova"})
    assert config.validate(plain).strategy == {"name": "fednova"}
    with pytest.raises(ConfigError, match=rf"training\.{next(iter(setting))}: must be \S+ with fednova"):
        config.validate(msgspec.structs.replace(plain, training=Training(**setting)))
