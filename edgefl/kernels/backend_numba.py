"""The numba back end, for machines without a C compiler: loops without the GIL, on plain threads.

numba's own parallel layer is not used because it does not survive a fork. Without fastmath, LLVM rounds every
product and every sum as numpy does.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba import types

from edgefl.kernels import arguments, steps
from edgefl.kernels.arguments import LANES, SCALE_BLOCK, TILE, Doubles, Floats, SumArguments, Update
from edgefl.kernels.backend_reference import decoded, difference, folded, int8_norms, round_all, words_of
from edgefl.kernels.backend_reference import observe as observe
from edgefl.kernels.field import PRIME, CodeArguments, FieldSumArguments
from edgefl.kernels.quantization import QuantizationArguments
from edgefl.kernels.ranks import GRAIN, RankArguments, network
from edgefl.kernels.steps import StepArguments

_CHUNK = 64 * TILE
_THREAD_CHUNKS = 8
"""Minimum chunks per additional thread, which takes about 100 μs to start."""
_ROWS = 16
"""Rows of lanes squared per iteration; enough for LLVM to vectorise over the lanes."""


# ---- the loops -----------------------------------------------------------------------------------


def _jit(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
        try:
            return numba.njit([signature], cache=True, **options)(function)
        except RuntimeError:  # no writable cache folder
            return numba.njit([signature], **options)(function)

    return compiled


def _input(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", readonly=True, aligned=False)


def _output(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", aligned=False)


_F32, _F64 = types.float32, types.float64


def _add_squares(x: Floats, start: Any, sums: Doubles, lanes: Any) -> None:
    """Add the squares of `_ROWS` rows of lanes from element ``start`` on to ``sums``, in order of rows."""
    for lane in range(lanes):
        total = sums[lane]
        for row in range(_ROWS):
            value = np.float64(x[start + lane + np.uint64(row * LANES)])
            total += value * value
        sums[lane] = total


def _folded(x: Floats, whole: Any, last: Any, sums: Doubles) -> float:
    """Returns a tile's norm: add the remaining elements to the lanes' sums, then the lanes pairwise."""
    for i in range(whole, last):
        value = np.float64(x[i])
        sums[(i - whole) % np.uint64(LANES)] += value * value
    low = (sums[0] + sums[4]) + (sums[2] + sums[6])
    total: float = low + ((sums[1] + sums[5]) + (sums[3] + sums[7]))
    return total


_squares: Any = numba.njit(error_model="numpy")(_add_squares)
_fold: Any = numba.njit(error_model="numpy")(_folded)


@_jit(types.void(_output(_F32), _input(_F32), _F32, _output(_F64), types.uint64))
def _add(out: Floats, x: Floats, weight: Any, norms: Doubles, lanes: Any) -> None:
    """out += weight·x tile by tile, and each tile's squared norm. Unsigned indices are faster.

    ``lanes`` is `LANES`. It is a parameter because LLVM unrolls a loop of constant length before it
    vectorises.
    """
    sums, step = np.zeros(LANES), np.uint64(_ROWS * LANES)
    for tile in range(norms.size):
        first, last = np.uint64(tile * TILE), np.uint64(min((tile + 1) * TILE, x.size))
        whole = last - (last - first) % step
        sums[:] = 0.0
        for start in range(first, whole, step):
            for i in range(start, start + step):
                out[i] += weight * x[i]
            _squares(x, start, sums, lanes)
        for i in range(whole, last):
            out[i] += weight * x[i]
        norms[tile] = _fold(x, whole, last, sums)


@_jit(types.void(_output(_F32), *[_input(_F32)] * 5, types.Array(_F64, 2, "A"), types.uint64))
def _add_four(
    out: Floats, a: Floats, b: Floats, c: Floats, d: Floats, weights: Floats, norms: Doubles, lanes: Any
) -> None:
    """`_add` for four vectors in one pass: reads and writes ``out`` once and overlaps four memory streams."""
    sums, step = np.zeros((4, LANES)), np.uint64(_ROWS * LANES)
    u, v, w, x = weights[0], weights[1], weights[2], weights[3]
    for tile in range(norms.shape[1]):
        first, last = np.uint64(tile * TILE), np.uint64(min((tile + 1) * TILE, a.size))
        whole = last - (last - first) % step
        sums[:] = 0.0
        for start in range(first, whole, step):
            for i in range(start, start + step):
                out[i] = (((out[i] + u * a[i]) + v * b[i]) + w * c[i]) + x * d[i]
            _squares(a, start, sums[0], lanes)
            _squares(b, start, sums[1], lanes)
            _squares(c, start, sums[2], lanes)
            _squares(d, start, sums[3], lanes)
        for i in range(whole, last):
            out[i] = (((out[i] + u * a[i]) + v * b[i]) + w * c[i]) + x * d[i]
        norms[0, tile] = _fold(a, whole, last, sums[0])
        norms[1, tile] = _fold(b, whole, last, sums[1])
        norms[2, tile] = _fold(c, whole, last, sums[2])
        norms[3, tile] = _fold(d, whole, last, sums[3])


@_jit(types.void(types.int64, _input(_F32), *[_input(_F32)] * 4, *[_output(_F32)] * 3))
def _step(
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
    """The equations of ef_step in kernels/edgefl_kernels.h, one loop per vector so that LLVM vectorises."""
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


@_jit(types.void(_input(types.uint32), _output(types.uint64)))
def _words(words: Any, sums: Any) -> None:
    s1 = s2 = np.uint64(0)
    for i in range(words.size):
        w = np.uint64(words[i])
        s1 += w
        s2 += np.uint64(i + 1) * w
    sums[0], sums[1] = s1, s2


@_jit(types.void(types.Array(_F32, 2, "C"), _input(types.int32), types.int64, _output(_F32)))
def _trimmed(rows: Any, comparisons: Any, trim: int, out: Floats) -> None:
    """Sort the middle ranks of each column of ``rows``, in place, and write their means."""
    count, width = rows.shape
    for pair in range(0, comparisons.size, 2):
        low, high = rows[comparisons[pair]], rows[comparisons[pair + 1]]
        for i in range(width):
            a, b = low[i], high[i]
            low[i] = b if b < a else a
            high[i] = a if b < a else b
    kept = count - 2 * trim
    for i in range(width):
        total = 0.0
        for rank in range(trim, trim + kept):
            total += np.float64(rows[rank, i])
        out[i] = np.float32(total / kept)


@_jit(types.void(types.Array(_F32, 2, "C"), types.Array(_F64, 2, "C"), types.uint64))
def _products(rows: Any, found: Any, lanes: Any) -> None:
    """Add one grain's inner products of all pairs of rows; the width is a multiple of `LANES`."""
    count, width = rows.shape
    sums = np.zeros(LANES)
    for j in range(count):
        for k in range(j, count):
            a, b = rows[j], rows[k]
            sums[:] = 0.0
            for start in range(0, width, LANES):
                for lane in range(lanes):
                    sums[lane] += np.float64(a[start + lane]) * np.float64(b[start + lane])
            low = (sums[0] + sums[4]) + (sums[2] + sums[6])
            found[j, k] += low + ((sums[1] + sums[5]) + (sums[3] + sums[7]))


