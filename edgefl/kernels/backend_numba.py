"""The numba back end, for machines without a compiler: serial kernels without the GIL, on plain threads.

No fastmath: LLVM then rounds every product and every sum as numpy does. numba's own parallel layer is
not used, because it does not survive a fork.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from edgefl.kernels import arguments
from edgefl.kernels.arguments import TILE, Doubles, Floats, Ids, Sum, Update
from edgefl.kernels.backend_reference import decoded, folded

_CHUNK = 4 * TILE
_THREAD_CHUNKS = 16
"""Least chunks for a thread of its own, against some 100 μs to start one."""


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


@_jit(types.void(_output(types.float32), _input(types.float32), types.float32))
def _add(total: Floats, x: Floats, weight: float) -> None:
    for i in range(total.size):
        total[i] = total[i] + weight * x[i]


@_jit(types.void(_input(types.float32), _output(types.float64)))
def _block_norms(x: Floats, norms: Doubles) -> None:
    lanes = np.empty(8)
    for block in range(norms.size):
        start = block * TILE
        stop = min(start + TILE, x.size)
        whole = start + (stop - start) // 8 * 8
        lanes[:] = 0.0
        for i in range(start, whole, 8):
            for lane in range(8):
                wide = np.float64(x[i + lane])
                lanes[lane] += wide * wide
        for i in range(whole, stop):
            wide = np.float64(x[i])
            lanes[i - whole] += wide * wide
        even = (lanes[0] + lanes[4]) + (lanes[2] + lanes[6])
        norms[block] = even + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]))


@_jit(types.void(_input(types.uint32), _output(types.uint64)))
def _words(words: Any, sums: Any) -> None:
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
def _observe(
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


def _sum_chunks(given: Sum, partial: Doubles, first: int, last: int) -> None:
    with np.errstate(all="ignore"):
        for chunk in range(first, last):
            start, stop = chunk * _CHUNK, min((chunk + 1) * _CHUNK, given.out.size)
            total = given.out[start:stop]
            if given.base is None:
                total.fill(0.0)
            elif given.base.ctypes.data != given.out.ctypes.data:
                total[:] = given.base[start:stop]
            tiles = slice(start // TILE, -(-stop // TILE))
            for k, (update, scale) in enumerate(zip(given.updates, given.scales, strict=True)):
                x = decoded(update, scale, start, stop)
                _add(total, x, given.weights[k])
                _block_norms(x, partial[k, tiles])


def weighted_sum(
    out: object,
    base: object | None,
    updates: object,
    weights: object,
    scales: object | None,
    checksums: object | None,
    threads: int,
) -> Doubles:
    given = arguments.weighted_sum(out, base, updates, weights, scales, checksums)
    chunks = -(-given.out.size // _CHUNK)
    partial = np.zeros((len(given.updates), -(-given.out.size // TILE)))
    threads = max(1, min(threads, chunks * len(given.updates) // _THREAD_CHUNKS))
    bounds = [chunks * i // threads for i in range(threads + 1)]
    others = [
        threading.Thread(target=_sum_chunks, args=(given, partial, bounds[i], bounds[i + 1]))
        for i in range(1, threads)
    ]
    for thread in others:
        thread.start()
    _sum_chunks(given, partial, 0, bounds[1])
    for thread in others:
        thread.join()
    if given.checksums is not None:
        given.checksums[:] = [checksum(update, threads) for update in given.updates]
    return np.array([_total(row) for row in partial])


def _total(blocks: Doubles) -> float:
    total = 0.0
    for block in blocks.tolist():
        total += block
    return total


def sq_norm(update: object, scale: object | None, threads: int) -> float:
    array, blocks = arguments.update("update", update, None, scale)
    return _norm(array, blocks)


def _norm(update: Update, scale: Floats | None) -> float:
    partial = np.zeros(-(-update.size // TILE))
    with np.errstate(all="ignore"):
        for start in range(0, update.size, _CHUNK):
            stop = min(start + _CHUNK, update.size)
            x = decoded(update, scale, start, stop)
            _block_norms(x, partial[start // TILE : -(-stop // TILE)])
    return _total(partial)


def checksum(update: object, threads: int) -> int:
    data = arguments.flat("update", update).view(np.uint8)
    words = data[: data.size // 4 * 4].view("<u4")
    tail = int.from_bytes(data[words.size * 4 :].tobytes(), "little")
    sums = np.empty(2, dtype=np.uint64)
    _words(words, sums)
    return folded(int(sums[0]) + tail, int(sums[1]) + (words.size + 1) * tail, data.size)


def observe(
    mode: int, width: int, decay: float, count: Ids, state: Doubles, ids: Ids, values: Doubles, means: Doubles
) -> None:
    _observe(mode, width, decay, count, state, ids, values, means)
