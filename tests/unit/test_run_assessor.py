"""Tests of evaluations: by a user's function, on clients' held-out examples, and of personal models."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgefl.devices.fleet import ClientInfo
from edgefl.errors import ConfigError
from edgefl.experiment import Data, Evaluation, Experiment, Fleet, MetricGoal, Model, Stop, Training
from edgefl.learning.evaluate import RESERVED, EvalResult, OwnEvaluation, _result, evaluate
from edgefl.learning.flat import FlatModel
from edgefl.learning.partition import hold_out
from edgefl.results.grouping import FIGURES
from edgefl.run import messages
from edgefl.run.control import column
from edgefl.run.messages import NO_SCORES
from edgefl.run.workload import Workload

FLEET = Fleet(devices={"pi-4": 4})
CLIENTS = [ClientInfo(client, "pi-4", "wifi") for client in range(4)]
TRIAL = Experiment(
    fleet=FLEET,
    data=Data(name="diabetes", client_test_fraction=0.25),
    model=Model(args={"hidden": [8]}),
    training=Training(loss="mse", epochs=2),
    evaluation=Evaluation(clients="personal"),
    stop=Stop(versions=1),
)


def workload(**tables: Any) -> Workload:
    return Workload(msgspec.structs.replace(TRIAL, **tables), CLIENTS, Path())


def offer(monkeypatch: pytest.MonkeyPatch, evaluate: object = None, **functions: object) -> OwnEvaluation:
    """Make these functions importable from a module ``measuring``."""
    module = ModuleType("measuring")
    vars(module).update(functions, evaluate=evaluate)
    monkeypatch.setitem(sys.modules, "measuring", module)
    monkeypatch.setenv("EDGEFL_MODULES", "measuring")
    return OwnEvaluation("measuring:evaluate", [], seed=0)


X, Y = np.ones((6, 3), np.float32), np.full((4, 2), 2.0, np.float32)


def test_a_users_function_gets_the_test_examples_and_a_model_in_evaluation_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
        outputs = model(x)
        assert not model.training
        assert not outputs.requires_grad
        assert (x.shape, y.shape) == ((4, 3), (4, 2))
        return {
            "tensor": (outputs - y).abs().mean(), "numpy": np.float32(0.5), "whole": 3, "infinite": math.inf,
            "noise": torch.rand(()), "accuracy": math.nan, "nan": torch.tensor(math.nan),
        }  # fmt: skip

    flat = FlatModel(nn.Sequential(nn.Linear(3, 2), nn.Dropout()))
    flat.load(np.zeros(flat.size, np.float32))
    own, before = offer(monkeypatch, measure), torch.get_rng_state()
    found = own.measure(flat, X, Y)
    noise = found.pop("noise")
    assert found == {"tensor": 2.0, "numpy": 0.5, "whole": 3.0}
    assert own.measure(flat, X, Y)["noise"] == noise
    assert torch.equal(torch.get_rng_state(), before)
    assert flat.module.training


def test_a_users_function_changes_neither_the_model_nor_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(model: Any, x: Tensor, y: Tensor) -> dict[str, float]:
        found = {"first": float((model(x) - y).square().mean())}
        model[0].weight.zero_()
        model[0].bias.data = torch.ones(2)
        model[1] = nn.Flatten()
        model.calls.add_(1)
        x.mul_(2)
        y.zero_()
        return found

    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    flat, x, y = FlatModel(model), X.copy(), Y.copy()
    before, own = flat.array.copy(), offer(monkeypatch, measure)
    found = own.measure(flat, x, y)
    assert np.array_equal(flat.array, before)
    assert isinstance(model[1], nn.ReLU)
    assert model.get_buffer("calls").item() == 0  # no parameter vector holds integers
    assert (x.tolist(), y.tolist()) == (X.tolist(), Y.tolist())
    assert own.measure(flat, x, y) == found
    flat.load(np.zeros(flat.size, np.float32))
    assert own.measure(flat, x, y) == {"first": 4.0}  # the module still uses the vector's memory


def test_the_gradients_of_a_users_function_do_not_reach_its_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(model: Any, x: Tensor, y: Tensor) -> dict[str, float]:
        with torch.enable_grad():
            (model(x) - y).square().mean().backward()
        return {"norm": float(model.weight.grad.norm())}

    flat, own = FlatModel(nn.Linear(3, 2)), offer(monkeypatch, measure)
    assert own.measure(flat, X, Y) == own.measure(flat, X, Y)


def test_a_model_and_a_loss_that_change_their_inputs_do_not_change_the_examples() -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(0.5))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets.mul_(2)).square().mean()

    flat, x, y = FlatModel(Centred(3, 2)), X.copy(), Y.copy()
    found = [evaluate(flat, x, y, None, loss=loss) for _ in range(2)]
    assert found[0].loss == found[1].loss
    assert (x.tolist(), y.tolist()) == (X.tolist(), Y.tolist())


class Counting(nn.Linear):
    """A layer that divides its outputs by the number of its training steps."""

    def __init__(self) -> None:
        super().__init__(10, 1)
        self.register_buffer("steps", torch.ones((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x) / self.steps


def test_an_evaluation_does_not_depend_on_the_personal_models_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, make=lambda input_shape, classes: Counting())
    made = workload(model=Model(name="measuring:make"))
    first = made.flat.array.copy()
    found = []
    for _ in range(2):
        made.flat.load(first)
        found.append(made.assess(0, lambda: None))
    assert found[0] == found[1]


class Fragile(nn.Linear):
    """A model that fails in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise IndexError("index out of range in self")
        return super().forward(x)


