"""The weighted sum against what else could do it and against the memory's limit, all in one run.

Every figure of a row counts the same bytes: the K updates and the base read, the result written, which is
(K+2)·D·4 for float32. The limits are a loop that only reads that much, STREAM's triad and a copy.
Contenders take turns, so that a host which slows down slows all of them; each figure is the median of at
least 9 turns. aggregate_contenders.py says who takes part, aggregate_picture.py draws the roofline.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from edgefl import kernels
from edgefl.bench.aggregate_contenders import NEEDS_STACK, Call, contenders, work_of

PARAMETERS = (62_006, 468_458, 1_663_370, 11_173_962, 25_000_000, 110_000_000)
UPDATES = (5, 10, 32, 100)
QUICK = ((62_006, 5), (1_000_000, 10))
TYPED = ((1_663_370, 10), (1_663_370, 32), (11_173_962, 10), (11_173_962, 32))
"""Sizes at which the other types of updates are measured."""
_TURN_S = 0.004
"""A turn repeats a contender's call until it takes about as long."""
_CALM_S = 0.04
"""Pause before a turn: the threads of BLAS and OpenMP spin for some 30 ms after their own."""
_LARGEST_ROW_BYTES = 3 << 30


def run(
    json_path: Path | str | None = None,
    quick: bool = False,
    sizes: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """Measure, print tables, write ``json_path`` and pictures beside it if given, return what it holds.

    ``rows`` has one entry a size, type of update and number of threads: ``parameters``, ``updates``,
    ``dtype``, ``threads``, ``bytes``, and for each contender its ``seconds`` (median), ``spread``
    (interquartile range over median), ``gbytes_per_s``, ``updates_per_s`` and ``of_limit`` (against the read
    loop; None without the C extension). ``skipped`` names the sizes that memory did not allow.
    """
    repetitions, everything = 9 if quick else 11, kernels.threads()
    grid = list(sizes or (QUICK if quick else [(d, k) for d in PARAMETERS for k in UPDATES]))
    typed = QUICK[1:] if quick else [size for size in TYPED if sizes is None or size in grid]
    wanted = [(*size, "float32", everything) for size in grid]
    wanted += [(*size, "float32", 1) for size in grid if everything > 1 and (quick or size[1] == 10)]
    wanted += [(*size, dtype, everything) for size in typed for dtype in ("float16", "bfloat16", "int8")]
    most_bytes = min(_LARGEST_ROW_BYTES, int(0.5 * psutil.virtual_memory().available))
    fits = [row for row in wanted if (row[1] + 2) * row[0] * 4 <= most_bytes]
    result = {
        "host": _host(),
        "call_overhead_us": _call_overhead_us(),
        "repetitions": repetitions,
        "skipped": [list(row) for row in wanted if row not in fits],
        "rows": [_measured(*row, repetitions=repetitions) for row in fits],
    }
    _print(result)
    if json_path is not None:
        from edgefl.bench.aggregate_picture import draw

        path = Path(json_path)
        path.write_text(json.dumps(result, indent=2) + "\n")
        draw(result, [path.with_suffix(".png"), path.with_suffix(".svg")])
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


def _measured(parameters: int, updates: int, dtype: str, threads: int, *, repetitions: int) -> dict[str, Any]:
    work = work_of(parameters, updates, dtype, threads)
    kernels.set_threads(threads)
    try:
        calls = dict(contenders(work))
        if threads == 1:  # only what one thread of ours does; the others' threads are their own
            calls = {
                name: call for name, call in calls.items() if name.startswith("edgefl") or "read" in name
            }
        counts = {name: _warm(call) for name, call in calls.items()}
        turns: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repetitions):
            for name, call in calls.items():
                turns[name].append(_timed(call, counts[name]))
    finally:
        kernels.set_threads(None)
    limit = float(np.median(turns["read loop"])) if "read loop" in turns else None
    return {
        "parameters": parameters,
        "updates": updates,
        "dtype": dtype,
        "threads": threads,
        "bytes": work.moved_bytes,
        "contenders": {
            name: _figures(samples, work.moved_bytes, updates, limit) for name, samples in turns.items()
        },
    }


