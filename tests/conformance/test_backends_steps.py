"""Fused steps and quantisation against their numpy twins: the same bits from every back end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_cases import DTYPES, fast_backends, random_update, same_bits, unaligned
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


def _step_case(
    dtype: str, size: int, count: int, optimizer: ServerOptimizer, wild: bool = False
) -> dict[str, Any]:
    rng = np.random.default_rng([size, count, wild])
    names = DTYPES[:4] if dtype == "mixed" else (dtype,)
    pairs = [random_update(names[k % len(names)], size, rng, wild) for k in range(count)]
    base, *old = (random_update("float32", size, rng, wild)[0] for _ in range(1 + optimizer.vectors))
    return {
        "base": base,
        "updates": [u for u, _ in pairs],
        "weights": rng.standard_normal(count),
        "optimizer": optimizer,
        "old_state": [old[0], *(np.abs(x) for x in old[1:])] if old else [],
        "scales": [s for _, s in pairs],
    }


def _step(backend: str, case: dict[str, Any], base_scale: float = 1.0, offset: int = 0) -> list[np.ndarray]:
    size = case["base"].size
    out, *new = (
        unaligned(np.full(size, np.nan, dtype=np.float32), offset) for _ in range(1 + len(case["old_state"]))
    )
    sums = np.zeros(len(case["updates"]), dtype=np.uint64)
    norms = kernels.weighted_step(
        out, **case, new_state=new, backend=backend, base_scale=base_scale, checksums=sums
    )
    assert sums.tolist() == [kernels.checksum(update, backend) for update in case["updates"]]
    return [out, *new, norms]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.kind}-{o.momentum}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps(fast: str, dtype: str, optimizer: ServerOptimizer) -> None:
    for size in SIZES:
        for count in (0, 1, 5, 8):
            case = _step_case(dtype, size, count, optimizer)
            for base_scale in (1.0, 0.75):
                for a, b in zip(
                    _step("reference", case, base_scale), _step(fast, case, base_scale), strict=True
                ):
                    same_bits(a, b)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.kind}-{o.momentum}")
def test_steps_of_denormals_infinities_and_nans(fast: str, optimizer: ServerOptimizer) -> None:
    for offset in (0, 1, 7):
        case = _step_case("mixed", 3 * TILE + 77, 5, optimizer, wild=True)
        for a, b in zip(_step("reference", case), _step(fast, case, offset=offset), strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.kind}-{o.momentum}")
def test_a_step_is_the_sum_and_then_the_optimizer(fast: str, optimizer: ServerOptimizer) -> None:
    """Large enough for several threads and for writing around the caches."""
    size = 300_007
    case = _step_case("float32", size, 4, optimizer)
    got, *state, norms = _step(fast, case)
    total, out = np.empty(size, np.float32), np.empty(size, np.float32)
    weights = case["weights"]
    if optimizer.vectors == 0:
        expected = kernels.weighted_sum(
            out, case["base"], case["updates"], optimizer.lr * weights, "reference"
        )
    else:
        expected = kernels.weighted_sum(total, None, case["updates"], weights, "reference")
        new = [np.empty(size, np.float32) for _ in state]
        apply(optimizer, out, case["base"], total, case["old_state"], new)
        for a, b in zip(new, state, strict=True):
            same_bits(a, b)
    same_bits(out, got)
    same_bits(expected, norms)


def test_threads_do_not_change_a_bit_of_a_step(fast: str) -> None:
    case = _step_case("mixed", 40 * TILE + 11, 5, OPTIMIZERS[3])
    update = case["base"]
    try:
        kernels.set_threads(1)
        expected, quantized = _step(fast, case), _quantize(fast, update, "int8", None, 1.0)
        for threads in (2, 3):
            kernels.set_threads(threads)
            for a, b in zip(expected, _step(fast, case), strict=True):
                same_bits(a, b)
            for a, b in zip(quantized, _quantize(fast, update, "int8", None, 1.0), strict=True):
                same_bits(a, b)
    finally:
        kernels.set_threads(None)


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


def _of_all_sizes(size: int, rng: np.random.Generator) -> np.ndarray:
    with np.errstate(over="ignore"):
        return rng.standard_normal(size, dtype=np.float32) * np.float32(10) ** rng.integers(-45, 38, size)


@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("kind", ["normal", "all sizes", "wild"])
def test_quantize(fast: str, dtype: str, kind: str) -> None:
    for size in SIZES:
        rng = np.random.default_rng(size)
        update, residual = (random_update("float32", size, rng, kind == "wild")[0] for _ in range(2))
        if kind == "all sizes":
            update = _of_all_sizes(size, rng).astype(np.float32)
        for old, weight, offset in ((None, 1.0, 0), (residual, 0.37, 0), (residual, -1.0, 3)):
            case = (unaligned(update, offset), dtype, old, weight)
            for a, b in zip(_quantize("reference", *case), _quantize(fast, *case, offset), strict=True):
                same_bits(a, b)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_and_every_tie_between_two(fast: str, dtype: str) -> None:
    """All 65,536 values, what lies half-way to the next one, and both neighbours of that."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        exact = bits.view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        finite = np.sort(exact[np.isfinite(exact)])
        ties = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
        near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
        update = np.concatenate([exact, ties, *near, np.array([65519.0, 65520.0, 3.4e38], np.float32)])
    for a, b in zip(
        _quantize("reference", update, dtype, None, 1.0),
        _quantize(fast, update, dtype, None, 1.0),
        strict=True,
    ):
        same_bits(a, b)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_blocks(data: st.DataObject) -> None:
    values = st.floats(width=32, allow_nan=True, allow_infinity=True)
    update = np.array(data.draw(st.lists(values, max_size=40)), dtype=np.float32)
    update = np.tile(update, data.draw(st.integers(1, 20)))
    residual = data.draw(st.none() | st.just(update[::-1].copy()))
    dtype, weight = data.draw(st.sampled_from(DTYPES[:4])), data.draw(st.floats(width=32))
    expected = _quantize("reference", update, dtype, residual, weight)
    for backend in {name for name, _ in fast_backends()}:
        for a, b in zip(expected, _quantize(backend, update, dtype, residual, weight), strict=True):
            same_bits(a, b)