def test_a_model_that_fails_on_the_test_examples_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, make=lambda input_shape, classes: Fragile(10, 1))
    found, scores = workload(model=Model(name="measuring:make")).assess(0, lambda: None)
    assert math.isnan(found.loss)
    assert found.problem == "the model cannot be evaluated: IndexError: index out of range in self"
    assert scores == NO_SCORES


def test_sys_exit_in_a_model_is_a_problem_of_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = workload()

    def exits(*_: object) -> None:
        raise SystemExit("no")

    measured.flat.module.register_forward_pre_hook(exits)
    found, _ = measured.assess(0, lambda: None)
    assert found.problem == "the model cannot be evaluated: RuntimeError: SystemExit: no"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda: {}[0], "^evaluation.function: 'measuring:evaluate' raised KeyError: 0"),
        (lambda: 3.0, r"must return a mapping of names to numbers \(got float\)"),
        (lambda: {"a": "1.5"}, r"must return numbers \(got str for 'a'\)"),
        (lambda: {"a": torch.zeros(2)}, r"must return numbers \(got Tensor for 'a'\)"),
        (lambda: {1: 1.0}, r"must return names of 1 to 32 letters \(got 1\)"),
        (lambda: {"trips": 1.0}, r"must return names that edgefl's own tables do not use \(got 'trips'\)"),
        (lambda: {"": 1.0}, r"must return names of 1 to 32 letters \(got ''\)"),
        (lambda: {"a\n": 1.0}, r"must return names of 1 to 32 letters"),
        (lambda: {"a" * 33: 1.0}, r"must return names of 1 to 32 letters"),
        (lambda: {f"m{k}": 1.0 for k in range(17)}, r"must return at most 16 metrics \(got 17\)"),
        (lambda: {"accuracy": 97.5}, r"must return an accuracy from 0 to 1 \(got 97.5\)"),
    ],
)
def test_invalid_metrics_are_one_line(monkeypatch: pytest.MonkeyPatch, returned: Any, message: str) -> None:
    own = offer(monkeypatch, lambda model, x, y: returned())
    with pytest.raises(ConfigError, match=message) as caught:
        own.measure(FlatModel(nn.Linear(3, 2)), X, Y)
    assert "\n" not in str(caught.value)


def test_the_names_of_edgefls_columns_and_figures_are_reserved() -> None:
    columns = {"version", "at_s", "wall_s", "trips", "epsilon"}
    of_sweeps = {"label", "seed", "seeds", "no_progress"}
    assert (columns | of_sweeps | {*FIGURES}) - {"accuracy", "loss"} == RESERVED


@pytest.mark.parametrize(("classes", "counted"), [(10_000, 10_000), (10_001, 0)])
def test_an_evaluation_with_any_number_of_classes_fits_a_message(classes: int, counted: int) -> None:
    found = _result(0.5, [np.ones(300 * classes, np.bool_)], np.arange(300 * classes) % classes, classes)
    counts = found.correct.tolist(), found.total.tolist()
    sent = messages.Assessed(3, found.loss, found.accuracy, *counts, {}, NO_SCORES, "")
    received = messages.decode_from_client(messages.encode(sent))
    assert isinstance(received, messages.Assessed)
    assert (received.accuracy, len(received.correct), len(received.total)) == (1.0, counted, counted)


