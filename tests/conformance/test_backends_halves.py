"""Norms of float16 and bfloat16: fast ways that square in float32 must not be told from float64's."""

from __future__ import annotations

import numpy as np
import pytest
from backend_cases import same_bits

from edgefl import kernels

TILE = kernels.TILE


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _decoded(update: np.ndarray) -> np.ndarray:
    if update.dtype == np.float16:
        return update.astype(np.float64)
    return (update.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _norms(fast: str, updates: list[np.ndarray]) -> np.ndarray:
    """The norms, after a check against the reference's bits and those of `sq_norm`."""
    size = updates[0].size
    out, expected = np.empty(size, np.float32), np.empty(size, np.float32)
    weights = np.linspace(0.5, 1.5, len(updates))
    norms = kernels.weighted_sum(expected, None, updates, weights, "reference")
    same_bits(norms, kernels.weighted_sum(out, None, updates, weights, fast))
    same_bits(expected, out)
    same_bits(norms, np.array([kernels.sq_norm(update, fast) for update in updates]))
    return norms


@pytest.mark.parametrize("exponent", [-140, -80, -75, -70, -66, -64, -62, -40, 0, 30, 59, 61, 63, 65, 120])
def test_bfloat16_of_every_size(fast: str, exponent: int) -> None:
    """Squares of less than 2^-126 or more than 2^127 are not float32's any more, but float64's."""
    rng = np.random.default_rng(exponent + 200)
    updates = [
        _bfloat16(np.ldexp(rng.standard_normal(3 * TILE + 5), exponent).clip(-3e38, 3e38)) for _ in range(4)
    ]
    updates[1][100:] = _bfloat16(rng.standard_normal(3 * TILE - 95))  # a few among usual ones
    updates[2][5] = _bfloat16(np.array([1.0]))[0]
    norms = _norms(fast, updates)
    exact = [float(np.sum(_decoded(update) ** 2)) for update in updates]
    np.testing.assert_allclose(norms, exact, rtol=1e-12)
    assert np.isfinite(norms).all()


def test_finite_float16_of_every_size(fast: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[(bits & 0x7C00) != 0x7C00].view(np.float16)
    rng = np.random.default_rng(0)
    updates = [finite, rng.permutation(finite), np.full_like(finite, 65504), np.full_like(finite, -6e-8)]
    norms = _norms(fast, updates)
    np.testing.assert_allclose(norms, [float(np.sum(_decoded(u) ** 2)) for u in updates], rtol=1e-12)


@pytest.mark.parametrize("place", [0, 7, TILE - 1, TILE, 2 * TILE + 4])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_number_is_found(fast: str, place: int, bad: float) -> None:
    values = np.random.default_rng(1).standard_normal(2 * TILE + 5).astype(np.float32)
    values[place] = bad
    for update in (values.astype(np.float16), _bfloat16(values)):
        usual = _bfloat16(np.ones(update.size)) if update.dtype == np.uint16 else np.ones_like(update)
        norms = _norms(fast, [usual, update, usual])
        assert np.isfinite(norms).tolist() == [True, False, True]


def test_bad_numbers_of_opposite_signs_do_not_cancel(fast: str) -> None:
    """As bits they could: two NaNs of one lane that differ in their sign alone."""
    for dtype, nan in ((np.float16, 0x7E00), (np.uint16, 0x7FC0)):
        bits = np.zeros(64, np.uint16)
        bits[[3, 11]] = nan, nan | 0x8000
        assert np.isnan(_norms(fast, [bits.view(dtype)])[0])


def test_zeros_have_a_norm_of_zero(fast: str) -> None:
    for dtype, minus in ((np.float16, 0x8000), (np.uint16, 0x8000)):
        update = np.array([0, minus] * 40, np.uint16).view(dtype)
        assert _norms(fast, [update]).tolist() == [0.0]


def test_flags_of_other_arithmetic_do_no_harm(fast: str) -> None:
    """Products with the weight that underflow make the fast way unsure, not wrong."""
    values = _bfloat16(np.random.default_rng(2).standard_normal(TILE + 3))
    out = np.empty(values.size, np.float32)
    norms = kernels.weighted_sum(out, None, [values, values], [1e-38, 3e38], fast)
    assert norms.tolist() == [kernels.sq_norm(values, "reference")] * 2
