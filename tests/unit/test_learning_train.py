"""Tests of a client's training and of evaluation."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import edgefl
from edgefl import Clock, Fleet, Stop, config
from edgefl.errors import ConfigError
from edgefl.experiment import Training
from edgefl.learning.arithmetic import Arithmetic
from edgefl.learning.evaluate import evaluate
from edgefl.learning.flat import FlatModel
from edgefl.learning.rule import LocalRule, Work
from edgefl.learning.train import Trainer
from edgefl.strategies.base import LocalTerms, TripInputs

ROWS, WIDTH, CLASSES = 22, 5, 3


def examples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((ROWS, WIDTH)).astype(np.float32), rng.integers(0, CLASSES, ROWS)


def network(dropout: float = 0.0) -> nn.Module:
    rng = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, CLASSES))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    return module


def batches_of(rule: LocalRule, rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Oracle for the batches of a rule: each epoch shuffles the rows and cuts them into batches."""
    rng.integers(2**63)
    epochs, order = [], []
    for size in rule.batches(len(rows)):
        if not order:
            order = list(rng.permutation(rows))
        epochs.append(np.array(order[:size]))
        del order[:size]
    return epochs


def test_many_steps_are_counted_without_a_loop_over_them() -> None:
    rule = LocalRule(steps=10**18, batch_size=4)
    assert rule.sizes(6) == {4: 10**18 // 2, 2: 10**18 // 2}
    assert rule.work(6) == Work(10**18, 3 * 10**18)


def test_the_proximal_term_pulls_to_the_downloaded_model_not_to_that_of_begin_trip() -> None:
    x, y = examples()
    flat, rule = FlatModel(network()), LocalRule(steps=1, batch_size=ROWS, lr=0.1)
    downloaded = flat.array.copy()
    began = downloaded + np.float32(0.25)
    trained = {}
    for mu in (0.0, 0.5):
        flat.load(began)
        inputs = TripInputs(0, downloaded)
        own = replace(rule, terms=LocalTerms(prox_mu=mu))
        Trainer(flat).run(x, y, own, np.random.default_rng(1), given=inputs)
        trained[mu] = flat.array.copy()
    pull = np.full(flat.size, 0.1 * 0.5 * 0.25)
    assert trained[0.0] - trained[0.5] == pytest.approx(pull, abs=1e-6)


def test_a_trip_sets_all_parts_of_the_module_to_training_mode() -> None:
    x, y = examples()
    seen: list[bool] = []
    module = network(dropout=0.5)
    module[2].register_forward_hook(lambda dropout, *_: seen.append(dropout.training))
    flat = FlatModel(module)
    trainer, rule = Trainer(flat), LocalRule(steps=1, batch_size=4)
    for left in (None, module[2], module):
        if left is not None:
            left.eval()
        trainer.run(x, y, rule, np.random.default_rng(0))
    assert seen == [True, True, True]
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("prox_mu", [0.0, 0.3])
@pytest.mark.parametrize("lr_normalization", [False, True])
def test_training_is_torch_sgd(momentum, weight_decay, prox_mu, lr_normalization):
    x, y = examples()
    kept = {"momentum": momentum, "weight_decay": weight_decay}
    terms = LocalTerms(prox_mu=prox_mu)
    rule = LocalRule(epochs=2, batch_size=8, lr=0.1, **kept, terms=terms, lr_normalization=lr_normalization)
    flat = FlatModel(network())
    result = Trainer(flat).run(x, y, rule, np.random.default_rng(9))

    module = network()
    start = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, **kept)
    losses = []
    for rows in batches_of(rule, np.arange(ROWS), np.random.default_rng(9)):
        optimizer.param_groups[0]["lr"] = 0.1 * len(rows) / 8 if lr_normalization else 0.1
        optimizer.zero_grad()
        loss = cross_entropy(module(torch.from_numpy(x[rows])), torch.from_numpy(y[rows]))
        losses += [loss.item()] * len(rows)
        pulls = zip(module.parameters(), start, strict=True)
        (loss + prox_mu / 2 * sum(((now - then) ** 2).sum() for now, then in pulls)).backward()
        optimizer.step()

    expected = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    np.testing.assert_allclose(flat.array, expected.numpy(), rtol=0, atol=2e-6)
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert (result.steps, result.examples) == (6, 2 * ROWS)


def test_a_trip_depends_only_on_its_start_and_seed():
    x, y = examples()
    rule = LocalRule(steps=4, batch_size=8, momentum=0.9, terms=LocalTerms(prox_mu=0.1), weight_decay=0.01)
    flat = FlatModel(network(dropout=0.4))
    start, trainer = flat.array.copy(), Trainer(flat)
    trips = []
    for seed, others in ((1, 5), (2, 5), (1, 6)):
        torch.manual_seed(others)  # torch's own stream is neither used nor moved
        before = torch.get_rng_state()
        flat.load(start)
        result = trainer.run(x, y, rule, np.random.default_rng(seed))
        trips.append((flat.array.tobytes(), result))
        assert torch.equal(torch.get_rng_state(), before)
    assert trips[0] == trips[2]
    assert trips[0] != trips[1]


