"""The work of a training or inference step, as data: an amount for each class of operation."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class StepWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work of one step for each class of operation: floating-point operations and bytes.

    A multiply-add counts as two operations. Bytes are the bytes of the tensors that an operation reads and
    writes; an operation that returns a view moves no bytes.

    >>> StepWork(conv_flop=2.0, calls=1.0) + StepWork(matmul_flop=4.0).scaled(0.5)
    StepWork(conv_flop=2.0, ..., matmul_flop=2.0, ..., calls=1.0, ...)
    """

    conv_flop: float = 0.0
    """Floating-point operations of convolutions with kernels larger than 1 × 1, including grouped
    convolutions."""
    thin_flop: float = 0.0
    """Floating-point operations of ungrouped convolutions with kernels larger than 1 × 1 and at most four
    input channels, for example in the first layer of a network. So few channels do not fill vector
    registers."""
    pointwise_flop: float = 0.0
    """Floating-point operations of 1 × 1 convolutions."""
    depthwise_flop: float = 0.0
    """Floating-point operations in the forward pass of convolutions whose groups have at most four input
    channels."""
    depthwise_backward_flop: float = 0.0
    matmul_flop: float = 0.0
    """Floating-point operations of matrix products and attention, and operations that a module declares."""
    recurrent_flop: float = 0.0
    """Floating-point operations of matrix products in recurrent cells."""
    depthwise_planes: float = 0.0
    """Number of depthwise groups times the number of images, summed over forward pass and gradients."""
    conv_bytes: float = 0.0
    """Bytes that convolutions move. The following fields hold the bytes that other operations move."""
    matmul_bytes: float = 0.0
    norm_bytes: float = 0.0
    pool_bytes: float = 0.0
    elementwise_bytes: float = 0.0
    """Bytes that all other operations move, such as elementwise ones."""
    copy_bytes: float = 0.0
    calls: float = 0.0
    """Number of operations of all classes."""
    parameters: float = 0.0
    """Number of parameters that the step updates."""

    @property
    def flop(self) -> float:
        """Number of floating-point operations of all classes."""
        return sum(value for name, value in self._items() if name.endswith("_flop"))

    @property
    def bytes(self) -> float:
        """Number of bytes that operations of all classes move."""
        return sum(value for name, value in self._items() if name.endswith("_bytes"))

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(**{name: value + getattr(other, name) for name, value in self._items()})

    def scaled(self, factor: float) -> StepWork:
        """Return the work of this step multiplied by ``factor``."""
        return StepWork(**{name: value * factor for name, value in self._items()})

    def _items(self) -> Iterator[tuple[str, float]]:
        return ((name, getattr(self, name)) for name in self.__struct_fields__)


class BatchWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one step as a function of the batch size.

    >>> BatchWork(fixed=StepWork(calls=3.0), per_example=StepWork(conv_flop=2.0)).at(10).conv_flop
    20.0
    """

    fixed: StepWork
    per_example: StepWork
    live: tuple[tuple[float, float], ...] = ()
    """Linear functions of the batch size, as pairs (bytes, bytes per example); `live_bytes` is their maximum.
    Empty if memory was not traced."""

    def live_bytes(self, batch: float) -> float:
        """Return the peak memory of a step in bytes: the batch, activations and temporary tensors.

        >>> BatchWork(fixed=StepWork(), per_example=StepWork(), live=((40.0, 0.0), (8.0, 1.0))).live_bytes(50)
        58.0
        """
        return max((fixed + per_example * batch for fixed, per_example in self.live), default=0.0)

    def at(self, batch: float) -> StepWork:
        """Return the work of a step on ``batch`` examples."""
        return self.fixed + self.per_example.scaled(batch)
