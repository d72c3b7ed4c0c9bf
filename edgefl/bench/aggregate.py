"""The weighted sum against what else could do it and against the memory's limit, all in one run.

Every figure counts the same bytes: K updates and the base read, the result written, (K+2)·D·4. The
limits are a loop that only reads that much and a copy that moves that much. Contenders take turns, so
that a host which slows down slows all of them; each figure is the median of at least 9 turns.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from edgefl import kernels

SIZES = ((62_006, 5), (468_458, 5), (1_000_000, 5), (1_000_000, 10), (1_000_000, 32), (10_000_000, 10))
QUICK_SIZES = ((62_006, 5), (1_000_000, 10))
LAYERS = 10
_TURN_S = 0.004
"""A turn repeats a contender's call until it takes about as long."""
_CALM_S = 0.04
"""Pause before a turn: the threads of BLAS and OpenMP spin for some 30 ms after their own."""

Call = Callable[[], object]


class Work(NamedTuple):
    """One size's arrays, all aligned to 64 bytes as slots of the parameter buffer are."""

    stacked: np.ndarray[Any, np.dtype[np.float32]]
    base: np.ndarray[Any, np.dtype[np.float32]]
    out: np.ndarray[Any, np.dtype[np.float32]]
    weights: list[float]

    @property
    def moved_bytes(self) -> int:
        return (len(self.weights) + 2) * self.base.nbytes


def run(json_path: Path | str | None = None, quick: bool = False) -> dict[str, Any]:
    """Measure, print a table, write ``json_path`` if given, and return what it holds.

    ``rows`` has one entry a size: ``parameters``, ``updates``, ``bytes``, and for each contender its
    ``seconds`` (median), ``spread`` (interquartile range over median), ``gbytes_per_s`` and ``of_limit``
    (against the read loop; None without the C extension).
    """
    repetitions = 9 if quick else 11
    result = {
        "host": _host(),
        "call_overhead_us": _call_overhead_us(),
        "repetitions": repetitions,
        "rows": [_measured(*size, repetitions=repetitions) for size in (QUICK_SIZES if quick else SIZES)],
    }
    _print(result)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n")
    return result


def _host() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": kernels.threads(),
        "backend": kernels.backend(),
        "instruction_set": _isa(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _isa() -> str | None:
    if kernels.backends()["c"] != "ok":
        return None
    from edgefl.kernels import _c

    return _c.isa()


def _call_overhead_us() -> float:
    """Microseconds of a whole call that sums 5 updates of 8 parameters."""
    out, updates = np.empty(8, np.float32), [np.ones(8, np.float32)] * 5
    weights, calls, best = [0.2] * 5, 2000, float("inf")
    kernels.weighted_sum(out, None, updates, weights)
    for _ in range(9):
        started = time.perf_counter()
        for _ in range(calls):
            kernels.weighted_sum(out, None, updates, weights)
        best = min(best, (time.perf_counter() - started) / calls)
    return round(best * 1e6, 2)


def _measured(parameters: int, updates: int, *, repetitions: int) -> dict[str, Any]:
    work = _work(parameters, updates)
    contenders = dict(_contenders(work))
    counts = {name: _warm(call) for name, call in contenders.items()}
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repetitions):
        for name, call in contenders.items():
            turns[name].append(_timed(call, counts[name]))
    limit = float(np.median(turns["read loop"])) if "read loop" in turns else None
    return {
        "parameters": parameters,
        "updates": updates,
        "bytes": work.moved_bytes,
        "contenders": {name: _figures(samples, work.moved_bytes, limit) for name, samples in turns.items()},
    }


def _figures(samples: list[float], moved_bytes: int, limit_s: float | None) -> dict[str, Any]:
    low, seconds, high = np.percentile(samples, [25, 50, 75]).tolist()
    return {
        "seconds": seconds,
        "spread": (high - low) / seconds,
        "gbytes_per_s": moved_bytes / seconds / 1e9,
        "of_limit": None if limit_s is None else limit_s / seconds,
    }


def _warm(call: Call) -> int:
    """Calls that make one turn."""
    call()
    started = time.perf_counter()
    call()
    return max(1, round(_TURN_S / max(time.perf_counter() - started, 1e-7)))


