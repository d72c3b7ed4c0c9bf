"""Threads of the numba back end, which wait between calls and each process parts of the vectors.

Waiting and sums run in the compiled code of `numba_sums`, without the GIL. Other work is started from Python.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.kernels import numba_sums
from edgefl.kernels.arguments import TILE, Doubles

CHUNK = 64 * TILE
"""Maximum number of elements per part, so that temporary arrays fit the cache."""
_THREAD_ELEMENTS, _SUM_THREAD_ELEMENTS = 1 << 18, 1 << 17
"""Minimum number of elements per thread: the second for a sum, the first for all other work. Waking a thread
takes about as long as summing half of this number of elements."""


def useful_threads(elements: int, threads: int, least: int = _THREAD_ELEMENTS) -> int:
    """Return how many threads, at most ``threads``, are worth waking to read this number of elements."""
    return max(1, min(threads, elements // least))


class _Pool:
    """Threads that wait for work. A forked child starts its own threads.

    A signal handler may raise an exception after any call. So the lock is taken by ``with`` and never by
    ``acquire``, because an exception right after ``acquire`` would leave the lock held.
    """

    def __init__(self) -> None:
        self._free = _thread.allocate_lock()
        self._job = np.zeros(numba_sums.JOB_WORDS, dtype=np.int64)
        numba_sums.prepare(self._job)
        self._size = 0
        self._work: Callable[[], None] | None = None

    def sum(
        self, listed: NDArray[np.int64], weights: Doubles, size: int, partial: Doubles, threads: int
    ) -> None:
        """Compute `numba_sums.sum_tiles` for all elements.

        If another call is using the pool's threads, this thread computes alone. If two calls begin at the
        same moment, one waits for the other.
        """
        if threads < 2 or self._free.locked():
            numba_sums.sum_tiles(listed, weights, 0, size, partial)
            return
        with self._free:
            helpers = self._grow(threads - 1)
            numba_sums.share_sum(self._job, listed, weights, size, partial, helpers)

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Call ``work`` in this thread and in ``threads`` − 1 others.

        If another call is using the pool's threads, call ``work`` only in this thread.
        """
        if threads < 2 or self._free.locked():
            work()
            return
        with self._free:
            try:
                self._work = work
                helpers = self._grow(threads - 1)
                numba_sums.wake(self._job, helpers, numba_sums.PYTHON)
                work()
            finally:
                numba_sums.join(self._job)
                self._work = None

    def _grow(self, size: int) -> int:
        """Grow the pool to ``size`` threads, or fewer if the system refuses; return the usable number."""
        while self._size < size:
            self._size += 1
            try:
                _thread.start_new_thread(self._wait, (self._job,))
            except RuntimeError:
                self._size -= 1
                break
        return min(size, self._size)

    def _wait(self, job: NDArray[np.int64]) -> None:
        while numba_sums.serve(job) != numba_sums.END:
            work: Any = self._work
            with suppress(BaseException):  # `in_parts` raises the exception in its caller
                work()
            del work
            numba_sums.done(job)
        numba_sums.done(job)

    def size(self) -> int:
        return self._size

    def close(self) -> None:
        """End the threads; the next call that needs threads starts new ones."""
        with self._free:
            try:
                numba_sums.wake(self._job, self._size, numba_sums.END)
            finally:
                self._size = 0
                numba_sums.join_all(self._job)


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.__init__)  # type: ignore[misc]

close_pool, pool_size = _pool.close, _pool.size


def shared_sum(
    listed: NDArray[np.int64], weights: Doubles, size: int, partial: Doubles, threads: int
) -> None:
    """Compute `numba_sums.sum_tiles` for ``size`` elements, divided among threads."""
    useful = useful_threads(size * len(weights), threads, _SUM_THREAD_ELEMENTS)
    _pool.sum(listed, weights, size, partial, useful)


def in_parts(work: Callable[[int, int], None], size: int, threads: int) -> None:
    """Call work(start, stop) for consecutive parts of ``size`` elements, in several threads.

    The size of a part is a multiple of `TILE`, and at most `CHUNK` elements.
    """
    part = min(CHUNK, -(-size // (2 * threads if threads > 1 else 1) // TILE) * TILE or TILE)
    starts, errors = iter(range(0, size, part)), list[BaseException]()

    def run_parts() -> None:
        try:
            for start in starts:
                work(start, min(start + part, size))
        except BaseException as error:
            errors.append(error)

    _pool.run(run_parts, threads)
    if errors:
        raise errors[0]
