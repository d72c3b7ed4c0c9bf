"""The pool's life: made when needed, given up when asked, harmless to a fork and to other threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def _sum(seed: int = 0) -> tuple[bytes, list[float]]:
    rng = np.random.default_rng(seed)
    updates = [rng.standard_normal(SIZE, dtype=np.float32) for _ in range(3)]
    out = np.empty(SIZE, dtype=np.float32)
    norms = kernels.weighted_sum(out, None, updates, [0.5, -1.0, 0.25], "c")
    return out.tobytes(), norms.tolist()


def _own_threads() -> int:
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def _pool_size() -> int:
    from edgefl.kernels import _c

    return _c.pool_size()


def test_threads_come_when_needed_and_go_when_asked() -> None:
    kernels.set_threads(3)
    before = _own_threads()
    assert _pool_size() == 0
    small = np.ones(1000, dtype=np.float32)
    kernels.weighted_sum(np.empty_like(small), None, [small], [1.0], "c")
    assert _pool_size() == 0
    _sum()
    assert _pool_size() == 2
    assert _own_threads() == before + 2
    kernels.set_threads(1)
    assert _pool_size() == 0
    patience = Patience(BOUND_S)
    while _own_threads() > before:  # one that was joined may be on the kernel's list for a moment longer
        assert not patience.over()


def test_a_fork_after_use_works_in_both() -> None:
    kernels.set_threads(2)
    expected = _sum()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        try:
            fresh = _pool_size() == 0
            same = _sum() == expected
            os.write(write, b"%d%d%d" % (fresh, same, _pool_size()))
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 10) == b"111"
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _sum() == expected


def test_callers_on_many_threads_at_once() -> None:
    kernels.set_threads(2)
    expected = [_sum(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as callers:
        got = list(callers.map(lambda seed: [_sum(seed) for _ in range(4)], range(4)))
    assert got == [[one] * 4 for one in expected]


def test_a_process_that_used_threads_ends_cleanly() -> None:
    code = """
import numpy
from edgefl import kernels
kernels.set_threads(4)
x = numpy.ones(2_000_000, numpy.float32)
kernels.weighted_sum(numpy.empty_like(x), None, [x], [1.0], "c")
from edgefl.kernels import _c
print(_c.pool_size())
"""
    env = os.environ | {"PYTHONPATH": str(Path(edgefl.__file__).parent.parent)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_numba_uses_threads_that_end_with_the_call() -> None:
    kernels.set_threads(3)
    x = np.random.default_rng(0).standard_normal(3 * SIZE, dtype=np.float32)
    out, other = np.empty_like(x), np.empty_like(x)
    norms = kernels.weighted_sum(out, None, [x] * 3, [1.0] * 3, "numba")
    assert threading.active_count() == 1
    assert norms.tolist() == kernels.weighted_sum(other, None, [x] * 3, [1.0] * 3, "c").tolist()
    assert out.tobytes() == other.tobytes()


def test_wrong_numbers_of_threads() -> None:
    for wrong, error, allowed in ((0, ValueError, "at least 1"), (1.5, TypeError, "an integer or None")):
        with pytest.raises(error, match=rf"^threads must be {allowed} \(got {wrong}\)$"):
            kernels.set_threads(wrong)
    kernels.set_threads(None)
    assert 1 <= kernels.threads() <= 16


def test_views_are_given_back() -> None:
    """A held buffer would keep its owner from being resized."""
    raw = bytearray(4 * SIZE)
    view = np.frombuffer(raw, dtype=np.float32)
    kernels.weighted_sum(np.empty(SIZE, dtype=np.float32), None, [view], [1.0], "c")
    kernels.checksum(raw, "c")
    with pytest.raises(ValueError, match="out must"):
        kernels.weighted_sum(np.empty((1, 1), dtype=np.float32), None, [raw, view], [1.0, 1.0], "c")
    del view
    raw.clear()
