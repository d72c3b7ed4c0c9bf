"""Examples held in memory in the data type of their files, and converted to float32 one batch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Examples(Protocol):
    """Inputs indexed by row: a numpy array, or an object that creates an array of the requested rows."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: Any, /) -> NDArray[Any]: ...


class Images:
    """Images stored as uint8 of shape (n, channels, height, width); indexing returns (x/top − mean)/std.

    Float32 copies would need four times as much memory, and every forked client might make its own.

    >>> images = Images(np.full((2, 1, 1, 2), 255, np.uint8), top=255, mean=[0.5], std=[0.25])
    >>> images[np.array([1])].tolist()
    [[[[2.0, 2.0]]]]
    """

    def __init__(self, raw: Bytes, *, top: int, mean: Sequence[float], std: Sequence[float]) -> None:
        if raw.dtype != np.uint8 or raw.ndim != 4 or not (len(mean) == len(std) == raw.shape[1]):
            raise ValueError(
                f"raw must be uint8 of shape (n, {len(mean)}, height, width) (got {raw.dtype} {raw.shape})"
            )
        self.raw = raw
        self.top, self.mean, self.std = top, tuple(mean), tuple(std)
        deviation = np.asarray(std, np.float64)
        self._scale = (1.0 / (top * deviation)).astype(np.float32).reshape(-1, 1, 1)
        self._shift = (-np.asarray(mean, np.float64) / deviation).astype(np.float32).reshape(-1, 1, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.raw.shape

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Any, /) -> NDArray[np.float32]:
        batch: NDArray[np.float32] = np.multiply(self.raw[rows], self._scale, dtype=np.float32)
        batch += self._shift
        return batch

    def take(self, rows: NDArray[np.int64] | slice) -> Images:
        """Return the images in ``rows``, still stored as bytes; a copy unless ``rows`` is a slice."""
        return Images(self.raw[rows], top=self.top, mean=self.mean, std=self.std)


class Tokens:
    """Tokens as whole numbers, stored in the smallest integer type that suffices; indexing returns int64.

    >>> Tokens(np.array([[3, 1], [0, 2]], np.uint8))[np.array([1])]
    array([[0, 2]])
    """

    def __init__(self, raw: NDArray[np.unsignedinteger[Any]]) -> None:
        if raw.dtype.kind != "u" or raw.ndim != 2:
            raise ValueError(f"raw must be unsigned and of shape (n, length) (got {raw.dtype} {raw.shape})")
        self.raw = raw

    @property
    def shape(self) -> tuple[int, ...]:
        return self.raw.shape

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, rows: Any, /) -> NDArray[np.int64]:
        chosen: NDArray[np.int64] = self.raw[rows].astype(np.int64)
        return chosen

    def take(self, rows: NDArray[np.int64] | slice) -> Tokens:
        """Return the tokens in ``rows``, still stored in the same integer type."""
        return Tokens(self.raw[rows])


Labels: TypeAlias = NDArray[np.int64]
Targets: TypeAlias = NDArray[Any]
"""Classes as int64 of shape (n,), tokens as int64 of shape (n, length), or numbers as float32 of shape
(n, *target_shape)."""
Part: TypeAlias = tuple[Examples, Targets]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training and test examples; row i of the inputs corresponds to row i of the targets.

    ``train_x`` and ``test_x`` are float32 arrays of shape (n, *input_shape), int64 arrays of tokens, or
    `Images` or `Tokens` objects, which create such arrays for the requested rows. Targets (`Targets`) are one
    class per example or per token, each in [0, classes), or float numbers, in which case ``classes`` is None.
    """

    name: str
    train_x: Examples
    train_y: Targets
    test_x: Examples
    test_y: Targets
    classes: int | None
    input_shape: tuple[int, ...]
    owners: Labels | None = None
    """Index of the user who owns each training example, for the partition ``natural``; None if the data set
    has no users."""

    @classmethod
    def of(
        cls, name: str, parts: Iterable[Part], classes: int | None, owners: Labels | None = None
    ) -> Dataset:
        """Create a data set from a training part and a test part, each a pair of inputs and targets."""
        (x, y), (test_x, test_y) = parts
        tests: dict[str, Any] = {"test_x": test_x, "test_y": test_y, "input_shape": x[:1].shape[1:]}
        return cls(name=name, train_x=x, train_y=y, classes=classes, owners=owners, **tests)

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of the target of one example; () if the target is a class."""
        return self.train_y.shape[1:]

    @property
    def outputs(self) -> int:
        """Number of model outputs per target: the number of classes, or the size of a float target."""
        return math.prod(self.target_shape) if self.classes is None else self.classes

    @property
    def labels(self) -> Labels | None:
        """Class of each training example; None if the targets are not one class per example."""
        return None if self.classes is None or self.target_shape else self.train_y

    @property
    def targets(self) -> str:
        """Description of the targets for error messages."""
        if self.labels is not None:
            return "classes"
        return f"{'float' if self.classes is None else 'token'} targets of shape {self.target_shape}"
