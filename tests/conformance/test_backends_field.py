"""Tests that each back end's arithmetic modulo p = 2^32 − 5 agrees with Python's integers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from backend_cases import same_bits, threads, unaligned

from edgefl import kernels
from edgefl.kernels.field import MAX_ENCODED, PRIME, Words

TILE = kernels.TILE
SIZES = (0, 1, 15, 33, TILE + 1, 16 * TILE + 5)


def random_words(rng: np.random.Generator, size: int, offset: int = 0) -> Words:
    """Return random numbers below p that start with the largest, p − 1, and the smallest, 0."""
    made = rng.integers(0, PRIME, size, dtype=np.uint32)
    made[:3] = [PRIME - 1, 0, PRIME // 2][: min(size, 3)]
    return unaligned(made, offset)


def summed(backend: str, vectors: list[Words], weights: list[int], size: int) -> Words:
    out = unaligned(np.zeros(size, np.uint32), 4)
    kernels.field_sum(out, vectors, weights, backend)
    return out


def coded(backend: str, update: Any, mask: Words, clip: float, factor: float) -> tuple[Any, ...]:
    out, floats = np.zeros(mask.size, np.uint32), np.zeros(mask.size, np.float32)
    over = kernels.field_encode(out, update, mask, clip, factor, backend)
    largest = kernels.field_decode(floats, out, mask, 0.75, backend)
    return out, floats, np.array([over, largest])


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_all_sizes_counts_and_weights(fast: str, size: int) -> None:
    for count in (0, 1, 3, 4, 9):
        rng = np.random.default_rng([size, count])
        vectors = [random_words(rng, size, 4 * k % 64) for k in range(count)]
        for most in (2, 2**16, PRIME):
            weights = rng.integers(0, most, count).tolist()
            same_bits(summed("reference", vectors, weights, size), summed(fast, vectors, weights, size))


def test_sums_of_the_largest_numbers(backend: str) -> None:
    """Up to a total weight of 2^32 − 1, the C kernel adds products in 64 bits without reducing them modulo p.

    The first two totals are 2^32 − 1 and 2^32.
    """
    vector = np.full(TILE + 3, PRIME - 1, np.uint32)
    for weights in ([2**31, 2**31 - 1], [2**31, 2**31], [PRIME - 1] * 9, [1] * 300):
        expected = sum(weights) * (PRIME - 1) % PRIME
        assert set(summed(backend, [vector] * len(weights), weights, vector.size).tolist()) == {expected}


@pytest.mark.parametrize("size", SIZES)
def test_encoding_and_decoding_of_all_sizes(fast: str, size: int) -> None:
    rng = np.random.default_rng(size)
    update, mask = rng.standard_normal(size, dtype=np.float32), random_words(rng, size, 12)
    special = [np.nan, np.inf, -np.inf, -0.0, 1e-45, 1.5 / 64, 2.5 / 64, -2.5 / 64]
    update[: len(special)] = special[:size]
    update = unaligned(update, 4)
    for clip, factor in ((0.5, 64.0), (1.0, float(MAX_ENCODED)), (2.0**-60, 2.0**90), (3.0, 1000.0)):
        same_bits(coded("reference", update, mask, clip, factor), coded(fast, update, mask, clip, factor))


def test_any_number_of_threads_gives_the_same_numbers(fast: str) -> None:
    rng = np.random.default_rng(1)
    size = 64 * TILE * 8 + 7
    update, mask = rng.standard_normal(size, dtype=np.float32), random_words(rng, size)
    vectors = [random_words(rng, size) for _ in range(5)]
    found = []
    for count in (1, 3):
        with threads(count):
            case = coded(fast, update, mask, 2.0, 256.0)
            found.append([*case, summed(fast, vectors, [1, 2, PRIME - 1, 4, 5], size)])
    same_bits(*found)
    assert found[0][2][0] == np.count_nonzero(np.abs(update) > 2.0)


def test_sums_and_codes_are_those_of_pythons_integers(backend: str) -> None:
    rng = np.random.default_rng(3)
    vectors = [random_words(rng, 500) for _ in range(7)]
    weights = rng.integers(0, PRIME, 7).tolist()
    exact = [sum(w * int(v[i]) for w, v in zip(weights, vectors, strict=True)) % PRIME for i in range(500)]
    assert summed(backend, vectors, weights, 500).tolist() == exact
    update, mask = rng.standard_normal(500, dtype=np.float32), random_words(rng, 500)
    out, floats, (over, largest) = coded(backend, update, mask, 1.0, 2.0**20)
    whole = [round(Fraction(max(-1.0, min(1.0, float(x)))) * 2**20) for x in update]
    assert out.tolist() == [(q + int(m)) % PRIME for q, m in zip(whole, mask, strict=True)]
    assert floats.tolist() == [float(np.float32(q) * np.float32(0.75)) for q in whole]
    assert (over, largest) == (np.count_nonzero(np.abs(update) > 1), 2**20)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"vectors": [np.zeros(3, np.int32)]}, r"vectors\[0\] must be uint32 \(got int32\)"),
        ({"vectors": [np.zeros(4, np.uint32)]}, r"vectors\[0\] must have 3 elements, as many as out"),
        ({"weights": [PRIME]}, r"weights\[0\] must be an integer from 0 to 4294967290 \(got 4294967291\)"),
        ({"weights": [-1]}, r"weights\[0\] must be an integer .* \(got -1\)"),
        ({"weights": [0.5]}, r"weights\[0\] must be an integer .* \(got 0.5\)"),
        ({"weights": []}, r"weights must have 1 entries, as many as vectors \(got 0\)"),
        ({"out": np.zeros((3, 1), np.uint32)}, r"out must be a flat array"),
    ],
)
def test_wrong_arguments_of_sums_are_named(backend: str, changed: dict[str, Any], why: str) -> None:
    given = {"out": np.zeros(3, np.uint32), "vectors": [np.zeros(3, np.uint32)], "weights": [1]} | changed
    with pytest.raises((ValueError, TypeError), match=why):
        kernels.field_sum(given["out"], given["vectors"], given["weights"], backend)


def test_wrong_arguments_of_encoding_and_decoding_are_named(backend: str) -> None:
    update, mask, out = np.zeros(3, np.float32), np.zeros(3, np.uint32), np.zeros(3, np.uint32)
    with pytest.raises(
        ValueError, match=r"clip · factor must be at most 2147483520 \(got 1.0 · 2147483648.0\)"
    ):
        kernels.field_encode(out, update, mask, 1.0, 2.0**31, backend)
    with pytest.raises(ValueError, match=r"factor must be a finite float32 above 0 \(got 0.0\)"):
        kernels.field_decode(update, out, mask, 0.0, backend)
    with pytest.raises(ValueError, match="words must not overlap the output array"):
        kernels.field_decode(out.view(np.float32), out, mask, 1.0, backend)
    with pytest.raises(TypeError, match=r"update must be float32 \(got float64\)"):
        kernels.field_encode(out, np.zeros(3), mask, 1.0, 2.0, backend)
    with pytest.raises(TypeError, match=r"clip must be a number \(got None\)"):
        kernels.field_encode(out, update, mask, None, 2.0, backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"vectors\[1\] must not overlap the output array"):
        kernels.field_sum(out, [mask, out], [1, 1], backend)
    assert kernels.field_encode(mask, update, mask, 1.0, 2.0, backend) == 0  # in place
