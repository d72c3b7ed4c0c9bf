"""Lists the layers of a torch module as TFLite executes them, without computing anything.

Matrix products are listed as 1 × 1 convolutions with one pixel per row, and other operations on two tensors
as additions. Normalisation and activations are part of the layer before them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.devices.phone_networks import Layer
from edgefl.errors import ConfigError, described

PRODUCTS: Final = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
"""Position of the first factor among the arguments of each matrix product."""
JOINS: Final = ("add", "add_", "sub", "mul", "mul_", "div", "cat")
POOLS: Final = ("pool", "mean")


def inference_layers(module: nn.Module, input_shape: Sequence[int], dtype: Any) -> tuple[Layer, ...]:
    """List the layers of an inference on one example with the numpy type ``dtype``.

    The module is not changed. Raises `ConfigError` if the module cannot run on torch's meta device.

    >>> [layer.kind for layer in inference_layers(nn.Conv2d(3, 8, 3), (3, 9, 9), np.float32)]
    ['conv']
    """
    try:
        shadow = copy.deepcopy(module).to("meta").eval()
        example = torch.zeros((1, *input_shape), dtype=getattr(torch, np.dtype(dtype).name), device="meta")
        with torch.no_grad(), _Layers() as seen:
            shadow(example)
    except Exception as error:  # the module may be the user's
        raise ConfigError(f"the module's layers cannot be listed: {described(error)}") from None
    return tuple(seen.layers)


class _Layers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that records the layers called inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: list[Layer] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import its compiler Dynamo, even though nothing is compiled here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name == "convolution":
            self.layers.append(_convolution(args, out))
        elif name in PRODUCTS:
            first = args[PRODUCTS[name]]
            self.layers.append(_product(first, out))
        elif name in JOINS and isinstance(out, Tensor):
            self.layers.append(_plain("add", out, out))
        elif any(word in name for word in POOLS):
            result = out[0] if isinstance(out, tuple) else out
            self.layers.append(_plain("pool", args[0], result))
        return out


def _convolution(args: Sequence[Any], out: Tensor) -> Layer:
    image, weight, stride, transposed, groups = args[0], args[1], args[3], args[6], int(args[8])
    depthwise = groups > 1 and groups == image.shape[1]
    # A transposed convolution does the same work as a convolution from its output to its input.
    first, last = (out, image) if transposed else (image, out)
    return Layer(
        kind="depthwise" if depthwise else "conv",
        in_side=_side(first),
        out_side=_side(last),
        in_channels=first.shape[1] if depthwise else weight.shape[1],
        out_channels=last.shape[1],
        kernel=math.sqrt(math.prod(weight.shape[2:])),
        stride=int(stride[0]),
    )


def _product(first: Tensor, out: Tensor) -> Layer:
    side = math.sqrt(out.numel() / out.shape[-1])
    sizes = {"in_channels": first.shape[-1], "out_channels": out.shape[-1]}
    return Layer(kind="conv", in_side=side, out_side=side, kernel=1, stride=1, **sizes)


def _plain(kind: Literal["add", "pool"], image: Tensor, out: Tensor) -> Layer:
    return Layer(
        kind=kind,
        in_side=_side(image),
        out_side=_side(out),
        in_channels=_channels(image),
        out_channels=_channels(out),
        kernel=1,
        stride=1,
    )


def _side(image: Tensor) -> float:
    """Return the side length of a square with as many pixels as the image."""
    return math.sqrt(math.prod(image.shape[2:]))


def _channels(image: Tensor) -> int:
    return int(image.shape[1]) if image.dim() > 1 else 1
