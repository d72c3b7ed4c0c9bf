"""Operations of training on one example, counted and not guessed."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from edgefl.errors import ConfigError
from edgefl.learning.arithmetic import torch_seed

BATCH = 2
"""Batch normalisation refuses a batch of one; matrix products and convolutions cost the same per example."""

FREE = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm)
"""Layers whose weights may be a matrix and cost no product."""


def flops_per_example(module: nn.Module, input_shape: tuple[int, ...], dtype: Any = np.float32) -> float:
    """Floating-point operations of one training example: forward and backward, a multiply-add being two.

    Matrix products, convolutions and attention count (by `torch.utils.flop_counter`'s formulas); elementwise
    work, normalisation, pooling and the loss do not. ``input_shape`` is one example's shape, ``dtype`` its
    type. A module with an attribute ``flops_per_example`` is believed instead; such a layer adds its own to
    what was counted in the others. The module is left as it is. Raises `ConfigError` if it cannot take such
    an input or a layer with a matrix of weights cannot be counted.

    >>> flops_per_example(nn.Linear(3, 2), (3,))  # forward and the gradient of the weight, each 2 · 3 · 2
    24.0
    """
    if (declared := getattr(module, "flops_per_example", None)) is not None:
        return _declared(declared)
    own = copy.deepcopy(module).train()
    count = _Count(own)
    example = torch.from_numpy(np.zeros((BATCH, *input_shape), dtype))
    # oneDNN's fused recurrent layers are one opaque operation; without it they are products, which count.
    recurrent = any(isinstance(part, nn.RNNBase) for part in own.modules())
    products = torch.backends.mkldnn.flags(enabled=False) if recurrent else nullcontext()
    try:
        with warnings.catch_warnings(action="ignore"), torch_seed(0), products, count:
            logits: Tensor = own(example)
            labels = torch.zeros(len(logits), dtype=torch.int64)
            cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        line = " ".join(str(error).split())
        raise ConfigError(
            f"model: cannot train on inputs of shape {tuple(input_shape)}: {type(error).__name__}: {line}"
        ) from error
    return count.total / BATCH + _uncounted(own, count.forward)


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations that reach torch while it is entered.

    `torch.utils.flop_counter.FlopCounterMode` does too, but imports 60 MiB into what forks the clients.

    >>> with FlopCount() as count:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> count.total
    48
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.operations = 0
        """Calls into torch, whether they count or not."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; shielding it from the compiler would import the compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.add(formula(*args, **(kwargs or {}), out_val=out))
        return out

    def add(self, flop: int) -> None:
        self.total += flop


class _Count(FlopCount):  # type: ignore[no-untyped-call]
    """Counts, and says which layer's forward the operations are part of."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.forward: Counter[str] = Counter()
        """Operations of the forward pass by layer, with its children; a layer that is not used is absent."""
        self._inside: list[str] = []
        for name, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            part.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def add(self, flop: int) -> None:
        super().add(flop)
        for name in self._inside:
            self.forward[name] += flop

    def _enter(self, name: str) -> None:
        self._inside.append(name)
        self.forward[name] += 0

    def _leave(self) -> None:
        self._inside.pop()


def _uncounted(module: nn.Module, forward: Mapping[str, int]) -> float:
    """Operations that layers declare; a used layer with a matrix of weights and no count is refused."""
    extra = 0.0
    for name, part in module.named_modules():
        if name not in forward or isinstance(part, FREE):
            continue
        if (declared := getattr(part, "flops_per_example", None)) is not None:
            extra += _declared(declared)
        elif not forward[name] and any(parameter.ndim >= 2 for parameter in part.parameters(recurse=False)):
            raise ConfigError(
                f"model: the operations of layer {name or type(module).__name__!r} ({type(part).__name__}) "
                "cannot be counted; give it an attribute flops_per_example (forward and backward)"
            )
    return extra


def _declared(declared: Any) -> float:
    if not isinstance(declared, int | float) or not (math.isfinite(declared) and declared >= 0):
        raise ConfigError(f"model: flops_per_example must be a number ≥ 0 (got {declared!r})")
    return float(declared)