def test_a_users_loss_and_accuracy_replace_the_default_ones() -> None:
    found = EvalResult(0.5, 0.25).with_metrics({"loss": 2.0, "accuracy": 0.75, "f1": 0.1})
    assert found == EvalResult(2.0, 0.75, metrics={"f1": 0.1})


def test_a_users_function_that_fails_is_refused_before_the_run_and_a_problem_during_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message contains a file name that is not UTF-8, as the system returns it."""
    calls: list[int] = []

    def once(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
        calls.append(len(x))
        if len(calls) > 1:
            raise OSError("no caf\udce9.csv")
        return {"mae": 1.0}

    offer(monkeypatch, once)
    evaluation = Evaluation(function="measuring:evaluate", max_examples=7)
    made = workload(evaluation=evaluation)
    found, scores = made.assess(0, lambda: None)
    assert calls == [7, 7]
    assert (found.metrics, scores) == ({}, NO_SCORES)
    assert found.problem.endswith("'measuring:evaluate' raised OSError: no caf?.csv")
    assert math.isfinite(found.loss)
    offer(monkeypatch, lambda model, x, y: 1 / 0)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        workload(evaluation=evaluation)


def test_an_evaluator_sends_a_heartbeat_before_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It also does so within a user's function: a silent evaluator would be killed as if it hung."""
    did: list[str] = []

    def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
        did.append("own")
        return {"worst": max(float((model(row) - y).abs().max()) for row in x.split(1))}

    offer(monkeypatch, one_by_one)
    made = workload(evaluation=Evaluation(function="measuring:evaluate", clients="personal"))
    first = next(made.flat.module.children())
    monkeypatch.setattr(type(first), "forward", lambda self, x: did.append("batch") or x.flatten(1))
    did.clear()
    made.assess(0, lambda: did.append("beat"))
    of = {"evaluate": did[: did.index("own")], "own": did[did.index("own") + 1 :]}
    for part in of.values():
        batches = [place for place, what in enumerate(part) if what == "batch"]
        assert len(batches) > 1
        assert all("beat" in part[last:place] for last, place in itertools.pairwise([0, *batches]))
    did.clear()
    made.flat.module(torch.zeros(1, 10))
    assert did == ["batch"]  # there is no heartbeat outside of an evaluation


def test_a_users_loss_that_fails_on_the_test_examples_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_short(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(targets) > 32:
            raise ValueError("too long " * 200)
        return (outputs - targets).square().mean()

    offer(monkeypatch, loss=only_short)
    found, scores = workload(training=Training(loss="measuring:loss")).assess(0, int)
    assert found.problem.startswith("training.loss: 'measuring:loss' raised ValueError: too long too")
    assert len(found.problem) == 500
    assert math.isnan(found.loss)
    assert scores == NO_SCORES


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (
            Stop(accuracy=0.5),
            "stop.accuracy: accuracy is not evaluated here, only loss; use stop.metric = { name",
        ),
        (
            Stop(metric=MetricGoal(name="mae", at_most=1.0)),
            "stop.metric.name: measure 'mae' not found; available: loss",
        ),
        (
            Stop(metric=MetricGoal(name="loss", at_most=-0.1)),
            "stop.metric.at_most: must be at least 0, the smallest loss, got -0.1",
        ),
    ],
)
def test_a_stop_at_a_metric_that_is_not_measured_is_refused_before_the_run(stop: Stop, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(stop=stop)
    workload(stop=Stop(metric=MetricGoal(name="loss", at_most=1.0)))
    workload(stop=Stop(accuracy=0.5), data=Data(client_test_fraction=0.2), training=Training())


def test_a_stop_at_an_accuracy_needs_an_output_for_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(input_shape: Any, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 1))

    offer(monkeypatch, make=make, loss=lambda outputs, targets: outputs.square().mean())
    tables: dict[str, Any] = {
        "data": Data(client_test_fraction=0.2),
        "model": Model(name="measuring:make"),
        "training": Training(loss="measuring:loss"),
    }
    workload(**tables)
    with pytest.raises(ConfigError, match=r"stop\.accuracy: accuracy is not evaluated here, only loss"):
        workload(stop=Stop(accuracy=0.5), **tables)


