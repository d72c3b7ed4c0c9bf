"""Tests of losses, and of float and token targets: training, evaluation, partitions, users' data."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from edgefl.errors import ConfigError
from edgefl.experiment import Data, Model
from edgefl.learning.data import load_data
from edgefl.learning.dataset import Dataset
from edgefl.learning.evaluate import evaluate
from edgefl.learning.flat import FlatModel
from edgefl.learning.losses import FLOAT_LOSSES, Loss, loss_on_zeros, make_loss
from edgefl.learning.models import make_model
from edgefl.learning.partition import partition
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer
from edgefl.learning.work import batch_work

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype(np.float32)
TOKENS = RNG.integers(0, 7, (12, 5))


def data(y: NDArray[Any], x: NDArray[Any] = X, classes: int | None = None) -> Dataset:
    return Dataset.of("mine", [(x, y), (x, y)], classes)


NUMBERS, WORDS, CLASSES = data(X[:, :2]), data(TOKENS, TOKENS, 7), data(np.arange(12) % 4, classes=4)


@pytest.mark.parametrize("name", [*FLOAT_LOSSES, "cross_entropy"])
def test_a_named_loss_is_torchs(name: str) -> None:
    outputs = torch.from_numpy(RNG.normal(size=(6, 2)))
    if name == "cross_entropy":
        logits, words = torch.from_numpy(RNG.normal(size=(12, 5, 7))), torch.from_numpy(TOKENS)
        expected = functional.cross_entropy(logits.transpose(1, 2), words)  # torch has classes second
        torch.testing.assert_close(make_loss(name, WORDS)(logits, words), expected)
        assert make_loss(name, CLASSES) is functional.cross_entropy
        return
    targets = torch.from_numpy(RNG.random((6, 2)))
    torchs_name = {"bce": "binary_cross_entropy_with_logits"}.get(name, f"{name}_loss")
    expected = getattr(functional, torchs_name)(outputs, targets)
    assert torch.equal(make_loss(name, NUMBERS)(outputs, targets), expected)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("mean", NUMBERS, "loss 'mean' not found; available: bce, cross_entropy, huber, l1, mse, my_mod"),
        ("cross_entropy", NUMBERS, r"takes classes, but data 'mine' has float targets of shape \(2,\); use"),
        ("mse", CLASSES, "'mse' takes float targets, but data 'mine' has classes; use cross_entropy or"),
        ("mse", WORDS, r"'mse' takes float targets, but data 'mine' has token targets of shape \(5,\)"),
        ("tried:missing", NUMBERS, "training.loss: module 'tried': attribute 'missing' not found"),
        ("tried:nothing", NUMBERS, "'tried:nothing' must be a function"),
    ],
)  # fmt: skip
def test_a_wrong_loss_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, given: Dataset, message: str
) -> None:
    offer(monkeypatch, nothing=3)
    with pytest.raises(ConfigError, match=message) as caught:
        make_loss(name, given)
    assert "\n" not in str(caught.value)


def offer(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    module = ModuleType("tried")
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, "tried", module)
    monkeypatch.setenv("EDGEFL_MODULES", "tried")


def fails(outputs: Tensor, targets: Tensor) -> Tensor:
    raise KeyError("wrong")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, "training.loss: 'tried:loss' raised KeyError: 'wrong'"),
        (lambda outputs, targets: sys.exit("no"), "'tried:loss' raised SystemExit: no"),
        (lambda outputs, targets: 1.0, r"tensor with one number and no dimensions \(got float\)"),
        (lambda outputs, targets: outputs, r"\(got shape \(2, 2\)\)"),
    ],
)
def test_a_users_loss_that_fails_is_one_line_before_the_run(
    monkeypatch: pytest.MonkeyPatch, function: Loss, message: str
) -> None:
    offer(monkeypatch, loss=function)
    loss = loss_on_zeros(make_loss("tried:loss", NUMBERS), NUMBERS)
    with pytest.raises(ConfigError, match=message):
        batch_work(nn.Linear(3, 2), (3,), loss=loss, meta=False)


@pytest.mark.parametrize(
    ("name", "given", "outputs", "message"),
    [
        ("mse", NUMBERS, 1, r"outputs must be of the targets' shape \(2, 2\) \(got \(2, 1\)\)"),
        ("cross_entropy", WORDS, 7, r"logits must be of shape \(batch, 5, classes\) for .* \(got \(2, 7\)\)"),
    ],
)
def test_a_model_with_wrong_outputs_is_refused(name: str, given: Dataset, outputs: int, message: str) -> None:
    """Otherwise torch would broadcast the outputs to the targets and train the model for another task."""
    loss = loss_on_zeros(make_loss(name, given), given)
    with pytest.raises(ConfigError, match=message):
        batch_work(nn.Linear(3, outputs), (3,), loss=loss, meta=False)


def test_the_work_of_a_step_includes_its_loss() -> None:
    module, matrix = nn.Linear(3, 2), torch.ones(2, 50)

    def heavy(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs @ matrix, targets @ matrix)

    plain = batch_work(module, (3,), loss=loss_on_zeros(make_loss("mse", NUMBERS), NUMBERS))
    more = batch_work(module, (3,), loss=loss_on_zeros(heavy, NUMBERS))
    # three matrix products per example: for the outputs, the targets and the gradient of the outputs
    assert more.per_example.matmul_flop - plain.per_example.matmul_flop == 3 * 2 * 2 * 50


class Words(nn.Module):
    """Predicts the next word from the current word alone."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.of = nn.Embedding(words, words)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.of(x)
        return out


