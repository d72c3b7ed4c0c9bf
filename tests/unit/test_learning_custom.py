"""Tests of training by a user's function: the bits of its result, its number of steps, its errors."""

from __future__ import annotations

import contextlib
import math
import os

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from edgefl.devices import load_device
from edgefl.errors import ConfigError, TrainingError
from edgefl.experiment import Training
from edgefl.learning.custom import CustomTrainer
from edgefl.learning.flat import FlatModel
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer
from edgefl.learning.work import batch_work, traced_work
from edgefl.loading import load_attribute
from edgefl.run.connection import of_training
from edgefl.run.workload import own_training
from edgefl.strategies import resolve
from edgefl.strategies.base import TripInputs
from edgefl.strategies.fedbuff import FedBuff

CLASSES = 3
ROWS = np.arange(3, 26)


def data():
    rng = np.random.default_rng(5)
    return rng.normal(size=(40, 6)).astype(np.float32), rng.integers(CLASSES, size=40)


def model():
    torch.manual_seed(3)
    return FlatModel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, CLASSES)))


def sgd(model, examples, context, forward_passes=1):
    made = optim.SGD(model.parameters(), lr=context.rule.lr, momentum=context.rule.momentum)
    for x, y in examples.batches():
        *_, logits = (model(x) for _ in range(forward_passes))
        loss = cross_entropy(logits, y)
        made.zero_grad()
        loss.backward()
        made.step()
        context.step(len(y), loss)


def run(function, rule=None, flat=None, **more):
    flat, (x, y) = flat or model(), data()
    trainer = CustomTrainer(flat, function, "mine:train", rule or LocalRule(epochs=2, batch_size=8, lr=0.1))
    given = more.pop("given", None) or TripInputs(7, flat.array.copy())
    return trainer.run(x, y, ROWS, 4, 2, given, np.random.default_rng(1), **more)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_in_a_users_function_has_the_bits_of_the_built_in_training(momentum):
    rule = LocalRule(epochs=2, batch_size=8, lr=0.1, momentum=momentum)
    built_in, users, (x, y) = model(), model(), data()
    expected = Trainer(built_in).run(x, y, rule, np.random.default_rng(1), rows=ROWS)
    assert run(sgd, rule, users) == expected
    assert users.array.tobytes() == built_in.array.tobytes()


def test_the_function_receives_the_clients_examples_and_vectors():
    x, y = data()
    seen = {}

    def train(model, examples, context):
        seen.update(client=context.client, trip=context.trip, version=context.version)
        assert len(examples) == len(ROWS)
        np.testing.assert_array_equal(examples.x.numpy(), x[ROWS])
        np.testing.assert_array_equal(examples.y.numpy(), y[ROWS])
        for vector in (context.start, context.vectors["c"]):
            with pytest.raises(ValueError, match="read-only"):
                vector[0] = 1.0
        assert model.training
        context.send["c"] += context.vectors["c"]
        context.kept["own"] = context.kept["own"] + 1.0  # writes into the vector

    flat = model()
    c, send, kept = (np.full(flat.size, value, np.float32) for value in (3.0, 0.0, 1.0))
    run(train, flat=flat, given=TripInputs.of(7, flat.array.copy(), {"c": c}, {"c": send}, {"own": kept}))
    assert seen == {"client": 4, "trip": 2, "version": 7}
    assert (send == 3.0).all()
    assert (kept == 2.0).all()


def test_each_epoch_has_every_example_once_in_a_new_order():
    orders = []

    def train(model, examples, context):
        for _ in range(2):
            batches = list(examples.batches(size=10, epochs=1))
            assert [len(y) for _, y in batches] == [10, 10, 3]
            orders.append(torch.cat([x for x, _ in batches]))

    run(train)
    assert not torch.equal(*orders)
    assert torch.equal(*(torch.sort(order[:, 0]).values for order in orders))


def test_missing_steps_take_their_declared_time_and_are_not_reported_as_made():
    accounted = []

    def train(model, examples, context):
        for number, (_, y) in enumerate(examples.batches()):
            assert context.step(len(y), number) == (context.left > 0)
            if number == 1:
                break
        context.log(accuracy=0.5, lost=math.inf, tensor=torch.tensor(2.0), better=torch.tensor(True))

    result = run(train, done=accounted.append)
    assert accounted == [8, 8, 7, 8, 8, 7]  # as declared
    assert (result.steps, result.examples, result.loss) == (2, 16, 0.5)
    assert result.metrics["accuracy"] == 0.5
    assert result.metrics["tensor"] == 2.0
    assert type(result.metrics["better"]) is float  # the server refuses a message with a bool
    assert math.isnan(result.metrics["lost"])