def _figures(samples: list[float], moved_bytes: int, updates: int, limit_s: float | None) -> dict[str, Any]:
    low, seconds, high = np.percentile(samples, [25, 50, 75]).tolist()
    return {
        "seconds": seconds,
        "spread": (high - low) / seconds,
        "gbytes_per_s": moved_bytes / seconds / 1e9,
        "updates_per_s": updates / seconds,
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


# ---- tables --------------------------------------------------------------------------------------

_SHORT = {
    "edgefl c": "c",
    "edgefl numba": "numba",
    "edgefl cuda": "cuda",
    "BLAS gemv": "gemv*",
    "torch addmv": "addmv*",
    "torch _foreach": "foreach",
    "numpy by layer": "numpy",
    "pfl-research": "pfl",
    "STREAM triad": "triad",
    "read loop": "read",
    "copy (one thread)": "copy",
}


def _print(result: dict[str, Any]) -> None:
    host, rows, console = result["host"], result["rows"], Console()
    most = [row for row in rows if row["dtype"] == "float32" and row["threads"] == host["threads"]]
    names = list(dict.fromkeys(name for row in most for name in row["contenders"]))
    table = _table(
        "Weighted sum of K float32 updates of D: GB/s", [_SHORT.get(n, n) for n in names] + ["c/r"]
    )
    for row in most:
        figures = row["contenders"]
        cells = [f"{figures[n]['gbytes_per_s']:.1f}" if n in figures else "" for n in names]
        table.add_row(_size(row), *cells, _ratio(figures.get("edgefl c", {}).get("of_limit")))
    console.print(table)
    single = [row for row in rows if row["threads"] == 1 != host["threads"]]
    if single:
        columns = list(dict.fromkeys(name for row in single for name in row["contenders"]))
        table = _table("On one thread: GB/s", [_SHORT.get(n, n) for n in columns])
        for row in single:
            table.add_row(_size(row), *(f"{row['contenders'][n]['gbytes_per_s']:.1f}" for n in columns))
        console.print(table)
    _print_types(console, most, [row for row in rows if row["dtype"] != "float32"])
    console.print(
        f"{host['cpu']}, {host['cores']} cores, {host['threads']} threads, {host['backend']} "
        f"({host['instruction_set']}), load {host['load_1min']}; a call costs "
        f"{result['call_overhead_us']} μs; medians of {result['repetitions']}"
    )
    if any(name in NEEDS_STACK for name in names):
        console.print("* needs the updates stacked in one matrix; c/r: c against the read loop")
    if result["skipped"]:
        sizes = dict.fromkeys(f"{_short(d)}×{k}" for d, k, *_ in result["skipped"])
        console.print(f"left out for want of memory: {', '.join(sizes)}")


def _print_types(console: Console, floats: list[dict[str, Any]], typed: list[dict[str, Any]]) -> None:
    if not typed:
        return
    table = _table(
        "Other types of updates, c: updates/s, and against float32", ["updates/s", "times", "GB/s", "c/read"]
    )
    for row in typed:
        same = [r for r in floats if (r["parameters"], r["updates"]) == (row["parameters"], row["updates"])]
        figures = row["contenders"].get("edgefl c")
        if figures is None:
            continue
        times = (
            figures["updates_per_s"] / same[0]["contenders"]["edgefl c"]["updates_per_s"] if same else None
        )
        cells = (f"{figures['updates_per_s']:.0f}", _ratio(times), f"{figures['gbytes_per_s']:.1f}")
        table.add_row(f"{_size(row)} {row['dtype']}", *cells, _ratio(figures["of_limit"]))
    console.print(table)


def _table(title: str, columns: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title)
    table.add_column("D × K", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _size(row: dict[str, Any]) -> str:
    return f"{_short(row['parameters'])}×{row['updates']}"


def _short(parameters: int) -> str:
    return f"{parameters / 1e6:.3g}M" if parameters >= 1_000_000 else f"{parameters / 1e3:.0f}k"
