"""The arrays that ``bench aggregate`` sums."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl import kernels

LAYERS = 10
DTYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8
}  # fmt: skip

Floats = npt.NDArray[np.float32]
Call = Callable[[], object]


class Work(NamedTuple):
    """One row's arrays, all aligned to 64 bytes as slots of the parameter buffer are."""

    stacked: npt.NDArray[Any]
    scales: list[Floats | None]
    base: Floats
    out: Floats
    weights: list[float]
    threads: int

    @property
    def layers(self) -> list[slice]:
        """Where each of ten layers is, for those that sum layer by layer."""
        ends = np.linspace(0, self.base.size, LAYERS + 1).astype(int).tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    @property
    def moved_bytes(self) -> int:
        """Updates, their scales and the base read, the result written."""
        scales = sum(scale.nbytes for scale in self.scales if scale is not None)
        return self.stacked.nbytes + scales + 2 * self.base.nbytes


def aligned(size: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    size_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(size_bytes + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes].view(dtype)


def work_of(parameters: int, updates: int, dtype: str, threads: int) -> Work:
    """Updates with one random stretch again and again: the values do not matter, but zeros might."""
    rng = np.random.default_rng([parameters, updates])
    base, out = aligned(parameters), aligned(parameters)
    base[:] = np.resize(rng.standard_normal(min(parameters, 1 << 20), dtype=np.float32), parameters)
    stacked = aligned(updates * parameters, DTYPES[dtype]).reshape(updates, parameters)
    scales: list[Floats | None] = [None] * updates
    for k, row in enumerate(stacked):
        scales[k] = aligned(-(-parameters // kernels.SCALE_BLOCK)) if dtype == "int8" else None
        if k == 0 or dtype != "float32":
            kernels.quantize(row, base, scales=scales[k])
        else:
            np.multiply(base, np.float32(1 + k / updates), out=row)
    return Work(stacked, scales, base, out, rng.random(updates).tolist(), threads)
