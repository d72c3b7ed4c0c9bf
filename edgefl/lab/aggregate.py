"""The weighted sum against what else could do it and against the memory's limit, all in one run.

Every figure of a row counts the same bytes: the K updates and the base read, the result written, which is
(K+2)·D·4 for float32. The limits are a loop that only reads that much, STREAM's triad and a copy.
Contenders take turns, so that a host which slows down slows all of them; each figure is the median of at
least 9 turns (fewer, and marked, where one call takes most of a second).

    aggregate_work.py         the arrays
    aggregate_contenders.py   who takes part
    aggregate_frameworks.py   Flower, NVFlare and pfl-research, where they are installed
    aggregate_tables.py       what is printed
    aggregate_picture.py      the roofline
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from edgefl import kernels
from edgefl.lab.aggregate_contenders import ONE_THREAD, SPIN, contenders
from edgefl.lab.aggregate_tables import show
from edgefl.lab.aggregate_work import DTYPES, Call, work_of

PARAMETERS = (62_006, 468_458, 1_663_370, 11_173_962, 25_000_000, 110_000_000)
UPDATES = (5, 10, 32, 100)
QUICK = ((62_006, 5), (1_000_000, 10))
TYPED = ((468_458, 10), (1_663_370, 10), (1_663_370, 32), (11_173_962, 10), (11_173_962, 32))
"""Sizes at which the other types of updates are measured."""
SINGLE = (10, 32)
"""Updates with which one thread alone is measured, too."""
TURNS = 9
_TURN_S = 0.004
"""A turn repeats a contender's call until it takes about as long."""
_SLOW_S = 5.0
"""Past this many seconds a contender gets fewer turns, but three."""
_CALM_S = 0.04
"""Pause after threads that spin for some 30 ms after their work, those of BLAS and OpenMP."""
_LARGEST_ROW_BYTES = 6e9
"""More takes minutes a row and is as far beyond any cache."""


class Row(NamedTuple):
    parameters: int
    updates: int
    dtype: str
    threads: int


def run(
    json_path: Path | str | None = None,
    quick: bool = False,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """Measure, print tables, write ``json_path`` and pictures beside it if given, return what it holds.

    ``rows`` has one entry a size, type of update and number of threads: ``parameters``, ``updates``,
    ``dtype``, ``threads``, ``bytes``, and for each contender its ``seconds`` (median), ``spread``
    (interquartile range over median), ``turns``, ``gbytes_per_s``, ``updates_per_s`` and ``of_limit``
    (against the read loop; None without the C extension). ``skipped`` names the rows too large to measure.
    """
    wanted = rows_of(sizes or (QUICK if quick else [(d, k) for d in PARAMETERS for k in UPDATES]), quick)
    most_bytes = min(_LARGEST_ROW_BYTES, 0.5 * psutil.virtual_memory().available)
    fits = [row for row in wanted if (row.updates + 2) * row.parameters * 4 <= most_bytes]
    started = time.monotonic()
    result = {
        "host": _host(),
        "call_overhead_us": _call_overhead_us(),
        "turns": TURNS,
        "skipped": [list(row) for row in wanted if row not in fits],
        "rows": [_measured(row) for row in fits],
        "seconds": None,
    }
    result["seconds"] = round(time.monotonic() - started, 1)
    show(result)
    if json_path is not None:
        from edgefl.lab.aggregate_picture import draw

        path = Path(json_path)
        path.write_text(json.dumps(result, indent=2) + "\n")
        draw(result, [path.with_suffix(".png"), path.with_suffix(".svg")])
    return result


def rows_of(sizes: Sequence[tuple[int, int]], quick: bool) -> list[Row]:
    """All sizes as float32 on all threads; some on one thread, too, and some with the other types."""
    everything = kernels.threads()
    rows = [Row(*size, "float32", everything) for size in sizes]
    if everything > 1:
        rows += [Row(*size, "float32", 1) for size in sizes if quick or size[1] in SINGLE]
    typed = [size for size in sizes if size in (QUICK[1:] if quick else TYPED)]
    rows += [Row(*size, dtype, everything) for size in typed for dtype in list(DTYPES)[1:]]
    return rows


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


def _measured(row: Row) -> dict[str, Any]:
    work = work_of(*row)
    fewer = row.threads < kernels.threads()
    kernels.set_threads(row.threads)
    try:
        calls = dict(contenders(work))
        if fewer:  # only what one thread of ours does; the others' threads are their own
            calls = {name: call for name, call in calls.items() if name in ONE_THREAD}
        counts = {name: _calls_a_turn(call) for name, call in calls.items()}
        turns: dict[str, list[float]] = {name: [] for name in calls}
        spinning = False
        for turn in range(TURNS):
            for name, call in calls.items():
                if turn >= 3 and sum(turns[name]) > _SLOW_S:
                    continue
                if spinning:
                    time.sleep(_CALM_S)
                turns[name].append(_timed(call, counts[name]))
                spinning = name in SPIN
    finally:
        kernels.set_threads(None)
    limit = float(np.median(turns["read loop"])) if "read loop" in turns else None
    figures = {
        name: _figures(samples, work.moved_bytes, row.updates, limit) for name, samples in turns.items()
    }
    return row._asdict() | {"bytes": work.moved_bytes, "contenders": figures}


def _figures(samples: list[float], moved_bytes: int, updates: int, limit_s: float | None) -> dict[str, Any]:
    low, seconds, high = np.percentile(samples, [25, 50, 75]).tolist()
    return {
        "seconds": seconds,
        "spread": (high - low) / seconds,
        "turns": len(samples),
        "gbytes_per_s": moved_bytes / seconds / 1e9,
        "updates_per_s": updates / seconds,
        "of_limit": None if limit_s is None else limit_s / seconds,
    }


def _calls_a_turn(call: Call) -> int:
    call()
    started = time.perf_counter()
    call()
    return max(1, round(_TURN_S / max(time.perf_counter() - started, 1e-7)))


def _timed(call: Call, count: int) -> float:
    if count > 1:  # a longer one finds nothing of the last turn in a cache anyway
        call()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count
