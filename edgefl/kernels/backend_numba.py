"""The numba back end, for machines without a compiler: serial kernels without the GIL, on plain threads.

numba's own parallel layer is not used, because it does not survive a fork.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Any

import numpy as np

from edgefl.kernels import arguments, differences, numba_loops, quantization, steps
from edgefl.kernels.arguments import SCALE_BLOCK, TILE, Doubles, Floats, Ids, Sum, Update
from edgefl.kernels.backend_reference import decoded, folded, remainder, rounded
from edgefl.kernels.steps import Optimizer

_CHUNK = 32 * TILE
_THREAD_CHUNKS = 16
"""Least chunks for a thread of its own, against some 100 μs to start one."""


def _sum_part(out: Floats, given: Sum, partial: Doubles, start: int, stop: int) -> None:
    """The sum of elements ``start`` (a multiple of the tile) to ``stop``, written to ``out``."""
    base = None if given.base is None else given.base[start:stop]
    if not given.updates:
        out[:] = 0.0 if base is None else base
        return
    with np.errstate(all="ignore"):
        vectors = [decoded(u, s, start, stop) for u, s in zip(given.updates, given.scales, strict=True)]
    norms = partial[:, start // TILE : -(-stop // TILE)]
    _sum_floats(out, base, vectors, given.weights, norms, 1)
    for update, scale, row in zip(given.updates, given.scales, norms, strict=True):
        if scale is not None:
            blocks = scale[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)]
            numba_loops.int8_norms(update[start:stop], blocks, row)


def _sum_floats(
    out: Floats, base: Floats | None, vectors: list[Update], weights: Floats, norms: Doubles, threads: int
) -> None:
    """A sum of one float32 vector or more."""
    place, model = _address(out), 0 if base is None else _address(base)
    addresses = np.array([_address(vector) for vector in vectors], dtype=np.uintp)
    # Writing around the caches saves reading what is overwritten.
    stream = place % 64 == 0 and out.nbytes >= numba_loops.LONG_BYTES and place != model
    counter = np.zeros(1, dtype=np.int64)
    given = (place, model, out.size, addresses, weights, norms, stream, _address(counter))
    _together(lambda: numba_loops.sum_tiles(*given), threads)


def _address(array: Update) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _share(size: int, loads: int, threads: int) -> int:
    """How many threads work on ``size`` elements that are each of ``loads`` arrays."""
    return max(1, min(threads, -(-size // _CHUNK) * loads // _THREAD_CHUNKS))


def _in_parts(work: Callable[[int, int], None], size: int, threads: int) -> None:
    """work(start, stop) over all elements, in parts that stay in cache; who is done takes the next part."""
    starts = iter(range(0, size, _CHUNK))

    def take() -> None:
        for start in starts:
            work(start, min(start + _CHUNK, size))

    _together(take, threads)


def _together(work: Callable[[], None], threads: int) -> None:
    """work() on this thread and on others, which have ended it when this returns.

    `threading.Thread` would wait for each thread to have started before this one does its share.
    """
    errors: list[BaseException] = []

    def other(done: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    locks = [_thread.allocate_lock() for _ in range(threads - 1)]
    for lock in locks:
        lock.acquire()
        _thread.start_new_thread(other, (lock,))
    try:
        work()
    finally:
        for lock in locks:
            lock.acquire()
    if errors:
        raise errors[0]


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
    size, vectors = given.out.size, given.updates
    partial = np.zeros((len(vectors), -(-size // TILE)))
    useful = _share(size, len(vectors), threads)
    if vectors and all(vector.dtype == np.float32 for vector in vectors):
        _sum_floats(given.out, given.base, vectors, given.weights, partial, useful)
    else:
        _in_parts(lambda a, b: _sum_part(given.out[a:b], given, partial, a, b), size, useful)
    return _finished(given, partial, threads)


def weighted_step(
    out: object,
    base: object,
    updates: object,
    weights: object,
    optimizer: Optimizer,
    old_state: object,
    new_state: object,
    scales: object | None,
    checksums: object | None,
    threads: int,
) -> Doubles:
    given = steps.checked(out, base, updates, weights, optimizer, old_state, new_state, scales, checksums)
    kind = steps.KINDS.index(optimizer.kind)
    with np.errstate(over="ignore"):
        numbers = np.array(steps.constants(optimizer), dtype=np.float64).astype(np.float32)
    partial = np.zeros((len(given.sum.updates), -(-given.sum.out.size // TILE)))
    unused = np.empty(0, dtype=np.float32)

    def work(start: int, stop: int) -> None:
        part = slice(start, stop)
        mean = np.empty(stop - start, dtype=np.float32)
        _sum_part(mean, given.sum, partial, start, stop)
        old_a, old_b = [*(x[part] for x in given.old), unused][:2]
        a, b = [*(x[part] for x in given.new), unused][:2]
        numba_loops.step(kind, numbers, mean, given.base[part], old_a, old_b, given.sum.out[part], a, b)

    size = given.sum.out.size
    _in_parts(work, size, _share(size, len(given.sum.updates) + 2, threads))
    return _finished(given.sum, partial, threads)


def _finished(given: Sum, partial: Doubles, threads: int) -> Doubles:
    if given.checksums is not None:
        given.checksums[:] = [checksum(update, threads) for update in given.updates]
    return _totals(partial)


def _totals(partial: Doubles) -> Doubles:
    """The sums of all blocks, one after the other."""
    if not partial.shape[1]:
        return np.zeros(len(partial))
    return np.ascontiguousarray(partial.cumsum(axis=1)[:, -1])


def quantize(
    out: object,
    update: object,
    scales: object | None,
    residual: object | None,
    left: object | None,
    weight: float,
    threads: int,
) -> float:
    given = quantization.checked(out, update, scales, residual, left, weight)

    def work(start: int, stop: int) -> None:
        """numpy's own conversions, on parts that stay in cache."""
        part, blocks = slice(start, stop), slice(start // SCALE_BLOCK, -(-stop // SCALE_BLOCK))
        factors = None if given.scales is None else given.scales[blocks]
        with np.errstate(all="ignore"):
            y = given.weight * given.update[part]
            if given.residual is not None:
                y += given.residual[part]
            rounded(given.out[part], y, factors)
            if given.left is not None:
                given.left[part] = remainder(y, given.out[part], factors)

    size = given.update.size
    _in_parts(work, size, _share(size, 2, threads))
    return _norm(given.out, given.scales)


def sq_norm(update: object, scale: object | None, threads: int) -> float:
    array, blocks = arguments.update("update", update, None, scale)
    return _norm(array, blocks)


def _norm(update: Update, scale: Floats | None) -> float:
    """The norm that a sum gives, its result thrown away."""
    partial = np.zeros((1, -(-update.size // TILE)))
    scratch = np.empty(min(_CHUNK, update.size), dtype=np.float32)
    given = Sum(scratch, None, [update], np.zeros(1, dtype=np.float32), [scale], None)
    for start in range(0, update.size, _CHUNK):
        stop = min(start + _CHUNK, update.size)
        _sum_part(scratch[: stop - start], given, partial, start, stop)
    return float(_totals(partial)[0])


def checksum(update: object, threads: int) -> int:
    data = arguments.flat("update", update).view(np.uint8)
    words = data[: data.size // 4 * 4].view("<u4")
    tail = int.from_bytes(data[words.size * 4 :].tobytes(), "little")
    sums = np.empty(2, dtype=np.uint64)
    numba_loops.words(words, sums)
    return folded(int(sums[0]) + tail, int(sums[1]) + (words.size + 1) * tail, data.size)


def delta(out: object, trained: object, base: object) -> int:
    given = differences.checked(out, trained, base)
    given.subtract()
    return checksum(given.out, 1)


def observe(
    mode: int, width: int, decay: float, count: Ids, state: Doubles, ids: Ids, values: Doubles, means: Doubles
) -> None:
    numba_loops.observe(mode, width, decay, count, state, ids, values, means)