def test_a_trip_that_is_cut_short_has_no_further_batches():
    accounted = []
    assert run(sgd, steps=2, done=accounted.append).steps == 2
    assert accounted == [8, 8]
    result = run(lambda *_: pytest.fail("nothing to train"), steps=0)
    assert result.steps == 0
    assert math.isnan(result.loss)


def raising(error):
    def train(model, examples, context):
        raise error

    return train


SEVENTEEN = {f"m{number}": 0.0 for number in range(17)}
PLACE = r"'mine:train' \(test_learning_custom.py:\d+\)"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, e, c: (sgd(m, e, c), c.step(1)), rf"{PLACE} made more steps than the 6 that "),
        (lambda m, e, c: list(e.batches()), rf"{PLACE} made no step in an epoch: call context.step"),
        (raising(KeyError("w")), rf"{PLACE} raised KeyError: 'w'$"),
        (lambda m, e, c: c.step(0), r"raised ValueError: step: examples must be at least 1 \(got 0\)$"),
        (raising(SystemExit(3)), r"raised SystemExit: 3$"),
        (raising(KeyboardInterrupt), r"\) raised KeyboardInterrupt$"),
        (
            lambda m, e, c: c.log(**SEVENTEEN),
            r"ValueError: log accepts at most 16 metrics, with names of .* letters \(got 17 metrics\)$",
        ),
    ],
)
def test_an_error_in_the_function_is_one_line_with_file_and_line(function, message):
    with pytest.raises(TrainingError, match=message):
        run(function)


class Cancelled(Exception):
    pass


def returns(model, examples, context):
    with contextlib.suppress(Exception):
        sgd(model, examples, context)


def continues(model, examples, context):
    for _ in range(1000):
        with contextlib.suppress(Exception):
            context.step(1)


@pytest.mark.parametrize("function", [sgd, returns, continues])
def test_a_cancelled_trip_ends_even_if_the_function_suppresses_exceptions(function):
    seen = []

    def done(examples):
        seen.append(examples)
        raise Cancelled

    with pytest.raises(Cancelled):
        run(function, done=done)
    assert len(seen) == 1


def test_the_cost_of_a_step_is_the_work_of_the_function():
    flat, (x, y) = model(), data()

    def cost(function):
        def train(batch):
            rule = LocalRule(steps=3, batch_size=batch)
            trainer = CustomTrainer(flat, function, "mine", rule)
            result = trainer.run(x, y, ROWS, 0, 0, TripInputs(0, flat.array), np.random.default_rng(0))
            return result.steps, result.examples

        return traced_work(train, 8).at(8)

    plain, built_in = cost(sgd), batch_work(flat.module, (6,)).at(8)
    assert plain.matmul_flop == pytest.approx(built_in.matmul_flop)
    forward = 2.0 * 8 * (6 * 8 + 8 * CLASSES)
    assert cost(lambda *given: sgd(*given, forward_passes=2)).matmul_flop == pytest.approx(
        plain.matmul_flop + forward
    )


def test_a_function_with_batches_of_its_own_size_may_refuse_every_other_one():
    layer = nn.Linear(3, 2)

    def train(batch):
        if batch > 2:
            raise TrainingError("made more steps than the 1 that [training] allows this trip")
        layer(torch.zeros(2, 3)).sum().backward()
        return 1, 2

    found = traced_work(train, 2)
    assert found.at(1) == found.at(9) == found.fixed
    assert found.fixed.matmul_flop > 0


