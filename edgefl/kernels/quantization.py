"""Quantisation of updates with error feedback, and clipping factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgefl.kernels import arguments
from edgefl.kernels.arguments import Doubles, Floats, Update
from edgefl.kernels.selection import select, threads


class QuantizationArguments(NamedTuple):
    """Arguments of `quantize`; `checked` validates them."""

    out: Update
    update: Floats
    scales: Floats | None
    residual: Floats | None
    left: Floats | None
    weight: Any

    def checked(self) -> QuantizationArguments:
        """Return the checked arguments, with a float32 weight. Error messages name the wrong argument."""
        source = arguments.floats("update", self.update, None)
        size = source.size
        target = arguments.packed("out", self.out, writable=True)
        if target.size != size:
            raise ValueError(f"out must have {size} elements like update (got {target.size})")
        if (target.dtype == np.int8) != (self.scales is not None):
            needed = "given for int8" if self.scales is None else f"None for {target.dtype}"
            raise ValueError(f"scales must be {needed} (got {type(self.scales).__name__})")
        blocks = -(-size // arguments.SCALE_BLOCK)
        steps, old, new = self.scales, self.residual, self.left
        steps = None if steps is None else arguments.floats("scales", steps, blocks, writable=True)
        old = None if old is None else arguments.floats("residual", old, size)
        new = None if new is None else arguments.floats("new_residual", new, size, writable=True)
        written = {"out": target, "scales": steps, "new_residual": new}
        arrays: dict[str, NDArray[Any] | None] = written | {"update": source, "residual": old}
        given = [(name, array) for name, array in arrays.items() if array is not None]
        for (name, array), (other, array2) in combinations(given, 2):
            in_place = (name, other) in (("out", "update"), ("new_residual", "residual"))
            same = array.ctypes.data == array2.ctypes.data and array.nbytes == array2.nbytes
            if name in written and not (in_place and same) and np.may_share_memory(array, array2):
                raise ValueError(f"{other} must not overlap the output {name}")
        try:
            with np.errstate(over="ignore"):
                factor = np.float64(float(self.weight)).astype(np.float32)
        except (TypeError, ValueError):
            raise TypeError(f"weight must be a number (got {self.weight!r})") from None
        return QuantizationArguments(target, source, steps, old, new, factor)

    def part(self, start: int, stop: int) -> QuantizationArguments:
        """Return the arguments for elements ``start`` (a multiple of `SCALE_BLOCK`) to ``stop``, as views."""

        def cut(array: Any, block: int = 1) -> Any:
            return None if array is None else array[start // block : -(-stop // block)]

        scales = cut(self.scales, arguments.SCALE_BLOCK)
        residual, left = cut(self.residual), cut(self.left)
        return QuantizationArguments(cut(self.out), cut(self.update), scales, residual, left, self.weight)


def quantize(
    out: Update,
    update: Floats,
    *,
    scales: Floats | None = None,
    residual: Floats | None = None,
    new_residual: Floats | None = None,
    weight: float = 1.0,
    backend: str | None = None,
) -> float:
    """Round y = weight·update + residual to ``out``'s type; return the rounded vector's squared L2 norm.

    ``update`` is a flat float32 array of D elements. ``out`` is a flat array of D elements of float32,
    float16, bfloat16 (uint16) or int8, and may be ``update``. With float16 and bfloat16, y is rounded to the
    nearest number, ties to even, and overflows to infinity. With int8, each block of 256 elements has
    scales[b] = max|y| / 127 and q = round(y / scales[b]), ties to even; a block with an inf or NaN has the
    scale NaN, which marks the update as bad. ``scales`` (float32[⌈D/256⌉]) is written for int8 and must be
    None otherwise.

    The error feedback is that of Seide et al. 2014 and Karimireddy et al. 2019 (arXiv:1901.09847).
    ``residual`` is the last rounding error (None means zero). ``new_residual`` receives y − decoded(out), or
    0 where this is not finite; it may be ``residual`` itself. The function makes one pass over memory, and
    every back end gives the same bits.

    Raises ValueError or TypeError with the name of the wrong argument, and ConfigError if ``backend`` is not
    available.

    >>> q, scales, left = np.empty(3, np.int8), np.empty(1, np.float32), np.empty(3, np.float32)
    >>> quantize(q, np.array([127, -3.5, 0.25], np.float32), scales=scales, new_residual=left)
    16145.0
    >>> q.tolist(), scales.tolist(), left.tolist()
    ([127, -4, 0], [1.0], [0.0, 0.5, 0.25])
    """
    given = QuantizationArguments(out, update, scales, residual, new_residual, weight)
    return select(backend).quantize(given, threads())


def clip_factors(sq_norms: Sequence[float] | Doubles, max_norm: float) -> Doubles:
    """Return min(1, L / ‖Δ_k‖) for squared norms ‖Δ_k‖² and L = ``max_norm``; NaN for non-finite norms.

    If the weights of a `weighted_sum` are multiplied by these factors, every update is clipped to norm L in
    the sum; the updates themselves do not change. `sq_norm` computes the norms.

    >>> clip_factors([4.0, 0.25, 0.0], 1.0).tolist()
    [0.5, 1.0, 1.0]
    """
    if not (math.isfinite(max_norm) and max_norm > 0):
        raise ValueError(f"max_norm must be a finite number above 0 (got {max_norm!r})")
    squares = np.asarray(sq_norms, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors = np.minimum(1.0, max_norm / np.sqrt(squares))
    return np.where(np.isfinite(squares), factors, np.nan)
