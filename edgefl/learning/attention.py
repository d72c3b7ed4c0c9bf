"""Splits fused attention on the CPU into the operations that it consists of, so that its work can be counted.

On the CPU, torch computes `scaled_dot_product_attention` in one operation, for which torch's FLOP counter has
no formula. Time models are fitted to steps whose attention was computed in separate operations, as it is on
torch's meta device. The work of a fused call is therefore counted as the work of these operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_FORWARD: Final = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD: Final = f"{_FORWARD}_backward"

Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a tensor."""


class FusedAttention(NamedTuple):
    """One call of fused attention without the contents of its tensors: the forward pass, or the gradients."""

    backward: bool
    operands: tuple[Like, Like, Like]
    """The query, the key and the value."""
    mask: Like | None
    causal: bool
    scale: float | None

    @classmethod
    def of(cls, packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FusedAttention | None:
        """Describe a call of the operation ``packet``; return None if it is not fused attention."""
        name = packet.__name__
        if name not in (_FORWARD, _BACKWARD):
            return None
        backward = name == _BACKWARD
        query, key, value = args[1:4] if backward else args[:3]
        at = 7 if backward else 4
        mask = kwargs.get("attn_mask")
        return cls(
            backward,
            (_like(query), _like(key), _like(value)),
            None if mask is None else _like(mask),
            bool(args[at]) if len(args) > at else False,
            kwargs.get("scale"),
        )

    @property
    def flop(self) -> int:
        """Number of floating-point operations of two products, or of the gradients of their four factors."""
        (*outer, rows, width), *_ = self.operands[0]
        columns, value_width = self.operands[1][0][-2], self.operands[2][0][-1]
        heads = torch.Size(outer).numel()
        return 2 * heads * rows * columns * (width + value_width) * (2 if self.backward else 1)

    def attend(self) -> tuple[Tensor, list[Tensor]]:
        """Compute attention in separate operations; return the result and the operands.

        This uses torch's meta device, on which the weights of all pairs of tokens need no memory. If
        ``backward`` is True, the result can be differentiated with respect to the operands.
        """
        (query, key, value), mask = map(_tensor, self.operands), self.mask and _tensor(self.mask)
        operands = [tensor.requires_grad_(self.backward) for tensor in (query, key, value)]
        groups = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        with torch.set_grad_enabled(self.backward):
            attention: Any = torch.ops.aten._scaled_dot_product_attention_math
            result, _ = attention(*operands, mask, 0.0, self.causal, None, scale=self.scale, **groups)
        return result, operands


def _like(tensor: Tensor) -> Like:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _tensor(like: Like) -> Tensor:
    shape, strides, dtype = like
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
