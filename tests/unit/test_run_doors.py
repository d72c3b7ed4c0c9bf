"""Models that cannot train on the data are refused before the run, with the user's file and line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from edgefl import Data, Experiment, Fleet, Model, Stop, Training, kernels
from edgefl.devices.fleet import fleet_of
from edgefl.errors import ConfigError
from edgefl.experiment import Attackers
from edgefl.run import zygote
from edgefl.run.workload import Workload

MODELS = """
from torch import nn

def outputs(input_shape, classes, count):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, count))

def normalized(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))

class Fails(nn.Linear):
    def forward(self, x):
        if self.training and len(x) == 1:
            raise ZeroDivisionError("one")
        return super().forward(x.flatten(1))

def fails(input_shape, classes):
    return Fails(64, classes)

class Exits(nn.Linear):
    def forward(self, x):
        if self.training and len(x) == 1:
            raise SystemExit("one")
        return super().forward(x.flatten(1))

def exits(input_shape, classes):
    return Exits(64, classes)

import torch
from edgefl.strategies.fedbuff import FedBuff

class ExitsAtStart(FedBuff):
    def begin_trip(self, model, given):
        raise SystemExit("early")
torch.set_num_threads(2)

class Threads(nn.Linear):
    def forward(self, x):
        torch.set_num_threads(3)
        return super().forward(x.flatten(1))

def threads(input_shape, classes):
    return Threads(64, classes)

class Trains(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)) if self.training else {}[0]

def trains(input_shape, classes):
    return Trains(64, classes)

def steps(model, examples, context):
    for x, y in examples.batches():
        context.criterion(model(x), y).backward()
        context.step(len(y))
"""


def made(folder: Path, name: str, batch_size: int = 8, **arguments: int) -> Workload:
    (folder / "doors_models.py").write_text(MODELS)
    experiment = Experiment(
        fleet=Fleet(devices={"pi-4": 3}),
        data=Data(max_examples=51),  # 17 each: two batches of 8 and one of 1
        model=Model(name=f"doors_models:{name}", args=dict(arguments)),
        training=Training(epochs=1, batch_size=batch_size),
        stop=Stop(versions=1),
    )
    return Workload(experiment, fleet_of(experiment), folder)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("outputs", {"count": 7}, r"training step: IndexError: Target \d is out of bounds"),
        ("normalized", {}, "training step: ValueError: Expected more than 1 value per channel"),
        ("fails", {}, r"training step \(doors_models.py:13\): ZeroDivisionError: one"),
        ("exits", {}, r"training step \(doors_models.py:22\): RuntimeError: SystemExit: one"),
    ],
)
def test_a_model_that_cannot_train_on_a_batch_of_the_fleet_is_one_line(
    tmp_path: Path, name: str, arguments: dict[str, int], message: str
) -> None:
    """Three of the models fail only on the last batch of an epoch, which has one example."""
    line = f"^model.name: 'doors_models:{name}' cannot run a {message}"
    with pytest.raises(ConfigError, match=line) as found:
        made(tmp_path, name, **arguments).prepared()
    assert "\n" not in str(found.value)


def test_sys_exit_in_a_strategys_begin_trip_is_an_error_of_the_trip(tmp_path: Path) -> None:
    """Otherwise, the process would end, and the trip's client would count as dead."""
    (tmp_path / "doors_models.py").write_text(MODELS)
    strategy = {"name": "doors_models:ExitsAtStart", "buffer_size": 1}
    experiment = Experiment(fleet=Fleet(devices={"pi-4": 3}), strategy=strategy, stop=Stop(versions=1))
    workload = Workload(experiment, fleet_of(experiment), tmp_path)
    with pytest.raises(RuntimeError, match=r"^SystemExit: early$"):
        workload.train(0, 0, None)


