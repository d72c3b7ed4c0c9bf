"""Weighted sums of the numba back end, and the compiled code of its threads.

A thread waits for work, computes its part of a sum and reports completion within compiled code, without
taking the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from edgefl.kernels.arguments import LANES, SCALE_BLOCK, TILE, Doubles, Floats
from edgefl.kernels.numba_vectors import (
    GROUP,
    ITEM_BYTES,
    SOURCE_DIGEST,
    STREAM_ALIGNMENT,
    WIDTH,
    add_group,
    copy_bytes,
)

_STREAM_BYTES = 1 << 20
"""Results of at least this size, in bytes, bypass the caches when they are written."""
_SPAN = 8
"""Number of tiles per span (a range summed in one pass) in a large sum. With long spans, memory is read
in fewer but longer streams."""
_PARTS_PER_THREAD, _PART_TILES = 2, 16
"""Number of parts per thread in a small sum, and size of a part in a large sum, in tiles."""


def jit(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = f"{function.__name__}_{SOURCE_DIGEST}"
        options: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
        try:
            return numba.njit([signature], cache=True, **options)(function)
        except RuntimeError:  # no writable cache folder
            return numba.njit([signature], **options)(function)

    return compiled


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only other compiled functions call."""
    made: Callable[..., Any] = numba.njit(error_model="numpy")(function)
    return made


