"""The operations that layers declare with an attribute ``flops_per_example`` (forward and backward)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves

from edgefl.errors import ConfigError

NO_MATRIX_PRODUCT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, ParametrizationList)
"""Layers that compute no matrix product even though their weight may be a matrix. A `ParametrizationList`
only computes the weight of a layer; the layer itself computes the product."""


FORWARD = 1 / 3
"""Share of a layer's declared operations that the forward pass needs; the backward pass needs the rest."""


class Meter(Protocol):
    """An object that counts floating-point operations and knows which tensors were only added or copied."""

    @property
    def flop(self) -> float: ...

    def moves(self, tensor: Tensor) -> bool: ...


class Layers:
    """The layers that the forward pass used, and the operations counted in each layer."""

    def __init__(self, module: nn.Module, meter: Meter) -> None:
        self._module = module
        self._meter = meter
        self._flop: dict[str, float] = {}
        """Floating-point operations of each layer, including its children; unused layers are absent."""
        self._calls: Counter[str] = Counter()
        self._entered: list[float] = []
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_: self._entered.append(self._meter.flop))
            part.register_forward_hook(lambda *_, name=name: self._leave(name), always_call=True)

    def _leave(self, name: str) -> None:
        self._calls[name] += 1
        self._flop[name] = self._flop.get(name, 0.0) + self._meter.flop - self._entered.pop()

    def declared_flop(self) -> float:
        """Return the number of operations per example that layers declare, summed over all of their calls.

        Raises `ConfigError` if a layer with a weight matrix neither declares its operations nor was counted.
        """
        used = ((name, part) for name, part in self._module.named_modules() if name in self._flop)
        return sum(self._own(name, part) for name, part in used)

    def _own(self, name: str, layer: nn.Module) -> float:
        declared = getattr(layer, "flops_per_example", None)
        if declared is not None:
            return self._calls[name] * declared_number(declared)
        if isinstance(layer, NO_MATRIX_PRODUCT):
            return 0.0
        own = layer.parameters(recurse=False)
        if not self._flop[name] and any(_is_matrix(p) and not self._meter.moves(p) for p in own):
            raise ConfigError(
                f"model: the operations of layer {name or type(layer).__name__!r} ({type(layer).__name__}) "
                "cannot be counted; give it an attribute flops_per_example (forward and backward)"
            )
        return 0.0


@contextmanager
def declared_calls(module: nn.Module | None) -> Iterator[list[float]]:
    """Yield a list to which each call of a layer that declares its operations appends their number.

    If ``module`` itself declares them, its layers' declarations are ignored.
    """
    found: list[float] = []

    def called(layer: nn.Module, _: object, outputs: Any) -> None:
        first = next((leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)), None)
        examples = len(first) if first is not None and first.dim() else 1
        share = 1.0 if torch.is_grad_enabled() else FORWARD
        found.append(share * examples * declared_number(layer.flops_per_example))

    parts = [] if module is None else list(module.modules())
    own = [part for part in parts if getattr(part, "flops_per_example", None) is not None]
    whole = own[:1] == parts[:1]
    hooks = [part.register_forward_hook(called) for part in (own[:1] if whole else own)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _is_matrix(parameter: nn.Parameter) -> bool:
    """Return True if at least two dimensions exceed 1, unlike the shape (n, 1, 1) of a scale per channel."""
    return sum(size > 1 for size in parameter.shape) > 1


def declared_number(declared: Any) -> float:
    """Return the value of ``flops_per_example``. Raises `ConfigError` unless it is a number of at least 0."""
    if not (isinstance(declared, Real) and 0.0 <= float(declared) < math.inf):  # numpy's numbers are Real
        raise ConfigError(f"model: flops_per_example must be a number ≥ 0 (got {declared!r})")
    return float(declared)
