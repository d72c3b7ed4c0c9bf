"""Evaluation of a model: the mean loss, the accuracy if targets are classes, and the user's own metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from edgefl.errors import ConfigError
from edgefl.learning.arithmetic import torch_seed
from edgefl.learning.custom import LONGEST_NAME, MAX_METRICS
from edgefl.learning.dataset import Examples
from edgefl.learning.flat import FlatModel
from edgefl.learning.losses import Loss
from edgefl.loading import call, load_attribute
from edgefl.seeds import stream

Counts = NDArray[np.int64]
KEY = "evaluation.function"
RESERVED = frozenset((
    "version", "versions", "at_s", "wall_s", "trips", "client_trips", "epsilon", "emulated_s",
    "slow_accuracy", "slow_weight", "staleness_mean", "staleness_max", "trips_to_target",
    "emulated_s_to_target", "label", "seed", "seeds", "no_progress",
))  # fmt: skip
"""Names of columns and figures in edgefl's own tables. The user's metrics must not have these names, because
the tables would not show them."""
NO_COUNTS: Counts = np.zeros(0, np.int64)
MAX_COUNTED = 10_000
"""Maximum number of classes for which results are counted per class; the counts must fit in one message."""


class EvalResult(NamedTuple):
    """Mean loss, accuracy, and the numbers of correct predictions and of examples in each class.

    ``accuracy`` is NaN if the targets are not classes or the outputs are not logits for the classes. The
    counts ``correct`` and ``total`` are int64[classes]; they are empty if there is no accuracy, if the
    targets are tokens, or if there are more than `MAX_COUNTED` classes. ``metrics`` is the result of the
    user's function; ``problem`` is the reason why the evaluation is incomplete.
    """

    loss: float
    accuracy: float
    correct: Counts = NO_COUNTS
    total: Counts = NO_COUNTS
    metrics: Mapping[str, float] = {}
    problem: str = ""

    def with_metrics(self, found: Mapping[str, float]) -> EvalResult:
        """Add the user's metrics, which replace the loss and the accuracy if they include them."""
        own = {name: value for name, value in found.items() if name not in ("loss", "accuracy")}
        loss, accuracy = found.get("loss", self.loss), found.get("accuracy", self.accuracy)
        return self._replace(loss=loss, accuracy=accuracy, metrics=own)


class OwnEvaluation:
    """The user's own function ``evaluate(model, x, y)``, which returns a mapping of names to numbers."""

    def __init__(self, name: str, search_path: Sequence[Path], seed: int) -> None:
        self._name = name
        self._function = load_attribute(name, KEY, search_path)
        self._seed = int(stream(seed, "evaluation").integers(2**63))
        self.names: tuple[str, ...] = ()
        """Names of all metrics that the last call of `measure` returned, finite or not."""

    def measure(self, flat: FlatModel, x: Examples, y: NDArray[Any]) -> dict[str, float]:
        """Call the user's function on the model in evaluation mode; return its finite metrics.

        The function receives copies of the first ``len(y)`` rows of ``x``, and of ``y``, as tensors on the
        model's device. Its changes to the model are undone. Raises a one-line `ConfigError` if the function
        fails or does not return a mapping of names to numbers.
        """
        module, device, training = flat.module, flat.vector.device, flat.module.training
        first = flat.array.copy()
        flat.push()
        flat.clear_gradients()
        module.eval()
        tensors = [torch.tensor(values, device=device) for values in (x[: len(y)], y)]
        try:
            with torch.no_grad(), torch_seed(self._seed, device):
                return self._checked(call(lambda: self._function(module, *tensors), self._name, KEY))
        finally:
            flat.restore()
            flat.prepare()
            np.copyto(flat.array, first)
            module.train(training)

    def _checked(self, found: Any) -> dict[str, float]:
        if not isinstance(found, Mapping):
            self._refuse("a mapping of names to numbers", type(found).__name__)
        if len(found) > MAX_METRICS:
            self._refuse(f"at most {MAX_METRICS} metrics", str(len(found)))
        named = {name: self._number(name, value) for name, value in found.items()}
        self.names = tuple(named)
        finite = {name: value for name, value in named.items() if math.isfinite(value)}
        if not 0 <= finite.get("accuracy", 0.0) <= 1:
            self._refuse("an accuracy from 0 to 1", f"{finite['accuracy']:g}")
        return finite

    def _number(self, name: Any, value: Any) -> float:
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            self._refuse(f"names of 1 to {LONGEST_NAME} letters", repr(name)[:80])
        if name in RESERVED:
            self._refuse("names that edgefl's own tables do not use", repr(name))
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if not isinstance(value, str | bytes):  # float() would parse strings and bytes
                return float(value)
        self._refuse("numbers", f"{type(value).__name__} for {name!r}")

    def _refuse(self, wanted: str, got: str) -> NoReturn:
        raise ConfigError(f"{KEY}: {self._name!r} must return {wanted} (got {got})")