def input_of(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", readonly=True, aligned=False)


def output_of(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", aligned=False)


F32, F64, I64 = types.float32, types.float64, types.int64


@helper
def _padded(target: Floats, source: int, size: int) -> int:
    """Copy ``size`` bytes to the front of ``target``, and fill the rest with zeros; return its address."""
    target[:] = 0.0
    copy_bytes(source, target.ctypes.data, size)
    return target.ctypes.data


@helper
def _sum_span(
    listed: Any,
    weights: Floats,
    start: int,
    stop: int,
    stream: int,
    partial: Doubles,
    sums: Floats,
    padded: Any,
) -> None:
    """Add all updates to one span of elements. An incomplete vector of `WIDTH` is padded with zeros."""
    lanes, vectors, scales = np.empty((GROUP, LANES)), np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    out, base, updates = listed[0, 0], listed[0, 1], listed[:, 2:]
    count, k = updates.shape[1], 0
    groups = -(-count // GROUP)
    while k < count:
        kind, most = updates[1, k], -(-(count - k) // groups)  # groups of equal size
        group = 1
        while group < most and updates[1, k + group] == kind:
            group += 1
        groups = max(groups - 1, -(-(count - k - group) // GROUP), 1)
        last = k + group == count
        for at in range(start, stop, TILE):
            size = min(TILE, stop - at)
            here = sums.ctypes.data + 4 * (at - start)
            whole = size % WIDTH == 0
            source = here if k else base + 4 * at if base else padded[GROUP].ctypes.data
            target = out + 4 * at if last and whole else here
            for j in range(group):
                vectors[j] = updates[0, k + j] + ITEM_BYTES[kind] * at
                scales[j] = updates[2, k + j] + at // SCALE_BLOCK * 4
                if not whole:
                    vectors[j] = _padded(padded[j], vectors[j], ITEM_BYTES[kind] * size)
            if not whole and base and not k:
                source = _padded(sums[at - start : at - start + TILE], source, 4 * size)
            lanes[:] = 0.0
            add_group(
                kind,
                group,
                stream if last and whole else 0,
                source,
                target,
                vectors.ctypes.data,
                scales.ctypes.data,
                weights.ctypes.data + 4 * k,
                -(-size // WIDTH) * WIDTH,
                lanes.ctypes.data,
            )
            if last and not whole:
                copy_bytes(target, out + 4 * at, 4 * size)
            for j in range(group):
                each = lanes[j]
                low = (each[0] + each[4]) + (each[2] + each[6])
                partial[k + j, at // TILE] = low + ((each[1] + each[5]) + (each[3] + each[7]))
        k += group


@helper
def _sum_range(
    listed: Any,
    rounded: Floats,
    start: int,
    stop: int,
    partial: Doubles,
    sums: Floats,
    padded: Any,
) -> None:
    """Add all updates to elements ``start`` to ``stop``, span by span, so that a span stays in the cache."""
    out, base = listed[0, 0], listed[0, 1]
    large = 4 * TILE * partial.shape[1] >= _STREAM_BYTES
    stream = int(large and out % STREAM_ALIGNMENT == 0 and out != base)
    span = TILE * (_SPAN if large else 1)
    for first in range(start, stop, span):
        _sum_span(listed, rounded, first, min(first + span, stop), stream, partial, sums, padded)


@jit(types.void(types.Array(I64, 2, "C"), input_of(F64), I64, I64, types.Array(F64, 2, "C")))
def sum_tiles(listed: Any, weights: Doubles, start: int, stop: int, partial: Doubles) -> None:
    """Compute base + Σ_k weights[k] · updates[k] for elements ``start`` to ``stop``, and norms per tile.

    Each column of ``listed`` describes a whole vector by its address, its type and the address of its scales.
    The first column is the result, the second one the base (address 0 without a base), and the others are
    the updates. ``start`` is a multiple of `TILE`.
    """
    sums, padded = np.empty(_SPAN * TILE, np.float32), np.zeros((GROUP + 1, TILE), np.float32)
    _sum_range(listed, weights.astype(np.float32), start, stop, partial, sums, padded)


# ---- the threads -----------------------------------------------------------------------------------

SUM, PYTHON, END = range(3)
"""Orders for a woken thread: compute parts of a sum, return to Python to call a function, or end."""
JOB_WORDS = 32
"""Size of a job in 64-bit words. A job is the array through which a pool assigns work to its threads."""
_WAKE, _DONE, _NEXT, _ORDER = 0, 8, 16, 24
"""Positions in a job: the semaphore that wakes threads, the semaphore that each thread posts when it is done,
the index of the next part of a sum, and the order. Each has its own cache line."""
_AWAKE, _SIZE, _PART, _COUNT, _LISTED, _WEIGHTS, _PARTIAL = range(25, 32)
"""Positions in a job of the number of woken threads, and of a sum's sizes and addresses."""

_intrinsic: Any = extending.intrinsic
_numba: Any = numba
_types: Any = types
_cgutils: Any = cgutils
_INT32, _INT64, _POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()


def _call_semaphore(function: str, *more: int) -> Any:
    """Return compiled code that calls one of the C library's functions on the semaphore at an address."""

    def typed(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, arguments: Sequence[Any]) -> Any:
            kind = ir.FunctionType(_INT32, [_POINTER, *[_INT32] * len(more)])
            called = _cgutils.get_or_insert_function(builder.module, kind, function)
            place = builder.inttoptr(arguments[0], _POINTER)
            return builder.call(called, [place, *(ir.Constant(_INT32, number) for number in more)])

        return types.int32(types.int64), generate

    return _intrinsic(typed)


def _count_up(_: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, atomically; return its previous value."""

    def generate(context: Any, builder: Any, _: Any, arguments: Sequence[Any]) -> Any:
        place = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(_INT64, 1), "monotonic")

    return types.int64(types.int64), generate


def _typed_pointer(_: Any, address: Any, example: Any) -> Any:
    """Return an address as a pointer to numbers of the type of ``example``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return _types.CPointer(example)(types.int64, example), generate


_sem_init, _sem_post = _call_semaphore("sem_init", 0, 0), _call_semaphore("sem_post")
_sem_wait, _sem_trywait = _call_semaphore("sem_wait"), _call_semaphore("sem_trywait")
_next_part: Any = _intrinsic(_count_up)
_pointer: Any = _intrinsic(_typed_pointer)


@helper
def _place(job: Any, word: int) -> Any:
    return job.ctypes.data + 8 * word


@helper
def _wait(semaphore: int) -> None:
    while _sem_wait(semaphore) != 0:  # a signal interrupted the wait
        pass


@helper
def _sum_parts(job: Any) -> None:
    """Compute parts of a sum until none is left."""
    size, part, count = job[_SIZE], job[_PART], job[_COUNT]
    start = part * _next_part(_place(job, _NEXT))
    if start >= size:
        return
    listed = _numba.carray(_pointer(job[_LISTED], np.int64(0)), (3, count + 2))
    weights = _numba.carray(_pointer(job[_WEIGHTS], 0.0), count)
    partial = _numba.carray(_pointer(job[_PARTIAL], 0.0), (count, -(-size // TILE)))
    rounded = weights.astype(np.float32)
    sums, padded = np.empty(_SPAN * TILE, np.float32), np.zeros((GROUP + 1, TILE), np.float32)
    while start < size:
        _sum_range(listed, rounded, start, min(start + part, size), partial, sums, padded)
        start = part * _next_part(_place(job, _NEXT))


_JOB = types.Array(I64, 1, "C")


@jit(types.void(_JOB))
def prepare(job: Any) -> None:
    _sem_init(_place(job, _WAKE))
    _sem_init(_place(job, _DONE))


@jit(types.void(_JOB))
def done(job: Any) -> None:
    _sem_post(_place(job, _DONE))


@jit(types.void(_JOB))
def join_all(job: Any) -> None:
    """Wait until all woken threads are done."""
    while job[_AWAKE] > 0:
        _wait(_place(job, _DONE))
        job[_AWAKE] -= 1


@jit(types.void(_JOB))
def join(job: Any) -> None:
    """Withdraw the wake-ups that no thread has received yet, then wait until the other threads are done."""
    while job[_AWAKE] > 0 and _sem_trywait(_place(job, _WAKE)) == 0:
        job[_AWAKE] -= 1
    join_all(job)


@jit(types.void(_JOB, I64, I64))
def wake(job: Any, helpers: int, order: int) -> None:
    """Wake threads with an order. First join threads of a previous call that an exception aborted."""
    join(job)
    job[_ORDER], job[_AWAKE] = order, helpers
    for _ in range(helpers):
        _sem_post(_place(job, _WAKE))


@jit(I64(_JOB))
def serve(job: Any) -> Any:
    """Wait for orders and compute sums; return the first order that is not `SUM`."""
    while True:
        _wait(_place(job, _WAKE))
        if job[_ORDER] != SUM:
            return job[_ORDER]
        _sum_parts(job)
        _sem_post(_place(job, _DONE))


@jit(types.void(_JOB, types.Array(I64, 2, "C"), input_of(F64), I64, types.Array(F64, 2, "C"), I64))
def share_sum(job: Any, listed: Any, weights: Doubles, size: int, partial: Doubles, helpers: int) -> None:
    """Compute `sum_tiles` for all elements together with ``helpers`` other threads."""
    join(job)
    job[_NEXT], job[_SIZE], job[_COUNT] = 0, size, weights.size
    parts = (helpers + 1) * _PARTS_PER_THREAD
    job[_PART] = TILE * max(1, min(-(-size // TILE) // parts, _PART_TILES))
    job[_LISTED], job[_WEIGHTS], job[_PARTIAL] = listed.ctypes.data, weights.ctypes.data, partial.ctypes.data
    wake(job, helpers, SUM)
    _sum_parts(job)
    join(job)
