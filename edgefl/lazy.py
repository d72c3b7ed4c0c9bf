"""Sequences that create their items on access, to save memory for fleets of a million clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """Base class; a subclass defines ``__len__`` and `make`. Slices are lists.

    >>> class Squares(LazySequence[int]):
    ...     def __len__(self): return 4
    ...     def make(self, index): return index * index
    >>> Squares()[-1], Squares()[1:3], list(Squares())
    (9, [1, 4], [0, 1, 4, 9])
    """

    def make(self, index: int) -> T:
        """Create the item at ``index``, which is from 0 to the length minus 1."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T]:
        return map(self.make, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self.make(at) for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}, got {index}")
        return self.make(index % len(self))
