"""Losses: torch's losses by name, or the user's own function.

`cross_entropy`  takes logits of shape (batch, *targets, classes), and one class per example or per token
`mse`, `l1`, `huber`, `bce`  take outputs and float targets of the same shape. They are `mse_loss`, `l1_loss`,
                 `huber_loss` and `binary_cross_entropy_with_logits` of torch.nn.functional, and return the
                 mean over all elements
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from edgefl.errors import ConfigError, described, unknown
from edgefl.learning.dataset import Dataset
from edgefl.loading import load_attribute

Loss = Callable[[Any, Tensor], Tensor]

FLOAT_LOSSES: dict[str, Loss] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
    "bce": functional.binary_cross_entropy_with_logits,
}
NON_NEGATIVE = ("cross_entropy", "mse", "l1", "huber")
"""Losses that are never negative; ``bce`` is negative for some targets outside [0, 1]."""
NAMES = ("cross_entropy", *FLOAT_LOSSES)
KEY = "training.loss"


def make_loss(name: str, data: Dataset, search_path: Sequence[Path] = ()) -> Loss:
    """Return the loss named in ``training.loss``, which maps the outputs and targets of a batch to a scalar.

    A function ``"my_module:loss"`` is called as ``loss(outputs, targets)`` with the outputs of the model.
    Raises `ConfigError` if the name is unknown, or if the loss does not fit the targets of ``data``.

    >>> import numpy as np
    >>> x, y = np.zeros((4, 2), np.float32), np.ones((4, 1), np.float32)
    >>> data = Dataset.of("mine", [(x, y), (x, y)], classes=None)
    >>> make_loss("mse", data)(torch.zeros(4, 1), torch.ones(4, 1))
    tensor(1.)
    """
    if ":" in name:
        return _own(load_attribute(name, KEY, search_path), name)
    if name not in NAMES:
        raise ConfigError(f"{KEY}: {unknown('loss', name, [*NAMES, 'my_module:loss'])}")
    if (name == "cross_entropy") != (data.classes is not None):
        takes, other = ("classes", FLOAT_LOSSES) if name == "cross_entropy" else ("float targets", NAMES[:1])
        raise ConfigError(
            f"{KEY}: {name!r} takes {takes}, but data {data.name!r} has {data.targets}; "
            f"use {', '.join(other)} or my_module:loss"
        )
    if name == "cross_entropy":
        return _of_tokens if data.target_shape else functional.cross_entropy
    return _of_one_shape(FLOAT_LOSSES[name])


def loss_on_zeros(loss: Loss, data: Dataset) -> Callable[[Any], Tensor]:
    """Return the loss as a function of the outputs alone, with targets of zeros on the outputs' device."""
    dtype = torch.from_numpy(data.train_y[:0]).dtype

    def of_outputs(outputs: Any) -> Tensor:
        first = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        return loss(outputs, torch.zeros((len(first), *data.target_shape), dtype=dtype, device=first.device))

    return of_outputs


def _of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"model: logits must be of shape (batch, {', '.join(map(str, targets.shape[1:]))}, classes) "
            f"for targets of shape {tuple(targets.shape)} (got {tuple(logits.shape)})"
        )
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _of_one_shape(loss: Loss) -> Loss:
    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:  # torch would broadcast them
            raise ConfigError(
                f"model: outputs must be of the targets' shape {tuple(targets.shape)} "
                f"(got {tuple(outputs.shape)})"
            )
        return loss(outputs, targets)

    return checked


def _own(function: Any, name: str) -> Loss:
    if not callable(function):
        raise ConfigError(f"{KEY}: {name!r} must be a function (got {type(function).__name__})")

    def checked(outputs: Any, targets: Tensor) -> Tensor:
        try:
            loss = function(outputs, targets)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{KEY}: {name!r} raised {described(error)}") from error
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"{KEY}: {name!r} must return a tensor with one number and no dimensions (got {got})"
            )
        return loss

    return checked
