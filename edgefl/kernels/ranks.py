"""Kernels that read all updates element by element: trimmed means and inner products."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgefl.kernels import arguments
from edgefl.kernels.arguments import TILE, Doubles, Floats, Update
from edgefl.kernels.selection import select, threads

MAX_UPDATES = 1024
"""Maximum number of updates; equal to EF_MOST_ORDERED in kernels/edgefl_kernels.h."""
GRAIN = 16 * TILE
"""Number of elements per partial inner product (16 tiles); equal to EF_GRAIN in kernels/edgefl_kernels.h."""
Network = NDArray[np.int32]
"""Flat array of comparisons (i, j): the smaller of the elements i and j is moved to i, the larger to j."""


class RankArguments(NamedTuple):
    """Arguments of `trimmed_mean`, or of `products` if ``out`` is None; `checked` validates them."""

    updates: Sequence[Update]
    scales: Sequence[Floats | None] | None
    out: Floats | None = None
    trim: int = 0

    def checked(self) -> RankArguments:
        """Return the checked arguments, in which ``scales`` has one entry per update.

        Errors name the wrong argument.
        """
        vectors = arguments.items("updates", self.updates)
        if not 1 <= len(vectors) <= MAX_UPDATES:
            raise ValueError(f"updates must be 1 to {MAX_UPDATES} vectors (got {len(vectors)})")
        scales = [None] * len(vectors) if self.scales is None else arguments.items("scales", self.scales)
        if len(scales) != len(vectors):
            raise ValueError(
                f"scales must have {len(vectors)} entries, as many as updates (got {len(scales)})"
            )
        out = None if self.out is None else arguments.floats("out", self.out, writable=True)
        size = None if out is None else out.size
        pairs = []
        for k, (vector, scale) in enumerate(zip(vectors, scales, strict=True)):
            pairs.append(arguments.update(f"updates[{k}]", vector, size, scale))
            size = pairs[0][0].size
            for name, array in zip(("updates", "scales"), pairs[-1], strict=True):
                if out is not None and array is not None and np.may_share_memory(out, array):
                    raise ValueError(f"{name}[{k}] must not overlap the output array (out)")
        try:
            trim = operator.index(self.trim)
        except TypeError:
            raise TypeError(f"trim must be an integer (got {self.trim!r})") from None
        if not 0 <= 2 * trim < len(vectors):
            most = (len(vectors) - 1) // 2
            raise ValueError(f"trim must be from 0 to {most} for {len(vectors)} updates (got {trim})")
        return RankArguments([array for array, _ in pairs], [scale for _, scale in pairs], out, trim)


def trimmed_mean(
    out: Floats,
    updates: Sequence[Update],
    trim: int,
    backend: str | None = None,
    *,
    scales: Sequence[Floats | None] | None = None,
) -> None:
    """Write the mean of each element over the updates, without the smallest and the largest values.

    For each element, ``trim`` values are left out at each end. The remaining values are added in ascending
    order in float64, and the mean is rounded to float32. A mean of zero is +0.0. For K updates, trim =
    (K − 1) // 2 gives the median. ``out`` is float32[D] and must not overlap an update. There are
    1 to 1024 ``updates``; they and their ``scales`` are as in `weighted_sum`, and all values must be finite.
    All CPU back ends give the same bits. There is no GPU version: ``cuda`` runs the fastest CPU back end.

    Raises ValueError or TypeError with the name of the wrong argument, and ConfigError if ``backend`` is not
    available.

    >>> out = np.empty(2, np.float32)
    >>> trimmed_mean(out, [np.array(row, np.float32) for row in ([1, 9], [2, 7], [90, 8])], trim=1)
    >>> out.tolist()
    [2.0, 8.0]
    """
    select(backend).trimmed_mean(RankArguments(updates, scales, out, trim), threads())


def products(
    updates: Sequence[Update],
    backend: str | None = None,
    *,
    scales: Sequence[Floats | None] | None = None,
) -> Doubles:
    """Return the inner products of all pairs of updates: float64[K, K], symmetric.

    The products of elements are exact in float64 and are added in a fixed order, so all CPU back ends give
    the same bits. There is no GPU version: ``cuda`` runs the fastest CPU back end. Arguments and errors are
    those of `trimmed_mean`.

    >>> products([np.array([1, 2], np.float32), np.array([3, 0], np.float32)]).tolist()
    [[5.0, 3.0], [3.0, 9.0]]
    """
    return select(backend).products(RankArguments(updates, scales), threads())


@cache
def network(count: int, trim: int) -> Network:
    """Return the comparisons that move the elements of ranks trim to count − trim − 1 to their positions.

    They are the comparisons of Batcher's odd-even merge sort (Knuth, The Art of Computer Programming 3,
    section 5.2.2, algorithm M), without the comparisons that do not affect these ranks.

    >>> network(3, 0).reshape(-1, 2).tolist()
    [[0, 2], [0, 1], [1, 2]]
    """
    pairs = list(_merge_exchange(count))
    needed, kept = set(range(trim, count - trim)), []
    for low, high in reversed(pairs):
        if low in needed or high in needed:
            needed |= {low, high}
            kept.append((low, high))
    return np.array(kept[::-1], np.int32).reshape(-1)


def _merge_exchange(count: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top if count > 1 else 0
    while p > 0:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return pairs
