"""The numba back end's compiled loops: serial, without the GIL. `backend_numba` puts them on threads.

No fastmath: LLVM then rounds every product and every sum as numpy does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from edgefl.kernels.arguments import LANES, SCALE_BLOCK, TILE, Doubles, Floats, Ids
from edgefl.kernels.numba_vectors import GROUP, WIDTH, fence, float_at, next_number, put_float, sum_group

GRAIN = 16
"""Tiles that a thread takes at once."""
SPAN = 8
"""Tiles in one pass over a group of updates where memory is the limit, which likes long stretches."""
LONG_BYTES = 1 << 20
"""An ``out`` of this many bytes or more is worth that."""


def _jit(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
        try:
            return numba.njit([signature], cache=True, **options)(function)
        except RuntimeError:  # no folder that the cache could be written to
            return numba.njit([signature], **options)(function)

    return compiled


def _input(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", readonly=True, aligned=False)


def _output(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", aligned=False)


def _output2(dtype: Any) -> Any:
    return types.Array(dtype, 2, "A", aligned=False)


def _group(stream: int) -> Any:
    """`sum_group` for any number of updates up to 6: each number is a loop of its own."""

    @_jit(types.void(types.intp, *[types.uintp] * 5, types.intp))
    def group(size: int, out: int, source: int, vectors: int, weights: int, lanes: int, n: int) -> None:
        if size == 1:
            sum_group(1, stream, out, source, vectors, weights, lanes, n)
        elif size == 2:
            sum_group(2, stream, out, source, vectors, weights, lanes, n)
        elif size == 3:
            sum_group(3, stream, out, source, vectors, weights, lanes, n)
        elif size == 4:
            sum_group(4, stream, out, source, vectors, weights, lanes, n)
        elif size == 5:
            sum_group(5, stream, out, source, vectors, weights, lanes, n)
        else:
            sum_group(6, stream, out, source, vectors, weights, lanes, n)

    return group


_sum_group, _stream_group = _group(0), _group(1)


@_jit(types.float64(types.Array(types.float64, 2, "C"), types.intp))
def _folded(lanes: Doubles, j: int) -> float:
    """The sum of a row of 8 lanes, in the order that vectors are halved in."""
    low = (lanes[j, 0] + lanes[j, 4]) + (lanes[j, 2] + lanes[j, 6])
    total: float = low + ((lanes[j, 1] + lanes[j, 5]) + (lanes[j, 3] + lanes[j, 7]))
    return total


@_jit(
    types.void(
        types.uintp,
        types.uintp,
        types.intp,
        _input(types.uintp),
        _input(types.float32),
        _output2(types.float64),
        types.boolean,
        types.uintp,
    )
)
def sum_tiles(
    out: int, base: int, n: int, vectors: Any, weights: Floats, norms: Any, stream: bool, counter: int
) -> None:
    """A sum over float32 arrays given by their addresses (base 0: zeros); norms[k, t] = the tiles' norms.

    The int64 at ``counter`` is the next `GRAIN` tiles to do: threads that share it share the work.
    """
    span = SPAN if n * 4 >= LONG_BYTES else 1
    running, lanes = np.zeros(span * TILE + WIDTH, dtype=np.float32), np.zeros((GROUP, LANES))
    group, factors = np.empty(GROUP, dtype=np.uintp), np.empty(GROUP, dtype=np.float32)
    scratch = np.uintp((running.ctypes.data + 63) // 64 * 64)
    places = (group.ctypes.data, factors.ctypes.data, lanes.ctypes.data)
    count, tiles, tile_bytes = vectors.size, (n + TILE - 1) // TILE, np.uintp(TILE * 4)
    while True:
        start = next_number(counter) * GRAIN
        if start >= tiles:
            fence()
            return
        for first_tile in range(start, min(start + GRAIN, tiles), span):
            last_tile = min(first_tile + span, tiles)
            at = np.uintp(first_tile) * tile_bytes
            if base == 0:
                running[:] = 0.0
            whence = scratch if base == 0 else base + at
            first = 0
            while first < count:
                # Equal groups: 8 updates are read as 4 and 4, not as 6 and 2.
                rest = count - first
                taken = (rest + GROUP - 1) // GROUP
                taken = (rest + taken - 1) // taken
                last = first + taken == count
                source, target = whence, out + at if last else scratch
                whence = target
                for j in range(taken):
                    group[j], factors[j] = vectors[first + j] + at, weights[first + j]
                for tile in range(first_tile, last_tile):
                    size = min(TILE, n - tile * TILE)
                    whole = size // WIDTH * WIDTH
                    lanes[:taken] = 0.0
                    if stream and last:
                        _stream_group(taken, target, source, *places, whole)
                    else:
                        _sum_group(taken, target, source, *places, whole)
                    for i in range(whole, size):
                        total = float_at(source, i)
                        for j in range(taken):
                            x = float_at(group[j], i)
                            total = total + factors[j] * x
                            lanes[j, (i - whole) % LANES] += np.float64(x) * np.float64(x)
                        put_float(target, i, total)
                    for j in range(taken):
                        norms[first + j, tile] = _folded(lanes, j)
                        group[j] += tile_bytes
                    source, target = source + tile_bytes, target + tile_bytes
                first += taken


@_jit(
    types.void(
        types.int64, _input(types.float32), *[_input(types.float32)] * 4, *[_output(types.float32)] * 3
    )
)
def step(
    kind: int,
    c: Floats,
    g: Floats,
    base: Floats,
    old_a: Floats,
    old_b: Floats,
    out: Floats,
    a: Floats,
    b: Floats,
) -> None:
    """The equations of ef_step in kernels/edgefl_kernels.h; one loop a vector, which LLVM can vectorise."""
    keep1, add1, keep2, add2, epsilon, lr = c[0], c[1], c[2], c[3], c[4], c[5]
    if kind == 0:
        for i in range(g.size):
            a[i] = old_a[i] * keep1 + g[i]
        for i in range(g.size):
            out[i] = base[i] + a[i] * lr
        return
    for i in range(g.size):
        a[i] = old_a[i] * keep1 + g[i] * add1
    if kind == 1:
        for i in range(g.size):
            b[i] = old_b[i] * keep2 + g[i] * g[i] * add2
    elif kind == 2:
        for i in range(g.size):
            squared = g[i] * g[i]
            ahead = old_b[i] - squared
            sign = np.float32(ahead > 0) - np.float32(ahead < 0) if ahead == ahead else ahead
            b[i] = old_b[i] - squared * sign * add2
    else:
        for i in range(g.size):
            b[i] = old_b[i] + g[i] * g[i]
    for i in range(g.size):
        out[i] = base[i] + a[i] / (np.sqrt(b[i]) + epsilon) * lr


@_jit(types.void(_input(types.int8), _input(types.float32), _output(types.float64)))
def int8_norms(q: Any, scales: Floats, norms: Doubles) -> None:
    """Each tile's Σ_b scale_b² · Σ q² over its scale blocks."""
    lanes = np.zeros((1, LANES))
    for tile in range(norms.size):
        lanes[:] = 0.0
        for block in range(tile * LANES, min((tile + 1) * LANES, scales.size)):
            squares = np.int32(0)
            for i in range(block * SCALE_BLOCK, min((block + 1) * SCALE_BLOCK, q.size)):
                squares += np.int32(q[i]) * np.int32(q[i])
            scale = np.float64(scales[block])
            lanes[0, block - tile * LANES] = scale * scale * np.float64(squares)
        norms[tile] = _folded(lanes, 0)


