"""Ascending whole numbers that come and go, found by place or by value without a look at each."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

BLOCK = 16_384
"""Numbers that lie together: so many are moved by one that comes or goes, at most."""
MOST_SHUFFLED = 10_000
"""Of more numbers than this a few are drawn without shuffling all of them."""


class Ascending(Sequence[int]):
    """Different whole numbers from 0 to below ``bound``, ascending; four bytes each.

    >>> idle = Ascending(10**6)
    >>> for client in (70_000, 3, 5, 999_999): idle.add(client)
    >>> idle.remove(5); idle, idle[1], idle.rank(70_001), 5 in idle
    ([3, 70000, 999999], 70000, 2, False)
    """

    def __init__(self, bound: int) -> None:
        self._blocks = [array("i") for _ in range(bound // BLOCK + 1)]
        self._len = 0
        self._ends: list[int] = []
        """Items up to the end of each block; empty where that is not known."""

    def add(self, number: int) -> None:
        """Put in a number that is not there."""
        insort(self._blocks[number // BLOCK], number)
        self._len += 1
        self._ends = []

    def discard(self, number: int) -> bool:
        """Take a number out; returns False if it was not there."""
        block = self._blocks[number // BLOCK]
        at = bisect_left(block, number)
        if at == len(block) or block[at] != number:
            return False
        del block[at]
        self._len -= 1
        self._ends = []
        return True

    def remove(self, number: int) -> None:
        """Take out a number that is there."""
        if not self.discard(number):
            raise ValueError(f"{number} is not among them")

    def rank(self, number: int) -> int:
        """The count of numbers below this one."""
        at = number // BLOCK
        return bisect_left(self._blocks[at], number) + (self._whole()[at - 1] if at else 0)

    def _whole(self) -> list[int]:
        if not self._ends:
            self._ends = list(accumulate(map(len, self._blocks)))
        return self._ends

    def __len__(self) -> int:
        return self._len

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int) or not 0 <= number < BLOCK * len(self._blocks):
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
        at = bisect_right(self._whole(), place)
        return self._blocks[at][place - (self._ends[at - 1] if at else 0)]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return repr(list(self))


def rank(ascending: Sequence[int], number: int) -> int:
    """The count of numbers below this one."""
    return ascending.rank(number) if isinstance(ascending, Ascending) else bisect_left(ascending, number)


class Changed(Sequence[int]):
    """Ascending ``numbers`` without those of ``without`` and with ``more``, which are few and not among them.

    >>> left = Changed([2, 3, 5, 8], without={3, 4, 8}, more=[9, 4])
    >>> len(left), [left[at] for at in range(4)]
    (4, [2, 4, 5, 9])
    """

    def __init__(self, numbers: Sequence[int], without: Collection[int], more: Iterable[int] = ()) -> None:
        self._numbers, self._more = numbers, sorted(more)
        places = ((rank(numbers, number), number) for number in without)
        gaps = sorted(at for at, number in places if at < len(numbers) and numbers[at] == number)
        self._shifts = [gap - count for count, gap in enumerate(gaps)]
        self._places = [
            (at := rank(numbers, number)) - bisect_left(gaps, at) + count
            for count, number in enumerate(self._more)
        ]

    def __len__(self) -> int:
        return len(self._numbers) - len(self._shifts) + len(self._more)

    def __getitem__(self, index: Any) -> Any:
        before = bisect_right(self._places, index)
        if before and self._places[before - 1] == index:
            return self._more[before - 1]
        place = index - before
        return self._numbers[place + bisect_right(self._shifts, place)]


def drawn(ready: Sequence[int], count: int, rng: np.random.Generator) -> list[int]:
    """At most ``count`` of ``ready``, different ones, each order of them equally likely.

    Of at most `MOST_SHUFFLED` they are the first of a permutation; of more they are drawn one by one, which
    gives other ones.

    >>> drawn([4, 5, 6], 2, np.random.default_rng(0))
    [6, 4]
    """
    size = len(ready)
    if size <= MOST_SHUFFLED or count >= size:
        return [ready[at] for at in rng.permutation(size)[:count].tolist()]
    return [ready[at] for at in rng.choice(size, count, replace=False).tolist()]