_U32, _U64 = types.uint32, types.uint64
_LOW, _HALF, _FIVE, _P = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(5), np.uint64(PRIME)
_SIGNED_P = np.int64(PRIME)


@_jit(types.void(_output(_U64), _input(_U32), _U64))
def _field_add(total: Any, vector: Any, weight: Any) -> None:
    """Add weight · vector to ``total``; each product is folded to less than 6 · 2^32."""
    for i in range(total.size):
        product = weight * np.uint64(vector[i])
        total[i] += (product & _LOW) + _FIVE * (product >> _HALF)


@_jit(types.void(_output(_U32), _input(_U64)))
def _field_fold(out: Any, total: Any) -> None:
    for i in range(out.size):
        folded = (total[i] & _LOW) + _FIVE * (total[i] >> _HALF)
        folded = (folded & _LOW) + _FIVE * (folded >> _HALF)
        out[i] = np.uint32(folded - _P if folded >= _P else folded)


@_jit(types.int64(_input(_F32), _output(_U32), _input(_U32), _F32, _F32))
def _field_encode(update: Any, out: Any, mask: Any, factor: Any, clip: Any) -> Any:
    limited = 0
    for i in range(out.size):
        value = update[i] if update[i] < clip else clip
        value = value if value > -clip else -clip
        limited += value != update[i]
        word = np.int64(np.rint(value * factor)) + np.int64(mask[i])
        word = word + _SIGNED_P if word < 0 else word
        out[i] = np.uint32(word - _SIGNED_P if word >= _SIGNED_P else word)
    return limited


