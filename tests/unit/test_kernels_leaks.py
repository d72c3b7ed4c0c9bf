"""Tests that no call of a kernel, valid or refused, leaks memory, objects or references."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgefl import kernels
from edgefl.strategies import ServerOptimizer

BACKENDS = [name for name in ("c", "numba") if kernels.backends()[name] == "ok"]
SIZE = 1000


class _Calls:
    """Calls of every kernel with valid and with wrong arguments."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.arrays = [np.ones(SIZE, np.float32) for _ in range(8)]
        self.small = np.ones(SIZE, np.int8)
        self.scales = np.ones(4, np.float32)
        self.sums = np.zeros(2, np.uint64)
        self.words = [np.zeros(SIZE, np.uint32) for _ in range(3)]
        self.averages = kernels.MovingAverage(10, backend=backend)
        self.many = [self.arrays[0]] * 40
        self.adam = ServerOptimizer(kind="adam")

    def right(self) -> None:
        out, base, a, b, *state = self.arrays
        name = self.backend
        kernels.weighted_sum(out, base, [a, b], [1.0, 2.0], name, checksums=self.sums)
        kernels.weighted_sum(out, None, [self.small, b], [1, 2], name, scales=[self.scales, None])
        kernels.weighted_sum(self.arrays[1], None, self.many, [0.5] * 40, name)
        kernels.weighted_step(out, base, [a, b], [1.0, 2.0], self.adam, state[:2], state[2:], name)
        kernels.quantize(self.small, a, scales=self.scales, new_residual=out, backend=name)
        kernels.sq_norm(a, name)
        kernels.checksum(a, name)
        kernels.delta(out, a, b, name)
        kernels.trimmed_mean(out, [a, b], 0, name)
        kernels.products([a, b], name)
        kernels.field_sum(self.words[0], self.words[1:], [1, 2], name)
        kernels.field_encode(self.words[0], a, self.words[1], 1.0, 2.0, name)
        kernels.field_decode(out, self.words[0], self.words[1], 0.5, name)
        self.averages.observe([1, 2], [0.5, 1.5])

    def wrong(self) -> None:
        out, base, a, b, *state = self.arrays
        name = self.backend
        for call in (
            lambda: kernels.weighted_sum(out, base[1:], [a, b], [1.0, 2.0], name),
            lambda: kernels.weighted_sum(out, base, [a, b[1:]], [1.0, 2.0], name),
            lambda: kernels.weighted_sum(out, base, [a, "b"], [1.0, 2.0], name),
            lambda: kernels.weighted_sum(out, base, [a, b], [1.0, "2"], name),
            lambda: kernels.weighted_sum(out, base, [*self.many, out], [1.0] * 41, name),
            lambda: kernels.weighted_step(out, base, [a], [1.0], self.adam, state[:2], state[:2], name),
            lambda: kernels.quantize(self.small, a, backend=name),
            lambda: kernels.checksum([1], name),
            lambda: kernels.delta(out, a, b[1:], name),
            lambda: kernels.trimmed_mean(out, [a, b[1:]], 0, name),
            lambda: kernels.products([a, b[1:]], name),
            lambda: kernels.field_sum(self.words[0], self.words, [1] * 3, name),
            lambda: kernels.field_encode(self.words[0], a[1:], self.words[1], 1.0, 2.0, name),
            lambda: kernels.field_decode(out[1:], self.words[0], self.words[1], 0.5, name),
        ):
            with contextlib.suppress(ValueError, TypeError):
                call()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _grows(call: Callable[[], None], count: int) -> tuple[int, int]:
    """Return by how many bytes and by how many memory blocks of Python the process grows in ``count`` calls.
    Each number is the minimum of three attempts: a leak adds to every attempt, caches and other threads do
    not."""
    for _ in range(200):
        call()
    grown = []
    for _ in range(3):
        gc.collect()
        resident, blocks = _resident_bytes(), sys.getallocatedblocks()
        for _ in range(count):
            call()
        gc.collect()
        grown.append((_resident_bytes() - resident, sys.getallocatedblocks() - blocks))
    return min(size for size, _ in grown), min(blocks for _, blocks in grown)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["right", "wrong"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "count", [400, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_nothing_leaks(backend: str, kind: str, count: int) -> None:
    calls = _Calls(backend)
    references = [sys.getrefcount(array) for array in calls.arrays]
    grown_bytes, grown_blocks = _grows(getattr(calls, kind), count)
    assert [sys.getrefcount(array) for array in calls.arrays] == references
    assert grown_blocks < count // 2  # one object a call would be more
    assert grown_bytes < 600_000  # one leaked view of 96 bytes a call would be 10 MB in the long run
