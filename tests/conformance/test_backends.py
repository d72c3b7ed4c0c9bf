"""Tests that sums, norms, checksums and moving averages in all back ends match the reference bit for bit.

They must match for all types, sizes, counts, alignments, instruction sets and numbers of threads. NaNs may
differ in sign and payload.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_cases import DTYPES, chosen, fast_backends, same_bits, threads, unaligned
from backend_cases import random_case as _case
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl import kernels

TILE, BLOCK = kernels.TILE, kernels.SCALE_BLOCK
SIZES = (0, 1, 7, 8, 9, 17, BLOCK - 1, BLOCK + 1, TILE - 1, TILE, TILE + 1, 2 * TILE, 5 * TILE + 13)


def _run(backend: str, case: dict[str, Any], offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    out = unaligned(np.full(case["base"].size, np.nan, dtype=np.float32), offset)
    sums = np.zeros(len(case["updates"]), dtype=np.uint64)
    norms = kernels.weighted_sum(out, **case, backend=backend, checksums=sums)
    assert sums.tolist() == [kernels.checksum(update, backend) for update in case["updates"]]
    return out, norms


def _check(fast: str, case: dict[str, Any], offset: int = 0, expected: Any = None) -> np.ndarray:
    """Compare a back end's weighted sum with the reference's; return the squared norms of the updates."""
    got, norms = _run(fast, case, offset)
    same_bits(expected or _run("reference", case), (got, norms))
    assert norms.dtype == np.float64
    for update, scale, norm in zip(case["updates"], case["scales"], norms, strict=True):
        same_bits(np.array([norm]), np.array([kernels.sq_norm(update, fast, scale=scale)]))
    return norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_sums_of_all_sizes_and_counts(dtype: str, size: int) -> None:
    for count in (0, 1, 2, 3, 4, 5, 6, 7, 13, 17):
        case = _case(dtype, size, count)
        expected = _run("reference", case)
        for each in fast_backends():
            with chosen(*each) as fast:
                _check(fast, case, expected=expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wild", [False, True])
def test_sums_of_unaligned_views(fast: str, dtype: str, wild: bool) -> None:
    """Wild updates contain denormals, infinities and NaNs."""
    for offset in (0, 1, 2, 4, 8, 31, 63):
        _check(fast, _case(dtype, TILE + 77, 5, wild=wild, offset=offset), offset=4 * offset % 64)


def test_sums_of_every_float16_and_bfloat16(fast: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    for update in (bits, bits.view(np.float16)):
        _check_halves(fast, [update])


def test_only_a_sum_with_a_base_keeps_a_negative_zero(fast: str) -> None:
    negative, out = np.array([-0.0, 0.0], np.float32), np.empty(2, np.float32)
    for base, updates in ((None, [negative]), (negative, [negative]), (negative, [])):
        kernels.weighted_sum(out, base, updates, [1.0] * len(updates), fast)
        assert np.signbit(out).tolist() == [base is not None, False]


def test_a_missing_base_counts_as_zeros(fast: str) -> None:
    case = _case("mixed", TILE + 5, 7)
    out = np.empty_like(case["base"])
    norms = kernels.weighted_sum(out, **case | {"base": None}, backend=fast)
    same_bits(_run(fast, case | {"base": np.zeros_like(out)}), (out, norms))


def test_the_base_may_be_the_output(fast: str) -> None:
    for size in (TILE + 3, 300_000):
        case = _case("float32", size, 8)
        expected, _ = _run("reference", case)
        out = case["base"].copy()
        kernels.weighted_sum(out, out, case["updates"], case["weights"], fast)
        same_bits(expected, out)


def test_products_and_sums_are_not_fused(fast: str) -> None:
    """(1 + 2^-12)² − (1 + 2^-11) is 2^-24, but 0 if the product is first rounded to float32."""
    x = np.full(64, 1 + 2**-12, dtype=np.float32)
    base = np.full(64, -(1 + 2**-11), dtype=np.float32)
    out = np.empty(64, dtype=np.float32)
    kernels.weighted_sum(out, base, [x], [float(x[0])], fast)
    assert not out.any()


def test_updates_are_added_in_their_order(fast: str) -> None:
    big, small = np.full(9, 1e8, np.float32), np.ones(9, np.float32)
    out = np.empty(9, dtype=np.float32)
    for updates, weights, left in (([big, small, big], [1, 1, -1], 0), ([big, big, small], [1, -1, 1], 1)):
        kernels.weighted_sum(out, None, updates, weights, fast)
        assert out.tolist() == [left] * 9


def test_any_number_of_threads_gives_the_same_sum(fast: str) -> None:
    case, made = _case("mixed", 40 * TILE + 11, 9), []
    for count in (1, 2, 3, 8):
        with threads(count):
            got, norms = _run(fast, case)
            made.append((got, norms, kernels.checksum(got, fast)))
            assert kernels.sq_norm(case["updates"][0], fast) == norms[0]
    for other in made[1:]:
        same_bits(made[0][:2], other[:2])
        assert made[0][2] == other[2]


def test_norms_are_computed_in_float64(fast: str) -> None:
    for dtype in ("float32", "int8"):
        case = _case(dtype, 3 * TILE + 300, 5)
        for update, scale, norm in zip(case["updates"], case["scales"], _run(fast, case)[1], strict=True):
            exact = update.astype(np.float64)
            if scale is not None:
                exact *= scale.astype(np.float64).repeat(BLOCK)[: update.size]
            assert norm == pytest.approx(float(np.sum(exact**2)), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_sums(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 3 * TILE) | st.integers(0, 40))
    dtype, count = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 20))
    case = _case(dtype, size, count, wild=data.draw(st.booleans()), offset=data.draw(st.integers(0, 63)))
    case["weights"] = data.draw(st.lists(st.floats(width=32), min_size=count, max_size=count))
    for backend in {name for name, _ in fast_backends()}:
        _check(backend, case, offset=data.draw(st.integers(0, 63)))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 63, 64, 65, 4 * 65536, 4 * 65536 + 7, 3_000_001])
def test_checksums_of_all_sizes_and_alignments(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    expected = kernels.checksum(data, "reference")
    for same in (data.tobytes(), *(unaligned(data, offset) for offset in (0, 1, 2, 3, 5))):
        for each in fast_backends():
            with chosen(*each) as fast:
                assert kernels.checksum(same, fast) == expected


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(["window", "cumulative", "exponential"]),
    window=st.integers(1, 7),
    decay=st.floats(0, 0.999),
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.floats(-1e6, 1e6)), max_size=12), min_size=1, max_size=8
    ),
)
def test_random_moving_averages(mode: Any, window: int, decay: float, batches: list[list[Any]]) -> None:
    names = ["reference", *sorted({name for name, _ in fast_backends()})]
    averages = [kernels.MovingAverage(5, mode, window, decay, backend=name) for name in names]
    one_by_one = kernels.MovingAverage(5, mode, window, decay)
    for batch in batches:
        ids, values = [i for i, _ in batch], [x for _, x in batch]
        means = [average.observe(ids, values) for average in averages]
        single = np.array([one_by_one.observe(i, x) for i, x in batch], dtype=np.float64)
        for other in [*means[1:], single]:
            same_bits(means[0], other)
    for average in [*averages[1:], one_by_one]:
        same_bits(averages[0].mean(range(5)), average.mean(range(5)))


def test_infinite_scales(fast: str) -> None:
    """Zero times an infinite scale is NaN. The zeros with which kernels pad the last block must not change
    the norm, but zeros that belong to the update must make it NaN."""
    for size in (3, 5, BLOCK + 9, TILE + 3):
        scales = np.full(-(-size // BLOCK), np.inf, dtype=np.float32)
        case = {"base": np.zeros(size, np.float32), "updates": [np.full(size, 2, np.int8)] * 2}
        assert _check(fast, case | {"weights": [1.0, 0.5], "scales": [scales] * 2}).tolist() == [np.inf] * 2
    zeros, scales = np.zeros(BLOCK + 1, np.int8), np.array([1.0, np.inf], np.float32)
    assert np.isnan(kernels.sq_norm(zeros, fast, scale=scales))


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _check_halves(fast: str, updates: list[np.ndarray]) -> np.ndarray:
    none, weights = [None] * len(updates), np.linspace(0.5, 1.5, len(updates))
    case = {"base": np.zeros(updates[0].size, np.float32), "updates": updates, "weights": weights}
    return _check(fast, case | {"scales": none})


@pytest.mark.parametrize("exponent", [-140, -75, -62, 0, 61, 65, 120])
def test_norms_of_bfloat16_of_every_exponent(fast: str, exponent: int) -> None:
    """In float32, squares below 2^-126 lose precision and squares above 2^128 overflow."""
    rng = np.random.default_rng(exponent + 200)
    values = np.ldexp(rng.standard_normal((3, 3 * TILE + 5)), exponent).clip(-3e38, 3e38)
    values[1, 100:] = rng.standard_normal(3 * TILE - 95)  # 100 numbers of this exponent among usual ones
    norms = _check_halves(fast, [_bfloat16(row) for row in values])
    exact = [(_bfloat16(row).astype(np.uint32) << 16).view(np.float32).astype(np.float64) for row in values]
    np.testing.assert_allclose(norms, [float(np.sum(x**2)) for x in exact], rtol=1e-12)
    assert np.isfinite(norms).all()


def test_norms_of_finite_float16(fast: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[(bits & 0x7C00) != 0x7C00].view(np.float16)
    updates = [finite, np.full_like(finite, 65504), np.full_like(finite, -6e-8), np.full_like(finite, -0.0)]
    norms = _check_halves(fast, updates)
    np.testing.assert_allclose(norms, [float(np.sum(u.astype(float) ** 2)) for u in updates], rtol=1e-12)
    assert norms[3] == 0.0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_16_bit_number_makes_the_norm_not_finite(fast: str, bad: float) -> None:
    good = np.random.default_rng(1).standard_normal(2 * TILE + 5).astype(np.float32)
    for place in (0, 7, TILE - 1, TILE, 2 * TILE + 4):
        values = good.copy()
        values[place] = bad
        for half in (lambda x: x.astype(np.float16), _bfloat16):
            norms = _check_halves(fast, [half(good), half(values), half(good)])
            assert np.isfinite(norms).tolist() == [True, False, True], place
