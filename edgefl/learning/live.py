"""Trace the memory of live tensors.

A tensor is live from the operation that creates its storage until the storage is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)

LiveLines = tuple[tuple[float, float], ...]
"""Pairs (bytes, bytes per example). The peak memory of a step is the maximum, over all pairs, of bytes +
examples × bytes per example."""


def memory_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor's elements or, for a sparse tensor, of its stored values.

    >>> len(memory_of(torch.eye(5).to_sparse())) == 5 * 4
    True
    """
    return stored(tensor).untyped_storage()


def stored(tensor: Tensor) -> Tensor:
    """Return the tensor itself or, for a sparse tensor, the tensor of its stored values."""
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor


class LiveTensors:
    """Counts the bytes of live tensors after each operation.

    Tensors in ``known``, such as weights, are not counted. A storage is counted from the first operation that
    creates or uses it until it is freed.

    >>> live = LiveTensors()
    >>> x = torch.zeros(4); live.note(None, (), (x,)); del x
    >>> y = torch.zeros(2); live.note(None, (), (y,))
    >>> live.line
    [16, 8]
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self.line: list[int] = []
        """Number of live bytes at each operation, including temporary memory inside the operation."""
        self.bytes = 0
        """Number of bytes that are live now."""
        self._storages: dict[int, weakref.ref[Any] | None] = {}
        for tensor in known:
            self._storages[memory_of(tensor)._cdata] = None

    def note(self, operation: Any, args: Sequence[Any], tensors: Iterable[Any]) -> None:
        """Record an operation and its positional arguments; ``tensors`` are its arguments and results."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = memory_of(tensor)
                if (key := storage._cdata) not in self._storages:
                    self.bytes += (size := storage.nbytes())
                    self._storages[key] = weakref.ref(storage, partial(self._freed, key, size))
        self.line.append(self.bytes + _inside(operation, args))

    def release(self, tensor: Tensor) -> None:
        """Stop counting a parameter's gradient, because complete gradients are counted separately."""
        storage = memory_of(tensor)
        if self._storages.get(storage._cdata) is not None:
            self._storages[storage._cdata] = None
            self.bytes -= storage.nbytes()
            weakref.finalize(storage, self._storages.pop, storage._cdata, None)

    def _freed(self, key: int, size: int, _: object) -> None:
        if self._storages.pop(key, None) is not None:
            self.bytes -= size


def _inside(operation: Any, args: Sequence[Any]) -> int:
    """Return the bytes that oneDNN needs temporarily to copy a convolution's operands to another layout."""
    if operation not in _CONVOLUTIONS:
        return 0
    operands = args[: 3 if operation is _CONVOLUTIONS[1] else 2]
    return sum(tensor.numel() * tensor.element_size() for tensor in operands)


def live_lines(low: Sequence[int], high: Sequence[int], batches: tuple[int, int]) -> LiveLines:
    """Fit the live bytes of each operation as a linear function of the batch size, from traces at two sizes.

    Return only the lines that are highest at some batch size. If the two traces have different numbers of
    operations, the result is the single line through the peaks of both.

    >>> live_lines([10, 40], [12, 40], (2, 4))
    ((40.0, 0.0), (8.0, 1.0))
    """
    if not low or not high:
        return ()
    first, last = (
        np.array(line if len(low) == len(high) else [max(line)], np.float64) for line in (low, high)
    )
    slope = (last - first) / (batches[1] - batches[0])
    fixed = first - slope * batches[0]
    lines, size = [], 1.0
    while True:
        values = fixed + slope * size
        top = np.flatnonzero(values >= values.max() - 0.5)
        best = top[slope[top].argmax()]
        lines.append((float(fixed[best]), float(slope[best])))
        steeper = np.flatnonzero(slope > slope[best])
        if not len(steeper):
            return tuple(dict.fromkeys(lines))  # a line is found again where a crossing is rounded
        crossings = (fixed[best] - fixed[steeper]) / (slope[steeper] - slope[best])
        size = max(size * (1 + 1e-9), float(crossings.min()))  # grows in any case
