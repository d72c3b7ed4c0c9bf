"""The weighted sum against what else could do it and against the memory's limit, all in one run.

Every figure of a row counts the same bytes: the K updates and the base read, the result written, which is
(K+2)·D·4 for float32. The limits are a loop that only reads that much, STREAM's triad and a copy.
Contenders take turns, so that a host which slows down slows all of them; each figure is the median of at
least 9 turns (fewer, and marked, where one call takes most of a second).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil

from edgefl import kernels
from edgefl.limits.capacity import host
from edgefl.results import tables

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


class SumCase(NamedTuple):
    """A size of a sum, its updates' type, and the threads that make it."""

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


def rows_of(sizes: Sequence[tuple[int, int]], quick: bool) -> list[SumCase]:
    """All sizes as float32 on all threads; some on one thread, too, and some with the other types."""
    everything = kernels.threads()
    rows = [SumCase(*size, "float32", everything) for size in sizes]
    if everything > 1:
        rows += [SumCase(*size, "float32", 1) for size in sizes if quick or size[1] in SINGLE]
    typed = [size for size in sizes if size in (QUICK[1:] if quick else TYPED)]
    rows += [SumCase(*size, dtype, everything) for size in typed for dtype in list(DTYPES)[1:]]
    return rows


def _host() -> dict[str, Any]:
    c = kernels.backends()["c"] == "ok"
    if c:
        from edgefl.kernels import _c
    return {
        "cpu": host().cpu,
        "cores": host().cores,
        "threads": kernels.threads(),
        "backend": kernels.backend(),
        "instruction_set": _c.isa() if c else None,
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _measured(row: SumCase) -> dict[str, Any]:
    arrays = arrays_of(*row)
    fewer = row.threads < kernels.threads()
    kernels.set_threads(row.threads)
    try:
        calls = dict(contenders(arrays))
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
        name: _figures(samples, arrays.moved_bytes, row.updates, limit) for name, samples in turns.items()
    }
    return row._asdict() | {"bytes": arrays.moved_bytes, "contenders": figures}


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
    return max(1, round(_TURN_S / max(timeit.timeit(call, number=1), 1e-7)))


def _timed(call: Call, count: int) -> float:
    if count > 1:  # a longer one finds nothing of the last turn in a cache anyway
        call()
    return timeit.timeit(call, number=count) / count


# ---- contenders: edgefl's back ends, the usual ways, other frameworks, the limits --------------

LAYERS = 10
DTYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8
}  # fmt: skip

Floats = npt.NDArray[np.float32]
Call = Callable[[], object]


class SumArrays(NamedTuple):
    """One row's arrays, all aligned to 64 bytes as slots of the parameter buffer are."""

    stacked: npt.NDArray[Any]
    scales: list[Floats | None]
    base: Floats
    out: Floats
    weights: list[float]
    threads: int

    @property
    def layers(self) -> list[slice]:
        """The places of ten layers, for those that sum layer by layer."""
        ends = np.linspace(0, self.base.size, LAYERS + 1).astype(int).tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    @property
    def moved_bytes(self) -> int:
        """Updates, their scales and the base read, the result written."""
        scales = sum(scale.nbytes for scale in self.scales if scale is not None)
        return self.stacked.nbytes + scales + 2 * self.base.nbytes


