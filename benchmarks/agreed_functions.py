"""The functions that `agreement.py` times.

``python agreed_functions.py NAME CALLS [CLOCK]`` calls the function NAME once to warm up, then CALLS times,
and prints the median time of these CALLS calls in seconds. CLOCK is the name of a clock function in the
module `time`, by default ``perf_counter``. Freed memory is kept for the next call, as in a device test.
"""

from __future__ import annotations

import statistics
import sys
import time
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

MODEL, BATCH, SHAPE = "cnn-femnist", 16, (1, 28, 28)


def loop() -> float:
    total = 0.0
    for number in range(300_000):
        total += number % 7 * 0.5
    return total


@cache
def _numbers() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(400_000)


def arrays() -> float:
    numbers = _numbers()
    return float(np.sort(numbers)[::2].sum() + np.sqrt(np.abs(numbers)).sum())


@cache
def _text() -> bytes:
    words = [b"phone", b"training", b"buffer", b"stale", b"weight", b"device"]
    return b" ".join(words[i] for i in np.random.default_rng(0).integers(0, len(words), 100_000))


def gzip() -> int:
    return len(zlib.compress(_text(), 6))


@cache
def _step() -> Callable[[], None]:
    import torch

    from edgefl.host.host_operations import sgd_step
    from edgefl.learning.models import model_to_trace

    torch.set_num_threads(1)
    net, _ = model_to_trace(MODEL, device="cpu")
    return sgd_step(net, torch.zeros(BATCH, *SHAPE), torch.zeros(BATCH, dtype=torch.int64), 0.0)


def step() -> None:
    _step()()


def half() -> None:
    step()
    loop()


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "loop": loop, "numpy": arrays, "step": step, "gzip": gzip, "half": half,
}  # fmt: skip


def call_s(name: str, calls: int, clock: Callable[[], float]) -> float:
    """Return the median time of ``calls`` calls in seconds, after one call that is not timed."""
    run, found = FUNCTIONS[name], []
    run()
    for _ in range(calls):
        start = clock()
        run()
        found.append(clock() - start)
    return statistics.median(found)


if __name__ == "__main__":
    from edgefl.host.process import keep_freed_memory

    keep_freed_memory()
    name, calls, *clock = sys.argv[1:]
    print(call_s(name, int(calls), getattr(time, *clock or ["perf_counter"])))