def test_sys_exit_still_ends_a_process_that_a_model_forks() -> None:
    """Otherwise, the copy of edgefl's process would continue with the run."""
    code = """
import os, sys
from edgefl.errors import exit_as_error

with exit_as_error():
    child = os.fork()
    if not child:
        sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"


def test_a_model_that_cannot_be_evaluated_is_one_line(tmp_path: Path) -> None:
    line = r"^model.name: 'doors_models:trains' cannot evaluate a test example \(doors_models.py:\d+\): Key"
    with pytest.raises(ConfigError, match=line):
        made(tmp_path, "trains").prepared()


def test_more_outputs_than_classes_are_a_remark_and_the_trial_step_leaves_the_model(tmp_path: Path) -> None:
    workload = made(tmp_path, "outputs", count=20)
    first = workload.flat.array.copy()
    assert workload.prepared().remark == "model 'doors_models:outputs' has 20 outputs for 10 classes"
    assert (workload.flat.array == first).all()
    assert made(tmp_path, "outputs", count=10).prepared().remark == ""


def test_a_class_without_an_output_is_refused_even_if_it_is_not_in_the_trial_step(tmp_path: Path) -> None:
    (tmp_path / "doors_models.py").write_text(MODELS)
    experiment = Experiment(
        fleet=Fleet(devices={"pi-4": 1, "pixel-4": 1}),
        data=Data(partition="by-device", labels={"pi-4": [0, 1, 2, 3, 4, 5, 6], "pixel-4": [7, 8, 9]}),
        model=Model(name="doors_models:outputs", args={"count": 7}),
        training=Training(epochs=1),
        stop=Stop(versions=1),
    )
    with pytest.raises(
        ConfigError, match="has 7 outputs, for the classes 0 to 6, but a client trains with class 9"
    ):
        Workload(experiment, fleet_of(experiment), tmp_path).prepared()


def test_a_class_without_an_output_is_refused_if_only_attackers_that_flip_labels_train_with_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "doors_models.py").write_text(MODELS)
    experiment = Experiment(
        seed=1,  # the client of the trial step is honest
        fleet=Fleet(devices={"pi-4": 4}, attackers=Attackers(share=0.25, kind="label-flip")),
        data=Data(partition="by-device", labels={"pi-4": [0, 1, 2, 3, 4]}),
        model=Model(name="doors_models:outputs", args={"count": 5}),
        training=Training(epochs=1),
        stop=Stop(versions=1),
    )
    with pytest.raises(ConfigError, match="has 5 outputs, for the classes 0 to 4, but a client trains with"):
        Workload(experiment, fleet_of(experiment), tmp_path).prepared()


def test_a_proximal_term_that_a_users_function_must_add_is_a_remark(tmp_path: Path) -> None:
    (tmp_path / "doors_models.py").write_text(MODELS)
    remarks = []
    for strategy in ("fedprox", "fedavg"):
        experiment = Experiment(
            fleet=Fleet(devices={"pi-4": 3}),
            data=Data(max_examples=51),
            training=Training(function="doors_models:steps", epochs=1),
            strategy={"name": strategy},
            stop=Stop(versions=1),
        )
        remarks.append(Workload(experiment, fleet_of(experiment), tmp_path).prepared().remark)
    assert "which 'doors_models:steps' must add itself (context.rule.terms.prox_mu)" in remarks[0]
    assert remarks[1] == ""


def test_forks_train_with_one_thread_because_more_would_wait_for_those_of_the_zygote(tmp_path: Path) -> None:
    made(tmp_path, "outputs", count=10).prepared()
    assert torch.get_num_threads() == 1  # although the module sets 2 while it is imported
    try:
        with pytest.raises(ConfigError, match="sets torch's threads to 3, but a phone"):
            made(tmp_path, "threads").prepared()
    finally:
        torch.set_num_threads(1)


def test_forks_run_the_kernels_on_the_cpu_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_BACKEND", "cuda")
    for name in ("become_child", "kill_forks_with_parent", "adopt_orphans", "Channel", "Zygote"):
        monkeypatch.setattr(zygote, name, Mock())
    kernels.set_threads(2)
    try:
        zygote.main(-1, 0)
        assert kernels.threads() == 1
        assert "EDGEFL_BACKEND" not in os.environ
    finally:
        kernels.set_threads(None)
