"""Sequences for large fleets: sorted sets of integers, and items that are created on access."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar, overload

import numpy as np

BLOCK = 16_384
"""Size of the range of numbers that one array stores. An insertion or a removal moves at most this many
items."""
MAX_SHUFFLED = 10_000
"""Maximum length of a sequence that `sample` permutes as a whole."""


class Ascending(Sequence[int]):
    """A sorted set of integers from 0 to ``bound`` − 1, each of which takes four bytes of memory.

    >>> idle = Ascending(10**6)
    >>> for client in (70_000, 3, 5, 999_999): idle.add(client)
    >>> idle.remove(5); idle, idle[1], idle.rank(70_001), 5 in idle
    ([3, 70000, 999999], 70000, 2, False)
    """

    def __init__(self, bound: int) -> None:
        self._blocks = [array("i") for _ in range(bound // BLOCK + 1)]
        self._bound = BLOCK * len(self._blocks)
        self._len = 0
        self._ends: list[int] = []
        """Cumulative number of items at the end of each block; empty after the set has changed."""

    def add(self, number: int) -> None:
        """Add a number, which must not be in the set yet."""
        insort(self._blocks[number // BLOCK], number)
        self._len += 1
        self._ends = []

    def discard(self, number: int) -> bool:
        """Remove a number and return True, or return False if the number is not in the set."""
        block = self._blocks[number // BLOCK]
        at = bisect_left(block, number)
        if at == len(block) or block[at] != number:
            return False
        del block[at]
        self._len -= 1
        self._ends = []
        return True

    def remove(self, number: int) -> None:
        """Remove a number. Raises ValueError if the number is not in the set."""
        if not self.discard(number):
            raise ValueError(f"{number} is not in the set")

    def rank(self, number: int) -> int:
        """Return how many elements of the set are below ``number``."""
        at = number // BLOCK
        return bisect_left(self._blocks[at], number) + (self._block_ends()[at - 1] if at else 0)

    def _block_ends(self) -> list[int]:
        if not self._ends:
            self._ends = list(accumulate(map(len, self._blocks)))
        return self._ends

    def __len__(self) -> int:
        return self._len

    def __contains__(self, number: object) -> bool:
        if type(number) is not int:
            if not isinstance(number, int | np.integer):
                return False
            number = int(number)
        if not 0 <= number < self._bound:
            return False
        block = self._blocks[number // BLOCK]
        at = bisect_left(block, number)
        return at < len(block) and block[at] == number

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        if not -self._len <= index < self._len:
            raise IndexError(f"index must be from 0 to {self._len - 1}, got {index}")
        place = index % self._len
        at = bisect_right(self._block_ends(), place)
        return self._blocks[at][place - (self._ends[at - 1] if at else 0)]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return repr(list(self))


def rank(ascending: Sequence[int], number: int) -> int:
    """Return how many elements of a sorted sequence are below ``number``."""
    return ascending.rank(number) if isinstance(ascending, Ascending) else bisect_left(ascending, number)


class PatchedSequence(Sequence[int]):
    """A sorted view of the sequence ``numbers`` without the numbers in ``without`` and with those in
    ``more``.

    ``numbers`` must be sorted. ``more`` must contain only a few numbers, none of which is in ``numbers``.

    >>> left = PatchedSequence([2, 3, 5, 8], without={3, 4, 8}, more=[9, 4])
    >>> len(left), [left[at] for at in range(4)]
    (4, [2, 4, 5, 9])
    """

    def __init__(self, numbers: Sequence[int], without: Collection[int], more: Iterable[int] = ()) -> None:
        self._numbers, self._more = numbers, sorted(more)
        places = ((rank(numbers, number), number) for number in without)
        gaps = sorted({at for at, number in places if at < len(numbers) and numbers[at] == number})
        self._shifts = [gap - count for count, gap in enumerate(gaps)]
        self._places = [
            (at := rank(numbers, number)) - bisect_left(gaps, at) + count
            for count, number in enumerate(self._more)
        ]

    def __len__(self) -> int:
        return len(self._numbers) - len(self._shifts) + len(self._more)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if index < 0 and (index := index + len(self)) < 0:
            raise IndexError(f"index must be from 0 to {len(self) - 1}, got {index - len(self)}")
        before = bisect_right(self._places, index)
        if before and self._places[before - 1] == index:
            return self._more[before - 1]
        place = index - before
        return self._numbers[place + bisect_right(self._shifts, place)]


def sample(ready: Sequence[int], count: int, rng: np.random.Generator) -> list[int]:
    """Draw ``count`` items from ``ready`` without replacement, in random order. If there are fewer items, all
    are drawn.

    If ``ready`` has up to `MAX_SHUFFLED` items, the result is the first part of a random permutation of all
    items. If it has more, a cheaper algorithm is used, which gives a different result for the same seed.

    >>> sample([4, 5, 6], 2, np.random.default_rng(0))
    [6, 4]
    """
    size = len(ready)
    if size <= MAX_SHUFFLED or count >= size:
        return [ready[at] for at in rng.permutation(size)[:count].tolist()]
    return [ready[at] for at in rng.choice(size, count, replace=False).tolist()]


def added(numbers: Iterable[float]) -> float:
    """Add numbers from left to right, as `sum` did before Python 3.12.

    Since then, `sum` compensates for the rounding errors of floats, so the last bits may differ.

    >>> added([1e16, 1.0, -1e16])
    0.0
    """
    total = 0.0
    for number in numbers:
        total += number
    return total


T = TypeVar("T")


class LazySequence(Sequence[T]):
    """Base class of sequences whose items are created each time they are accessed. Slices are lists.

    A subclass must define ``__len__`` and `make`.

    >>> class Squares(LazySequence[int]):
    ...     def __len__(self): return 4
    ...     def make(self, index): return index * index
    >>> Squares()[-1], Squares()[1:3], list(Squares())
    (9, [1, 4], [0, 1, 4, 9])
    """

    def make(self, index: int) -> T:
        """Create the item at ``index``, where 0 ≤ ``index`` < length."""
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
