"""Tests of `Ascending` and `PatchedSequence` against sorted and changed lists, and of draws by `sample`."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.sequences import BLOCK, MAX_SHUFFLED, Ascending, PatchedSequence, sample

BOUND = 3 * BLOCK
numbers = st.one_of(
    st.integers(0, 9), st.integers(BLOCK - 5, BLOCK + 5), st.integers(2 * BLOCK - 2, BOUND - 1)
)


@given(st.lists(numbers))
def test_ascending_numbers_equal_a_sorted_list(moves: list[int]) -> None:
    mine, plain = Ascending(BOUND), list[int]()
    for number in moves:
        there = number in plain
        assert (number in mine) == there
        if there:
            plain.remove(number)
            mine.remove(number)
        else:
            plain = sorted([*plain, number])
            mine.add(number)
        assert mine.rank(number) == bisect_left(plain, number)
        assert not mine.discard(number + 1) or plain.remove(number + 1) is None
    assert mine == plain
    assert (len(mine), list(mine), mine[1:3], [mine[at] for at in range(-len(plain), len(plain))]) == (
        len(plain), plain, plain[1:3], plain + plain
    )  # fmt: skip


def test_numpys_integers_are_found() -> None:
    """Regression: ``in view.idle`` was False for clients that a strategy had drawn with numpy."""
    mine = Ascending(BOUND)
    for number in (3, BLOCK + 1):
        mine.add(number)
    wanted = np.array([3, 4, BLOCK + 1, BOUND + 1, -1])
    assert [number in mine for number in wanted] == [True, False, True, False, False]
    assert np.uint8(3) in mine
    assert not any(other in mine for other in (None, "3", 3.5, 10**30))


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 45)), st.sets(st.integers(0, 45)))
def test_a_patched_sequence_has_the_changes(clients: set[int], without: set[int], more: set[int]) -> None:
    found = Ascending(50)
    for client in clients:
        found.add(client)
    for base in (sorted(clients), found):
        rest = PatchedSequence(base, without, more - clients)
        wanted = sorted((clients - without) | (more - clients))
        assert [rest[index] for index in range(-len(wanted), len(wanted))] == wanted + wanted
        assert (rest[:3], rest[-2:], rest[::2]) == (wanted[:3], wanted[-2:], wanted[::2])
        for beyond in (-len(wanted) - 1, len(wanted)):
            with pytest.raises(IndexError):
                _ = rest[beyond]


def test_a_number_that_is_left_out_twice_is_missing_once() -> None:
    rest = PatchedSequence([2, 3, 5, 8], without=[3, 8, 3])
    assert (len(rest), rest[:]) == (2, [2, 5])


def test_a_sample_of_many_has_no_number_twice_and_one_of_few_is_a_permutation() -> None:
    few, many = range(MAX_SHUFFLED), range(MAX_SHUFFLED + 1)
    first = np.random.default_rng(1).permutation(len(few))[:5].tolist()
    assert sample(few, 5, np.random.default_rng(1)) == first
    counts = np.zeros(len(many))
    rng = np.random.default_rng(2)
    for _ in range(200):
        found = sample(many, 50, rng)
        assert len(set(found)) == 50
        counts[found] += 1
    assert counts.sum() == 10_000
    assert counts.max() < 12  # of 10,000 draws from about as many numbers
    assert sorted(sample(many, len(many) + 5, rng)) == list(many)


def test_each_number_takes_four_bytes() -> None:
    idle = Ascending(10**6)
    for client in range(10**5):
        idle.add(client)
    held = sum(block.itemsize * len(block) for block in idle._blocks)
    assert held == 4 * 10**5