def aligned(size: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    size_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(size_bytes + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes].view(dtype)


def arrays_of(parameters: int, updates: int, dtype: str, threads: int) -> SumArrays:
    """Updates with one random stretch again and again: the values do not matter, but zeros might."""
    rng = np.random.default_rng([parameters, updates])
    base, out = aligned(parameters), aligned(parameters)
    base[:] = np.resize(rng.standard_normal(min(parameters, 1 << 20), dtype=np.float32), parameters)
    stacked = aligned(updates * parameters, DTYPES[dtype]).reshape(updates, parameters)
    scales: list[Floats | None] = [None] * updates
    for k, row in enumerate(stacked):
        scales[k] = aligned(-(-parameters // kernels.SCALE_BLOCK)) if dtype == "int8" else None
        if k == 0 or dtype != "float32":
            kernels.quantize(row, base, scales=scales[k])
        else:
            np.multiply(base, np.float32(1 + k / updates), out=row)
    return SumArrays(stacked, scales, base, out, rng.random(updates).tolist(), threads)


RAW = "c, one thread, bare"
"""The C function itself on one thread, its arguments prepared: what a call of a small sum adds to."""
NEEDS_STACK = ("BLAS gemv", "torch addmv")
"""Ways that need all updates in one matrix, which no server has without a copy."""
SPIN = ("BLAS gemv", "torch addmv", "torch _foreach")
"""Their threads wait for more work without sleeping."""
ONE_THREAD = ("edgefl c", "edgefl numba", RAW, "read loop")
"""Those that are measured on one thread, too."""


def contenders(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    """Names and calls; every sum is checked against numpy's before it is measured."""
    yield from _ours(arrays)
    if arrays.stacked.dtype == np.float32:
        expected = arrays.base + np.asarray(arrays.weights, np.float32) @ arrays.stacked
        for name, call in _usual(arrays):
            arrays.out.fill(np.nan)
            call()
            np.testing.assert_allclose(arrays.out, expected, rtol=1e-4, atol=1e-4, err_msg=name)
            yield name, call
        yield from frameworks(arrays)
    yield from _limits(arrays)


def _ours(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    stacked, scales, base, out, weights, _ = arrays
    rows, expected = list(stacked), np.empty_like(out)
    usable = [name for name, status in kernels.backends().items() if status == "ok" and name != "reference"]
    kernels.weighted_sum(expected, base, rows, weights, usable[-1], scales=scales)

    def sum_with(name: str) -> Call:
        return lambda: kernels.weighted_sum(out, base, rows, weights, name, scales=scales)

    for name in usable:
        sum_with(name)()
        np.testing.assert_array_equal(out, expected)
        yield f"edgefl {name}", sum_with(name)
    if "c" in usable:
        from edgefl.kernels import _c

        norms = np.empty(len(rows))
        yield RAW, lambda: _c.weighted_sum(out, base, rows, weights, scales, norms, None, 1)


def _usual(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    stacked, _, base, out, _, _ = arrays
    weights, layers = np.asarray(arrays.weights, np.float32), arrays.layers

    def gemv() -> None:
        np.matmul(weights, stacked, out=out)
        np.add(out, base, out=out)

    def by_layer() -> None:
        for layer in layers:
            total = base[layer].copy()
            for weight, update in zip(weights, stacked, strict=True):
                total += weight * update[layer]
            out[layer] = total

    yield "BLAS gemv", gemv
    with contextlib.suppress(ImportError):
        import torch

        rows, vector = torch.from_numpy(stacked), torch.from_numpy(weights)
        start, end = torch.from_numpy(base), torch.from_numpy(out)
        parts, targets = [[row[layer] for layer in layers] for row in rows], [end[layer] for layer in layers]

        def foreach() -> None:
            end.copy_(start)
            for weight, layer_updates in zip(arrays.weights, parts, strict=True):
                torch._foreach_add_(targets, layer_updates, alpha=weight)

        yield "torch addmv", lambda: torch.addmv(start, rows.T, vector, out=end)
        yield "torch _foreach", foreach
    yield "numpy by layer", by_layer


def _limits(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    """As many bytes: only read; two read for one written; one read for one written."""
    third, half = arrays.moved_bytes // 12, arrays.moved_bytes // 8
    try:
        from edgefl.lab import _probe
    except ImportError:  # no C compiler when edgefl was installed
        source, target = np.ones(half, np.float32), np.ones(half, np.float32)
        yield "copy (one thread)", lambda: np.copyto(target, source)
        return
    updates, vectors, threads = list(arrays.stacked), [arrays.base, arrays.out], arrays.threads
    groups = [updates[i : i + 60] for i in range(0, len(updates), 60)]
    is_float = arrays.stacked.dtype == np.float32
    groups = [[*updates, *vectors]] if is_float and len(updates) < 60 else [*groups, vectors]

    def read() -> None:
        for group in groups:
            _probe.read(group, threads)

    yield "read loop", read
    if not is_float:
        return
    space = arrays.stacked.reshape(-1)  # no more memory than the sum itself has, where it is large enough
    if space.size < (room := max(3 * third, 2 * half)):
        space = np.ones(room, np.float32)
    a, b, c = (space[i * third : (i + 1) * third] for i in range(3))
    yield "STREAM triad", lambda: _probe.triad(a, b, c, 0.0, threads)
    yield "copy", lambda: _probe.copy(space[half : 2 * half], space[:half], threads)


def frameworks(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    """Other frameworks' own functions on the same arrays, where they are installed.

    They average, so no base is added; their figures count the same bytes as everybody's.
    """
    parts = [[row[layer] for layer in arrays.layers] for row in arrays.stacked]
    examples = list(range(1, len(parts) + 1))
    expected = np.asarray(examples, np.float32) @ arrays.stacked / sum(examples)
    for name, make in (("Flower", _flower), ("NVFlare", _nvflare), ("pfl-research", _pfl)):
        try:
            call, exact = make(parts, examples)
        except ImportError:
            continue
        if exact:
            np.testing.assert_allclose(np.concatenate(call()), expected, rtol=1e-3, atol=1e-3, err_msg=name)
        yield name, call


def _flower(parts: Any, examples: list[int]) -> tuple[Callable[[], Any], bool]:
    module = importlib.import_module("flwr.server.strategy.aggregate")
    results = list(zip(parts, examples, strict=True))
    return lambda: module.aggregate(results), True


def _nvflare(parts: Any, examples: list[int]) -> tuple[Callable[[], Any], bool]:
    module = importlib.import_module("nvflare.app_common.aggregators.weighted_aggregation_helper")
    named = [{str(i): layer for i, layer in enumerate(layers)} for layers in parts]

    def call() -> list[Floats]:
        helper = module.WeightedAggregationHelper()
        with contextlib.redirect_stdout(io.StringIO()):  # some releases print each array's range
            for i, (data, weight) in enumerate(zip(named, examples, strict=True)):
                helper.add(data, weight, f"site-{i}", 0)
        return list(helper.get_result().values())

    return call, True


def _pfl(parts: Any, examples: list[int]) -> tuple[Callable[[], Any], bool]:
    """Its clients weigh their own statistics, so that this is the plain sum and one division."""
    statistics = importlib.import_module("pfl.stats").MappedVectorStatistics
    each = [
        statistics({str(i): layer for i, layer in enumerate(layers)}, weight=float(weight))
        for layers, weight in zip(parts, examples, strict=True)
    ]

    def call() -> Any:
        total = each[0]
        for other in each[1:]:
            total = total + other
        total.average()
        return total

    return call, False


# ---- what is printed and drawn -----------------------------------------------------------------

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
LIMITS = ("read loop", "STREAM triad", "copy", "copy (one thread)")


def show(result: dict[str, Any]) -> None:
    """Print bandwidths, what they come to against each other, one thread, other types of updates."""
    facts, rows, turns = result["host"], result["rows"], result["turns"]
    floats = [row for row in rows if row["dtype"] == "float32" and row["threads"] == facts["threads"]]
    single = [row for row in rows if row["threads"] == 1 != facts["threads"]]
    typed = [row for row in rows if row["dtype"] != "float32"]
    names = _names(floats)
    main = [name for name in names if name not in (RAW, *FRAMEWORKS)]
    others = [name for name in main if not name.startswith("edgefl") and name not in LIMITS[1:]]
    others += [name for name in names if name in FRAMEWORKS]
    tables.show(_bandwidths("Weighted sum of K float32 updates of D: GB/s", floats, main, turns))
    if "edgefl c" in names:
        tables.show(_against(floats, others))
    if single:
        tables.show(_bandwidths("On one thread: GB/s", single, _names(single), turns))
    if typed and "edgefl c" in names:
        tables.show(_types(floats, typed))
    tables.show(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, {facts['backend']} "
        f"({facts['instruction_set']}), load {facts['load_1min']}; medians of {turns} turns, "
        f"in {result['seconds']:.0f} s"
    )
    if any(name in NEEDS_STACK for name in main):
        tables.show("* needs the updates stacked in one matrix")
    if any(figures["turns"] < turns for row in rows for figures in row["contenders"].values()):
        tables.show(f"~ slow, so of fewer turns than {turns}")
    if result["skipped"]:
        sizes = dict.fromkeys(f"{_short(d)}×{k}" for d, k, *_ in result["skipped"])
        tables.show(f"left out as too large for this memory, or for minutes: {', '.join(sizes)}")


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["contenders"]))


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    return tables.table(["D × K", *(f">{SHORT.get(name, name)}" for name in names)], rows, title)


def _bandwidths(title: str, rows: list[dict[str, Any]], names: list[str], turns: int) -> Any:
    def cell(row: dict[str, Any], name: str) -> str:
        figures = row["contenders"].get(name)
        mark = "~" if figures and figures["turns"] < turns else ""
        return f"{mark}{figures['gbytes_per_s']:.1f}" if figures else ""

    return _table(title, names, [[_size(row), *(cell(row, name) for name in names)] for row in rows])


def _against(rows: list[dict[str, Any]], others: list[str]) -> Any:
    """Ratios of `c` to each of the others and of numba to `c`; a call less the bare function."""
    cells = []
    for row in rows:
        seconds = {name: figures["seconds"] for name, figures in row["contenders"].items()}
        mine = seconds["edgefl c"]
        ratios = [_ratio(seconds.get(name), mine) for name in others]
        over = f"{(mine - seconds[RAW]) * 1e6:+.0f} μs" if RAW in seconds else ""
        cells.append([_size(row), *ratios, _ratio(mine, seconds.get("edgefl numba")), over])
    return _table("c: times as fast as", [*others, "numba/c", "over bare"], cells)


def _types(floats: list[dict[str, Any]], typed: list[dict[str, Any]]) -> Any:
    as_floats = {(row["parameters"], row["updates"]): row for row in floats}
    cells = []
    for row in typed:
        figures, same = row["contenders"]["edgefl c"], as_floats.get((row["parameters"], row["updates"]))
        cells.append(
            [
                f"{_size(row)} {row['dtype']}",
                f"{figures['updates_per_s']:.0f}",
                _ratio(same["contenders"]["edgefl c"]["seconds"], figures["seconds"]) if same else "",
                _ratio(same["bytes"], row["bytes"]) if same else "",
                f"{figures['gbytes_per_s']:.1f}",
                f"{figures['of_limit']:.2f}",
                _ratio(figures["seconds"], row["contenders"].get("edgefl numba", {}).get("seconds")),
            ]
        )
    heads = ["updates/s", "times", "bytes allow", "GB/s", "c/read", "numba/c"]
    return _table("Other types of updates, c: updates/s, and against float32", heads, cells)


def _ratio(value: float | None, to: float | None) -> str:
    return "" if value is None or to is None else f"{value / to:.2f}"


def _size(row: dict[str, Any]) -> str:
    return f"{_short(row['parameters'])}×{row['updates']}"


def _short(parameters: int) -> str:
    return f"{parameters / 1e6:.3g}M" if parameters >= 1_000_000 else f"{parameters / 1e3:.0f}k"


MARKERS = {"float32": "o", "float16": "s", "bfloat16": "D", "int8": "^"}


def draw(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """Gflop/s over flop per byte, one point a row and contender, to each of ``paths``.

    A sum is K·D products and as many additions over the bytes that it moves; a roof is a limit's median
    bandwidth times flop per byte, once for the largest row (memory) and once for the smallest (cache).
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["threads"] == result["host"]["threads"]]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    names = [name for name in _names(rows) if name not in LIMITS[:3]]
    colors = {name: f"C{i % 10}" for i, name in enumerate(names)}
    intensities = [_flop(row) / row["bytes"] for row in rows]
    for row in rows:
        for name, figures in row["contenders"].items():
            if name in colors:
                axes.plot(
                    _flop(row) / row["bytes"],
                    _flop(row) / figures["seconds"] / 1e9,
                    MARKERS[row["dtype"]],
                    color=colors[name],
                    markersize=5,
                    alpha=0.8,
                )
    span = (0.8 * min(intensities), 1.25 * max(intensities))
    floats = sorted((row for row in rows if row["dtype"] == "float32"), key=lambda row: int(row["bytes"]))
    for where, row, style in (("memory", floats[-1], "-"), ("cache", floats[0], "--")):
        for limit, shade in zip(LIMITS[:3], ("0.2", "0.45", "0.65"), strict=True):
            if limit in row["contenders"]:
                rate = row["contenders"][limit]["gbytes_per_s"]
                label = f"{limit}, {where}: {rate:.0f} GB/s"
                axes.plot(span, [x * rate for x in span], style, color=shade, linewidth=1, label=label)
    for name, color in colors.items():
        axes.plot([], [], "o", color=color, label=name)
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        axes.plot([], [], MARKERS[dtype], color="black", markerfacecolor="none", label=dtype)
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
