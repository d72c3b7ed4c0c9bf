"""Streams: named, independent, and the same on every machine."""

from __future__ import annotations

import copy

import numpy as np

from edgefl.seeds import stream


def test_a_name_is_its_text() -> None:
    first = stream(1, "trip", 3, 12).integers(2**63)
    assert stream(1, "trip", 3, 12).integers(2**63) == first
    assert stream(int(np.int64(1)), "trip", *np.array([3, 12])).integers(2**63) == first


def test_names_that_look_alike_are_different_streams() -> None:
    names = [(1, "a", 2, 3), (1, "a", 23), (12, "a", 3), (1, "a", 3, 2), (1, "a"), (1, "b"), (-1, "a")]
    drawn = [stream(seed, purpose, *ids).integers(2**63) for seed, purpose, *ids in names]
    assert len(set(drawn)) == len(names)


def test_neighbouring_streams_are_uncorrelated() -> None:
    """Trips are numbered one after another: their streams must not be neighbours too."""
    count = 2000
    draws = np.array([stream(7, "trip", 0, trip).random(4) for trip in range(count)])
    bound = 4.5 / np.sqrt(count)  # a correlation of independent draws is beyond it once in 10⁵ times
    assert abs(np.corrcoef(draws, rowvar=False) - np.eye(4)).max() < bound
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < bound
    assert abs(draws.mean() - 0.5) < 4.5 * np.sqrt(1 / 12 / draws.size)


def test_the_bits_are_those_of_every_machine() -> None:
    """A run's bits depend on these: a change of them is a change of every result."""
    assert stream(1, "trip", 3, 12).integers(2**63) == 5973142416120778127


def test_a_stream_can_be_copied() -> None:
    first = stream(1, "strategy")
    first.random()
    assert copy.deepcopy(first).random() == first.random()
