"""timm's networks by name, with random weights; timm has about a thousand image architectures."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from edgefl.errors import ConfigError, near

Shape = tuple[int, ...]


def timm_network(name: str, input_shape: Shape, classes: int, **args: Any) -> nn.Module:
    """Create the network that timm calls ``name`` for images of that shape; ``args`` are passed to timm.

    Raises `ConfigError` if timm is not installed, has no such network, or the network rejects such images.
    """
    own = timm_input(name)
    arguments: dict[str, Any] = {"in_chans": input_shape[0], "num_classes": classes, **args}
    if input_shape[1:] != own[1:] and _timm().get_pretrained_cfg(name).fixed_input_size:
        arguments["img_size"] = input_shape[1:]
    try:
        network: nn.Module = _timm().create_model(name, **arguments)
    except Exception as error:
        line = " ".join(str(error).split())
        shape = "×".join(map(str, input_shape))
        raise ConfigError(f"timm:{name} for {shape}: {type(error).__name__}: {line}") from error
    return network


def timm_input(name: str) -> Shape:
    """Return the image shape that the network was made for: channels, height, width."""
    timm = _timm()
    if not timm.is_model(name):
        raise ConfigError(
            f"timm has no network {name!r};{near(name, timm.list_models())} see timm.list_models()"
        )
    config = timm.get_pretrained_cfg(name)
    return tuple(config.input_size) if config is not None else (3, 224, 224)


@cache
def _timm() -> Any:
    try:
        return _imported()
    except ImportError:
        raise ConfigError("timm is not installed: pip install 'edgefl[timm]'") from None


def _imported() -> Any:
    """Import timm. If torchvision's compiled operators belong to another build, declare their names to torch.

    timm imports torchvision, which fails without these operators. No network here uses them.
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
"""Keeps the declarations alive: they are removed with the library object."""