@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_sgd_takes_as_long_as_the_built_in_one(foreach):
    """Mutant: an update of a parameter is counted as moved bytes, although it takes a hundred times as long
    in MNN."""
    module, x, y = nn.Linear(1000, 1000), torch.ones(32, 1000), torch.zeros(32, dtype=torch.int64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=foreach)

    def train(batch):
        for first in range(0, 32, batch):
            optimizer.zero_grad()
            cross_entropy(module(x[first : first + batch]), y[first : first + batch]).backward()
            optimizer.step()
        return 32 // batch, 32

    own, built_in = traced_work(train, 8).at(8), batch_work(module, (1000,), meta=False).at(8)
    assert own.parameters == pytest.approx(built_in.parameters)
    for runtime in ("mnn", "torch"):
        seconds = load_device("pixel-4").time_model(runtime).seconds
        assert seconds(own) == pytest.approx(seconds(built_in), rel=0.15)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("through", ["parameter", "data", "detached"])
def test_every_update_of_a_parameter_is_counted_in_a_runs_model(through, whole):
    """In a run, all parameters are views of one vector. Mutants: only one parameter is counted; changes of
    ``parameter.data`` are counted as moved bytes."""
    flat, x = model(), torch.ones(32, 6)
    if whole:
        flat.module.flops_per_example = 1e6

    def train(batch):
        for first in range(0, 32, batch):
            flat.module(x[first : first + batch]).sum().backward()
            for parameter in flat.module.parameters():
                views = {"parameter": parameter, "data": parameter.data, "detached": parameter.detach()}
                with torch.no_grad():
                    views[through].sub_(parameter.grad, alpha=0.1)
        return 32 // batch, 32

    assert traced_work(train, 8, module=flat.module).at(8).parameters == flat.trainable


