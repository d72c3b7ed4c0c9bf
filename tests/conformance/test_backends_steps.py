"""Tests that fused optimiser steps and quantisation match the reference bit for bit in every back end."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from backend_cases import DTYPES, chosen, fast_backends, random_case, random_update, same_bits, unaligned
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl import kernels
from edgefl.kernels.steps import apply
from edgefl.strategies import ServerOptimizer

TILE, BLOCK = kernels.TILE, kernels.SCALE_BLOCK
SIZES = (0, 1, 7, 8, 9, BLOCK + 1, TILE, TILE + 1, 5 * TILE + 13)
OPTIMIZERS = (
    ServerOptimizer(lr=0.3),
    ServerOptimizer(lr=0.3, momentum=0.9),
    ServerOptimizer(momentum=0.5),
    ServerOptimizer(kind="adam", lr=0.1),
    ServerOptimizer(kind="yogi", lr=0.1, beta1=0.5, beta2=0.8, epsilon=0.1),
    ServerOptimizer(kind="adagrad", beta1=0.0),
)
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.kind}-{o.momentum}")


def _step_case(dtype: str, size: int, count: int, optimizer: Any, wild: bool = False) -> dict[str, Any]:
    case = random_case(dtype, size, count, wild=wild, vectors=optimizer.vectors)
    return {"old_state": []} | case | {"optimizer": optimizer}


def _step(backend: str, case: dict[str, Any], base_scale: float = 1.0, offset: int = 0) -> list[np.ndarray]:
    empty = np.full(case["base"].size, np.nan, dtype=np.float32)
    out, *new = (unaligned(empty, offset) for _ in range(1 + len(case["old_state"])))
    sums = np.zeros(len(case["updates"]), dtype=np.uint64)
    norms = kernels.weighted_step(
        out, **case, new_state=new, backend=backend, base_scale=base_scale, checksums=sums
    )
    assert sums.tolist() == [kernels.checksum(update, backend) for update in case["updates"]]
    return [out, *new, norms]


@each_optimizer
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_of_all_types_sizes_and_counts(dtype: str, optimizer: ServerOptimizer) -> None:
    """Each size and each count is tested with both values of ``base_scale``."""
    for (i, size), (j, count) in itertools.product(enumerate(SIZES), enumerate((0, 1, 5, 8))):
        case, base_scale = _step_case(dtype, size, count, optimizer), (1.0, 0.75)[(i + j) % 2]
        expected = _step("reference", case, base_scale)
        for each in fast_backends():
            with chosen(*each) as fast:
                same_bits(expected, _step(fast, case, base_scale))


@each_optimizer
def test_steps_of_denormals_infinities_and_nans(fast: str, optimizer: ServerOptimizer) -> None:
    case = _step_case("mixed", 3 * TILE + 77, 5, optimizer, wild=True)
    for offset in (0, 1, 7):
        same_bits(_step("reference", case), _step(fast, case, offset=offset))


@each_optimizer
def test_a_step_is_the_sum_and_then_the_optimizer(optimizer: ServerOptimizer) -> None:
    """The updates are so large that kernels use several threads and bypass the caches when they write."""
    case = _step_case("float32", 300_007, 4, optimizer)
    base, updates, weights = case["base"], case["updates"], case["weights"]
    total, out, *new = (np.empty_like(base) for _ in range(2 + len(case["old_state"])))
    if optimizer.vectors == 0:
        expected = kernels.weighted_sum(out, base, updates, optimizer.lr * weights, "reference")
    else:
        expected = kernels.weighted_sum(total, None, updates, weights, "reference")
        apply(optimizer, out, base, total, case["old_state"], new)
    for each in fast_backends():
        with chosen(*each) as fast:
            same_bits([out, *new, expected], _step(fast, case))


def test_any_number_of_threads_gives_the_same_step_and_codes(fast: str) -> None:
    case = _step_case("mixed", 40 * TILE + 11, 5, OPTIMIZERS[3])
    made = []
    try:
        for threads in (1, 2, 3):
            kernels.set_threads(threads)
            made.append([*_step(fast, case), *_quantize(fast, case["base"], "int8", None, 1.0)])
    finally:
        kernels.set_threads(None)
    same_bits(made[0], made[1])
    same_bits(made[0], made[2])


_OUT = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}


def _quantize(
    backend: str, update: Any, dtype: str, residual: Any, weight: float, offset: int = 0
) -> list[np.ndarray]:
    out = unaligned(np.zeros(update.size, _OUT[dtype]), offset)
    scales = np.full(-(-update.size // BLOCK), 7, np.float32) if dtype == "int8" else None
    left = unaligned(np.full(update.size, np.nan, np.float32), offset)
    norm = kernels.quantize(
        out, update, scales=scales, residual=residual, new_residual=left, weight=weight, backend=backend
    )
    assert np.isfinite(left).all()
    same_bits(np.array([norm]), np.array([kernels.sq_norm(out, backend, scale=scales)]))
    if dtype == "bfloat16":
        out = (out.astype(np.uint32) << 16).view(np.float32)
    return [out, left, np.array([norm]), np.empty(0, np.float32) if scales is None else scales]


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("kind", ["normal", "all sizes", "wild"])
def test_quantisation_of_all_types_and_sizes(dtype: str, kind: str) -> None:
    for size in SIZES:
        rng = np.random.default_rng(size)
        update, residual = (random_update("float32", size, rng, kind == "wild")[0] for _ in range(2))
        if kind == "all sizes":
            with np.errstate(over="ignore"):
                update = rng.standard_normal(size, dtype=np.float32)
                update *= np.float32(10) ** rng.integers(-45, 38, size)
        for old, weight, offset in ((None, 1.0, 0), (residual, 0.37, 0), (residual, -1.0, 3)):
            case = (unaligned(update, offset), dtype, old, weight)
            expected = _quantize("reference", *case)
            for each in fast_backends():
                with chosen(*each) as fast:
                    same_bits(expected, _quantize(fast, *case, offset))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_quantisation_of_every_16_bit_number_and_every_tie(fast: str, dtype: str) -> None:
    """Quantise all 65,536 values, the midpoints of adjacent values, and the midpoints' float32 neighbours."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        with np.errstate(invalid="ignore"):  # signalling NaNs, of which numpy warns on ARM
            exact = bits.view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        finite = np.sort(exact[np.isfinite(exact)])
        ties = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
        near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
        update = np.concatenate([exact, ties, *near, np.array([65519.0, 65520.0, 3.4e38], np.float32)])
    same_bits(*(_quantize(backend, update, dtype, None, 1.0) for backend in ("reference", fast)))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_quantisation_of_random_blocks(data: st.DataObject) -> None:
    values = st.floats(width=32, allow_nan=True, allow_infinity=True)
    update = np.array(data.draw(st.lists(values, max_size=40)), dtype=np.float32)
    update = np.tile(update, data.draw(st.integers(1, 20)))
    residual = data.draw(st.none() | st.just(update[::-1].copy()))
    dtype, weight = data.draw(st.sampled_from(DTYPES[:4])), data.draw(st.floats(width=32))
    for backend in {name for name, _ in fast_backends()}:
        same_bits(*(_quantize(name, update, dtype, residual, weight) for name in ("reference", backend)))
