"""The numba back end, for machines without a C compiler: compiled loops that run in threads without the GIL.

numba's own parallel layer is not used because it does not survive a fork. Without fastmath, LLVM rounds every
product and every sum as numpy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numba import types
from numpy.typing import NDArray

from edgefl.kernels import arguments, steps
from edgefl.kernels.arguments import LANES, SCALE_BLOCK, TILE, Doubles, Floats, SumArguments, Update
from edgefl.kernels.backend_reference import decoded, difference, folded, round_all, words_of
from edgefl.kernels.backend_reference import observe as observe
from edgefl.kernels.field import PRIME, CodeArguments, FieldSumArguments
from edgefl.kernels.numba_sums import F32, F64, I64, helper, input_of, jit, output_of, sum_tiles
from edgefl.kernels.numba_threads import CHUNK, in_parts, shared_sum, useful_threads
from edgefl.kernels.numba_threads import close_pool as close_pool
from edgefl.kernels.numba_vectors import INT8, ITEM_BYTES, word_at
from edgefl.kernels.quantization import QuantizationArguments
from edgefl.kernels.ranks import GRAIN, RankArguments, network
from edgefl.kernels.steps import StepArguments


@jit(types.void(types.int64, input_of(F32), *[input_of(F32)] * 4, *[output_of(F32)] * 3))
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
    """Compute ef_step of kernels/edgefl_kernels.h, with one loop per vector so that LLVM vectorises it."""
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


@jit(types.void(types.Array(F64, 2, "C"), output_of(F64)))
def _in_order(partial: Doubles, sums: Doubles) -> None:
    """Add the columns of ``partial`` to ``sums``, one after another."""
    for k in range(partial.shape[0]):
        for tile in range(partial.shape[1]):
            sums[k] += partial[k, tile]


@jit(types.void(input_of(types.uint32), output_of(types.uint64)))
def _words(words: Any, sums: Any) -> None:
    s1 = s2 = np.uint64(0)
    for i in range(words.size):
        w = np.uint64(words[i])
        s1 += w
        s2 += np.uint64(i + 1) * w
    sums[0], sums[1] = s1, s2


@jit(types.void(types.Array(F32, 2, "C"), input_of(types.int32), types.int64, output_of(F32)))
def _trimmed(rows: Any, comparisons: Any, trim: int, out: Floats) -> None:
    """Write the trimmed mean of each column of ``rows`` to ``out``.

    The columns are sorted in place, but only as far as is necessary for the ranks that are not trimmed.
    """
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


@jit(types.void(types.Array(F32, 2, "C"), types.Array(F64, 2, "C"), types.uint64))
def _products(rows: Any, found: Any, lanes: Any) -> None:
    """Add the inner products of all pairs of rows to ``found``; the rows' width is a multiple of `LANES`."""
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


@jit(types.void(output_of(_U64), input_of(_U32), _U64))
def _field_add(total: Any, vector: Any, weight: Any) -> None:
    """Add weight · vector to ``total``; each product is first reduced to less than 6 · 2^32."""
    for i in range(total.size):
        product = weight * np.uint64(vector[i])
        total[i] += (product & _LOW) + _FIVE * (product >> _HALF)


@jit(types.void(output_of(_U32), input_of(_U64)))
def _field_fold(out: Any, total: Any) -> None:
    for i in range(out.size):
        folded = (total[i] & _LOW) + _FIVE * (total[i] >> _HALF)
        folded = (folded & _LOW) + _FIVE * (folded >> _HALF)
        out[i] = np.uint32(folded - _P if folded >= _P else folded)


@jit(types.int64(input_of(F32), output_of(_U32), input_of(_U32), F32, F32))
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


