"""The work of a training or inference step, as data: amounts by class of operation."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class StepWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work of one step by class of operation: floating-point operations (a multiply-add is two) and bytes.

    Bytes are those of the tensors that an operation reads and writes. A view moves none.

    >>> StepWork(conv_flop=2.0, calls=1.0) + StepWork(matmul_flop=4.0).scaled(0.5)
    StepWork(conv_flop=2.0, ..., matmul_flop=2.0, ..., calls=1.0, ...)
    """

    conv_flop: float = 0.0
    """Convolutions with kernels above 1 × 1, including grouped ones."""
    thin_flop: float = 0.0
    """Ungrouped convolutions with kernels above 1 × 1 and up to four input channels, such as those of a
    network's first layer. So few channels do not fill vector registers."""
    pointwise_flop: float = 0.0
    """1 × 1 convolutions."""
    depthwise_flop: float = 0.0
    """Forward pass of convolutions with groups of up to four input channels."""
    depthwise_backward_flop: float = 0.0
    matmul_flop: float = 0.0
    """Matrix products, attention, and work that a module declares."""
    recurrent_flop: float = 0.0
    """Matrix products in recurrent cells."""
    depthwise_planes: float = 0.0
    """Number of depthwise groups × number of images, summed over the forward pass and each gradient."""
    conv_bytes: float = 0.0
    """Bytes moved by convolutions. The fields below are the bytes moved by other kinds of operations."""
    matmul_bytes: float = 0.0
    norm_bytes: float = 0.0
    pool_bytes: float = 0.0
    elementwise_bytes: float = 0.0
    """Bytes moved by all other operations."""
    copy_bytes: float = 0.0
    calls: float = 0.0
    """Number of operations of any class."""
    parameters: float = 0.0
    """Number of parameters that the step updates."""

    @property
    def flop(self) -> float:
        """Floating-point operations of all classes."""
        return sum(value for name, value in self._items() if name.endswith("_flop"))

    @property
    def bytes(self) -> float:
        """Bytes moved by operations of all classes."""
        return sum(value for name, value in self._items() if name.endswith("_bytes"))

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(**{name: value + getattr(other, name) for name, value in self._items()})

    def scaled(self, factor: float) -> StepWork:
        """Return the work of ``factor`` such steps."""
        return StepWork(**{name: value * factor for name, value in self._items()})

    def _items(self) -> Iterator[tuple[str, float]]:
        return ((name, getattr(self, name)) for name in self.__struct_fields__)


class BatchWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one step as a function of its batch size.

    >>> BatchWork(fixed=StepWork(calls=3.0), per_example=StepWork(conv_flop=2.0)).at(10).conv_flop
    20.0
    """

    fixed: StepWork
    per_example: StepWork
    live: tuple[tuple[float, float], ...] = ()
    """Pairs (bytes, bytes per example) of lines whose maximum is `live_bytes`; empty without a trace."""

    def live_bytes(self, batch: float) -> float:
        """Return the peak of live bytes in a step: batch, activations and temporaries.

        >>> BatchWork(fixed=StepWork(), per_example=StepWork(), live=((40.0, 0.0), (8.0, 1.0))).live_bytes(50)
        58.0
        """
        return max((fixed + per_example * batch for fixed, per_example in self.live), default=0.0)

    def at(self, batch: float) -> StepWork:
        """Return the work of a step on ``batch`` examples."""
        return self.fixed + self.per_example.scaled(batch)
