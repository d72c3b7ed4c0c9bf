"""Quantisation, error feedback and clipping: what they promise, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgefl import kernels

BACKENDS = [name for name, status in kernels.backends().items() if status == "ok"]
TYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}


def _normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def _empty(dtype: str, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    return np.zeros(size, TYPES[dtype]), np.zeros(-(-size // 256), np.float32) if dtype == "int8" else None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "error"), [("float16", 2**-11), ("bfloat16", 2**-8), ("int8", 1 / 254)])
def test_error_is_at_most_half_a_step(backend: str, dtype: str, error: float) -> None:
    update = _normal(10_001)
    out, scales = _empty(dtype, update.size)
    decoded = np.empty_like(update)
    norm = kernels.quantize(out, update, scales=scales, backend=backend)
    assert norm == kernels.dequantize(decoded, out, scale=scales, backend=backend)
    largest = np.maximum.reduceat(np.abs(update), range(0, update.size, 256)).repeat(256)[: update.size]
    step = largest if dtype == "int8" else np.abs(update)
    assert (np.abs(decoded - update) <= error * step * (1 + 1e-6) + 2**-25).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_residual_is_exactly_what_was_lost(backend: str, dtype: str) -> None:
    update, residual = _normal(1000), 0.01 * _normal(1000, 1)
    out, scales = _empty(dtype, 1000)
    left, decoded = np.empty_like(update), np.empty_like(update)
    kernels.quantize(out, update, scales=scales, residual=residual, new_residual=left, backend=backend)
    kernels.dequantize(decoded, out, scale=scales, backend=backend)
    np.testing.assert_array_equal(left, (update + residual) - decoded)
    kernels.quantize(out, update, scales=scales, residual=residual, new_residual=residual, backend=backend)
    np.testing.assert_array_equal(residual, left)


@pytest.mark.parametrize("backend", BACKENDS)
def test_error_feedback_loses_nothing_over_time(backend: str) -> None:
    """The sum of what was sent stays within one rounding of the sum of what was meant."""
    update, residual = 0.1 * _normal(512), np.zeros(512, np.float32)
    out, scales = _empty("int8", 512)
    sent, decoded = np.zeros(512), np.empty(512, np.float32)
    for _ in range(50):
        kernels.quantize(
            out, update, scales=scales, residual=residual, new_residual=residual, backend=backend
        )
        kernels.dequantize(decoded, out, scale=scales, backend=backend)
        sent += decoded
    np.testing.assert_allclose(sent + residual, 50 * update.astype(np.float64), atol=1e-5)
    assert np.abs(residual).max() < 0.01


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_update_stays_bad_and_spoils_no_later_one(backend: str, dtype: str, bad: float) -> None:
    update = _normal(600)
    update[300] = bad
    out, scales = _empty(dtype, 600)
    left = np.empty_like(update)
    assert not np.isfinite(kernels.quantize(out, update, scales=scales, new_residual=left, backend=backend))
    assert np.isfinite(left).all()
    assert left[300] == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_of_the_smallest_numbers(backend: str) -> None:
    """Too small for a scale: sent as zeros, kept in the residual."""
    update = np.full(256, 1e-45, np.float32)
    out, scales = _empty("int8", 256)
    left = np.empty_like(update)
    assert kernels.quantize(out, update, scales=scales, new_residual=left, backend=backend) == 0.0
    np.testing.assert_array_equal(left, update)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clip(backend: str) -> None:
    update = np.array([3, 4], np.float32)
    out = np.empty_like(update)
    assert kernels.clip(out, update, 1.0, backend=backend) == 25.0
    assert kernels.sq_norm(out, backend) == pytest.approx(1.0, rel=1e-6)
    assert kernels.clip(update, update, 5.0, backend=backend) == 25.0
    assert update.tolist() == [3.0, 4.0]
    assert kernels.clip(update, update, 2.5, backend=backend) == 25.0
    assert update.tolist() == [1.5, 2.0]


def test_clip_factors_in_the_weights_clip_the_updates() -> None:
    updates = [_normal(100, seed) for seed in range(3)]
    norms = np.array([kernels.sq_norm(update) for update in updates])
    factors = kernels.clip_factors(norms, 8.0)
    clipped = [np.empty(100, np.float32) for _ in updates]
    for each, update in zip(clipped, updates, strict=True):
        kernels.clip(each, update, 8.0)
    a, b = np.empty(100, np.float32), np.empty(100, np.float32)
    kernels.weighted_sum(a, None, updates, factors / 3)
    kernels.weighted_sum(b, None, clipped, [1 / 3] * 3)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert np.isnan(kernels.clip_factors([np.inf, np.nan], 1.0)).all()
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"^max_norm must be a finite number above 0 \(got "):
            kernels.clip_factors(norms, wrong)


_UPDATE = np.ones(300, np.float32)
WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("out-type", {"out": np.ones(300)}, TypeError, "out must be float32, float16, uint16"),
    (
        "out-short",
        {"out": np.ones(3, np.float16)},
        ValueError,
        "out must have 300 elements like update (got 3)",
    ),
    ("update-type", {"update": np.ones(300)}, TypeError, "update must be float32 (got float64)"),
    ("scales-missing", {"out": np.ones(300, np.int8)}, ValueError, "scales must be given for int8 (got None"),
    (
        "scales-extra",
        {"scales": np.ones(2, np.float32)},
        ValueError,
        "scales must be None for float16 (got nd",
    ),
    (
        "scales-short",
        {"out": np.ones(300, np.int8), "scales": np.ones(1, np.float32)},
        ValueError,
        "scales must have 2 elements (got 1)",
    ),
    ("residual-short", {"residual": _UPDATE[:3]}, ValueError, "residual must have 300 elements (got 3)"),
    (
        "residual-shared",
        {"new_residual": _UPDATE},
        ValueError,
        "update must not overlap new_residual, which is written",
    ),
    ("weight", {"weight": "x"}, TypeError, "weight must be a number (got 'x')"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "error", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_arguments_are_named(
    backend: str, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    given: dict[str, Any] = {"out": np.ones(300, np.float16), "update": _UPDATE} | change
    with pytest.raises(error) as caught:
        kernels.quantize(**given, backend=backend)
    assert str(caught.value).startswith(words)