class Drifting(nn.Module):
    """A model with a buffer that changes in evaluation mode, too."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, classes)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1.0
        return self.layer(x.flatten(1))


def test_the_check_of_a_stop_at_an_accuracy_does_not_change_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, make=lambda input_shape, classes: Drifting(math.prod(input_shape), classes))
    tables: dict[str, Any] = {
        "data": Data(client_test_fraction=0.2),
        "model": Model(name="measuring:make"),
        "training": Training(),
    }
    models = [workload(stop=stop, **tables).flat.array for stop in (Stop(versions=1), Stop(accuracy=0.5))]
    assert models[0].tobytes() == models[1].tobytes()


def test_a_metric_that_is_not_finite_at_first_can_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, lambda model, x, y: {"auc": math.nan})
    stop = Stop(metric=MetricGoal(name="auc", at_least=0.9))
    workload(evaluation=Evaluation(function="measuring:evaluate"), stop=stop)


def test_each_client_holds_out_a_seeded_share_of_its_examples() -> None:
    parts = [np.arange(10), np.arange(10, 12), np.array([12])]
    train, test = hold_out(parts, 0.3, seed=1)
    assert [len(rows) for rows in train] == [7, 1, 1]
    assert [len(rows) for rows in test] == [3, 1, 0]
    for whole, mine, others in zip(parts, train, test, strict=True):
        assert sorted([*mine, *others]) == whole.tolist()
        assert np.all(np.diff(mine) > 0)
    again, other = hold_out(parts, 0.3, seed=1), hold_out(parts, 0.3, seed=2)
    assert all(map(np.array_equal, again[1], test))
    assert not all(map(np.array_equal, other[1], test))
    assert [len(rows) for rows in hold_out(parts, 0.0, seed=1)[1]] == [0, 0, 0]


def test_clients_are_evaluated_on_held_out_examples_on_which_they_never_train() -> None:
    made = workload()
    data, first = made.data, made.flat.array.copy()
    known = made.prepared()
    examples, held_out = column(known.examples).tolist(), column(known.held_out).tolist()
    assert [mine + out for mine, out in zip(examples, held_out, strict=True)] == [89, 89, 88, 88]
    assert held_out == [22, 22, 22, 22]
    assert column(known.classes).tolist() == [0, 0, 0, 0]
    _, scores = made.assess(7, int)
    assert scores.clients == [0, 1, 2, 3]
    assert scores.accuracy == scores.personal_accuracy == []
    held_out, loss = made._assessor.held_out, made._loss
    for client, rows in enumerate(held_out):
        assert not set(rows) & set(made._rows[client])
        made.flat.load(first)
        alone = evaluate(made.flat, data.train_x[rows], data.train_y[rows], None, loss=loss)
        assert alone.loss == scores.loss[client]
        made._personalise(7, client)
        own = evaluate(made.flat, data.train_x[rows], data.train_y[rows], None, loss=loss)
        assert own.loss == scores.personal_loss[client] < alone.loss


def test_max_clients_chooses_the_same_clients_each_time() -> None:
    evaluation = Evaluation(clients="global", max_clients=2)
    few = [workload(evaluation=evaluation).assess(0, int)[1] for _ in range(2)]
    assert len(few[0].clients) == 2
    assert few[0] == few[1]
    assert few[0].personal_loss == []


def test_clients_that_hold_one_example_each_cannot_be_evaluated() -> None:
    line = "evaluation.clients: no client has a test example; at least one client needs two examples"
    with pytest.raises(ConfigError, match=line):
        workload(data=Data(name="diabetes", client_test_fraction=0.5, max_examples=4))


def test_personal_models_do_not_use_the_vectors_that_a_strategys_clients_keep() -> None:
    plain, scaffold = (workload(strategy={"name": name}).assess(0, int)[1] for name in ("fedavg", "scaffold"))
    assert scaffold == plain


def test_a_personal_model_is_trained_by_the_users_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def train(model: nn.Module, examples: Any, context: Any) -> None:
        seen.append((context.client, context.version, len(examples)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        for _, y in examples.batches():
            context.step(len(y))

    offer(monkeypatch, train=train)
    made = workload(training=Training(loss="mse", epochs=1, function="measuring:train"))
    seen.clear()
    _, scores = made.assess(5, lambda: None)
    assert seen == [(0, 5, 67), (1, 5, 67), (2, 5, 66), (3, 5, 66)]
    for loss, rows in zip(scores.personal_loss, made._assessor.held_out, strict=True):
        assert loss == pytest.approx(float(np.square(made.data.train_y[rows]).mean()), rel=1e-5)
