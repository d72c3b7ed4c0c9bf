"""Kernels of secure aggregation: arithmetic modulo the prime p = 2^32 − 5 on flat uint32 arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgefl.kernels import arguments
from edgefl.kernels.arguments import Floats
from edgefl.kernels.selection import select, threads

PRIME = 2**32 - 5
"""p, the largest prime below 2^32; equal to EF_PRIME in kernels/edgefl_kernels.h."""
MAX_VECTORS = 65_536
"""Maximum number of vectors in a sum; equal to EF_MOST_FIELD in kernels/edgefl_kernels.h."""
MAX_ENCODED = 2_147_483_520
"""Maximum magnitude of an encoded number: the largest float32 below 2^31."""
Words: TypeAlias = NDArray[np.uint32]


def words(name: str, value: object, size: int | None = None, *, writable: bool = False) -> Words:
    """Check that ``value`` is a flat uint32 array of ``size`` elements (of any size if None); return it."""
    array = arguments.flat(name, value, writable=writable)
    if array.dtype != np.uint32 or not array.dtype.isnative:
        raise TypeError(f"{name} must be uint32 (got {array.dtype})")
    if size is not None and array.size != size:
        raise ValueError(f"{name} must have {size} elements, as many as out (got {array.size})")
    return array


class FieldSumArguments(NamedTuple):
    """Arguments of `field_sum`; `checked` validates them."""

    out: Words
    vectors: Sequence[Words]
    weights: Sequence[int]

    def checked(self) -> FieldSumArguments:
        """Return the checked arguments. Errors name the wrong argument."""
        out = words("out", self.out, writable=True)
        vectors, weights = arguments.items("vectors", self.vectors), arguments.items("weights", self.weights)
        if len(vectors) > MAX_VECTORS:
            raise ValueError(f"vectors: at most {MAX_VECTORS} can be summed at once (got {len(vectors)})")
        if len(weights) != len(vectors):
            raise ValueError(
                f"weights must have {len(vectors)} entries, as many as vectors (got {len(weights)})"
            )
        checked = [words(f"vectors[{k}]", vector, out.size) for k, vector in enumerate(vectors)]
        for k, (vector, weight) in enumerate(zip(checked, weights, strict=True)):
            if np.may_share_memory(out, vector):
                raise ValueError(f"vectors[{k}] must not overlap the output array (out)")
            if not 0 <= weight < PRIME or weight != int(weight):
                raise ValueError(f"weights[{k}] must be an integer from 0 to {PRIME - 1} (got {weight!r})")
        return FieldSumArguments(out, checked, [int(weight) for weight in weights])


class CodeArguments(NamedTuple):
    """Arguments of `field_encode` and `field_decode`; `checked` validates them."""

    floats: Floats
    words: Words
    mask: Words
    factor: float
    clip: float | None = None
    """Magnitude to which `field_encode` limits the elements; None for `field_decode`."""

    def checked(self) -> CodeArguments:
        """Return the checked arguments, with numbers rounded to float32. Errors name the wrong argument."""
        encodes = self.clip is not None
        coded = words("out" if encodes else "words", self.words, writable=encodes)
        plain = arguments.floats(
            "update" if encodes else "out", self.floats, coded.size, writable=not encodes
        )
        mask = words("mask", self.mask, coded.size)
        out = coded if encodes else plain
        in_place = encodes and mask.ctypes.data == coded.ctypes.data
        for name, array in (("update", plain), ("words", coded), ("mask", mask)):
            if array is not out and np.may_share_memory(array, out) and not (name == "mask" and in_place):
                raise ValueError(f"{name} must not overlap the output array (out)")
        numbers = {"factor": self.factor} | ({"clip": self.clip} if self.clip is not None else {})
        rounded = {name: float(np.float32(value)) for name, value in numbers.items()}
        for name, value in rounded.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite float32 above 0 (got {numbers[name]!r})")
        if encodes and rounded["clip"] * rounded["factor"] > MAX_ENCODED:
            raise ValueError(f"clip · factor must be at most {MAX_ENCODED} (got {self.clip} · {self.factor})")
        return CodeArguments(plain, coded, mask, rounded["factor"], rounded.get("clip"))


def field_sum(
    out: Words, vectors: Sequence[Words], weights: Sequence[int], backend: str | None = None
) -> None:
    """Write Σ_k weights[k] · vectors[k] modulo p to ``out``.

    ``out`` and the vectors are flat uint32 arrays of D elements; ``out`` must not overlap a vector. All
    elements and weights must be below p; elements are not checked. All back ends give the same numbers.

    Raises ValueError or TypeError with the name of the wrong argument, and ConfigError if ``backend`` is not
    available.

    >>> out = np.empty(2, np.uint32)
    >>> field_sum(out, [np.array([PRIME - 1, 3], np.uint32), np.array([5, 1], np.uint32)], [2, 7])
    >>> out.tolist()
    [33, 13]
    """
    select(backend).field_sum(FieldSumArguments(out, vectors, weights), threads())


def field_encode(
    out: Words, update: Floats, mask: Words, clip: float, factor: float, backend: str | None = None
) -> int:
    """Write round(update · factor) + mask modulo p to ``out``; return the number of clipped elements.

    Each element is first clipped to [−clip, clip], and its product with ``factor`` is rounded to the nearest
    integer, ties to even. A negative integer −n becomes p − n, and NaN becomes ``clip``. ``update`` is
    float32[D]; ``out`` and ``mask`` are uint32[D] and may be the same array. The elements of ``mask`` must be
    below p, and clip · factor below 2^31. If ``factor`` is a power of two, the product is exact.

    >>> out = np.empty(3, np.uint32)
    >>> field_encode(out, np.array([0.5, -0.25, 9], np.float32), np.zeros(3, np.uint32), 1.0, 8.0)
    1
    >>> out.tolist() == [4, PRIME - 2, 8]
    True
    """
    if clip is None:  # without a clip, CodeArguments describes a decoding
        raise TypeError("clip must be a number (got None)")
    return select(backend).field_encode(CodeArguments(update, out, mask, factor, clip), threads())


def field_decode(out: Floats, words: Words, mask: Words, factor: float, backend: str | None = None) -> int:
    """Write c · factor to ``out``, where c = words − mask modulo p; return the maximum of abs(c).

    c is in [−(p−1)/2, (p−1)/2] and is rounded to float32 before it is multiplied. ``words`` and ``mask`` are
    uint32[D] with elements below p; ``out`` is float32[D] and must not overlap them.

    >>> out = np.empty(2, np.float32)
    >>> field_decode(out, np.array([9, 1], np.uint32), np.array([5, 3], np.uint32), 0.125)
    4
    >>> out.tolist()
    [0.5, -0.25]
    """
    return select(backend).field_decode(CodeArguments(out, words, mask, factor), threads())
