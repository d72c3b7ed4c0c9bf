"""Tests of one trip of a Flower app's client: its inputs, its reply and errors."""

from __future__ import annotations

import random
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import nn
from torch.optim import optimizer

from edgefl.errors import ConfigError, TrainingError
from edgefl.experiment import Training
from edgefl.learning.custom import CustomTrainer
from edgefl.learning.flat import FlatModel
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import TrainResult
from edgefl.strategies.base import TripInputs

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'edgefl[flower]'")

from edgefl.learning.flower_client import FlowerTraining, run_config

HEAD = """
import random
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

app = ClientApp()
seen = []

def answer(message, arrays, **metrics):
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 5, **metrics})})
    return Message(content, reply_to=message)

"""
RULE = LocalRule(steps=2, batch_size=4, lr=0.3)


@pytest.fixture
def trip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[TrainResult, FlatModel, Any]]:
    """Return a function that makes one trip of an app with the given code."""

    def made(code: str, name: str = "app", rule: LocalRule = RULE, **more: Any) -> Any:
        (tmp_path / "apps.py").write_text(HEAD + code)
        monkeypatch.delitem(sys.modules, "apps", raising=False)
        flat = FlatModel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        flat.array[:] = np.arange(flat.size)
        name = f"flower:apps:{name}"
        trainer = CustomTrainer(flat, FlowerTraining(name, [tmp_path], 7), name, rule)
        x, y = np.zeros((9, 2), np.float32), np.zeros(9, np.int64)
        given = TripInputs(6, flat.array.copy())
        result = trainer.run(x, y, np.arange(9), 3, 0, given, np.random.default_rng(1), **more)
        return result, flat, sys.modules["apps"]

    return made


MESSAGE = """
@app.train()
def train(message, context):
    seen.append((dict(message.content["config"].items()), context.node_config, context.run_config))
    arrays = message.content["arrays"]
    seen.append(list(arrays))
    seen.append((random.random(), np.random.rand(), torch.rand(1).item()))
    state = arrays.to_torch_state_dict()
    for tensor in state.values():
        tensor += 1
    return answer(message, ArrayRecord(state), loss=0.5)
"""


def test_an_app_gets_the_same_inputs_as_from_flower(trip: Any, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.flwr.app.config]\nlocal-epochs = 3\nopt.name = 'sgd'\n")
    state = random.getstate()
    result, flat, apps = trip(MESSAGE)
    assert random.getstate() == state
    config, place, run = apps.seen[0]
    assert (config["server-round"], config["lr"], config["batch-size"]) == (7, 0.3, 4)
    assert place == {"partition-id": 3, "num-partitions": 7}
    assert run == {"local-epochs": 3, "opt.name": "sgd"}
    assert apps.seen[1] == list(flat.module.state_dict())
    np.testing.assert_array_equal(flat.array, np.arange(flat.size) + 1)
    assert (result.steps, result.counted, result.metrics) == (2, 5, {"loss": 0.5})
    assert trip(MESSAGE)[2].seen[2] == apps.seen[2]


STEPS = """
@app.train()
def train(message, context):
    weight = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=1.0)
    for _ in range({}):
        weight.sum().backward()
        sgd.step()
    return answer(message, message.content["arrays"])
"""


def test_each_optimiser_step_is_counted_and_missing_steps_take_their_time(trip: Any) -> None:
    accounted: list[int] = []
    rule = LocalRule(epochs=1, batch_size=4)
    result, _, _ = trip(STEPS.format(2), rule=rule, done=accounted.append)
    assert (result.steps, accounted) == (2, [4, 4, 1])
    with pytest.raises(TrainingError, match=r"\(apps.py:\d+\) made more steps than the 3 that "):
        trip(STEPS.format(4), rule=rule)
    assert not optimizer._global_optimizer_post_hooks


CLIENT = """
class Mine(NumPyClient):
    def fit(self, parameters, config):
        seen.append(config)
        return [array + 2 for array in parameters], 11, {{"loss": 1.5, "name": "x"}}

def client_fn(context):
    return Mine(){}

older = ClientApp(client_fn=client_fn)
"""


