"""Tests of the results of every back end: bounds, exact identities and fixed values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl import kernels
from edgefl.kernels import backend_reference
from edgefl.strategies import ServerOptimizer

TYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}


def _floats(value: float = 1.0, size: int = 4) -> np.ndarray:
    return np.full(size, value, dtype=np.float32)


def _normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def _empty(dtype: str, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    return np.zeros(size, TYPES[dtype]), np.zeros(-(-size // 256), np.float32) if dtype == "int8" else None


def _decode(out: np.ndarray, update: np.ndarray, scale: np.ndarray | None, backend: str) -> float:
    """Write an update of any type to ``out`` as float32; return its squared norm."""
    return float(kernels.weighted_sum(out, None, [update], [1.0], backend, scales=[scale])[0])


def test_weights_are_rounded_to_float32(backend: str) -> None:
    out = np.empty(1, dtype=np.float32)
    kernels.weighted_sum(out, None, [_floats(size=1)], [0.1], backend)
    assert out[0] == np.float32(0.1)
    kernels.weighted_sum(out, None, [_floats(size=1)], [1e300], backend)
    assert out[0] == np.inf


def test_an_update_that_is_not_finite_changes_only_its_own_norm(backend: str) -> None:
    good, bad, infinite, out = (_floats(size=70_000) for _ in range(4))
    bad[69_999], infinite[3] = np.nan, -np.inf
    norms = kernels.weighted_sum(out, None, [good, bad, infinite], [1.0] * 3, backend)
    np.testing.assert_array_equal(norms, [70_000, np.nan, np.inf])


def test_norms_of_the_largest_values_and_of_scaled_ones(backend: str) -> None:
    largest = np.full(3, np.finfo(np.float32).max, dtype=np.float32)
    assert kernels.sq_norm(largest, backend) == 3 * float(largest[0]) ** 2
    assert kernels.sq_norm(np.full(3, 2, np.int8), backend, scale=np.array([0.5], np.float32)) == 3.0


def test_norms_of_int8_tiles_are_added_in_order(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: Python's `sum` adds the norms. Since Python 3.12, it rounds here as math.fsum does, to
    10^16 + 2."""
    monkeypatch.setattr(backend_reference, "sum", lambda numbers, *_: math.fsum(numbers), raising=False)
    update, scales = np.zeros(3 * kernels.TILE, np.int8), np.zeros(24, np.float32)
    update[:: kernels.TILE], scales[::8] = 1, [1e8, 1.0, 1.0]
    assert kernels.sq_norm(update, backend, scale=scales) == 1e16


def test_c_kernels_keep_denormals_even_if_torch_flushes_them() -> None:
    torch = pytest.importorskip("torch")
    tiny, out = np.full(9, 10**6, np.uint32).view(np.float32), np.empty(9, np.float32)
    if kernels.backends()["c"] != "ok" or not torch.set_flush_denormal(True):
        pytest.skip("needs the C back end and a CPU that can flush denormals")
    try:
        norms = kernels.weighted_sum(out, None, [tiny], [1.0], "c")
    finally:
        torch.set_flush_denormal(False)
    assert out.tobytes() == tiny.tobytes()
    assert norms[0] == kernels.sq_norm(tiny, "reference") > 0


def test_a_step_changes_no_input(backend: str) -> None:
    base, old, updates = _floats(3), [_floats(0.5), _floats(0.25)], [_floats(2), _floats(4)]
    before = [x.tobytes() for x in (base, *old, *updates)]
    out, *new = (np.empty(4, np.float32) for _ in range(3))
    adam, made = ServerOptimizer(kind="adam"), []
    for _ in range(2):
        norms = kernels.weighted_step(out, base, updates, [0.5, 0.5], adam, old, new, backend)
        made.append([x.tobytes() for x in (out, *new, norms)])
    assert made[0] == made[1]
    assert [x.tobytes() for x in (base, *old, *updates)] == before
    assert norms.tolist() == [16.0, 64.0]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_base_scale_shrinks_the_model(backend: str, momentum: float) -> None:
    """The step uses g = (0.5 − 1)·4 + 2·3 = 4. Norms and checksums are those of the unscaled updates."""
    optimizer = ServerOptimizer(lr=1.0 if momentum else 0.5, momentum=momentum)
    state = [_floats(8)] * optimizer.vectors
    out, new = np.empty(4, np.float32), [np.empty(4, np.float32) for _ in state]
    sums = np.zeros(1, np.uint64)
    norms = kernels.weighted_step(
        out, _floats(4), [_floats(3)], [2.0], optimizer, state, new, backend, base_scale=0.5, checksums=sums
    )
    assert out.tolist() == [4 + 0.5 * 4] * 4 if not state else [4 + 0.5 * 8 + 4] * 4
    assert norms.tolist() == [36.0]
    assert sums.tolist() == [kernels.checksum(_floats(3))]


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2**-11), ("bfloat16", 2**-8), ("int8", 1 / 254)])
def test_quantization_error_is_at_most_half_a_step(backend: str, dtype: str, error: float) -> None:
    update = _normal(10_001)
    out, scales = _empty(dtype, update.size)
    decoded = np.empty_like(update)
    norm = kernels.quantize(out, update, scales=scales, backend=backend)
    assert norm == _decode(decoded, out, scales, backend)
    largest = np.maximum.reduceat(np.abs(update), range(0, update.size, 256)).repeat(256)[: update.size]
    step = largest if dtype == "int8" else np.abs(update)
    assert (np.abs(decoded - update) <= error * step * (1 + 1e-6) + 2**-25).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_the_residual_is_exactly_the_quantization_error(backend: str, dtype: str) -> None:
    update, residual = _normal(1000), 0.01 * _normal(1000, 1)
    out, scales = _empty(dtype, 1000)
    left, decoded = np.empty_like(update), np.empty_like(update)
    kernels.quantize(out, update, scales=scales, residual=residual, new_residual=left, backend=backend)
    _decode(decoded, out, scales, backend)
    np.testing.assert_array_equal(left, (update + residual) - decoded)
    kernels.quantize(out, update, scales=scales, residual=residual, new_residual=residual, backend=backend)
    np.testing.assert_array_equal(residual, left)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantizing_keeps_bad_norms_and_a_finite_residual(backend: str, dtype: str, bad: float) -> None:
    update = _normal(600)
    update[300] = bad
    out, scales = _empty(dtype, 600)
    left = np.empty_like(update)
    assert not np.isfinite(kernels.quantize(out, update, scales=scales, new_residual=left, backend=backend))
    assert np.isfinite(left).all()
    assert left[300] == 0.0