@pytest.mark.parametrize("whole", [False, True])
def test_the_operations_that_a_layer_declares_are_part_of_the_work_of_the_function(whole):
    """Fails if the declared operations are left out, or if the number that the whole module declares is added
    to the operations counted in its layers."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, CLASSES))
    (module if whole else module[1]).flops_per_example = 1e6
    x = torch.ones(32, 6)

    def work(forward_passes):
        def train(batch):
            for first in range(0, 32, batch):
                for _ in range(forward_passes):
                    with torch.no_grad():
                        module(x[first : first + batch])
                module(x[first : first + batch]).sum().backward()
            return 32 // batch, 32

        return traced_work(train, 8, module=module).at(8).matmul_flop

    expected = batch_work(module, (6,), loss=torch.sum).at(8).matmul_flop
    assert expected >= 8e6
    assert work(forward_passes=0) == pytest.approx(expected)
    counted = 0 if whole else 2 * 8 * (6 * 8 + 8 * CLASSES)
    assert work(forward_passes=1) == pytest.approx(expected + 8e6 / 3 + counted)
    assert not module._forward_hooks
    assert not module[1]._forward_hooks


class OwnWay(FedBuff):
    def train(self, model, examples, context):
        raise NotImplementedError


def test_the_experiments_training_function_is_loaded_or_refused(tmp_path):
    (tmp_path / "my_train.py").write_text(
        "def train(model, examples, context): ...\nnumber = 3\n"
        "async def later(model, examples, context): ...\n"
        "def lazy(model, examples, context): yield\n"
        "def two(model, examples): ...\n"
    )

    def named(name):
        return Training(function=f"my_train:{name}")

    plain, scaffold = resolve({"name": "fedbuff"}), resolve({"name": "scaffold"})
    assert own_training(Training(), plain, tmp_path, 1) is None
    train, loaded = named("train"), load_attribute("my_train:train", "training.function", [tmp_path])
    assert own_training(train, plain, tmp_path, 1) == (loaded, "my_train:train")
    assert own_training(Training(), OwnWay(), tmp_path, 1)[1] == "OwnWay.train"
    for training, strategy, message in [
        (train, OwnWay(), r"^training.function: strategy OwnWay trains in its own way; leave out 'my_"),
        (train, scaffold, r"^training.function: strategy Scaffold adds terms to SGD's"),
        (named("number"), plain, r"must be a function \(got int\)$"),
        (named("trian"), plain, r"did you mean 'train'\?"),
        (named("later"), plain, r"^'my_train:later' is an async function; calling"),
        (named("lazy"), plain, r"^'my_train:lazy' is a generator function \(it"),
        (
            named("two"),
            plain,
            r"^'my_train:two' must take three arguments, \(model, examples, context\): too many",
        ),
        (Training(function="nowhere:train"), plain, r"^training.function: module 'nowhere' not found"),
        (Training(function="my_train:train", precision="bfloat16"), plain, r"^training.precision: "),
        (Training(function="flower:app:app"), scaffold, r"terms to SGD's gradient that 'flower:"),
    ]:
        with pytest.raises(ConfigError, match=message):
            own_training(training, strategy, tmp_path, 1)


def by_hand(assign):
    """Return a function that computes w − lr·g as one vector, which ``assign`` writes into the model."""

    def train(model, examples, context):
        parameters = list(model.parameters())
        for x, y in examples.batches():
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            gradient = parameters_to_vector([parameter.grad for parameter in parameters])
            with torch.no_grad():
                assign(model, parameters_to_vector(parameters) - context.rule.lr * gradient)
            context.step(len(y))

    return train


def in_place(model, vector):
    parameters = list(model.parameters())
    for one, part in zip(parameters, vector.split([each.numel() for each in parameters]), strict=True):
        one.copy_(part.view_as(one))


def rebound(model, vector):
    vector_to_parameters(vector, model.parameters())


def test_a_lack_of_memory_in_the_function_ends_the_process_as_in_the_built_in_training():
    def lacks(model, examples, context):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    with pytest.raises(TrainingError, match="raised RuntimeError: DefaultCPUAllocator") as caught:
        run(lacks)
    assert not of_training(caught.value)
    assert of_training(TrainingError("'mine:train' raised ValueError"))


def test_hooks_on_gradients_that_the_model_registers_itself_stay():
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, CLASSES))
    module[0].weight.register_hook(torch.zeros_like)  # its 48 numbers, the first of the vector, are frozen
    flat = FlatModel(module)
    first = flat.array.copy()
    for _ in range(2):
        run(sgd, flat=flat)
        assert (flat.array != first)[48:].all()
        assert (flat.array == first)[:48].all()


def test_each_trip_starts_with_gradients_of_zero():
    """The function clears the gradients after each step, as PyTorch's tutorial does, but not before the first
    step."""

    def clears_after(model, examples, context):
        made = optim.SGD(model.parameters(), lr=context.rule.lr)
        for x, y in examples.batches():
            loss = cross_entropy(model(x), y)
            loss.backward()
            made.step()
            made.zero_grad()
            context.step(len(y), loss)

    after, before = model(), model()
    for _ in range(2):
        assert run(clears_after, flat=after) == run(sgd, flat=before)
        assert after.array.tobytes() == before.array.tobytes()


def test_a_term_of_the_gradient_may_depend_on_the_weights():
    """Mutant: the vector of gradients cannot be set to 0, because torch's autograd has recorded the addition
    in it."""

    def decays(model, examples, context):
        made = optim.SGD(model.parameters(), lr=context.rule.lr)
        for x, y in examples.batches():
            cross_entropy(model(x), y).backward()
            weight = next(model.parameters())
            weight.grad.add_(weight, alpha=0.1)
            made.step()
            made.zero_grad()
            context.step(len(y))

    flat, fresh = model(), model()
    first = flat.array.copy()
    run(decays, flat=flat)
    flat.load(first)
    for each in (flat, fresh):
        run(decays, flat=each)
    assert flat.array.tobytes() == fresh.array.tobytes() != first.tobytes()


def test_a_function_may_replace_tensors_and_the_next_trip_starts_with_the_original_ones():
    """Mutants: the original tensors are restored before the result is copied, which sends the start model;
    they are not restored after the copy, which loses the result of trip 2."""
    trained, wanted = model(), model()
    for _ in range(2):
        assert run(by_hand(rebound), flat=trained).steps == run(by_hand(in_place), flat=wanted).steps == 6
        assert trained.array.tobytes() == wanted.array.tobytes()


@pytest.mark.parametrize("assign", [
    lambda layer, values: setattr(layer, "weight", nn.Parameter(values)),
    lambda layer, values: setattr(layer.weight, "data", values.t().contiguous().t()),
    lambda layer, values: setattr(layer.double().weight, "data", values.double()),
])  # fmt: skip
def test_a_tensor_with_other_memory_strides_or_precision_is_sent(assign):
    values = torch.arange(48.0).view(8, 6)
    flat = model()
    run(lambda module, *_: assign(module[0], values), flat=flat)
    assert flat.array[:48].tolist() == list(range(48))


def test_tensors_whose_memory_was_exchanged_are_sent_exchanged():
    flat = FlatModel(nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)))
    first = flat.array.reshape(2, -1).copy()

    def swap(module, examples, context):
        one, two = module[0].weight, module[1].weight
        one.data, two.data = two.data, one.data

    run(swap, flat=flat)
    assert (flat.array.reshape(2, -1) == first[::-1]).all()


@pytest.mark.parametrize(
    ("weight", "got"),
    [
        (None, r"\(got none\)"),
        (torch.zeros(2, 2), r"\(got float32 of shape \(2, 2\)\)"),
        (torch.ones(8, 6).long(), r"\(got int64 of"),
    ],
)
def test_a_missing_tensor_or_one_of_wrong_shape_or_type_is_an_error_with_file_and_line(weight, got):
    def spoils(module, examples, context):
        del module[0].weight
        if weight is not None:
            module[0].weight = weight

    line = spoils.__code__.co_firstlineno
    where = rf"^'mine:train' \(test_learning_custom.py:{line}\) left no .* shape \(8, 6\) in '0.weight' "
    with pytest.raises(TrainingError, match=where + got):
        run(spoils)


SPOILERS = {
    "delete": lambda module, layer, weight: delattr(layer, "weight"),
    "replace": lambda module, layer, weight: setattr(layer, "weight", nn.Parameter(torch.zeros_like(weight))),
    "freeze": lambda module, layer, weight: weight.requires_grad_(False),
    "double": lambda module, layer, weight: module.double(),
    "no grad": lambda module, layer, weight: torch.set_grad_enabled(False),
    "default": lambda module, layer, weight: torch.set_default_dtype(torch.float64),
    "hook": lambda module, layer, weight: layer.register_forward_hook(
        lambda *_: torch.zeros(1, requires_grad=True)
    ),
    "grad hook": lambda module, layer, weight: weight.register_hook(torch.zeros_like),
    "accumulate hook": lambda module, layer, weight: weight.register_post_accumulate_grad_hook(
        lambda one: one.grad.zero_()
    ),
    "layer": lambda module, layer, weight: module.append(nn.Dropout(0.9)),
    "eval": lambda module, layer, weight: (
        setattr(module, "train", lambda mode=True: nn.Module.train(module, False)),
        module.eval(),
    ),
    "forward": lambda module, layer, weight: setattr(layer, "forward", torch.zeros_like),
    "parametrize": lambda module, layer, weight: nn.utils.parametrizations.weight_norm(layer),
    "parameter": lambda module, layer, weight: setattr(layer, "extra", nn.Parameter(torch.ones(3))),
    "buffer": lambda module, layer, weight: layer.register_buffer("extra", torch.ones(3)),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_changes_to_the_module_end_with_the_trip(spoil):
    """The next trip of the process may be for another client."""

    def spoils(module, examples, context):
        weight = next(module.parameters())
        layer = next(part for part in module.modules() if weight in set(part.parameters(recurse=False)))
        spoil(module, layer, weight)
        raise ValueError("and it fails")

    rule, flat = LocalRule(epochs=2, batch_size=8, lr=0.1), model()
    first, fresh = flat.array.copy(), model()
    with pytest.raises(TrainingError, match="and it fails"):
        run(spoils, rule, flat)
    flat.load(first)
    layers, expected = ([name for name, _ in each.module.named_modules()] for each in (flat, fresh))
    assert layers == expected
    assert flat.module.state_dict().keys() == fresh.module.state_dict().keys()
    assert run(sgd, rule, flat) == run(sgd, rule, fresh)
    assert flat.array.tobytes() == fresh.array.tobytes()
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)


def test_a_child_that_the_function_forks_does_not_continue_as_the_client():
    reading, writing = os.pipe()

    def forks(model, examples, context):
        if os.fork() == 0:
            return
        os.wait()

    flat, x, y = FlatModel(nn.Linear(2, 3)), np.zeros((4, 2), np.float32), np.arange(4) % 3
    trainer = CustomTrainer(flat, forks, "mine:forks", LocalRule(epochs=1, batch_size=2))
    trainer.run(x, y, np.arange(4), 0, 0, TripInputs(0, flat.array.copy()), np.random.default_rng(0))
    os.write(writing, b".")
    assert os.read(reading, 2) == b"."
    os.close(reading)
    os.close(writing)
