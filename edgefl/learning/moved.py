"""The bytes that one torch operation moves, and their kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from edgefl.learning.live import stored

COPIES: Final = (
    "cat", "stack", "clone", "copy_", "_to_copy", "index", "index_put", "index_put_", "index_select", "roll",
    "constant_pad_nd", "slice_backward", "select_backward", "unfold_backward",
)  # fmt: skip
_LOOKUPS: Final = (
    "embedding", "_embedding_bag", "_embedding_bag_forward_only", "index", "index_select", "gather", "take"
)  # fmt: skip
"""Operations that read only the chosen elements of their first argument, a table."""


def moved_bytes(packet: Any, args: Sequence[Any], leaves: Sequence[Any], out: Any) -> int:
    """Return the number of bytes in the floating-point tensors that an operation reads and writes.

    ``leaves`` are all of its arguments and results. Tensors of indices are ignored, because their size
    depends on the runtime.
    """
    found = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
    moved = sum(tensor.numel() * tensor.element_size() for tensor in map(stored, found))
    return moved - _unread_bytes(packet, args, out)


def _unread_bytes(packet: Any, args: Sequence[Any], out: Any) -> int:
    """Return the number of bytes of a table that a lookup does not read."""
    if packet.__name__ not in _LOOKUPS or not args[0].is_floating_point():
        return 0
    table, bags = args[0], not isinstance(out, Tensor)
    # An `nn.EmbeddingBag` returns sums of rows, so it reads more numbers than it returns.
    read: int = args[1].numel() * table.shape[1] if bags else out.numel()
    return max(0, int(table.numel()) - read) * int(table.element_size())


def bytes_kind(operation: str) -> str:
    """Return the `StepWork` field for the bytes of operations other than convolutions and matrix products."""
    if operation in COPIES:
        return "copy_bytes"
    if "pool" in operation:
        return "pool_bytes"
    return "norm_bytes" if "norm" in operation or "var" in operation else "elementwise_bytes"