def evaluate(
    flat: FlatModel,
    x: Examples,
    y: NDArray[Any],
    classes: int | None,
    batch: int = 64,
    loss: Loss = cross_entropy,
) -> EvalResult:
    """Evaluate the model on the first ``len(y)`` rows of ``x``, ``batch`` examples at a time.

    The model is in evaluation mode and computes in float32, even if the training does not. Model and loss
    receive copies of the examples, because they may change their inputs in place.
    ``classes`` is None for float targets. Raises ValueError if there are no examples or if a class is not in
    [0, classes).

    >>> from torch import nn
    >>> flat = FlatModel(nn.Linear(2, 3)); flat.load(np.float32([0, 0, 0, 0, 0, 0, 1, 0, 0]))
    >>> result = evaluate(flat, np.zeros((4, 2), np.float32), np.array([0, 0, 0, 2]), classes=3)
    >>> result.accuracy, result.correct.tolist(), result.total.tolist()
    (0.75, [3, 0, 0], [3, 0, 1])
    """
    if len(y) == 0:
        raise ValueError("y must hold at least one example (got none)")
    if classes is not None and (int(y.min()) < 0 or int(y.max()) >= classes):
        raise ValueError(f"labels must be in [0, {classes}) (got {int(y.min())} to {int(y.max())})")
    module, device, training = flat.module, flat.vector.device, flat.module.training
    flat.push()
    module.eval()
    right: list[NDArray[np.bool_]] = []
    total = 0.0
    try:
        with torch.no_grad():
            for first in range(0, len(y), batch):
                wanted = y[first : first + batch]
                outputs = module(torch.tensor(x[first : first + len(wanted)], device=device))
                total += loss(outputs, torch.tensor(wanted, device=device)).item() * len(wanted)
                if classes is not None and _are_logits(outputs, wanted, classes):
                    right.append(outputs.argmax(-1).cpu().numpy() == wanted)
    finally:
        module.train(training)
    return _result(total / len(y), right, y, classes)


def _are_logits(outputs: Any, targets: NDArray[Any], classes: int) -> bool:
    """Return True if the outputs contain at least one logit per class for each target.

    A single output for two classes, for example, is not a logit per class. The model may have more outputs
    than the data have classes.
    """
    if not isinstance(outputs, Tensor) or outputs.shape[:-1] != targets.shape:
        return False
    return outputs.shape[-1] >= classes


def _result(loss: float, right: list[NDArray[np.bool_]], y: NDArray[Any], classes: int | None) -> EvalResult:
    if classes is None or not right:
        return EvalResult(loss, math.nan)
    hits = np.concatenate(right)
    accuracy = int(hits.sum()) / hits.size
    if y.ndim > 1 or classes > MAX_COUNTED:
        return EvalResult(loss, accuracy)
    correct, total = (np.bincount(labels, minlength=classes) for labels in (y[hits], y))
    return EvalResult(loss, accuracy, correct, total)