def test_training_uses_only_the_examples_in_rows():
    x, y = examples()
    rows = np.array([1, 4, 5, 11, 20])
    own, chosen = FlatModel(network()), FlatModel(network())
    rule = LocalRule(epochs=3, batch_size=2)
    chosen_result = Trainer(chosen).run(x, y, rule, np.random.default_rng(4), rows=rows)
    own_result = Trainer(own).run(x[rows], y[rows], rule, np.random.default_rng(4))
    assert chosen_result == own_result
    np.testing.assert_array_equal(chosen.array, own.array)


def test_done_is_called_for_every_step_and_may_stop_the_trip():
    x, y = examples()

    class Stop(Exception):
        pass

    seen: list[int] = []

    def done(n: int) -> None:
        seen.append(n)
        if len(seen) == 4:
            raise Stop

    flat = FlatModel(network(dropout=0.5))
    before = torch.get_rng_state()
    with pytest.raises(Stop):
        Trainer(flat).run(x, y, LocalRule(epochs=9, batch_size=8), np.random.default_rng(0), done)
    assert seen == [8, 8, 6, 8]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_diverging_trip_returns_its_loss():
    x, y = examples()
    flat = FlatModel(network())
    result = Trainer(flat).run(x * np.float32(np.inf), y, LocalRule(steps=5), np.random.default_rng(0))
    assert result.steps == 5
    assert not np.isfinite(result.loss)


@given(
    examples=st.integers(1, 300),
    batch_size=st.integers(1, 64),
    steps=st.none() | st.integers(1, 60),
    epochs=st.none() | st.integers(1, 5),
    cut=st.none() | st.integers(0, 40),
)
def test_batches_and_their_counts_follow_the_rule(examples, batch_size, steps, epochs, cut):
    rule = LocalRule(steps=steps, epochs=None if steps else epochs, batch_size=batch_size)
    sizes = list(rule.batches(examples))
    assert rule.work(examples) == Work(len(sizes), sum(sizes))
    assert all(1 <= size <= min(batch_size, examples) for size in sizes)
    if steps is None:
        assert sum(sizes) == examples * (epochs or 1)
    else:
        assert len(sizes) == steps
    assert list(rule.batches(examples, 400))[: len(sizes)] == sizes[:400]
    assert len(list(rule.batches(examples, 400))) == 400
    assert list(rule.sizes(examples, cut).items()) == list(Counter(rule.batches(examples, cut)).items())


def test_the_rule_has_the_values_of_the_experiments_training():
    values = {"steps": 7, "batch_size": 4, "lr": 0.2, "momentum": 0.3, "weight_decay": 0.4}
    values["lr_normalization"] = True
    terms = LocalTerms(prox_mu=0.5)
    assert LocalRule.of(Training(**values), terms) == LocalRule(**values, terms=terms)


@pytest.mark.parametrize("batch", [1, 7, 22, 1000])
def test_evaluation_is_the_same_for_every_batch_size(batch):
    x, y = examples()
    module = network(dropout=0.9)
    result = evaluate(FlatModel(module), x, y, CLASSES, batch=batch)
    module.eval()
    with torch.no_grad():
        logits = module(torch.from_numpy(x))
    guesses = logits.argmax(1).numpy()
    assert result.loss == pytest.approx(cross_entropy(logits, torch.from_numpy(y)).item(), rel=1e-5)
    assert result.accuracy == (guesses == y).mean()
    assert result.correct.tolist() == [int(((guesses == y) & (y == c)).sum()) for c in range(CLASSES)]
    assert result.total.tolist() == np.bincount(y, minlength=CLASSES).tolist()
    assert result.correct.dtype == result.total.dtype == np.int64


def test_evaluation_changes_neither_the_vector_nor_the_mode():
    module = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    flat = FlatModel(module)
    before = flat.array.copy()
    module.train()
    evaluate(flat, *examples(), CLASSES)
    assert module.training
    np.testing.assert_array_equal(flat.array, before)


def test_labels_out_of_range_and_empty_data_are_refused():
    x, y = examples()
    flat = FlatModel(network())
    with pytest.raises(ValueError, match=r"labels must be in \[0, 2\) \(got 0 to 2\)"):
        evaluate(flat, x, y, classes=2)
    with pytest.raises(ValueError, match="at least one example"):
        evaluate(flat, x[:0], y[:0], CLASSES)
    with pytest.raises(ValueError, match="rows must contain at least one example"):
        Trainer(flat).run(x, y, LocalRule(), np.random.default_rng(0), rows=np.empty(0, np.int64))


