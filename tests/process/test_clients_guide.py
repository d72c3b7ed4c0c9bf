"""Tests of the examples in docs/clients.md."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import edgefl
from edgefl import ConfigError, Stop, Training
from edgefl.lab.verify import verify
from edgefl.results.record import Record
from tests.process.runs import experiment, virtual

TEXT = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\w+\.py) -->\n```python\n(.*?)```", TEXT, flags=re.DOTALL))
ROUNDS = {"cohort": 3, "weighting": "uniform"}


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which contains the example files of the guide."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_example_is_short() -> None:
    assert sorted(FILES) == ["by_hand.py", "distil.py", "dynamic.py", "half_way.py", "my_training.py"]
    assert all(len(content.splitlines()) <= 80 for content in FILES.values())


def run(folder: Path, **changes: Any) -> edgefl.Result:
    return edgefl.run(virtual(1, **{"stop": Stop(versions=8), **changes}), folder)


def weights(result: edgefl.Result) -> np.ndarray[Any, Any]:
    return np.concatenate([tensor.ravel() for tensor in result.model().values()])


IN_TURNS = """
import distil
import my_training


def train(model, examples, context):
    (distil if context.trip % 2 else my_training).train(model, examples, context)
"""


def test_training_functions_train_and_take_the_time_of_their_operations(guide: Path) -> None:
    """One run uses both functions in turn, since importing torch's optimizers takes 2 s in each run."""
    (guide / "in_turns.py").write_text(IN_TURNS)
    training = Training(epochs=1, lr=0.01)
    plain = run(guide / "plain", training=training, stop=Stop(versions=1)).record
    own = run(guide / "own", training=replace(training, function="in_turns:train")).record
    assert plain.clients[0].step_s < own.clients[0].step_s  # an Adam
    losses = own.trips["loss"]
    losses = losses[np.isfinite(losses)]
    assert losses[-3:].mean() < losses[:3].mean()
    assert np.nanmax(own.metrics["drift"]) > 0.0
    plain.close()
    own.close()


def test_scaffold_by_hand_is_the_built_in_one(guide: Path) -> None:
    by_hand = run(guide / "hand", strategy={"name": "by_hand:Scaffold", **ROUNDS})
    built_in = run(guide / "built-in", strategy={"name": "scaffold", **ROUNDS})
    np.testing.assert_allclose(weights(by_hand), weights(built_in), rtol=0, atol=1e-5)
    assert np.abs(weights(by_hand) - weights(built_in)).max() < 1e-3 * np.abs(weights(built_in)).max()


def test_feddyn_from_its_terms_is_the_built_in_one(guide: Path) -> None:
    run(guide / "own", strategy={"name": "dynamic:FedDyn", "alpha": 0.1, **ROUNDS})
    run(guide / "built-in", strategy={"name": "feddyn", "alpha": 0.1, **ROUNDS})
    with Record(guide / "own") as own, Record(guide / "built-in") as built_in:
        assert own.meta.model_sha256 == built_in.meta.model_sha256


def test_half_way_starts_half_way(guide: Path) -> None:
    wanted = {"training": Training(steps=1, lr=1e-30), "stop": Stop(versions=2)}  # training changes nothing
    rounds = {"name": "half_way:HalfWay", "cohort": 6, "server_lr": 2.0, "weighting": "uniform"}
    still = weights(run(guide / "still", strategy=rounds, **wanted))
    (guide / "half_way.py").write_text(FILES["half_way.py"].replace("[:] = model\n", " = model + 1.0\n"))
    moved = weights(run(guide / "moved", strategy=rounds, **wanted))
    # On its second trip, a client starts halfway to its own vector, which is 1.0 away. ``server_lr`` is 2.
    np.testing.assert_allclose(moved - still, 1.0, atol=1e-5)


