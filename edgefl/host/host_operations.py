"""The operations that a calibration runs on one thread, and the measurement of their speed.

``python -m edgefl.host.host_operations`` measures this host and prints JSON. `calibrate` runs it in a
separate process because a BLAS library fixes its number of threads when it is loaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy

from edgefl.host import code_operations
from edgefl.host.calibration import MAX_CV, Measured, Rate
from edgefl.host.capacity import available_bytes
from edgefl.learning.networks import cnn_femnist

REPETITIONS = 9
ROUNDS = 5
"""Maximum number of rounds. A noisy rate is measured again, and the least noisy round is used."""
USUAL_S = 5.0  # minimum total CPU seconds of the repetitions in `usual_rate`
CODE_S = 2.0  # minimum total CPU seconds of the repetitions for a class of code
GEMM_SIZES = (64, 256, 1024)
TRIAD_MIN_MIB = 64  # minimum size of each of the triad's three arrays
_REPETITION_S = 0.05
_CALLS = 3
"""A repetition takes at least `_REPETITION_S` CPU seconds and makes at least `_CALLS` calls, so that a single
interruption does not dominate it."""
_MIB = 1 << 20

FEMNIST_BATCH = 10
FEMNIST_FLOP = 6 * FEMNIST_BATCH * (28 * 28 * 32 * 25 + 14 * 14 * 64 * 800 + 3136 * 2048 + 2048 * 62)
"""Floating-point operations of a forward and a backward pass of FLASH's FEMNIST CNN on one batch. The
backward pass counts as two forward passes. The devices' ``train`` rates were measured on this workload
(docs/profiles.md)."""


def measure(sizes: tuple[int, ...] = GEMM_SIZES, triad_mib: float | None = None) -> Measured:
    """Measure all rates in this process, even if they are noisy.

    By default, the three arrays of the memory measurement (the triad) are larger than the cache.
    """
    torch.set_num_threads(1)
    cache_mib = last_level_cache_mib()
    if triad_mib is None:
        triad_mib = _triad_mib(cache_mib)
    floats = int(triad_mib * _MIB / 4)
    b, c, out = torch.ones(floats), torch.ones(floats), torch.zeros(floats)
    net = cnn_femnist((1, 28, 28), 62)
    images = torch.linspace(0, 1, FEMNIST_BATCH * 28 * 28).reshape(FEMNIST_BATCH, 1, 28, 28)
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    pointwise, depthwise = rate(*_pointwise()), rate(*_depthwise())
    code = dict[str, Rate]()
    for name in (*code_operations.PROGRAMS, "simd"):
        with contextlib.suppress(ImportError):  # the C extension was not built
            code[name] = measure_class(name, triad_mib)
    return Measured(
        gemm_gflops={str(n): rate(_gemm(n), 2.0 * n**3 / 1e9) for n in sizes},
        conv_gflops={
            "3x3": rate(_conv(64, 64, 56, 3), 2.0 * 64 * 64 * 9 * 56**2 / 1e9),
            "1x1": pointwise,
        },
        depthwise_gflops=depthwise,
        train_gflops=rate(sgd_step(net, images, torch.arange(FEMNIST_BATCH), 0.01), FEMNIST_FLOP / 1e9),
        triad_gbytes_per_s=rate(lambda: torch.add(b, c, alpha=3.0, out=out), 12.0 * floats / 1e9),
        triad_mib=triad_mib,
        cache_mib=cache_mib,
        blas=blas[1] if blas else "unknown",
        code=code,
    )


def measure_class(code_class: str, copy_mib: float) -> Rate:
    """Measure one class of code in this process; the class ``copy`` copies ``copy_mib`` MiB at a time.

    Raises ImportError if the class needs the C extension and the extension was not built.
    """
    torch.set_num_threads(1)
    if code_class == "simd":
        return code_operations.simd(*(usual_rate(*one, CODE_S) for one in (_pointwise(), _depthwise())))
    return usual_rate(*code_operations.program(code_class, copy_mib), CODE_S)


def rate(run: Callable[[], Any], work: float) -> Rate:
    """Return the work per CPU second of ``run`` after a warm-up, from the least noisy of several rounds."""
    repetitions, rounds = _repetitions(run), list[Rate]()
    while len(rounds) < ROUNDS and not any(found.cv <= MAX_CV / 2 for found in rounds):
        rounds.append(_rate_of([calls * work / took_s for calls, took_s in islice(repetitions, REPETITIONS)]))
    return min(rounds, key=lambda found: found.cv)


def usual_rate(run: Callable[[], Any], work: float, least_s: float = USUAL_S) -> Rate:
    """Return the work per CPU second of ``run`` after a warm-up, as the median over the repetitions.

    There are at least `REPETITIONS` repetitions, which take at least ``least_s`` CPU seconds in total. The
    speed of a virtual machine can change by a factor of two for some seconds, because it shares its cores
    with others. A program's usual speed is therefore close to this median, not to the rate in the least noisy
    half second.
    """
    samples, spent_s = list[float](), 0.0
    for calls, took_s in _repetitions(run):
        samples.append(calls * work / took_s)
        spent_s += took_s
        if len(samples) >= REPETITIONS and spent_s >= least_s:
            break
    return _rate_of(samples)


def _repetitions(run: Callable[[], Any]) -> Iterator[tuple[int, float]]:
    """Warm up, then yield the number of calls and the CPU seconds of each repetition."""

    def took(calls: int) -> float:
        start = time.thread_time()
        for _ in range(calls):
            run()
        return time.thread_time() - start

    run()
    calls = max(_CALLS, int(_REPETITION_S / max(took(1), 1e-9)))
    while True:
        yield calls, took(calls)


def _rate_of(samples: list[float]) -> Rate:
    cv = statistics.stdev(samples) / statistics.fmean(samples)
    return Rate(median=statistics.median(samples), cv=cv, samples=tuple(samples))


def last_level_cache_mib(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> float:
    """Return the size of the last-level cache, in MiB; 0 if the system does not report it."""
    sizes = [0.0]
    for index in sorted(cpu.glob("index*/size")):
        with contextlib.suppress(OSError, ValueError):
            text = index.read_text().strip()
            sizes.append(float(text.removesuffix("K")) / 1024 if text.endswith("K") else float(text) / _MIB)
    with contextlib.suppress(OSError, ValueError):
        sizes.append(os.sysconf("SC_LEVEL3_CACHE_SIZE") / _MIB)
    return max(sizes)


def _triad_mib(cache_mib: float) -> float:
    """Return the size of each of the triad's three arrays, in MiB.

    Together they are twice as large as the cache, but take at most an eighth of the free memory. Each array
    has at least `TRIAD_MIN_MIB` MiB, even if that is more.
    """
    free_mib = available_bytes() / _MIB
    return max(TRIAD_MIN_MIB, min(2 * cache_mib / 3, free_mib / 24))


def _gemm(n: int) -> Callable[[], Any]:
    a, b, out = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
    return lambda: torch.mm(a, b, out=out)


def _conv(inputs: int, outputs: int, side: int, kernel: int, groups: int = 1) -> Callable[[], Any]:
    image = torch.ones(1, inputs, side, side)
    weights = torch.ones(outputs, inputs // groups, kernel, kernel)
    return lambda: conv2d(image, weights, padding=kernel // 2, groups=groups)


def _pointwise() -> tuple[Callable[[], Any], float]:
    return _conv(128, 128, 28, 1), 2.0 * 128 * 128 * 28**2 / 1e9


def _depthwise() -> tuple[Callable[[], Any], float]:
    return _conv(128, 128, 56, 3, groups=128), 2.0 * 128 * 9 * 56**2 / 1e9


def sgd_step(
    net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor | None, lr: float
) -> Callable[[], None]:
    """Return a function that performs one step of plain SGD on a fixed batch.

    Without ``labels``, all targets are the class 0. With ``lr`` = 0 the weights do not change.
    """
    parameters, loss_of = list(net.parameters()), _loss(labels)

    def step() -> None:
        for weights in parameters:
            weights.grad = None
        loss_of(net(inputs)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for weights in parameters:
                assert weights.grad is not None
                weights.add_(weights.grad, alpha=-lr)

    return step


def _loss(labels: torch.Tensor | None) -> Callable[[Any], torch.Tensor]:
    if labels is not None:
        return partial(cross_entropy, target=labels)
    from edgefl.learning.work import usual_loss  # imported only if needed: its imports take memory

    return usual_loss


def measure_step(name: str, batch: int, dtype: str, shape: tuple[int, ...]) -> Rate:
    """Measure how many SGD steps of a model this process performs per CPU second, with zeros as inputs."""
    from edgefl.learning.models import model_to_trace

    torch.set_num_threads(1)
    net, _ = model_to_trace(name, shape, device="cpu")
    inputs = torch.zeros(batch, *shape, dtype=getattr(torch, dtype))
    return usual_rate(sgd_step(net, inputs, None, 0.0), 1.0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["code"]:
        encoded = msgspec.json.encode(measure_class(sys.argv[2], _triad_mib(last_level_cache_mib())))
    elif sys.argv[1:]:
        name, batch, dtype, *sizes = sys.argv[1:]
        encoded = msgspec.json.encode(measure_step(name, int(batch), dtype, tuple(map(int, sizes))))
    else:
        encoded = msgspec.json.encode(measure())
    sys.stdout.buffer.write(encoded)
