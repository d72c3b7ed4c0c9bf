"""Tasks beyond classes as docs/tasks.md has them: regression, the next token, personal models."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

import edgefl
from edgefl import Checkpoint, Clock, Data, Evaluation, MetricGoal, Stop, Training, config
from edgefl.lab.verify import verify
from edgefl.results.record import Record

from .runs import experiment, virtual

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
EXAMPLES = dict(re.findall(r"```(?:toml|python)\n# ([\w.-]+)[^\n]*\n(.*?)```", PAGE, re.S))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """The page's files in a folder."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_numbers_are_learned_until_the_loss_is_as_asked(docs: Path) -> None:
    found = edgefl.run(config.load(docs / "regression.toml"), docs / "run").summary()
    assert found["stop_reason"] == "metric loss"
    assert found["loss"] <= 0.5
    assert (found["accuracy"], found["per_class"], found["metrics"]) == (None, [], {})
    with Record(docs / "run") as record:
        assert all(math.isnan(row.accuracy) for row in record.evaluations)
        assert record.evaluations[0].loss > 0.5


def test_the_next_token_is_learned_with_own_data_model_loss_and_measures(
    docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(docs)
    sooner = ["stop.metric={ name = 'perplexity', at_most = 5.0 }", "strategy.buffer_size=4", "training.lr=2"]
    wanted = config.change(config.load(docs / "next-token.toml"), sooner)
    found = edgefl.run(wanted, docs / "run").summary()
    assert found["stop_reason"] == "metric perplexity"
    assert found["metrics"]["perplexity"] <= 5.0
    assert 0.5 < found["accuracy"] <= 1.0
    assert found["per_class"] == []
    with Record(docs / "run") as record:
        rows = [row.metrics for row in record.evaluations]
    assert all(row.keys() == {"perplexity", "last_letter"} for row in rows)
    assert rows[0]["perplexity"] > 10
    verify(docs / "run", code=docs)


def test_personal_models_are_better_than_the_global_one_on_their_own_examples(docs: Path) -> None:
    found = edgefl.run(config.load(docs / "personal.toml"), docs / "run").summary()["on_clients"]
    assert (found["version"], found["clients"], found["measure"]) == (40, 10, "accuracy")
    assert found["global"]["worst_decile"] <= found["global"]["mean"] < found["personal"]["mean"] <= 1.0
    assert {name: profile["clients"] for name, profile in found["by_profile"].items()} == {
        "moto-g4": 4, "pixel-3a": 6
    }  # fmt: skip
    with Record(docs / "run") as record:
        assert [row.version for row in record.evaluations if row.clients] == [0, 10, 20, 30, 40]
        assert all(1 <= row.test_examples < row.examples for row in record.clients)


def test_what_is_measured_is_the_same_for_any_number_of_workers_and_changes_no_model(tmp_path: Path) -> None:
    data = Data(name="diabetes", client_test_fraction=0.2)
    tried = {
        "one": (1, Evaluation(every_versions=3, clients="personal", max_clients=4)),
        "three": (3, Evaluation(every_versions=3, clients="personal", max_clients=4)),
        "none": (2, Evaluation(every_versions=3)),
    }
    figures, rows = {}, {}
    for name, (workers, evaluation) in tried.items():
        trial = virtual(workers, data=data, training=Training(loss="huber", steps=3), evaluation=evaluation)
        figures[name] = edgefl.run(trial, tmp_path / name).summary()
        with Record(tmp_path / name) as record:
            rows[name] = [
                (row.version, row.loss, row.client_loss, row.personal_loss) for row in record.evaluations
            ]
    assert len({found["model_sha256"] for found in figures.values()}) == 1
    assert rows["one"] == rows["three"]
    assert [row[:2] for row in rows["none"]] == [row[:2] for row in rows["one"]]
    assert figures["one"]["on_clients"]["clients"] == 4
    assert figures["none"]["on_clients"] is None


def test_a_run_whose_server_was_killed_measures_the_same_and_stops_at_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = virtual(
        data=Data(name="diabetes", client_test_fraction=0.2),
        training=Training(loss="mse", steps=3),
        evaluation=Evaluation(every_versions=2, clients="personal"),
        checkpoint=Checkpoint(every_s=1e-6),
        stop=Stop(versions=200, metric=MetricGoal(name="loss", at_most=0.55)),
    )
    edgefl.run(wanted, tmp_path / "calm")
    monkeypatch.setenv("EDGEFL_FAILPOINTS", "event:0:15")
    edgefl.run(wanted, tmp_path / "killed")
    with Record(tmp_path / "killed") as record:
        assert [row.kind for row in record.incidents] == ["restart"]
    found = []
    for name in ("calm", "killed"):
        with Record(tmp_path / name) as record:
            rows = [msgspec.structs.replace(row, wall_s=0.0, accuracy=0.0) for row in record.evaluations]
            found.append((record.meta.stop_reason, record.meta.model_sha256, rows))
    assert found[0] == found[1]
    assert found[0][0] == "metric loss"


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


def test_an_evaluation_that_fails_in_the_middle_costs_its_measures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_later.py").write_text(FAILS_LATER)
    monkeypatch.chdir(tmp_path)
    evaluation = Evaluation(every_versions=4, function="failing_later:evaluate")
    found = edgefl.run(virtual(evaluation=evaluation), tmp_path / "run").summary()
    assert (found["versions"], found["incidents"]) == (12, {"evaluation": 1})
    with Record(tmp_path / "run") as record:
        rows, (incident,) = record.evaluations, record.incidents
    assert [row.metrics for row in rows] == [{"third": 1.0}, {}, {"third": -1.0}, {"third": -0.5}]
    assert all(np.isfinite(row.accuracy) for row in rows)
    assert incident.detail.startswith("version 4: evaluation.function: 'failing_later:evaluate' raised Zero")


def test_a_goal_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    wrong = virtual(
        clock=Clock(kind="virtual"), data=Data(name="diabetes"), training=Training(loss="mse"),
        stop=Stop(metric=MetricGoal(name="mae", at_most=1.0)),
    )  # fmt: skip
    with pytest.raises(edgefl.ConfigError, match="measure 'mae' not found; available: loss"):
        edgefl.run(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()
