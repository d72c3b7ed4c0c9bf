"""The server's test of a model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from edgefl.learning.dataset import Examples
from edgefl.learning.flat import FlatModel
from edgefl.learning.train import Loss


class EvalResult(NamedTuple):
    """Mean loss, share of right answers; right answers and examples by class, int64 of shape (classes,)."""

    loss: float
    accuracy: float
    correct: NDArray[np.int64]
    total: NDArray[np.int64]


def evaluate(
    flat: FlatModel,
    x: Examples,
    y: NDArray[np.int64],
    classes: int,
    batch: int = 64,
    loss: Loss = cross_entropy,
) -> EvalResult:
    """Test the model on the first ``len(y)`` of ``x``, ``batch`` examples at a time.

    In evaluation mode and in float32, whatever it is trained in. Raises ValueError if there are no examples
    or a label is not in [0, classes).

    >>> from torch import nn
    >>> flat = FlatModel(nn.Linear(2, 3)); flat.load(np.float32([0, 0, 0, 0, 0, 0, 1, 0, 0]))
    >>> result = evaluate(flat, np.zeros((4, 2), np.float32), np.array([0, 0, 0, 2]), classes=3)
    >>> result.accuracy, result.correct.tolist(), result.total.tolist()
    (0.75, [3, 0, 0], [3, 0, 1])
    """
    if len(y) == 0:
        raise ValueError("y must hold at least one example (got none)")
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise ValueError(f"labels must be in [0, {classes}) (got {int(y.min())} to {int(y.max())})")
    module, device = flat.module, flat.vector.device
    flat.push()
    training = module.training
    module.eval()
    guesses = np.empty(len(y), np.int64)
    total = 0.0
    try:
        with torch.no_grad():
            for first in range(0, len(y), batch):
                labels = y[first : first + batch]
                logits = module(torch.from_numpy(x[first : first + len(labels)]).to(device))
                total += loss(logits, torch.from_numpy(labels).to(device)).item() * len(labels)
                guesses[first : first + batch] = logits.argmax(1).cpu().numpy()
    finally:
        module.train(training)
    hits = y[guesses == y]
    return EvalResult(
        loss=total / len(y),
        accuracy=len(hits) / len(y),
        correct=np.bincount(hits, minlength=classes),
        total=np.bincount(y, minlength=classes),
    )