@jit(types.int64(output_of(F32), input_of(_U32), input_of(_U32), F32))
def _field_decode(out: Any, words: Any, mask: Any, factor: Any) -> Any:
    largest, half = np.int64(0), np.int64(PRIME // 2)
    for i in range(out.size):
        number = np.int64(words[i]) - np.int64(mask[i])
        number = number + _SIGNED_P if number < -half else number
        number = number - _SIGNED_P if number > half else number
        largest = max(largest, abs(number))
        out[i] = np.float32(number) * factor
    return largest


_LAYOUT = np.array([object.__basicsize__, id(np.ndarray), *map(id, arguments.DTYPES)])
"""Size of a Python object's header, and the addresses of numpy's array type and of the updates' dtypes."""
_CONTIGUOUS, _WRITEABLE = 0x0001, 0x0400


@helper
def _kind_of(array: int, size: int, layout: Any) -> int:
    """Return the index of a flat array's type in DTYPES; −1 if it is not a flat array of ``size`` elements.

    After its header, an array object consists of the PyArrayObject_fields of numpy's C interface: the
    address, the number of dimensions, the addresses of sizes and strides, the base, the dtype and the flags.
    """
    fields = array + layout[0]
    if word_at(fields - 8) != layout[1]:
        return -1
    if word_at(fields + 8) & 0xFFFFFFFF != 1 or not word_at(fields + 48) & _CONTIGUOUS:
        return -1
    if word_at(word_at(fields + 16)) != size:
        return -1
    for kind in range(layout.size - 2):
        if word_at(fields + 40) == layout[2 + kind]:
            return kind
    return -1


@helper
def _overlap(a: int, a_bytes: int, b: int, b_bytes: int) -> bool:
    return a < b + b_bytes and b < a + a_bytes


@jit(types.boolean(types.Array(I64, 2, "C"), I64, types.Array(I64, 1, "C")))
def _resolve(listed: Any, size: int, layout: Any) -> bool:
    """Replace array ids with the entries that `sum_tiles` reads; return False if an array is unsuitable.

    The first row of ``listed`` holds the ids of the result, the base (0 without a base) and the updates;
    the third row holds the ids of their scales. The result and the base must be float32 arrays of ``size``
    elements. The result must be writable and must not overlap another array, but it may be the base.
    """
    blocks = -(-size // SCALE_BLOCK)
    for k in range(listed.shape[1]):
        kind, address, scales = 0, listed[0, k], listed[2, k]
        if address:
            kind = _kind_of(address, size, layout)
            if kind < 0 or (k < 2 and kind > 0) or (kind == INT8) != (scales != 0):
                return False
            if k == 0 and not word_at(address + layout[0] + 48) & _WRITEABLE:
                return False
            address = word_at(address + layout[0])
        elif k != 1:
            return False
        if scales:
            if _kind_of(scales, blocks, layout) != 0:
                return False
            scales = word_at(scales + layout[0])
            if _overlap(scales, 4 * blocks, listed[0, 0], 4 * size):
                return False
        listed[0, k], listed[1, k], listed[2, k] = address, kind, scales
        in_place = k == 1 and address == listed[0, 0]
        if k and not in_place and _overlap(address, ITEM_BYTES[kind] * size, listed[0, 0], 4 * size):
            return False
    return True


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _layout_holds() -> bool:
    """Return True if this version of numpy has the array layout that `_resolve` assumes."""
    array, other = np.empty(3, dtype=np.float32), np.empty(3, dtype=np.int8)
    scales = np.empty(1, dtype=np.float32)
    listed = np.array([[id(array), 0, id(other)], [0] * 3, [0, 0, id(scales)]])
    known: bool = _resolve(listed, 3, _LAYOUT)
    expected = [[_address(array), 0, _address(other)], [0, 0, INT8], [0, 0, _address(scales)]]
    return known and listed.tolist() == expected


_FAST_CHECKS = _layout_holds()


# ---- the kernel table ------------------------------------------------------------------------------


_KINDS: dict[Any, int] = {dtype: kind for kind, dtype in enumerate(arguments.DTYPES)}


def _usual(given: Any) -> NDArray[np.int64] | None:
    """Return the table of arrays for `sum_tiles`; None if an argument needs a full check or a conversion.

    Compiled code checks the arrays, because checks in Python take longer than a small sum.
    """
    out, base, updates, weights, scales, _ = given
    if type(updates) is not list or not updates or type(out) is not np.ndarray or not _FAST_CHECKS:
        return None
    if type(weights) is not list or len(weights) != len(updates):
        return None
    listed = np.zeros((3, len(updates) + 2), dtype=np.int64)
    listed[0] = [id(out), 0 if base is None else id(base), *map(id, updates)]
    if scales is not None:
        if type(scales) is not list or len(scales) != len(updates):
            return None
        listed[2, 2:] = [0 if scale is None else id(scale) for scale in scales]
    return listed if _resolve(listed, out.size, _LAYOUT) else None


def _listed(given: SumArguments) -> NDArray[np.int64]:
    """Return the table of checked arrays for `sum_tiles`."""
    listed = np.zeros((3, len(given.updates) + 2), dtype=np.int64)
    listed[0, :2] = _address(given.out), 0 if given.base is None else _address(given.base)
    listed[0, 2:] = [_address(update) for update in given.updates]
    listed[1, 2:] = [_KINDS[update.dtype] for update in given.updates]
    listed[2, 2:] = [0 if scale is None else _address(scale) for scale in given.scales]
    return listed


def weighted_sum(given: SumArguments, threads: int) -> Doubles:
    if type(given.updates) is list:  # hold the arrays, because another thread may change the caller's lists
        scales = given.scales[:] if type(given.scales) is list else given.scales
        given = given._replace(updates=given.updates[:], scales=scales)
    listed = None if given.checksums is not None else _usual(given)
    if listed is None:
        given = given.checked()
        listed = _listed(given)
        if not given.updates:
            given.out[:] = 0.0 if given.base is None else given.base
    size, count = given.out.size, len(given.updates)
    try:
        # `float` refuses None, which np.array would convert to NaN.
        weights = np.fromiter(map(float, given.weights), np.float64)
    except (TypeError, ValueError):
        given.checked()  # raises an error that names the wrong argument
        raise
    partial = np.empty((count, -(-size // TILE)))
    if count:
        shared_sum(listed, weights, size, partial, threads)
    return _finished(given, partial, threads)


def weighted_step(given: StepArguments, threads: int) -> Doubles:
    total, optimizer, old, new = given.checked()
    kind, base = steps.KINDS.index(optimizer.kind), total.base
    size, count = total.out.size, len(total.updates)
    assert base is not None
    with np.errstate(over="ignore"):
        numbers = np.array(steps.constants(optimizer), dtype=np.float64).astype(np.float32)
    partial, unused = np.zeros((count, -(-size // TILE))), np.empty(0, dtype=np.float32)
    listed, weights = _listed(total._replace(base=None)), total.weights.astype(np.float64)

    def work(start: int, stop: int) -> None:
        here, part, mean = listed.copy(), slice(start, stop), np.zeros(stop - start, dtype=np.float32)
        if count:
            here[0, 0] = _address(mean) - 4 * start
            sum_tiles(here, weights, start, stop, partial)
        old_a, old_b = [*(x[part] for x in old), unused][:2]
        a, b = [*(x[part] for x in new), unused][:2]
        _step(kind, numbers, mean, base[part], old_a, old_b, total.out[part], a, b)

    in_parts(work, size, useful_threads(size * (count + 2), threads))
    return _finished(total, partial, threads)


def cached_in() -> str | None:
    """Return the cache folder of the compiled code; None if each process compiles it, which takes 10 s."""
    folder: str | None = cast(Any, sum_tiles).stats.cache_path
    return folder


def _finished(given: SumArguments, partial: Doubles, threads: int) -> Doubles:
    """Write the checksums if requested; return the norms, summed over tiles in ascending order."""
    if given.checksums is not None:
        given.checksums[:] = [checksum(update, threads) for update in given.updates]
    norms = np.zeros(len(partial))
    _in_order(partial, norms)
    return norms


def quantize(given: QuantizationArguments, threads: int) -> float:
    given = given.checked()
    size = given.update.size
    useful = useful_threads(2 * size, threads)
    in_parts(lambda start, stop: round_all(given.part(start, stop)), size, useful)
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

    in_parts(work, out.size, useful_threads(out.size * len(updates), threads))


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

    in_parts(work, out.size, useful_threads(out.size * len(vectors), threads))


def field_encode(given: CodeArguments, threads: int) -> int:
    update, out, mask, factor, clip = given.checked()
    limited: list[int] = []

    def work(start: int, stop: int) -> None:
        part = slice(start, stop)
        limited.append(
            _field_encode(update[part], out[part], mask[part], np.float32(factor), np.float32(clip))
        )

    in_parts(work, out.size, useful_threads(3 * out.size, threads))
    return sum(limited)


def field_decode(given: CodeArguments, threads: int) -> int:
    out, words, mask, factor, _ = given.checked()
    largest = [0]

    def work(start: int, stop: int) -> None:
        part = slice(start, stop)
        largest.append(_field_decode(out[part], words[part], mask[part], np.float32(factor)))

    in_parts(work, out.size, useful_threads(3 * out.size, threads))
    return max(largest)


def _rows(updates: Sequence[Update], scales: Any, start: int, stop: int, width: int | None = None) -> Floats:
    """Return elements ``start`` to ``stop`` of all updates as float32 rows, zero-padded to ``width``."""
    rows = np.zeros((len(updates), width or stop - start), dtype=np.float32)
    for row, update, scale in zip(rows, updates, scales, strict=True):
        row[: stop - start] = decoded(update, scale, start, stop)
    return rows


def sq_norm(update: object, scale: object | None, threads: int) -> float:
    return _norm(*arguments.update("update", update, None, scale))


def _norm(update: Update, scale: Floats | None) -> float:
    """Return the squared norm of an update, computed as in `weighted_sum`, but without keeping the sum."""
    partial = np.zeros((1, -(-update.size // TILE)))
    scratch, zero = np.empty(min(CHUNK, update.size), dtype=np.float32), np.zeros(1)
    given = SumArguments(scratch, None, [update], zero.astype(np.float32), [scale], None)
    listed = _listed(given)
    for start in range(0, update.size, CHUNK):
        listed[0, 0] = _address(scratch) - 4 * start
        sum_tiles(listed, zero, start, min(start + CHUNK, update.size), partial)
    return float(_finished(given, partial, 1)[0])


def checksum(update: object, threads: int) -> int:
    words, tail, size = words_of(update)
    sums = np.empty(2, dtype=np.uint64)
    _words(words, sums)
    return folded(int(sums[0]) + tail, int(sums[1]) + (words.size + 1) * tail, size)


def delta(out: object, trained: object, base: object) -> int:
    return checksum(difference(out, trained, base), 1)