def test_a_model_learns_float_targets() -> None:
    given = load_data(Data(name="diabetes"), seed=0)
    assert given.train_x[:].shape == (354, 10)
    for part in (given.train_x[:], given.train_y):
        np.testing.assert_allclose(part.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(part.std(0), 1, atol=1e-5)
    flat = FlatModel(make_model(Model(), given.input_shape, given.outputs, seed=0))
    loss = make_loss("mse", given)
    before = evaluate(flat, given.test_x, given.test_y, given.classes, loss=loss)
    Trainer(flat, loss).run(given.train_x, given.train_y, LocalRule(epochs=20), np.random.default_rng(0))
    after = evaluate(flat, given.test_x, given.test_y, given.classes, loss=loss)
    outputs = flat.module(torch.from_numpy(given.test_x[:])).detach().numpy()
    np.testing.assert_allclose(after.loss, np.square(outputs - given.test_y).mean(), rtol=1e-5)
    assert after.loss < 0.7 < before.loss  # 1 is the loss of the mean
    assert np.isnan(after.accuracy)
    assert after.correct.tolist() == after.total.tolist() == []


def test_a_model_learns_the_next_token() -> None:
    text = np.arange(64).reshape(8, 8) % 5  # each word follows from the one before
    given = data(text[:, 1:], text[:, :-1], classes=5)
    flat, loss = FlatModel(Words(5)), make_loss("cross_entropy", given)
    rule = LocalRule(epochs=40, batch_size=4, lr=2.0)
    Trainer(flat, loss).run(given.train_x, given.train_y, rule, np.random.default_rng(0))
    after = evaluate(flat, given.test_x, given.test_y, given.classes, loss=loss)
    assert after.accuracy == 1.0
    assert after.total.tolist() == []


def test_outputs_that_are_not_logits_have_a_loss_but_no_accuracy() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs[0], targets)

    found = evaluate(FlatModel(Two(3, 4)), X, CLASSES.test_y, 4, loss=loss)
    assert np.isnan(found.accuracy)
    assert found.loss > 0


