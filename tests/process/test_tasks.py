"""Tests of the tasks in docs/tasks.md: regression, next-token prediction and personal models."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

import edgefl
from edgefl import Checkpoint, Data, Evaluation, MetricGoal, Stop, Training, config
from edgefl.lab.verify import verify
from edgefl.results.record import Record
from edgefl.run import supervisor

from .runs import experiment, virtual

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
EXAMPLES = dict(re.findall(r"```(?:toml|python)\n# ([\w.-]+)[^\n]*\n(.*?)```", PAGE, re.S))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder that contains the example files of docs/tasks.md."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_regression_is_trained_until_the_loss_reaches_its_goal(docs: Path) -> None:
    found = edgefl.run(config.load(docs / "regression.toml"), docs / "run").summary()
    assert found["stop_reason"] == "metric loss"
    assert found["loss"] <= 0.5
    assert (found["accuracy"], found["per_class"], found["metrics"]) == (None, [], {})
    with Record(docs / "run") as record:
        assert all(math.isnan(row.accuracy) for row in record.evaluations)
        assert record.evaluations[0].loss > 0.5


def test_next_tokens_are_learned_with_own_functions(docs: Path) -> None:
    faster = [
        *("stop.metric={ name = 'perplexity', at_most = 5.0 }", "strategy.buffer_size=4", "training.lr=2"),
        "model.flops_per_example=1e6",  # to count those of a GRU, torch imports modules for seconds
    ]
    wanted = config.change(config.load(docs / "next-token.toml"), faster)
    found = supervisor.run(wanted, docs / "run", quiet=True, base=docs).summary()
    assert found["stop_reason"] == "metric perplexity"
    assert found["metrics"]["perplexity"] <= 5.0
    assert 0.5 < found["accuracy"] <= 1.0
    assert found["per_class"] == []
    with Record(docs / "run") as record:
        rows = [row.metrics for row in record.evaluations]
    assert all(row.keys() == {"perplexity", "last_letter"} for row in rows)
    assert rows[0]["perplexity"] > 10
    verify(docs / "run", code=docs)


def test_personal_models_are_better_than_the_global_one_on_own_examples(docs: Path) -> None:
    wanted = config.change(config.load(docs / "personal.toml"), ["stop.versions=20"])
    found = edgefl.run(wanted, docs / "run").summary()["on_clients"]
    assert (found["version"], found["clients"], found["measure"]) == (20, 10, "accuracy")
    assert found["global"]["worst_decile"] <= found["global"]["mean"] < found["personal"]["mean"] <= 1.0
    assert {name: profile["clients"] for name, profile in found["by_profile"].items()} == {
        "moto-g4": 4, "pixel-3a": 6
    }  # fmt: skip
    with Record(docs / "run") as record:
        assert [row.version for row in record.evaluations if row.clients] == [0, 10, 20]
        assert all(1 <= row.test_examples < row.examples for row in record.clients)


def test_measures_do_not_depend_on_workers_and_kills_and_the_model_does_not_depend_on_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    personal = Evaluation(every_versions=2, clients="personal", max_clients=4)
    found, figures = {}, {}
    for name, workers, evaluation, fault in (
        ("calm", 1, personal, ""),
        ("killed", 3, personal, "event:0:15"),
        ("none", 2, Evaluation(every_versions=2), ""),
    ):
        wanted = virtual(
            workers,
            data=Data(name="diabetes", client_test_fraction=0.2),
            training=Training(loss="mse", steps=3),
            evaluation=evaluation,
            checkpoint=Checkpoint(every_s=1e-6),
            stop=Stop(versions=200, metric=MetricGoal(name="loss", at_most=0.55)),
        )
        monkeypatch.setenv("EDGEFL_FAILPOINTS", fault)
        figures[name] = edgefl.run(wanted, tmp_path / name).summary()
        with Record(tmp_path / name) as record:
            rows = [msgspec.structs.replace(row, wall_s=0.0, accuracy=0.0) for row in record.evaluations]
            found[name] = (record.meta.stop_reason, record.meta.model_sha256, rows)
            assert [row.kind for row in record.incidents] == (["restart"] if fault else [])
    assert found["calm"] == found["killed"]
    assert found["calm"][:2] == found["none"][:2]
    assert found["calm"][0] == "metric loss"
    assert [row.loss for row in found["calm"][2]] == [row.loss for row in found["none"][2]]
    assert figures["calm"]["on_clients"]["clients"] == 4
    assert figures["none"]["on_clients"] is None


def test_under_the_wall_clock_the_run_does_not_wait_for_personal_models(tmp_path: Path) -> None:
    trial = experiment(
        data=Data(name="diabetes", client_test_fraction=0.2),
        training=Training(loss="mse", steps=3),
        evaluation=Evaluation(every_versions=1, clients="personal"),
    )
    found = edgefl.run(trial, tmp_path / "run").summary()
    assert found["on_clients"]["version"] == found["evaluated_version"] == found["versions"] == 12
    with Record(tmp_path / "run") as record:
        measured = [row.version for row in record.evaluations]
    assert measured == sorted(set(measured))
    assert {0, 12} <= set(measured)


FAILS_LATER = """
calls = []


def evaluate(model, x, y):
    calls.append(0)
    return {"third": 1.0 / (3 - len(calls))}  # the trial before the run is the first call
"""


def test_an_evaluation_that_fails_during_the_run_loses_only_its_own_measures(tmp_path: Path) -> None:
    (tmp_path / "failing_later.py").write_text(FAILS_LATER)
    evaluation = Evaluation(every_versions=4, function="failing_later:evaluate")
    wanted = virtual(evaluation=evaluation)
    found = supervisor.run(wanted, tmp_path / "run", quiet=True, base=tmp_path).summary()
    assert (found["versions"], found["incidents"]) == (12, {"evaluation": 1})
    with Record(tmp_path / "run") as record:
        rows, (incident,) = record.evaluations, record.incidents
    assert [row.metrics for row in rows] == [{"third": 1.0}, {}, {"third": -1.0}, {"third": -0.5}]
    assert all(np.isfinite(row.accuracy) for row in rows)
    assert incident.detail.startswith("version 4: evaluation.function: 'failing_later:evaluate' raised Zero")


FEWER = """
import torch

def train(model, examples, context):
    scale = 1 - 0.01 * context.left
    for x, y in examples.batches():
        context.criterion(model(x), y).backward()
        context.step(len(y))
        break
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
"""


def test_verify_repeats_trips_that_make_fewer_steps_than_a_poll_allows(tmp_path: Path) -> None:
    """The model that the function returns depends on the number of steps that the trip allows."""
    (tmp_path / "fewer.py").write_text(FEWER)
    wanted = virtual(
        strategy={"name": "favano", "participants": 2, "interval_s": 5.0},
        training=Training(function="fewer:train"),
        stop=Stop(versions=4),
    )
    supervisor.run(wanted, tmp_path / "run", quiet=True, base=tmp_path)
    with Record(tmp_path / "run") as record:
        assert record.trips["steps"].max() == 1
    assert verify(tmp_path / "run", code=tmp_path).versions == 4