@_jit(types.int64(_output(_F32), _input(_U32), _input(_U32), _F32))
def _field_decode(out: Any, words: Any, mask: Any, factor: Any) -> Any:
    largest, half = np.int64(0), np.int64(PRIME // 2)
    for i in range(out.size):
        number = np.int64(words[i]) - np.int64(mask[i])
        number = number + _SIGNED_P if number < -half else number
        number = number - _SIGNED_P if number > half else number
        largest = max(largest, abs(number))
        out[i] = np.float32(number) * factor
    return largest


# ---- chunks on threads -----------------------------------------------------------------------------


def _useful_threads(size: int, loads: int, threads: int) -> int:
    """Number of threads that pay off for ``loads`` arrays of ``size`` elements, at most ``threads``."""
    return max(1, min(threads, -(-size // _CHUNK) * loads // _THREAD_CHUNKS))


def _in_parts(work: Callable[[int, int], None], size: int, threads: int) -> None:
    """Call work(start, stop) for chunks of all elements that fit the cache; threads share the chunks."""
    starts, errors = iter(range(0, size, _CHUNK)), list[BaseException]()

    def run_chunks() -> None:
        for start in starts:
            work(start, min(start + _CHUNK, size))

    def run_in_thread(done: Any) -> None:
        try:
            run_chunks()
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    locks = [_thread.allocate_lock() for _ in range(threads - 1)]
    for lock in locks:  # `threading.Thread.start` would wait for each thread to start
        lock.acquire()
        _thread.start_new_thread(run_in_thread, (lock,))
    try:
        run_chunks()
    finally:
        for lock in locks:
            lock.acquire()
    if errors:
        raise errors[0]


# ---- the kernel table ------------------------------------------------------------------------------


def _sum_part(out: Floats, given: SumArguments, partial: Doubles, start: int, stop: int) -> None:
    """Sum elements ``start`` (a multiple of `TILE`) to ``stop``; write their tiles' norms to ``partial``."""
    if given.base is None:
        out[:] = 0.0
    elif out.ctypes.data != given.base[start:stop].ctypes.data:
        out[:] = given.base[start:stop]
    norms = partial[:, start // TILE : -(-stop // TILE)]
    with np.errstate(all="ignore"):
        vectors = [decoded(u, s, start, stop) for u, s in zip(given.updates, given.scales, strict=True)]
    whole = len(vectors) // 4 * 4
    for k in range(0, whole, 4):
        _add_four(out, *vectors[k : k + 4], given.weights[k : k + 4], norms[k : k + 4], LANES)
    for k in range(whole, len(vectors)):
        _add(out, vectors[k], given.weights[k], norms[k], LANES)
    for update, scale, row in zip(given.updates, given.scales, norms, strict=True):
        if scale is not None:
            blocks = scale[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)]
            with np.errstate(all="ignore"):
                row[:] = int8_norms(update[start:stop], blocks)


def weighted_sum(given: SumArguments, threads: int) -> Doubles:
    given = given.checked()
    size, count = given.out.size, len(given.updates)
    partial = np.zeros((count, -(-size // TILE)))
    useful = _useful_threads(size, count, threads)
    _in_parts(lambda a, b: _sum_part(given.out[a:b], given, partial, a, b), size, useful)
    return _finished(given, partial, threads)


def weighted_step(given: StepArguments, threads: int) -> Doubles:
    total, optimizer, old, new = given.checked()
    kind, size, base = steps.KINDS.index(optimizer.kind), total.out.size, total.base
    assert base is not None
    with np.errstate(over="ignore"):
        numbers = np.array(steps.constants(optimizer), dtype=np.float64).astype(np.float32)
    partial = np.zeros((len(total.updates), -(-size // TILE)))
    plain, unused = total._replace(base=None), np.empty(0, dtype=np.float32)

    def work(start: int, stop: int) -> None:
        part = slice(start, stop)
        mean = np.empty(stop - start, dtype=np.float32)
        _sum_part(mean, plain, partial, start, stop)
        old_a, old_b = [*(x[part] for x in old), unused][:2]
        a, b = [*(x[part] for x in new), unused][:2]
        _step(kind, numbers, mean, base[part], old_a, old_b, total.out[part], a, b)

    _in_parts(work, size, _useful_threads(size, len(total.updates) + 2, threads))
    return _finished(total, partial, threads)


def _finished(given: SumArguments, partial: Doubles, threads: int) -> Doubles:
    """Fill the checksums; returns the norms, summed over tiles in order."""
    if given.checksums is not None:
        given.checksums[:] = [checksum(update, threads) for update in given.updates]
    if not partial.shape[1]:
        return np.zeros(len(partial))
    return np.ascontiguousarray(partial.cumsum(axis=1)[:, -1])


def quantize(given: QuantizationArguments, threads: int) -> float:
    given = given.checked()
    size = given.update.size
    useful = _useful_threads(size, 2, threads)
    _in_parts(lambda start, stop: round_all(given.part(start, stop)), size, useful)
    return _norm(given.out, given.scales)


def trimmed_mean(given: RankArguments, threads: int) -> None:
    updates, scales, out, trim = given.checked()
    assert out is not None
    comparisons = network(len(updates), trim)
    width = max(TILE, (1 << 18) // len(updates) // TILE * TILE)

    def work(start: int, stop: int) -> None:
        for first in range(start, stop, width):
            last = min(first + width, stop)
            _trimmed(_rows(updates, scales, first, last), comparisons, trim, out[first:last])

    _in_parts(work, out.size, _useful_threads(out.size, len(updates), threads))


def products(given: RankArguments, threads: int) -> Doubles:
    updates, scales, _, _ = given.checked()
    found = np.zeros((len(updates), len(updates)))
    for start in range(0, updates[0].size, GRAIN):
        rows = _rows(updates, scales, start, min(start + GRAIN, updates[0].size), GRAIN)
        _products(rows, found, LANES)
    return found + np.triu(found, 1).T


def field_sum(given: FieldSumArguments, threads: int) -> None:
    out, vectors, weights = given.checked()

    def work(start: int, stop: int) -> None:
        for first in range(start, stop, TILE):
            part = slice(first, min(first + TILE, stop))
            total = np.zeros(part.stop - first, np.uint64)
            for vector, weight in zip(vectors, weights, strict=True):
                _field_add(total, vector[part], np.uint64(weight))
            _field_fold(out[part], total)

    _in_parts(work, out.size, _useful_threads(out.size, len(vectors), threads))


def field_encode(given: CodeArguments, threads: int) -> int:
    update, out, mask, factor, clip = given.checked()
    limited: list[int] = []

    def work(start: int, stop: int) -> None:
        part = slice(start, stop)
        limited.append(
            _field_encode(update[part], out[part], mask[part], np.float32(factor), np.float32(clip))
        )

    _in_parts(work, out.size, _useful_threads(out.size, 3, threads))
    return sum(limited)


def field_decode(given: CodeArguments, threads: int) -> int:
    out, words, mask, factor, _ = given.checked()
    largest = [0]

    def work(start: int, stop: int) -> None:
        part = slice(start, stop)
        largest.append(_field_decode(out[part], words[part], mask[part], np.float32(factor)))

    _in_parts(work, out.size, _useful_threads(out.size, 3, threads))
    return max(largest)


def _rows(updates: Sequence[Update], scales: Any, start: int, stop: int, width: int | None = None) -> Floats:
    """Elements ``start`` to ``stop`` of all updates as float32, in rows padded with zeros to ``width``."""
    rows = np.zeros((len(updates), width or stop - start), dtype=np.float32)
    for row, update, scale in zip(rows, updates, scales, strict=True):
        row[: stop - start] = decoded(update, scale, start, stop)
    return rows


def sq_norm(update: object, scale: object | None, threads: int) -> float:
    return _norm(*arguments.update("update", update, None, scale))


def _norm(update: Update, scale: Floats | None) -> float:
    """Squared norm of an update, computed exactly as by the sum, but without keeping the sum."""
    partial = np.zeros((1, -(-update.size // TILE)))
    scratch = np.empty(min(_CHUNK, update.size), dtype=np.float32)
    given = SumArguments(scratch, None, [update], np.zeros(1, dtype=np.float32), [scale], None)
    for start in range(0, update.size, _CHUNK):
        stop = min(start + _CHUNK, update.size)
        _sum_part(scratch[: stop - start], given, partial, start, stop)
    return float(_finished(given, partial, 1)[0])


def checksum(update: object, threads: int) -> int:
    words, tail, size = words_of(update)
    sums = np.empty(2, dtype=np.uint64)
    _words(words, sums)
    return folded(int(sums[0]) + tail, int(sums[1]) + (words.size + 1) * tail, size)


def delta(out: object, trained: object, base: object) -> int:
    return checksum(difference(out, trained, base), 1)