@_jit(types.void(_input(types.uint32), _output(types.uint64)))
def words(words: Any, sums: Any) -> None:
    s1 = s2 = np.uint64(0)
    for i in range(words.size):
        w = np.uint64(words[i])
        s1 += w
        s2 += np.uint64(i + 1) * w
    sums[0], sums[1] = s1, s2


@_jit(
    types.void(
        types.int64,
        types.int64,
        types.float64,
        _output(types.int64),
        _output(types.float64),
        _input(types.int64),
        _input(types.float64),
        _output(types.float64),
    )
)
def observe(
    mode: int, width: int, decay: float, count: Ids, state: Doubles, ids: Ids, values: Doubles, means: Doubles
) -> None:
    for i in range(ids.size):
        client = ids[i]
        first, seen = client * width, count[client]
        if mode == 0:
            state[first + seen % width] = values[i]
        elif mode == 1:
            state[first] += values[i]
        elif seen > 0:
            state[first] = decay * state[first] + (1.0 - decay) * values[i]
        else:
            state[first] = values[i]
        seen += 1
        count[client] = seen
        if mode == 2:
            means[i] = state[first]
        elif mode == 1:
            means[i] = state[first] / np.float64(seen)
        else:
            kept = min(seen, width)
            total = 0.0
            for j in range(kept):
                total += state[first + j]
            means[i] = total / np.float64(kept)