TRAIN = """
import torch


def train(model, examples, context):
    parameters = list(model.parameters())
    for x, y in examples.batches():
        loss = torch.nn.functional.cross_entropy(model(x), y)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
                parameter -= 0.01 * gradient
        context.step(len(y), loss)
"""
"""Source of a function that trains without torch's optimizers, whose import takes 2 s."""
HALF = TRAIN.replace(
    "for x, y in examples.batches():", "for _, (x, y) in zip(range(context.left // 2), examples.batches()):"
)
"""The same, with half of the steps that it may take."""
STARTING = f"""
import multiprocessing
import subprocess
import time

{TRAIN}

def starts(model, examples, context):
    train(model, examples, context)
    program = subprocess.Popen(["sleep", "300"])
    function = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    function.start()
    program.terminate()
    function.terminate()
    function.join()
    context.log(program=program.wait(), function=function.exitcode)
    subprocess.Popen(["sleep", "300"])  # left running
"""


@pytest.mark.parametrize("made", [virtual, experiment])
def test_a_training_function_can_terminate_what_it_started_and_the_run_ends_the_rest(
    made: Any, guide: Path
) -> None:
    """The fixture `nothing_left` checks that no process is left."""
    (guide / "starting.py").write_text(STARTING)
    training = Training(steps=1, function="starting:starts")
    with edgefl.run(made(training=training, stop=Stop(trips=4)), guide / "run").record as record:
        ends = record.metrics
    for kind in ("program", "function"):
        codes = ends[kind][~np.isnan(ends[kind])]  # without trips that the end of the run cut off
        assert len(codes) >= 4
        assert set(codes) == {-signal.SIGTERM}


FAILING = f"""
import os

{TRAIN}

def now_and_then(model, examples, context):
    train(model, examples, context)
    if context.trip == 1 and context.client == 1:
        raise ValueError("no such label")
    if context.trip == 1 and context.client == 2:
        os._exit(7)
    if context.trip == 1 and context.client == 3:
        raise KeyboardInterrupt


def forgets(model, examples, context):
    for _ in examples.batches():
        pass
"""


def test_a_failure_of_a_training_function_costs_a_trip_or_at_the_start_the_run(guide: Path) -> None:
    (guide / "failing.py").write_text(FAILING)
    for name, made in (("virtual", virtual), ("wall", experiment)):
        training = Training(steps=2, function="failing:now_and_then")
        everyone = {"name": "fedavg", "cohort": 6}
        wanted = made(training=training, strategy=everyone, stop=Stop(versions=2))
        result = edgefl.run(wanted, guide / name)
        with result.record as record:
            incidents = sorted((row.client, row.kind, row.detail) for row in record.incidents if row.client)
            fates, reasons = (record.trips[name].tolist() for name in ("fate", "reason"))
        (_, _, raised), died, (_, _, stopped) = incidents
        assert [row[:2] for row in incidents] == [(1, "failed"), (2, "death"), (3, "failed")]
        where = r"TrainingError: 'failing:now_and_then' \(failing.py:\d+\) raised "
        assert re.fullmatch(where + "ValueError: no such label", raised)
        assert re.fullmatch(where + "KeyboardInterrupt", stopped)
        assert died[2] == "exit code 7"
        assert fates.count("lost") >= 3
        assert sum(reason.endswith("exit code 7") for reason in reasons) == 1
    forgets = Training(function="failing:forgets")
    with pytest.raises(
        ConfigError, match=r"^training.function: 'failing:forgets' .* made no step in an epoch"
    ):
        edgefl.run(virtual(training=forgets), guide / "never")
    assert not (guide / "never").exists()


def test_a_run_is_verified_whose_function_makes_fewer_steps_than_its_strategy_sets(guide: Path) -> None:
    """Regression: it was repeated with the steps that were made as its limit, and made half of these."""
    (guide / "half.py").write_text(HALF)
    training = Training(steps=8, function="half:train")
    result = run(guide / "run", training=training, strategy={"name": "asyncfeded", "max_growth": 2})
    assert verify(guide / "run", code=guide).model_sha256 == result.summary()["model_sha256"]
