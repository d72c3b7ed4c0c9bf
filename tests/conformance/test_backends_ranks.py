"""Tests that trimmed means and inner products are bit-identical in all back ends and agree with numpy."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from backend_cases import DTYPES, chosen, fast_backends, random_case, same_bits, threads, unaligned

from edgefl import kernels
from edgefl.kernels.ranks import GRAIN, network

TILE = kernels.TILE
SIZES = (0, 1, 31, 33, 257, TILE + 1, GRAIN + 5)


def results(backend: str, case: dict[str, Any], trim: int) -> tuple[np.ndarray, np.ndarray]:
    updates, scales = case["updates"], case["scales"]
    out = unaligned(np.full(updates[0].size, np.nan, np.float32), len(updates) % 4)
    kernels.trimmed_mean(out, updates, trim, backend, scales=scales)
    return out, kernels.products(updates, backend, scales=scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_all_types_sizes_counts_and_trims(dtype: str, size: int) -> None:
    few = ((1, 0), (3, 1), (6, 2))
    for count, trim in (*few, (2, 0), (10, 4), (17, 8), (33, 3)) if size == TILE + 1 else few:
        case = random_case(dtype, size, count, offset=count)
        expected = results("reference", case, trim)
        for each in fast_backends():
            with chosen(*each) as fast:
                same_bits(expected, results(fast, case, trim))


@cache
def many() -> tuple[dict[str, Any], Any]:
    """Return a case of 130 updates, large enough for several threads, and its results with one thread."""
    case = random_case("float32", GRAIN + 3 * TILE + 7, 130)
    with threads(1):
        return case, results(fast_backends()[0][0], case, 60)


def test_many_updates_on_several_threads(fast: str) -> None:
    case, expected = many()
    with threads(3):
        same_bits(expected, results(fast, case, 60))


def test_inner_products_continue_from_one_window_of_grains_to_the_next(fast: str) -> None:
    """The C kernel computes windows of 16 grains of `GRAIN` elements. Each of these updates has 19 grains."""
    case = random_case("int8", 18 * GRAIN + 300, 2)
    same_bits(results("reference", case, 0), results(fast, case, 0))


def test_results_are_those_of_sorting_and_multiplying_in_float64(backend: str) -> None:
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((13, 5000)).astype(np.float32)
    rows[3] = rows[4]  # equal values
    out = np.empty(5000, np.float32)
    for trim in range(7):
        kernels.trimmed_mean(out, list(rows), trim, backend)
        ranked = np.sort(rows.astype(np.float64), axis=0)[trim : 13 - trim]
        np.testing.assert_allclose(out, ranked.mean(axis=0).astype(np.float32), rtol=1e-7, atol=1e-12)
    np.testing.assert_array_equal(out, np.median(rows, axis=0))
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(kernels.products(list(rows), backend), exact @ exact.T, rtol=1e-12, atol=1e-9)


def test_a_mean_of_negative_zeros_is_positive_zero(backend: str) -> None:
    out = np.empty(2, np.float32)
    kernels.trimmed_mean(out, [np.array([-0.0, 1], np.float32), np.array([-0.0, -1], np.float32)], 0, backend)
    assert out.tobytes() == np.zeros(2, np.float32).tobytes()


def test_the_values_of_a_single_element_are_added_in_ascending_order(backend: str) -> None:
    """In ascending order, adding a 50 to −2^60 changes nothing: the next float64 is at least 128 away.

    Mutant: the values are added with numpy's sum, which adds eight or more values of one column pairwise. The
    mean is then 16.
    """
    out, values = np.empty(1, np.float32), [-(2.0**60), *[50.0] * 6, 2.0**60]
    kernels.trimmed_mean(out, [np.array([value], np.float32) for value in values], 0, backend)
    assert out.tolist() == [0.0]


@pytest.mark.parametrize("count", [*range(1, 12), 16, 31, 64, 100])
def test_a_sorting_network_sorts_all_zeros_and_ones(count: int) -> None:
    """A network that sorts all columns of zeros and ones sorts all columns (the 0-1 principle). With a trim,
    only the middle rows must be sorted."""
    rng = np.random.default_rng(count)
    columns = (rng.random((count, 4000)) < rng.random(4000)).astype(np.int8)
    if count <= 11:
        columns = (np.arange(1 << count)[None] >> np.arange(count)[:, None] & 1).astype(np.int8)
    for trim in {0, (count - 1) // 2}:
        ranks = columns.copy()
        for low, high in network(count, trim).reshape(-1, 2):
            pair = ranks[[low, high]]
            ranks[low], ranks[high] = pair.min(axis=0), pair.max(axis=0)
        middle = slice(trim, count - trim)
        np.testing.assert_array_equal(ranks[middle], np.sort(columns, axis=0)[middle])


@pytest.mark.parametrize(
    ("updates", "options", "why"),
    [
        ([], {}, r"updates must be 1 to 1024 vectors \(got 0\)"),
        ([np.zeros(3, np.float32)] * 2, {"trim": 1}, r"trim must be from 0 to 0 for 2 updates \(got 1\)"),
        ([np.zeros(3, np.float32)] * 2, {"trim": -1}, r"trim must be from 0 to 0 for 2 updates \(got -1\)"),
        ([np.zeros(3, np.float32)] * 3, {"trim": 1.0}, r"trim must be an integer \(got 1.0\)"),
        ([np.zeros(3, np.float32), np.zeros(4, np.float32)], {}, r"updates\[1\] must have 3 elements"),
        ([np.zeros(3, np.int8)], {}, r"scales must be given for an int8 update|scales\[0\] must be given"),
        ([np.zeros(3)], {}, r"updates\[0\] must be float32"),
    ],
)
def test_wrong_arguments_are_named(backend: str, updates: Any, options: dict[str, Any], why: str) -> None:
    out = np.zeros(3, np.float32)
    with pytest.raises((ValueError, TypeError), match=why):
        kernels.trimmed_mean(out, updates, options.get("trim", 0), backend)
    if "trim" not in options:
        with pytest.raises((ValueError, TypeError), match=why):
            kernels.products(updates, backend)


def test_the_output_may_not_be_an_update(backend: str) -> None:
    out = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"updates\[1\] must not overlap the output array"):
        kernels.trimmed_mean(out, [np.ones(3, np.float32), out], 0, backend)
    scale = out[:1]
    with pytest.raises(ValueError, match=r"scales\[0\] must not overlap the output array"):
        kernels.trimmed_mean(scale, [np.ones(1, np.int8)], 0, backend, scales=[scale])
