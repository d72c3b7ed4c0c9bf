"""The models by name and a user's own: float32 (batch, *input_shape) or tokens to logits (batch, classes)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from edgefl.errors import ConfigError, unknown
from edgefl.experiment import Model
from edgefl.learning import networks
from edgefl.learning.arithmetic import torch_seed
from edgefl.loading import call, load_attribute
from edgefl.seeds import stream

Shape = tuple[int, ...]


def mlp(input_shape: Shape, classes: int, *, hidden: Sequence[Any] = (64,)) -> nn.Module:
    """Fully connected layers with ReLU between them; ``hidden`` are the widths in between.

    >>> sum(p.numel() for p in mlp((1, 8, 8), 10, hidden=[32]).parameters())
    2410
    """
    if not isinstance(hidden, list | tuple) or not all(type(width) is int and width > 0 for width in hidden):
        raise ConfigError(f"model.args.hidden must be a list of positive whole numbers (got {hidden!r})")
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn-fedbuff": networks.cnn_fedbuff,
    "cnn-defedavg": networks.cnn_defedavg,
    "cnn-groupnorm": networks.cnn_groupnorm,
    "cnn-celeba": networks.cnn_celeba,
    "cnn-femnist": networks.cnn_femnist,
    "lstm-sent140": networks.lstm_sent140,
    "lstm-shakespeare": networks.lstm_shakespeare,
}


def make_model(
    spec: Model, input_shape: Shape, classes: int, seed: int, search_path: Sequence[Path] = ()
) -> nn.Module:
    """The model that the experiment's ``[model]`` names, its first weights drawn by ``seed``.

    ``"my_module:make"`` is called as ``make(input_shape=…, classes=…, **args)`` and returns a
    `torch.nn.Module`. torch's global random stream is left as it was. Raises `ConfigError` for an unknown
    model or argument, or if a user's function cannot be found, fails or returns something else.

    >>> first = make_model(Model(args={"hidden": [8]}), (1, 8, 8), 10, seed=1)
    >>> again = make_model(Model(args={"hidden": [8]}), (1, 8, 8), 10, seed=1)
    >>> bool((first[1].weight == again[1].weight).all())
    True
    """
    arguments = {"input_shape": tuple(input_shape), "classes": classes, **spec.args}
    if len(arguments) != len(spec.args) + 2:
        raise ConfigError("model.args must not name input_shape or classes: they follow from the data")
    if ":" in spec.name:
        factory = load_attribute(spec.name, "model.name", search_path)
    elif spec.name in MODELS:
        factory = MODELS[spec.name]
        allowed = list(inspect.signature(factory).parameters)[2:]
        for name in spec.args:
            if name not in allowed:
                raise ConfigError(f"model.args: {unknown(f'argument of {spec.name!r}', name, allowed)}")
    else:
        raise ConfigError(f"model.name: {unknown('model', spec.name, [*MODELS, 'my_module:make'])}")
    with torch_seed(int(stream(seed, "model").integers(2**63))):
        model = call(factory, spec.name, "model.name", **arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name: {spec.name!r} must return a torch.nn.Module (got {type(model).__name__})"
        )
    return model