def _timed(call: Call, count: int) -> float:
    time.sleep(_CALM_S)
    call()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def _work(parameters: int, updates: int) -> Work:
    rng = np.random.default_rng([parameters, updates])
    stacked = _aligned(updates * parameters).reshape(updates, parameters)
    for row in stacked:
        rng.standard_normal(parameters, dtype=np.float32, out=row)
    base, out = _aligned(parameters), _aligned(parameters)
    rng.standard_normal(parameters, dtype=np.float32, out=base)
    return Work(stacked, base, out, rng.random(updates).tolist())


def _aligned(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    raw = np.zeros(size * 4 + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * 4].view(np.float32)


def _contenders(work: Work) -> Iterator[tuple[str, Call]]:
    """Names and calls; every sum is checked against numpy's before it is measured."""
    expected = work.base + np.asarray(work.weights, np.float32) @ work.stacked
    for name, call in [*_ours(work), *_theirs(work)]:
        work.out.fill(np.nan)
        call()
        np.testing.assert_allclose(work.out, expected, rtol=1e-4, atol=1e-4, err_msg=name)
        yield name, call
    yield from _limits(work)


def _ours(work: Work) -> Iterator[tuple[str, Call]]:
    rows = list(work.stacked)
    for backend in ("c", "numba"):
        if kernels.backends()[backend] == "ok":
            yield (
                f"edgefl {backend}",
                lambda backend=backend: kernels.weighted_sum(  # type: ignore[misc]
                    work.out, work.base, rows, work.weights, backend
                ),
            )


def _theirs(work: Work) -> Iterator[tuple[str, Call]]:
    weights = np.asarray(work.weights, np.float32)

    def gemv() -> None:
        np.matmul(weights, work.stacked, out=work.out)
        np.add(work.out, work.base, out=work.out)

    bounds = np.linspace(0, work.base.size, LAYERS + 1).astype(int)
    layers = [slice(a, b) for a, b in pairwise(bounds)]

    def by_layer() -> None:
        for layer in layers:
            total = work.base[layer].copy()
            for weight, update in zip(weights, work.stacked, strict=True):
                total += weight * update[layer]
            work.out[layer] = total

    yield "BLAS gemv *", gemv
    try:
        import torch
    except ImportError:
        pass
    else:
        matrix, vector = torch.from_numpy(work.stacked).T, torch.from_numpy(weights)
        base, out = torch.from_numpy(work.base), torch.from_numpy(work.out)
        yield "torch addmv *", lambda: torch.addmv(base, matrix, vector, out=out)
    yield "numpy by layer", by_layer


def _limits(work: Work) -> Iterator[tuple[str, Call]]:
    """The same bytes, only read; and half of them read and written elsewhere."""
    half = work.moved_bytes // 8
    source, target = np.ones(half, np.float32), np.ones(half, np.float32)
    if kernels.backends()["c"] != "ok":
        yield "copy (one thread)", lambda: np.copyto(target, source)
        return
    from edgefl.kernels import _c

    buffers, threads = [*work.stacked, work.base, work.out], kernels.threads()
    yield "read loop", lambda: _c.read(buffers, threads)
    yield "copy", lambda: _c.copy(target, source, threads)


def _print(result: dict[str, Any]) -> None:
    host = result["host"]
    rows = result["rows"]
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title="Weighted sum of K float32 updates of D: GB/s, and % of the read loop",
    )
    table.add_column("D × K", no_wrap=True)
    for row in rows:
        table.add_column(f"{_short(row['parameters'])}×{row['updates']}", justify="right", no_wrap=True)
    for name in rows[0]["contenders"]:
        table.add_row(name, *(_cell(row["contenders"][name]) for row in rows))
    console = Console()
    console.print(table)
    console.print(
        f"{host['cpu']}, {host['cores']} cores, {host['threads']} threads, {host['backend']} "
        f"({host['instruction_set']}), load {host['load_1min']}; a call costs "
        f"{result['call_overhead_us']} μs; medians of {result['repetitions']}; "
        "* needs the updates stacked in one matrix"
    )


def _cell(figures: dict[str, Any]) -> str:
    share = "" if figures["of_limit"] is None else f" {100 * figures['of_limit']:3.0f}"
    return f"{figures['gbytes_per_s']:.1f}{share}"


def _short(parameters: int) -> str:
    return f"{parameters / 1e6:g}M" if parameters % 1_000_000 == 0 else f"{parameters / 1e3:.0f}k"