def test_numbers_too_small_for_a_scale_are_sent_as_zeros_and_kept_in_the_residual(backend: str) -> None:
    update = np.full(256, 1e-45, np.float32)
    out, scales = _empty("int8", 256)
    left = np.empty_like(update)
    assert kernels.quantize(out, update, scales=scales, new_residual=left, backend=backend) == 0.0
    np.testing.assert_array_equal(left, update)


def test_clip_factors_in_the_weights_clip_the_updates() -> None:
    updates = [_normal(100, seed) for seed in range(3)]
    norms = np.array([kernels.sq_norm(update) for update in updates])
    factors = kernels.clip_factors(norms, 8.0)
    np.testing.assert_allclose(factors, np.minimum(1.0, 8.0 / np.sqrt(norms)))
    assert factors.min() < 1.0
    clipped = [update * np.float32(factor) for update, factor in zip(updates, factors, strict=True)]
    a, b = np.empty(100, np.float32), np.empty(100, np.float32)
    kernels.weighted_sum(a, None, updates, factors / 3)
    kernels.weighted_sum(b, None, clipped, [1 / 3] * 3)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert np.isnan(kernels.clip_factors([np.inf, np.nan], 1.0)).all()
    assert kernels.clip_factors([1e-80], 1e300).tolist() == [1.0]  # L / norm is above float64's range
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"^max_norm must be a finite number above 0 \(got "):
            kernels.clip_factors(norms, wrong)


def test_the_checksum_of_the_words_1_2_3_is_the_documented_one(backend: str) -> None:
    """The formula must not change: checksums in existing files must stay valid. The plain sum of the words is
    6, the weighted sum is 14."""
    data = np.array([1, 2, 3], dtype="<u4")
    h = (6 + 0x9E3779B97F4A7C16 * 14 + 0xD1B54A32D192ED03 * 13) % 2**64
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    for same in (data, data.view(np.uint8), data.view(np.int16), memoryview(data), data.tobytes()):
        assert kernels.checksum(same, backend) == h ^ h >> 31


@settings(max_examples=60)
@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=60),
    place=st.integers(0, 59),
    other=st.integers(0, 59),
    value=st.integers(0, 2**32 - 1),
)
def test_changes_and_swaps_change_the_checksum(words: list[int], place: int, other: int, value: int) -> None:
    place, other = place % len(words), other % len(words)
    before = kernels.checksum(np.array(words, dtype=np.uint32))
    changed, swapped = words.copy(), words.copy()
    changed[place] = value
    swapped[place], swapped[other] = words[other], words[place]
    for altered in (changed, swapped):
        same = kernels.checksum(np.array(altered, dtype=np.uint32)) == before
        assert same == (altered == words)


def test_checksums_of_zeros_depend_on_their_number() -> None:
    sums = {kernels.checksum(np.zeros(size, dtype=np.uint8)) for size in range(64)}
    assert len(sums) == 64


@pytest.mark.parametrize(
    "size", [0, 1, 3, 17, 31, 32, 33, 63, 64, 65, 127, 4095, 4096, 1 << 18, (1 << 18) + 4099, 300_001]
)
def test_delta_has_the_bits_of_a_difference_and_of_its_checksum(backend: str, size: int) -> None:
    """Inputs have random bits, but are finite: the bits of a NaN result are not specified. The largest sizes
    bypass the caches."""
    bits = np.random.default_rng(size).integers(0, 2**32, (2, size), dtype=np.uint32).view(np.float32)
    trained, base = np.where(np.isfinite(bits), bits, np.float32(-0.0))
    trained[::7] = np.float32(1e-45)
    with np.errstate(all="ignore"):
        expected = trained - base
    memory = np.zeros(4 * size + 128, np.uint8)
    for place in (0, 4, 1):
        start = -memory.ctypes.data % 64 + place
        out = memory[start : start + 4 * size].view(np.float32)
        out[:] = 7.0
        assert kernels.delta(out, trained, base, backend) == kernels.checksum(expected, "reference")
        assert out.tobytes() == expected.tobytes()
        assert not memory[:start].any()
        assert not memory[start + 4 * size :].any()
        out[:] = 0.0
