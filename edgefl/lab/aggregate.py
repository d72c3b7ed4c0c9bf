"""The weighted sum against what else could do it and against the memory's limit, all in one run.

Every figure of a row counts the same bytes: the K updates and the base read, the result written, which is
(K+2)·D·4 for float32. The limits are a loop that only reads that much, STREAM's triad and a copy.
Contenders take turns, so that a host which slows down slows all of them; each figure is the median of at
least 9 turns (fewer, and marked, where one call takes most of a second).
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from edgefl import kernels
from edgefl.lab.contenders import DTYPES, NEEDS_STACK, ONE_THREAD, RAW, SPIN, Call, contenders, work_of

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


SHORT = {
    "edgefl c": "c",
    "edgefl numba": "numba",
    "edgefl cuda": "cuda",
    RAW: "bare",
    "BLAS gemv": "gemv*",
    "torch addmv": "addmv*",
    "torch _foreach": "foreach",
    "numpy by layer": "numpy",
    "pfl-research": "pfl",
    "STREAM triad": "triad",
    "read loop": "read",
}
FRAMEWORKS = ("Flower", "NVFlare", "pfl-research")
_LIMITS = ("read loop", "STREAM triad", "copy", "copy (one thread)")


def show(result: dict[str, Any]) -> None:
    """Bandwidths, what they come to against each other, one thread, other types of updates."""
    host, rows, console = result["host"], result["rows"], Console()
    floats = [row for row in rows if row["dtype"] == "float32" and row["threads"] == host["threads"]]
    single = [row for row in rows if row["threads"] == 1 != host["threads"]]
    names = _names(floats, without=(RAW, *FRAMEWORKS))
    _bandwidths(console, "Weighted sum of K float32 updates of D: GB/s", floats, names, result["turns"])
    others = [name for name in names if not name.startswith("edgefl")] + _names(floats, only=FRAMEWORKS)
    _against(console, floats, others)
    if single:
        _bandwidths(console, "On one thread: GB/s", single, _names(single), result["turns"])
    _types(console, floats, [row for row in rows if row["dtype"] != "float32"])
    console.print(
        f"{host['cpu']}, {host['cores']} cores, {host['threads']} threads, {host['backend']} "
        f"({host['instruction_set']}), load {host['load_1min']}; a call costs "
        f"{result['call_overhead_us']} μs; medians of {result['turns']} turns, in {result['seconds']:.0f} s"
    )
    if any(name in NEEDS_STACK for name in names):
        console.print("* needs the updates stacked in one matrix")
    if any(figures["turns"] < result["turns"] for row in rows for figures in row["contenders"].values()):
        console.print(f"~ slow, so of fewer turns than {result['turns']}")
    if result["skipped"]:
        sizes = dict.fromkeys(f"{_short(d)}×{k}" for d, k, *_ in result["skipped"])
        console.print(f"left out as too large for this memory, or for minutes: {', '.join(sizes)}")


def _names(
    rows: Iterable[dict[str, Any]], only: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> list[str]:
    found = dict.fromkeys(name for row in rows for name in row["contenders"])
    return [name for name in found if name not in without and (name in only or not only)]


def _bandwidths(
    console: Console, title: str, rows: list[dict[str, Any]], names: list[str], turns: int
) -> None:
    table = _table(title, [SHORT.get(name, name) for name in names])
    for row in rows:
        cells = []
        for name in names:
            figures = row["contenders"].get(name)
            mark = "~" if figures and figures["turns"] < turns else ""
            cells.append(f"{mark}{figures['gbytes_per_s']:.1f}" if figures else "")
        table.add_row(_size(row), *cells)
    console.print(table)


def _against(console: Console, rows: list[dict[str, Any]], others: list[str]) -> None:
    """How often as fast `c` is as each of the others; numba against `c`; a call against the bare function."""
    if not any("edgefl c" in row["contenders"] for row in rows):
        return
    columns = [SHORT.get(name, name) for name in others if name not in _LIMITS[1:]]
    table = _table("c: times as fast as", [*columns, "numba/c", "over bare"])
    for row in rows:
        seconds = {name: figures["seconds"] for name, figures in row["contenders"].items()}
        mine = seconds["edgefl c"]
        cells = [_ratio(seconds.get(name), mine) for name in others if name not in _LIMITS[1:]]
        over = f"{(mine - seconds[RAW]) * 1e6:+.0f} μs" if RAW in seconds else ""
        table.add_row(_size(row), *cells, _ratio(mine, seconds.get("edgefl numba")), over)
    console.print(table)


def _types(console: Console, floats: list[dict[str, Any]], typed: list[dict[str, Any]]) -> None:
    if not typed:
        return
    columns = ["updates/s", "times", "bytes allow", "GB/s", "c/read", "numba/c"]
    table = _table("Other types of updates, c: updates/s, and against float32", columns)
    for row in typed:
        same = [r for r in floats if (r["parameters"], r["updates"]) == (row["parameters"], row["updates"])]
        figures = row["contenders"].get("edgefl c")
        if figures is None:
            continue
        times = _ratio(same[0]["contenders"]["edgefl c"]["seconds"], figures["seconds"]) if same else ""
        allowed = _ratio(same[0]["bytes"], row["bytes"]) if same else ""
        cells = (f"{figures['updates_per_s']:.0f}", times, allowed, f"{figures['gbytes_per_s']:.1f}")
        other = row["contenders"].get("edgefl numba", {}).get("seconds")
        limit = "" if figures["of_limit"] is None else f"{figures['of_limit']:.2f}"
        table.add_row(f"{_size(row)} {row['dtype']}", *cells, limit, _ratio(figures["seconds"], other))
    console.print(table)


def _table(title: str, columns: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title)
    table.add_column("D × K", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _ratio(value: float | None, to: float | None) -> str:
    return "" if value is None or to is None else f"{value / to:.2f}"


def _size(row: dict[str, Any]) -> str:
    return f"{_short(row['parameters'])}×{row['updates']}"


def _short(parameters: int) -> str:
    return f"{parameters / 1e6:.3g}M" if parameters >= 1_000_000 else f"{parameters / 1e3:.0f}k"


_MARKERS = {"float32": "o", "float16": "s", "bfloat16": "D", "int8": "^"}
_ROOFS = ("read loop", "STREAM triad", "copy")


def draw(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """Gflop/s over flop per byte, one point a row and contender, to each of ``paths``.

    A sum is K·D products and as many additions over the bytes that it moves; a roof is a limit's median
    bandwidth times flop per byte, once for the largest row (memory) and once for the smallest (cache).
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["threads"] == result["host"]["threads"]]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"] if name not in _ROOFS))
    colors = {name: f"C{i % 10}" for i, name in enumerate(names)}
    intensities = [_flop(row) / row["bytes"] for row in rows]
    for row in rows:
        for name, figures in row["contenders"].items():
            if name in colors:
                axes.plot(
                    _flop(row) / row["bytes"],
                    _flop(row) / figures["seconds"] / 1e9,
                    _MARKERS[row["dtype"]],
                    color=colors[name],
                    markersize=5,
                    alpha=0.8,
                )
    span = (0.8 * min(intensities), 1.25 * max(intensities))
    floats = sorted((row for row in rows if row["dtype"] == "float32"), key=lambda row: int(row["bytes"]))
    for where, row, style in (("memory", floats[-1], "-"), ("cache", floats[0], "--")):
        for limit, shade in zip(_ROOFS, ("0.2", "0.45", "0.65"), strict=True):
            if limit in row["contenders"]:
                rate = row["contenders"][limit]["gbytes_per_s"]
                label = f"{limit}, {where}: {rate:.0f} GB/s"
                axes.plot(span, [x * rate for x in span], style, color=shade, linewidth=1, label=label)
    for name, color in colors.items():
        axes.plot([], [], "o", color=color, label=name)
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        axes.plot([], [], _MARKERS[dtype], color="black", markerfacecolor="none", label=dtype)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=span,
        xlabel="flop per byte moved",
        ylabel="Gflop/s",
        title=f"Weighted sum, {result['host']['cpu']}, {result['host']['threads']} threads",
    )
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    axes.grid(visible=True, which="both", linewidth=0.3)
    for path in paths:
        figure.savefig(path, dpi=150)


def _flop(row: dict[str, Any]) -> float:
    return 2.0 * int(row["updates"]) * int(row["parameters"])