@pytest.mark.parametrize("name", ["client_fn", "older"])
@pytest.mark.parametrize("made", ["", ".to_client()"])
def test_a_client_of_the_older_api_trains(name: str, made: str, trip: Any) -> None:
    result, flat, apps = trip(CLIENT.format(made), name)
    np.testing.assert_array_equal(flat.array, np.arange(flat.size) + 2)
    assert (result.counted, result.metrics) == (11, {"loss": 1.5})
    assert apps.seen[0]["server_round"] == 7


def body(lines: str) -> str:
    return "@app.train()\ndef train(message, context):\n    arrays = message.content['arrays']\n    " + lines


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (body("raise KeyError('w')"), r"^'flower:apps:app' \(apps.py:\d+\) raised KeyError: 'w'$"),
        (
            body("del arrays['0.bias']; return answer(message, arrays)"),
            r"'0.weight' has shape \(3, 2\) \(got another",
        ),
        (
            body("return answer(message, ArrayRecord([a.numpy()[..., None] for a in arrays.values()]))"),
            r"must reply with the experiment's model: '0.weight' has .* \(got \(3, 2, 1\)\)$",
        ),
        (
            body("return Message(RecordDict(), reply_to=message)"),
            r"must reply with one ArrayRecord .*\(got 0, 0\)$",
        ),
        (
            body("context.state['n'] = ConfigRecord(); return answer(message, arrays)"),
            r"stores records in context.state",
        ),
        (
            body("m = answer(message, arrays); m.content['metrics']['num-examples'] = -1; return m"),
            r"\(got -1\)$",
        ),
        ("", r"raised ValueError: No train function registered"),
    ],
)
def test_an_invalid_reply_is_a_training_error(code: str, message: str, trip: Any) -> None:
    with pytest.raises(TrainingError, match=message):
        trip(code)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"^training.function: module 'apps': attribute 'nothing' not found"),
        ("seen", r"^training.function: 'flower:apps:seen' raised TypeError"),
        ("answer", r"^training.function: 'flower:apps:answer' raised ValueError: A `ClientApp` cannot"),
    ],
)
def test_a_name_that_is_not_an_app_is_refused(name: str, message: str, trip: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        trip("", name)


def test_without_flower_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.clientapp", None)
    with pytest.raises(ConfigError, match=r"'flower:apps:app' needs Flower: pip install 'edgefl\[flower\]'"):
        FlowerTraining("flower:apps:app", [], 2)


GUIDE = (Path(__file__).parents[2] / "docs" / "flower.md").read_text(encoding="utf-8")


def test_the_examples_of_the_guide_run(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    (server,) = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    exec(server, names)
    assert type(names["strategy"]).__name__ == "FastFedAvgM"
    (table,) = re.findall(r"```toml\n(.*?)```", GUIDE, flags=re.DOTALL)
    training = msgspec.convert(tomllib.loads(table)["training"], Training)
    assert training.function is not None
    module, _, _ = training.function.removeprefix("flower:").partition(":")
    file = (tmp_path / module.replace(".", "/")).with_suffix(".py")
    file.parent.mkdir()
    file.write_text(HEAD + MESSAGE)
    flat, rule = FlatModel(nn.Linear(2, 3)), LocalRule.of(training)
    own = FlowerTraining(training.function, [tmp_path], 7)
    trainer = CustomTrainer(flat, own, training.function, rule)
    x, y, given = np.zeros((9, 2), np.float32), np.zeros(9, np.int64), TripInputs(6, flat.array.copy())
    result = trainer.run(x, y, np.arange(9), 0, 0, given, np.random.default_rng(0))
    assert (result.steps, result.counted) == (training.steps, 5)
    np.testing.assert_array_equal(flat.array, given.start + 1)


def test_a_project_file_of_another_kind_configures_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('tool = "café"\n', "utf-8")
    assert run_config(str(tmp_path / "app.py")) == {}
