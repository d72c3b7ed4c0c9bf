"""Threads of the numba back end: they wait between calls and share the parts of a vector.

The compiled loops run without the GIL. A thread takes the GIL only between two parts.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from edgefl.kernels.arguments import TILE

CHUNK = 64 * TILE
"""Number of elements whose temporary arrays fit the cache."""
_THREAD_ELEMENTS = 1 << 18
"""Minimum number of elements per thread. Waking a thread takes as long as summing about half of them."""


def useful_threads(elements: int, threads: int) -> int:
    """Return the number of threads that pay off for reading ``elements``, at most ``threads``."""
    return max(1, min(threads, elements // _THREAD_ELEMENTS))


class _Pool:
    """Threads that wait for work. A forked child starts its own."""

    def __init__(self) -> None:
        self._free = _thread.allocate_lock()
        self._threads: list[tuple[Any, Any]] = []
        """A lock to wake each thread, and one that it releases when it has finished."""
        self._work: Callable[[], None] | None = None

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Call ``work`` in this thread and in ``threads`` − 1 others; only in this one if they are busy."""
        if threads < 2 or not self._free.acquire(blocking=False):
            work()
            return
        try:
            self._work = work
            while len(self._threads) < threads - 1:
                locks = _thread.allocate_lock(), _thread.allocate_lock()
                for lock in locks:
                    lock.acquire()
                _thread.start_new_thread(self._wait, locks)
                self._threads.append(locks)
            helpers = self._threads[: threads - 1]
            for wake, _ in helpers:
                wake.release()
            try:
                work()
            finally:
                _acquire_all([finished for _, finished in helpers])
        finally:
            self._work = None
            self._free.release()

    def _wait(self, wake: Any, finished: Any) -> None:
        while True:
            wake.acquire()
            if (work := self._work) is None:
                finished.release()
                return
            with suppress(BaseException):  # `in_parts` raises it in the caller
                work()
            del work
            finished.release()

    def size(self) -> int:
        return len(self._threads)

    def close(self) -> None:
        """End the threads; the next call starts others."""
        with self._free:
            for wake, _ in self._threads:
                wake.release()
            _acquire_all([finished for _, finished in self._threads])
            self._threads.clear()


def _acquire_all(locks: Sequence[Any]) -> None:
    """Acquire all locks, then raise what a signal handler raised meanwhile."""
    raised: BaseException | None = None
    for lock in locks:
        while True:
            try:
                lock.acquire()
                break
            except BaseException as error:
                raised = error
    if raised is not None:
        raise raised


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.__init__)  # type: ignore[misc]

close_pool, pool_size = _pool.close, _pool.size


def in_parts(work: Callable[[int, int], None], size: int, threads: int, largest: int | None = CHUNK) -> None:
    """Call work(start, stop) for parts of all elements; threads share the parts.

    Parts are multiples of `TILE` of at most ``largest`` elements, None for no limit.
    """
    part = -(-size // (2 * threads if threads > 1 else 1) // TILE) * TILE or TILE
    part = part if largest is None else min(part, largest)
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