def test_one_output_for_two_classes_has_a_loss_but_no_accuracy() -> None:
    """Regression: a single output is always the largest, so the accuracy was the share of class 0."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())

    y = np.arange(12) % 2
    found = evaluate(FlatModel(nn.Linear(3, 1)), X, y, 2, loss=loss)
    assert np.isnan(found.accuracy)
    assert found.total.tolist() == []
    assert evaluate(FlatModel(nn.Linear(3, 5)), X, y, 2).accuracy >= 0


@pytest.mark.parametrize("given", [NUMBERS, WORDS])
def test_partitions_other_than_even_and_natural_need_classes(given: Dataset) -> None:
    rest: tuple[Any, ...] = (given.train_y, ["pi-4"] * 3, given.classes, 0, np.arange(12) % 4)
    assert [len(rows) for rows in partition(Data(), *rest)] == [4, 4, 4]
    assert [len(rows) for rows in partition(Data(partition="natural"), *rest)] == [3, 3, 3]
    by_device = Data(partition="by-device", labels={"pi-4": [0]})
    for spec in (Data(partition="dirichlet"), Data(partition="shards"), by_device):
        message = f"{spec.partition!r} needs one class per example, but these targets are"
        with pytest.raises(ConfigError, match=message):
            partition(spec, *rest)


def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str) -> Dataset:
    lines = (
        "import numpy as np",
        "from edgefl.learning.dataset import Images, Tokens",
        "x = np.arange(6.0).reshape(3, 2)",
        "images = Images(np.full((3, 1, 2, 2), 99, np.uint8), top=255, mean=[0.0], std=[1.0])",
        "def load(spec, seed):",
        f"    return {returned}",
    )
    (tmp_path / "own_targets.py").write_text("\n".join(lines))
    monkeypatch.delitem(sys.modules, "own_targets", raising=False)
    return load_data(Data(name="own_targets:load", max_examples=2), 0, [tmp_path])


@pytest.mark.parametrize(
    ("returned", "shape", "dtype", "classes", "outputs"),
    [
        ("x, [0.5, 1, 2], x, [0.0, 1, 1]", (1,), np.float32, None, 1),
        ("x, x, x[:2], x[1:]", (2,), np.float32, None, 2),
        ("np.int32(x), np.int16(x), np.int32(x) + 4, np.int16(x)", (2,), np.int64, 10, 10),
        ("x, [0, 3, 1], x, [0, 4, 1]", (), np.int64, 5, 5),
        ("(t := Tokens(np.uint8(x + 4))), np.int16(x), t, np.int16(x)", (2,), np.int64, 10, 10),
        ("images, np.int16(x), images, np.int16(x)", (2,), np.int64, 6, 6),
    ],
)
def test_a_users_targets_determine_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str, shape: tuple[int, ...],
    dtype: type, classes: int | None, outputs: int,
) -> None:  # fmt: skip
    found = users(tmp_path, monkeypatch, returned)
    assert (found.target_shape, found.classes, found.outputs) == (shape, classes, outputs)
    assert (found.train_y.dtype, found.test_y.dtype, len(found.train_y)) == (dtype, dtype, 2)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("x, [0, 1.5, np.nan], x, [0.0] * 3", "train_y must be finite float32 numbers"),
        ("x, [1e300, 0, 0], x, [0.0] * 3", "train_y must be finite"),
        ("x / 0, [0, 1, 2], x, [0, 1, 2]", "train_x must be finite"),
        ("np.zeros((0, 2), int), np.int16(x), x, np.int16(x)", "train_x has 0 rows, but train_y has 3"),
        ("x, x, x, x[:, :1]", r"test_y must be floats, of shape \(2,\) per example \(got float32 of .*3, 1"),
        ("x, [0, 1, 2], x, [0.0, 1, 2]", r"test_y must be whole numbers in \[0, 3\), of shape \(\) per"),
        ("x, ['a', 'b', 'c'], x, [0, 1, 2]", "train_y must be whole numbers ≥ 0 of shape .* or floats"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_examples_that_do_not_fit_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        users(tmp_path, monkeypatch, returned)
    assert "\n" not in str(caught.value)
