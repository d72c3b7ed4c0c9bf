"""Experiments made in Python are checked like those of a file, and so are arguments of public functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import edgefl
from edgefl import config
from edgefl.core import Core
from edgefl.core.events import Arrived
from edgefl.errors import ConfigError, EdgeflError
from edgefl.experiment import Data, Evaluation, Experiment, Fleet, Model, Stop, Training
from edgefl.results.trackers import track
from edgefl.run import supervisor
from edgefl.strategies import resolve
from edgefl.strategies.fedavg import FedAvg
from edgefl.testing import check_strategy, fleet, run_in_memory
from tests.reports import write_run


def test_tables_and_numpy_scalars_are_accepted() -> None:
    given = Experiment(
        fleet={"devices": {"pi-4": np.int64(3)}, "battery": np.bool_(False)},
        seed=np.int32(7),
        training=Training(lr=np.float32(0.5), steps=2),
        stop={"accuracy": 1},
        evaluation=Evaluation(every_versions=1),
        strategy={"name": "fedbuff", "shape": (1, np.array(2))},
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
        ({"stop": Stop()}, "stop: has no stopping condition"),
        ({"fleet": Fleet(devices={3: 1})}, "fleet.devices: keys must be strings, got 3"),
        ({"strategy": {"f": print}}, "strategy.f: must be a string, .* got a builtin_function_or_method"),
        ({"strategy": {"f": None}}, "strategy.f: must be a string, number, .* got a NoneType"),
        ({"model": Model(args={3: 1})}, "model.args: keys must be strings, got 3"),
        ({"data": Data(path="\udcff")}, r"data.path: must be text that can be encoded as UTF-8, got '/.*"),
        ({"seed": "1"}, "seed: must be a whole number .* got '1'"),
    ],
)
def test_a_wrong_experiment_made_in_python_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.validate(Experiment(**PHONE | given))


@pytest.mark.parametrize("setting", [{"momentum": 0.5}, {"lr_normalization": True}])
def test_fednova_needs_plain_sgd(setting: dict[str, Any]) -> None:
    plain = Experiment(**PHONE, strategy={"name": "fednova"})
    assert config.validate(plain).strategy == {"name": "fednova"}
    with pytest.raises(ConfigError, match=rf"training\.{next(iter(setting))}: must be \S+ with fednova"):
        config.validate(msgspec.structs.replace(plain, training=Training(**setting)))


def in_memory(**given: Any) -> object:
    core = Core(FedAvg(cohort=2), fleet(2), seed=0, stop=Stop(versions=1))
    return run_in_memory(**{"core": core, "durations": [1.0, 1.0], **given})


def checked(**given: Any) -> object:
    return check_strategy(**{"strategy": FedAvg(cohort=2), **given})


CALLS: dict[str, Callable[[Any], object]] = {
    "folder": edgefl.Result,
    "folder: must be": edgefl.Sweep,
    "runs": lambda value: edgefl.plot(value, "x.pdf"),
    "file": lambda value: edgefl.plot(["r"], value),
    "y": lambda value: edgefl.plot(["r"], "x.pdf", y=value),
    "over": lambda value: edgefl.plot(["r"], "x.pdf", over=value),
    "band": lambda value: edgefl.plot(["r"], "x.pdf", band=value),
    "width_in": lambda value: edgefl.plot(["r"], "x.pdf", width_in=value),
    "out": lambda value: edgefl.run(Experiment(**PHONE), value),
    "web": lambda value: edgefl.run(Experiment(**PHONE), "new", web=value),
    "tracker": lambda value: track(Path("r"), value),
    "clients": fleet,
    "examples": lambda value: fleet(2, value),
    "strategy": lambda value: checked(strategy=value),
    "clients: must": lambda value: checked(clients=value),
    "versions": lambda value: checked(versions=value),
    "seed": lambda value: checked(seed=value),
}
for name in inspect.signature(run_in_memory).parameters:
    if name != "join":  # a bool
        CALLS[name] = lambda value, name=name: in_memory(**{name: value})
UNUSABLE = object()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": np.zeros(2, int)}, "model: must be a one-dimensional array of floating-point numbers"),
        ({"model": np.zeros((2, 2))}, "model: must be a one-dimensional array of floating-point numbers"),
        (
            {"durations": [1.0, -1.0]},
            r"durations: must be a finite number of seconds of at least 0, got -",
        ),
        ({"durations": lambda client, trip: math.nan}, "durations: must be a finite number of seconds"),
        ({"durations": ["1", "2"]}, "durations: must be a finite number of seconds"),
    ],
)
def test_a_run_in_memory_refuses_numbers_with_which_its_models_would_be_wrong(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        in_memory(**given)


@pytest.mark.parametrize("name", ["favano", "quafl"])
def test_trips_in_memory_that_a_poll_ends_may_take_no_time(name: str) -> None:
    core = Core(resolve({"name": name}), fleet(2), seed=0, stop=Stop(versions=2))
    run = run_in_memory(core, durations=[0.0, 0.0], steps=3)
    assert [event.steps for event in run.events if isinstance(event, Arrived)] == [3] * len(run.fates)


@pytest.mark.parametrize("argument", CALLS)
def test_a_wrong_argument_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "run", lambda *_: None)
    write_run(tmp_path / "r")
    said = ""
    for value in (None, 3, "", [], math.nan, UNUSABLE):  # some calls accept some of these
        try:
            CALLS[argument](value)
        except EdgeflError as error:
            said = str(error)
            assert len(said.splitlines()) == 1, value
    name = argument.partition(":")[0]
    assert said.startswith((f"{name}: must be ", f"{name} '<object"))
    assert "<object object" in said
