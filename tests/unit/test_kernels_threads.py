"""Tests of the thread pools: start, end, forks, signals and several callers at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count, product
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import edgefl
from edgefl import kernels
from tests.patience import Patience

SIZE = 1_000_003
BOUND_S = 20.0

pytestmark = pytest.mark.skipif(kernels.backends()["c"] != "ok", reason="needs the C back end")


@pytest.fixture(autouse=True)
def _default_threads_after() -> Iterator[None]:
    yield
    kernels.set_threads(None)


each_pool = pytest.mark.parametrize("backend", ["c", "numba"])


@lru_cache(maxsize=4)
def _updates(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(SIZE, dtype=np.float32) for _ in range(3)]


def _sum(backend: str, seed: int = 0) -> tuple[bytes, list[float]]:
    updates = _updates(seed)
    out = np.empty(SIZE, dtype=np.float32)
    norms = kernels.weighted_sum(out, None, updates, [0.5, -1.0, 0.25], backend)
    return out.tobytes(), norms.tolist()


def _threads() -> set[str]:
    return {*os.listdir("/proc/self/task")}


def _pool_size(backend: str) -> int:
    from edgefl.kernels import _c, numba_threads

    return _c.pool_size() if backend == "c" else numba_threads.pool_size()


@each_pool
def test_threads_start_when_needed_and_end_on_request(backend: str) -> None:
    kernels.set_threads(3)
    before = _threads()
    assert _pool_size(backend) == 0
    small = np.ones(1000, dtype=np.float32)
    kernels.weighted_sum(np.empty_like(small), None, [small], [1.0], backend)
    assert _pool_size(backend) == 0
    _sum(backend)
    assert _pool_size(backend) == 2
    started = _threads() - before
    assert len(started) == 2
    kernels.set_threads(1)
    assert _pool_size(backend) == 0
    patience = Patience(BOUND_S)
    while started & _threads():  # Linux lists an ended thread for a moment
        assert not patience.over()


@each_pool
def test_parent_and_child_work_after_a_fork(backend: str) -> None:
    kernels.set_threads(2)
    expected = _sum(backend)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        try:
            fresh = _pool_size(backend) == 0
            same = _sum(backend) == expected
            os.write(write, b"%d%d%d" % (fresh, same, _pool_size(backend)))
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 10) == b"111"
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _sum(backend) == expected


@each_pool
def test_callers_on_several_threads_get_their_own_results(backend: str) -> None:
    kernels.set_threads(2)
    expected = [_sum(backend, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as callers:
        got = list(callers.map(lambda seed: [_sum(backend, seed) for _ in range(4)], range(4)))
    assert got == [[one] * 4 for one in expected]


@each_pool
def test_signals_during_a_sum_change_no_result(backend: str) -> None:
    kernels.set_threads(2)
    expected, arrived = _sum(backend), list[int]()
    before = signal.signal(signal.SIGALRM, lambda *_: arrived.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        patience = Patience(BOUND_S)
        while len(arrived) < 200 and not patience.over():
            assert _sum(backend) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(arrived) >= 200
    assert _sum(backend) == expected


@each_pool
def test_a_process_that_used_threads_ends_cleanly(backend: str) -> None:
    code = f"""
