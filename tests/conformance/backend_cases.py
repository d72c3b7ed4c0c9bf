"""Creates test arrays for comparing kernel back ends, and compares their results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgefl import kernels

BLOCK = kernels.SCALE_BLOCK
DTYPES = ("float32", "float16", "bfloat16", "int8", "mixed")


def fast_backends() -> list[tuple[str, str]]:
    """Return (name, instruction set) for each back end that must match the reference bit for bit."""
    found = []
    if kernels.backends()["c"] == "ok":
        from edgefl.kernels import _c

        found += [("c", isa) for isa in _c.isas()]
    return [*found, ("numba", "")]


@contextmanager
def chosen(backend: str, isa: str) -> Iterator[str]:
    """Select a back end and an instruction set in this context; name both in failed assertions."""
    before = None
    if isa:
        from edgefl.kernels import _c

        before = _c.isa()
        _c.set_isa(isa)
    try:
        yield backend
    except AssertionError as error:
        error.add_note(f"back end {backend} {isa}")
        raise
    finally:
        if before is not None:
            _c.set_isa(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let the kernels use ``count`` threads in this context."""
    kernels.set_threads(count)
    try:
        yield
    finally:
        kernels.set_threads(None)


def same_bits(a: Any, b: Any) -> None:
    """Assert that two arrays, or two lists of arrays, are bit-identical, except that all NaNs are equal."""
    if isinstance(a, list | tuple):
        for one, other in zip(a, b, strict=True):
            same_bits(one, other)
        return
    nan, unsigned = np.isnan(a), f"u{a.dtype.itemsize}"
    alike = a.shape == b.shape and a.dtype == b.dtype
    if alike and np.where(nan, np.isnan(b), a.view(unsigned) == b.view(unsigned)).all():
        return  # numpy's own comparison, which describes the failure, takes several times as long
    np.testing.assert_array_equal(nan, np.isnan(b))
    np.testing.assert_array_equal(a[~nan].view(unsigned), b[~nan].view(unsigned))


def unaligned(array: np.ndarray, offset: int) -> np.ndarray:
    """Return a copy that begins ``offset`` bytes after a 64-byte boundary."""
    raw = np.zeros(array.nbytes + 128, dtype=np.uint8)
    start = -raw.ctypes.data % 64 + offset
    view = raw[start : start + array.nbytes].view(array.dtype)
    view[:] = array
    return view


def random_update(dtype: str, size: int, rng: np.random.Generator, wild: bool) -> tuple[Any, Any]:
    """Return a random update and its scales (None unless its type is int8).

    A wild update of a floating-point type has random bits, including denormals, infinities and NaNs.
    """
    if dtype == "int8":
        scale = rng.standard_normal(-(-size // BLOCK)).astype(np.float32)
        return rng.integers(-128, 128, size, dtype=np.int8), scale
    if dtype == "float32":
        bits = rng.integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)
        return bits if wild else rng.standard_normal(size, dtype=np.float32), None
    bits16 = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    if not wild:
        values = rng.standard_normal(size, dtype=np.float32)
        bits16 = (values.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "float16":
            bits16 = values.astype(np.float16).view(np.uint16)
    return bits16.view(np.float16) if dtype == "float16" else bits16, None


def random_case(
    dtype: str, size: int, count: int, *, wild: bool = False, offset: int = 0, vectors: int = 0
) -> dict[str, Any]:
    """Return arguments of a sum, or of a step of an optimiser that keeps ``vectors`` state vectors.

    Only the first state vector may have negative elements.
    """
    rng = np.random.default_rng([size, count, wild])
    names = itertools.cycle(DTYPES[:4] if dtype == "mixed" else [dtype])
    pairs = [random_update(next(names), size, rng, wild) for _ in range(count)]
    base, *old = (random_update("float32", size, rng, wild)[0] for _ in range(1 + vectors))
    return {
        "base": unaligned(base, offset),
        "updates": [unaligned(u, offset) for u, _ in pairs],
        "weights": rng.standard_normal(count),
        "scales": [s for _, s in pairs],
    } | ({"old_state": [*old[:1], *(np.abs(x) for x in old[1:])]} if vectors else {})
