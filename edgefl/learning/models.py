"""Models by name, and the user's own models.

A model maps inputs, which are tokens or float32 of shape (batch, *input_shape), to logits of shape (batch,
classes). If each target is k float numbers, ``classes`` is k, and the outputs are predictions instead of
logits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgefl.errors import ConfigError, described, near, unknown
from edgefl.experiment import Model
from edgefl.learning import networks
from edgefl.learning.arithmetic import torch_seed
from edgefl.loading import call, load_attribute
from edgefl.seeds import stream

Shape = tuple[int, ...]


def mlp(input_shape: Shape, classes: int, *, hidden: Sequence[Any] = (64,)) -> nn.Module:
    """Create fully connected layers with ReLU between them; ``hidden`` is the list of hidden widths.

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


MODELS: dict[str, tuple[Callable[..., nn.Module], Shape, int]] = {
    "mlp": (mlp, (1, 28, 28), 10),
    "cnn-fedbuff": (networks.cnn_fedbuff, (3, 32, 32), 10),
    "cnn-defedavg": (networks.cnn_defedavg, (1, 28, 28), 10),
    "cnn-groupnorm": (networks.cnn_groupnorm, (1, 28, 28), 10),
    "cnn-celeba": (networks.cnn_celeba, (3, 84, 84), 2),
    "cnn-femnist": (networks.cnn_femnist, (1, 28, 28), 62),
    "lstm-sent140": (networks.lstm_sent140, (25,), 2),
    "lstm-shakespeare": (networks.lstm_shakespeare, (80,), 80),
}
"""For each built-in model: the function that makes it, and the shape of an example and the number of classes
in the data with which the model was published."""
TIMM = "timm:"
OTHERS = ("my_module:make", "timm:NAME")
"""Patterns for the names of a user's own model and of a timm network."""


def make_model(
    spec: Model, input_shape: Shape, classes: int, seed: int, search_path: Sequence[Path] = ()
) -> nn.Module:
    """Create the model named in ``[model]``, with initial weights drawn with ``seed``.

    ``classes`` is `Dataset.outputs` of the data set. A function ``"my_module:make"`` is called as
    ``make(input_shape=…, classes=…, **args)`` and returns a `torch.nn.Module`; ``"timm:resnet18"`` stands for
    the network of this name in timm. Torch's global random stream is unchanged. Raises `ConfigError` if
    the model or an argument is unknown, or if the user's function is missing, fails or does not return a
    module.

    >>> first = make_model(Model(args={"hidden": [8]}), (1, 8, 8), 10, seed=1)
    >>> again = make_model(Model(args={"hidden": [8]}), (1, 8, 8), 10, seed=1)
    >>> bool((first[1].weight == again[1].weight).all())
    True
    """
    arguments = {"input_shape": tuple(input_shape), "classes": classes, **spec.args}
    if len(arguments) != len(spec.args) + 2:
        raise ConfigError("model.args must not include input_shape or classes: they follow from the data")
    factory: Callable[..., nn.Module]
    if spec.name.startswith(TIMM):
        factory = partial(timm_network, spec.name.removeprefix(TIMM))
    elif ":" in spec.name:
        factory = load_attribute(spec.name, "model.name", search_path)
    elif spec.name in MODELS:
        factory = MODELS[spec.name][0]
        allowed = list(inspect.signature(factory).parameters)[2:]
        for name in spec.args:
            if name not in allowed:
                raise ConfigError(f"model.args: {unknown(f'argument of {spec.name!r}', name, allowed)}")
    else:
        raise ConfigError(f"model.name: {unknown('model', spec.name, [*MODELS, *OTHERS])}")
    with torch_seed(int(stream(seed, "model").integers(2**63))):
        model = call(factory, spec.name, "model.name", **arguments)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name: {spec.name!r} must return a torch.nn.Module (got {type(model).__name__})"
        )
    return model


def model_to_trace(
    name: str, input_shape: Shape | None = None, device: str | None = None
) -> tuple[nn.Module, Shape]:
    """Create the model ``name``; return it and the shape of one example.

    By default, the shape is that of the data with which the model was published (`MODELS`). Tensors are
    created on ``device``; by default this is torch's meta device for a timm network, so that its tensors need
    no memory, and the CPU for other models. Raises `ConfigError` like `make_model`, and also for a user's own
    model if no shape is given.

    >>> model_to_trace("cnn-femnist")[1]
    (1, 28, 28)
    """
    _, shape, classes = MODELS.get(name, (None, input_shape, 10))
    if name.startswith(TIMM):
        shape, classes = timm_input(name.removeprefix(TIMM)), 1000
    shape = input_shape or shape
    if shape is None and ":" in name:
        raise ConfigError(f"{name} needs an input shape: give --input 3,32,32 or torch:{name}@16x3x32x32")
    with torch.device(device or ("meta" if name.startswith(TIMM) else "cpu")):
        return make_model(Model(name=name), shape or (), classes, seed=0), shape or ()


# ---- timm: about a thousand image architectures, with random weights ------------------------------


def timm_network(name: str, input_shape: Shape, classes: int, **args: Any) -> nn.Module:
    """Create the network ``name`` of timm for images of shape ``input_shape``; ``args`` are passed to timm.

    Raises `ConfigError` if timm is not installed or has no network of this name, or if the network does not
    accept images of this shape.
    """
    own = timm_input(name)
    arguments: dict[str, Any] = {"in_chans": input_shape[0], "num_classes": classes, **args}
    if input_shape[1:] != own[1:] and timm_module().get_pretrained_cfg(name).fixed_input_size:
        arguments["img_size"] = input_shape[1:]
    try:
        network: nn.Module = timm_module().create_model(name, **arguments)
    except Exception as error:
        shape = "×".join(map(str, input_shape))
        raise ConfigError(f"timm:{name} for {shape}: {described(error)}") from error
    return network


def timm_input(name: str) -> Shape:
    """Return the shape (channels, height, width) of the images for which a timm network was designed."""
    timm = timm_module()
    if not timm.is_model(name):
        raise ConfigError(
            f"timm has no network {name!r};{near(name, timm.list_models())} see timm.list_models()"
        )
    config = timm.get_pretrained_cfg(name)
    return tuple(config.input_size) if config is not None else (3, 224, 224)


@cache
def timm_module() -> Any:
    """Return the module timm. Raises `ConfigError` if it is not installed."""
    try:
        return _imported()
    except ImportError:
        raise ConfigError("timm is not installed: pip install 'edgefl[timm]'") from None


def _imported() -> Any:
    """Import timm, even if torchvision's compiled operators do not match this torch.

    timm imports torchvision, and this import fails if torchvision's operators are missing. In that case, this
    function declares the operators' names to torch and imports timm again. No network here uses them.
    """
    try:
        import timm
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        untyped: Any = torch.library.Library
        declared = untyped("torchvision", "FRAGMENT")
        _KEPT.append(declared)
        declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import timm
    return timm


_KEPT: list[Any] = []
"""Library objects of the declared operators, kept because torch removes an operator when its library object
is deleted."""