import numpy
from edgefl import kernels
kernels.set_threads(4)
x = numpy.ones(2_000_000, numpy.float32)
kernels.weighted_sum(numpy.empty_like(x), None, [x], [1.0], "{backend}")
from edgefl.kernels import {"_c as pool" if backend == "c" else "numba_threads as pool"}
print(pool.pool_size())
"""
    env = os.environ | {"PYTHONPATH": str(Path(edgefl.__file__).parent.parent)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


class _Stop(Exception):
    pass


def _slow_part(act: Callable[[], object] = lambda: None) -> tuple[Callable[[int, int], None], list[int]]:
    """Return a function for two threads, and a list to which the pool's thread appends each part it has done.

    The pool's thread calls ``act`` and finishes its part after the caller's thread has finished.
    """
    main, reached, ended = threading.get_ident(), threading.Event(), list[int]()

    def part(start: int, stop: int) -> None:
        if threading.get_ident() == main:
            assert reached.wait(BOUND_S)
        else:
            reached.set()
            act()
            time.sleep(0.05)  # the caller meanwhile waits for this thread
            ended.append(start)

    return part, ended


def test_an_exception_of_a_part_or_a_signal_reaches_numbas_caller_and_the_pool_still_works() -> None:
    from edgefl.kernels import numba_threads

    def fail(start: int, stop: int) -> None:
        raise _Stop

    kernels.set_threads(2)
    expected = _sum("c")
    with pytest.raises(_Stop):
        numba_threads.in_parts(fail, SIZE, 2)
    assert _sum("numba") == expected
    slow, ended = _slow_part(lambda: os.kill(os.getpid(), signal.SIGUSR1))

    def stop(*_: object) -> None:
        raise _Stop

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(_Stop):
            numba_threads.in_parts(slow, 2 * SIZE, 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended  # the call returned after its last part
    assert _sum("numba") == expected


def test_a_call_ended_by_a_signal_handler_does_not_disturb_the_next_calls() -> None:
    """The pool's thread may finish its part of such a call later. Mutant: the next call takes this for the
    end of its own part."""
    from edgefl.kernels import numba_sums, numba_threads

    pool, left = numba_threads._pool, threading.Event()
    kernels.set_threads(2)
    expected = _sum("c")
    assert _sum("numba") == expected
    for _ in range(3):
        left.clear()
        pool._work = left.set
        numba_sums.wake(pool._job, 1, numba_sums.PYTHON)
        assert left.wait(BOUND_S)
        assert _sum("numba") == expected
        pool._work = left.set
        numba_sums.wake(pool._job, 1, numba_sums.PYTHON)
        slow, ended = _slow_part()
        numba_threads.in_parts(slow, 2 * SIZE, 2)
        assert ended


def test_an_exception_after_any_call_leaves_the_numba_pool_usable() -> None:
    """A signal handler may raise at the start of any function or just after its return. Mutant: the lock is
    not released."""
    from edgefl.kernels import numba_threads

    pool, parts = numba_threads._pool, list[int]()
    kernels.set_threads(2)
    expected = _sum("c")
    calls = {
        "sum": lambda: _sum("numba"),
        "parts": lambda: numba_threads.in_parts(lambda start, stop: parts.append(start), 2 * SIZE, 2),
    }
    for call, closed in product(calls.values(), (False, True)):
        for nth in count():
            if closed:
                pool.close()  # the call starts threads
            left = nth

            def stop(frame: FrameType, event: str, argument: object) -> None:
                nonlocal left
                if event in ("call", "c_return") and frame.f_code.co_filename == numba_threads.__file__:
                    left -= 1
                    if left < 0:
                        sys.setprofile(None)
                        raise _Stop

            sys.setprofile(stop)
            try:
                call()
                break
            except _Stop:
                pass
            finally:
                sys.setprofile(None)
            assert not pool._free.locked(), nth
            assert _sum("numba") == expected
            assert pool.size() == 1
        assert nth > 5  # the exception was raised at several places
    assert parts


def test_if_no_thread_can_start_numba_computes_in_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgefl.kernels import numba_threads

    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    expected = _sum("c")
    numba_threads.close_pool()
    monkeypatch.setattr(numba_threads._thread, "start_new_thread", refuse)
    kernels.set_threads(2)
    assert _sum("numba") == expected
    starts = list[int]()
    numba_threads.in_parts(lambda start, stop: starts.append(start), SIZE, 2)
    assert starts
    assert numba_threads.pool_size() == 0


def test_a_wrong_number_of_threads_is_refused() -> None:
    for wrong, error, allowed in ((0, ValueError, "at least 1"), (1.5, TypeError, "an integer or None")):
        with pytest.raises(error, match=rf"^threads must be {allowed} \(got {wrong}\)$"):
            kernels.set_threads(wrong)
    kernels.set_threads(None)
    assert 1 <= kernels.threads() <= 16


def test_calls_release_their_buffers() -> None:
    """A bytearray cannot be resized while its buffer is in use."""
    raw = bytearray(4 * SIZE)
    view = np.frombuffer(raw, dtype=np.float32)
    kernels.weighted_sum(np.empty(SIZE, dtype=np.float32), None, [view], [1.0], "c")
    kernels.checksum(raw, "c")
    with pytest.raises(ValueError, match="out must"):
        kernels.weighted_sum(np.empty((1, 1), dtype=np.float32), None, [raw, view], [1.0, 1.0], "c")
    del view
    raw.clear()