PROGRAM = """
import hashlib, os, sys
import numpy as np, torch
torch.set_num_threads(1)
from edgefl.experiment import Data, Model
from edgefl.learning.data import load_data
from edgefl.learning.flat import FlatModel
from edgefl.learning.models import make_model
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer
from edgefl.learning.evaluate import evaluate
from edgefl.learning.work import batch_work
from edgefl.seeds import stream

def say(line):
    os.write(1, f"{line}\\n".encode())  # one call, so that the lines of two children do not mix

def trip():
    flat.load(start)
    result = trainer.run(data.train_x, data.train_y, rule, stream(0, "batches", 1, 2))
    test = evaluate(flat, data.test_x, data.test_y, data.classes)
    return f"{hashlib.sha256(flat.array.tobytes()).hexdigest()} {result} {test.loss} {test.correct.tolist()}"

data = load_data(Data(max_examples=128), seed=0)
rule = LocalRule(steps=3, batch_size=16, momentum=0.9)
for model in sys.argv[1:]:
    flat = FlatModel(make_model(Model(name=model), data.input_shape, data.classes, seed=0))
    batch_work(flat.module, data.input_shape, meta=False)
    trainer, start = Trainer(flat), flat.array.copy()
    say(trip())
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            say(trip())
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    say(trip())
say(f"compiler {'torch._dynamo' in sys.modules} sklearn {'sklearn' in sys.modules}")
say(f"threads {len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 1}")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children_train_to_the_parents_bits():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, "mlp", "cnn-groupnorm"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    *trips, imported, threads = done.stdout.splitlines()
    assert len(trips) == 8
    assert len(set(trips[:4])) == len(set(trips[4:])) == 1
    # Each client inherits the modules that its parent has imported. torch's compiler would add 60 MiB to each
    # client, and sklearn would start OpenMP threads.
    assert imported == "compiler False sklearn False"
    assert threads == "threads 1"


RULE = LocalRule(steps=4, batch_size=8, momentum=0.9, terms=LocalTerms(prox_mu=0.1))


class Probe(nn.Conv2d):
    """A convolution that records the data type and memory format of its outputs."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 4, 3)
        self.seen: set[tuple[torch.dtype, bool]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        self.seen.add((made.dtype, made.is_contiguous(memory_format=torch.channels_last)))
        return made


def probed(channels: int, dropout: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        rest = nn.Dropout(dropout), nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, 3)
        return nn.Sequential(Probe(channels), nn.ReLU(), *rest)


def trained(
    channels: int = 1, *, dropout: float = 0.0, moved: bool = False, **choices: Any
) -> tuple[FlatModel, float]:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((24, channels, 8, 8)).astype(np.float32)
    flat = FlatModel(probed(channels, dropout))
    trainer = Trainer(flat, arithmetic=Arithmetic(**choices))
    y = rng.integers(0, 3, 24)
    if moved:
        trainer.run(x, y, RULE, np.random.default_rng(1))  # as the zygote does before it moves the model
        flat.load(FlatModel(probed(channels, dropout)).array)
        flat.move(torch.device("cpu"))
    loss = trainer.run(x, y, RULE, np.random.default_rng(3)).loss
    return flat, loss + evaluate(flat, x, y, 3).loss


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_layers_use_the_given_precision_and_format(channels: int, precision: str, memory_format: str) -> None:
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


def test_a_model_on_a_device_trains_to_the_same_bits() -> None:
    """Makes the copies to a GPU and back, but with the CPU in place of the GPU."""
    here, loss = trained(dropout=0.3)
    there, its_loss = trained(dropout=0.3, moved=True)
    assert there.vector.data_ptr() != there.array.ctypes.data
    assert there.array.tobytes() == here.array.tobytes()
    assert its_loss == loss
    assert all(tensor.data_ptr() != 0 for tensor in copy.deepcopy(there.module).parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_on_a_host_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"training\.device: must be 'cpu' here \(.+\), got 'cuda'"):
        Arithmetic.of(Training(device="cuda")).check()


def test_cuda_is_refused_under_the_wall_clock() -> None:
    tables: dict[str, Any] = {"fleet": Fleet(devices={"pixel-4": 2}), "stop": Stop(versions=1)}
    tables["training"] = Training(device="cuda")
    config.validate(edgefl.Experiment(**tables))
    with pytest.raises(ConfigError, match=r"training\.device: must be 'cpu' if clock\.kind = 'wall'"):
        config.validate(edgefl.Experiment(**tables, clock=Clock(kind="wall")))


class Ragged(nn.Module):
    """A module with a sparse gradient, a layer that is used twice, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embedding = nn.Embedding(12, 6, sparse=True)
            self.unused = nn.Parameter(torch.ones(5))
            self.shared = nn.Linear(6, 6)
            self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x.long()).mean(1)
        made: torch.Tensor = self.out(self.shared(torch.relu(self.shared(hidden))))
        return made


@pytest.mark.parametrize("choices", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=["plain", "terms"])
def test_sparse_shared_and_unused_gradients_train_as_with_torchs_optimizer(choices: dict[str, float]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 12, (16, 4)).astype(np.float32), rng.integers(0, 3, 16)
    flat, theirs = FlatModel(Ragged()), Ragged()
    Trainer(flat).run(x, y, LocalRule(steps=6, batch_size=16, lr=0.1, **choices), np.random.default_rng(0))
    theirs.embedding.sparse = False  # torch's weight decay takes no sparse gradients
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, **choices)
    for _ in range(6):  # each batch is the whole data: its order changes only the rounding
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        theirs.unused.grad = torch.zeros(5)
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in theirs.parameters()])
    torch.testing.assert_close(torch.from_numpy(flat.array), expected, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in flat.module.parameters())
