"""Compares the weighted sum with other implementations and with memory bandwidth, all in one run.

All results of a row, in GB/s, are for the same number of bytes: (K+2)·D·4 for K float32 updates of D
parameters, since the updates and the base model are read and the result is written. Two loops set the limits:
one only reads this many bytes, and the other is the triad of the STREAM benchmark. The contenders
(implementations and limits) take turns, so that a slowdown of the host affects all of them. Each result is
the median of 9 turns, or of at least 3 turns if the contender is slow (marked ~). A row that the host
disturbed is marked !, and the reason is printed.
"""

from __future__ import annotations

import contextlib
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl import kernels
from edgefl.errors import EdgeflError
from edgefl.host.capacity import UsageMeter, available_bytes
from edgefl.host.verdict import STEAL_MAX, STOLEN, THROTTLED, THROTTLED_MAX, exceeded
from edgefl.kernels.arguments import Floats
from edgefl.lab import bench
from edgefl.lab.bench import Say
from edgefl.results import tables

PARAMETERS = (62_006, 468_458, 1_663_370, 11_173_962, 25_000_000, 110_000_000)
UPDATES = (5, 10, 32, 100)
QUICK = ((62_006, 5), (1_000_000, 10))
TYPED = ((468_458, 10), (1_663_370, 10), (1_663_370, 32), (11_173_962, 10), (11_173_962, 32))
"""Sizes (number of parameters, number of updates) for which types other than float32 are also measured."""
SINGLE = (10, 32)
"""Numbers of updates for which the sum is also measured on one thread."""
DTYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8
}  # fmt: skip
TURNS = 9
_TURN_S = 0.004
"""Approximate duration of a contender's turn, in seconds; its call is repeated to fill the turn."""
_SLOW_S = 5.0
"""After its third turn, a contender gets no more turns once its calls took longer than this in total."""
_CALM_S = 0.04
"""Pause in seconds after contenders whose threads spin for about 30 ms after their work (BLAS, OpenMP)."""
_LARGEST_ROW_BYTES = 6e9
"""Rows with more bytes are skipped: they would take minutes, and smaller rows already exceed all caches."""
_ROW_SHARE = 0.4
"""Maximum bytes of a row as a share of the available memory. The measurement of a row needs up to 2.3 times
its bytes, because the triad has vectors of its own, and results are compared."""
HOST_LIMITS = {
    "others": ("cores used by other programs", 0.10),
    "steal": (STOLEN, STEAL_MAX),
    "throttled": (THROTTLED, THROTTLED_MAX),
}
"""Description and limit of each measured share of the host's cores; above a limit, a row is unreliable."""
SPREAD_MAX = 0.30
"""A row is unreliable if the spread of edgefl's results or of the read loop is larger than this."""

Call = Callable[[], object]


class SumCase(NamedTuple):
    """The size of a sum, the type of its updates, and the number of threads."""

    parameters: int
    updates: int
    dtype: str
    threads: int


def run(
    quick: bool = False,
    sizes: Sequence[tuple[int, int]] | None = None,
    say: Say = bench.silent,
) -> dict[str, Any]:
    """Measure all rows; return plain values for `show`, `draw` and a JSON file.

    ``rows`` has one entry per size, type of update and number of threads: ``parameters``, ``updates``,
    ``dtype``, ``threads``, ``bytes``, ``doubts`` (reasons why its results are unreliable), and for each
    contender its ``seconds`` (median), ``spread`` (interquartile range divided by the median), ``turns``,
    ``gbytes_per_s``, ``updates_per_s`` and ``of_limit`` (speed relative to the read loop; None if the C
    extension is not available). ``skipped`` lists the rows that are too large to measure.
    """
    wanted = rows_of(sizes or (QUICK if quick else [(d, k) for d in PARAMETERS for k in UPDATES]), quick)
    most_bytes = min(_LARGEST_ROW_BYTES, _ROW_SHARE * available_bytes())
    fits = [row for row in wanted if (row.updates + 2) * row.parameters * 4 <= most_bytes]
    for name, why in compiled_backends().items():
        if why:
            say(f"without {name}: {why}")
    started, instructions = time.monotonic(), None
    if kernels.backends()["c"] == "ok":
        from edgefl.kernels import _c

        instructions = _c.isa()
    result = {
        "host": bench.machine(
            threads=kernels.threads(), backend=kernels.backend(), instruction_set=instructions
        ),
        "turns": TURNS,
        "skipped": [list(row) for row in wanted if row not in fits],
        "rows": list(_rows(fits, say)),
    }
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def rows_of(sizes: Sequence[tuple[int, int]], quick: bool) -> list[SumCase]:
    """Return all sizes in float32 on all threads, some sizes also on one thread, and some in other types."""
    everything = kernels.threads()
    rows = [SumCase(*size, "float32", everything) for size in sizes]
    if everything > 1:
        rows += [SumCase(*size, "float32", 1) for size in sizes if quick or size[1] in SINGLE]
    typed = [size for size in sizes if size in (QUICK[1:] if quick else TYPED)]
    return rows + [SumCase(*size, dtype, everything) for size in typed for dtype in list(DTYPES)[1:]]


def _rows(cases: Sequence[SumCase], say: Say) -> Iterator[dict[str, Any]]:
    for place, case in enumerate(cases, 1):
        threads = "1 thread" if case.threads == 1 else f"{case.threads} threads"
        say(f"{place} of {len(cases)}: {_size(case._asdict())} {case.dtype}, {threads}")
        yield _measured(case)


def doubts(usage: dict[str, float | None], figures: dict[str, dict[str, Any]]) -> list[str]:
    """List the reasons why a row is unreliable, given the host's usage and the spreads of the contenders.

    >>> doubts({"others": 0.41, "steal": 0.0, "throttled": None}, {"edgefl c": {"spread": 0.1}})
    ['cores used by other programs 41.0%, at most 10% is allowed']
    """
    found = [
        line for name, (what, most) in HOST_LIMITS.items() for line in exceeded(what, usage.get(name), most)
    ]
    spreads = {name: each["spread"] for name, each in figures.items() if name in ONE_THREAD}
    worst = max(spreads, key=lambda name: spreads[name])
    return [*found, *exceeded(f"spread of {worst}", spreads[worst], SPREAD_MAX)]


def _measured(row: SumCase) -> dict[str, Any]:
    arrays = arrays_of(*row)
    fewer = row.threads < kernels.threads()
    kernels.set_threads(row.threads)
    try:
        # If threads are limited, measure only contenders whose number of threads can be set.
        calls = {name: call for name, call in contenders(arrays) if name in ONE_THREAD or not fewer}
        once_s = {name: min(timeit.repeat(call, number=1, repeat=2)) for name, call in calls.items()}
        counts = {name: max(1, round(_TURN_S / max(seconds, 1e-7))) for name, seconds in once_s.items()}
        turns: dict[str, list[float]] = {name: [] for name in calls}
        spinning, meter = False, UsageMeter()
        meter.begin()
        for turn in range(TURNS):
            for name, call in calls.items():
                if turn >= 3 and sum(turns[name]) > _SLOW_S:
                    continue
                if spinning:
                    time.sleep(_CALM_S)
                if counts[name] > 1:  # warm the cache; longer calls process more data than the cache holds
                    call()
                turns[name].append(timeit.timeit(call, number=counts[name]) / counts[name])
                spinning = name in SPIN
        meter.end()
    finally:
        kernels.set_threads(None)
    limit_s = float(np.median(turns["read loop"])) if "read loop" in turns else None
    figures = {}
    for name, samples in turns.items():
        seconds, spread = bench.median_and_spread(samples)
        figures[name] = {
            "seconds": seconds,
            "spread": spread,
            "turns": len(samples),
            "gbytes_per_s": arrays.moved_bytes / seconds / 1e9,
            "updates_per_s": row.updates / seconds,
            "of_limit": None if limit_s is None else limit_s / seconds,
        }
    facts = {"bytes": arrays.moved_bytes, "doubts": doubts(meter.usage(), figures)}
    return row._asdict() | facts | {"contenders": figures}


# ---- contenders: edgefl's back ends, common implementations, limits ------------------------------

LAYERS = 10
RAW = "c, one thread, bare"
"""Contender that calls the C function directly, on one thread, to show the overhead of edgefl's wrapper."""
NEEDS_STACK = ("BLAS gemv", "torch addmv")
"""Contenders that need all updates in one matrix; a server would have to copy the updates into it."""
SPIN = ("BLAS gemv", "torch addmv", "torch _foreach")
"""Contenders whose threads spin while they wait for work."""
ONE_THREAD = ("edgefl c", "edgefl numba", RAW, "read loop")
"""Contenders that are also measured on one thread."""
LIMITS = ("read loop", "STREAM triad")


class SumArrays(NamedTuple):
    """The arrays of one row, aligned to 64 bytes like the slots of the parameter buffer."""

    stacked: npt.NDArray[Any]
    scales: list[Floats | None]
    base: Floats
    out: Floats
    weights: list[float]
    threads: int

    @property
    def moved_bytes(self) -> int:
        """Number of bytes that are read (updates, scales and base) and written (the result)."""
        scales = sum(scale.nbytes for scale in self.scales if scale is not None)
        return self.stacked.nbytes + scales + 2 * self.base.nbytes


def aligned(size: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    size_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(size_bytes + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size_bytes].view(dtype)


def arrays_of(parameters: int, updates: int, dtype: str, threads: int) -> SumArrays:
    """Create the arrays and fill them with a repeated random block; sums of zeros could be faster."""
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


@cache
def compiled_backends() -> dict[str, str]:
    """Return the back ends to measure, each with the error of its first use, or "" if it works.

    The CUDA back end may be reported as available and then fail, because its kernels are built and its
    devices are looked up only at first use.
    """
    found: dict[str, str] = {}
    for name, status in kernels.backends().items():
        if status != "ok" or name == "reference":
            continue
        try:
            kernels.weighted_sum(np.empty(1, np.float32), None, [np.ones(1, np.float32)], [1.0], name)
        except EdgeflError as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found


def contenders(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    """Yield the name of each contender and a function that computes the sum once.

    The function's result is checked first: edgefl's back ends must agree with each other bit for bit, and the
    common implementations must agree approximately with NumPy.
    """
    stacked, scales, base, out, weights, _ = arrays
    rows, reference = list(stacked), np.empty_like(out)
    usable = [name for name, why in compiled_backends().items() if not why]
    kernels.weighted_sum(reference, base, rows, weights, usable[-1], scales=scales)
    for name in usable:
        call = partial(kernels.weighted_sum, out, base, rows, weights, name, scales=scales)
        call()
        np.testing.assert_array_equal(out, reference)
        yield f"edgefl {name}", call
    if "c" in usable:
        from edgefl.kernels import _c

        norms = np.empty(len(rows))
        yield RAW, lambda: _c.weighted_sum(out, base, rows, weights, scales, norms, None, 1)
    if stacked.dtype == np.float32:
        expected = base + np.asarray(weights, np.float32) @ stacked
        for name, usual in _usual(arrays):
            out.fill(np.nan)
            usual()
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4, err_msg=name)
            yield name, usual
    yield from _limits(arrays)


def _usual(arrays: SumArrays) -> Iterator[tuple[str, Call]]:
    stacked, _, base, out, _, _ = arrays
    weights = np.asarray(arrays.weights, np.float32)
    ends = np.linspace(0, base.size, LAYERS + 1).astype(int).tolist()
    layers = [slice(a, b) for a, b in pairwise(ends)]

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
    """Yield loops over the same number of bytes: one only reads, and one makes two reads for each write.

    Yields nothing if the native extension is not available.
    """
    try:
        from edgefl.lab import _probe
    except ImportError:
        return
    updates, vectors, threads = list(arrays.stacked), [arrays.base, arrays.out], arrays.threads
    both: list[list[Any]] = [updates, [scale for scale in arrays.scales if scale is not None]]
    groups = [*(group[i : i + 60] for group in both for i in range(0, len(group), 60)), vectors]
    is_float = arrays.stacked.dtype == np.float32
    if is_float and len(updates) < 60:
        groups = [[*updates, *vectors]]

    def read() -> None:
        for group in groups:
            _probe.read(group, threads)

    yield "read loop", read
    if is_float:
        third = arrays.moved_bytes // 12
        space = np.ones(3 * third, np.float32)
        a, b, c = (space[i * third : (i + 1) * third] for i in range(3))
        yield "STREAM triad", lambda: _probe.triad(a, b, c, 0.0, threads)


# ---- table and picture ---------------------------------------------------------------------------

MARK = " !"
"""Suffix added to the size in an unreliable row."""
DOUBTS = 8
"""Maximum number of unreliable rows for which the reasons are printed; the JSON file contains all reasons."""
SHORT = {RAW: "bare", "torch _foreach": "foreach", "numpy by layer": "numpy"}
SHORT |= {"STREAM triad": "triad", "read loop": "read"}
SHORT |= {f"{name}*": f"{name.split()[-1]}*" for name in NEEDS_STACK}
"""Shorter headings for narrow terminals."""


def show(result: dict[str, Any]) -> None:
    """Print tables of bandwidths and speed ratios, and tables for one thread and for other update types."""
    facts, rows, turns = result["host"], result["rows"], result["turns"]
    instructions = facts["instruction_set"]
    backend = facts["backend"] + (f" ({instructions})" if instructions else "")
    here = bench.machine_line(facts, f"{facts['threads']} threads", backend)
    floats = [row for row in rows if row["dtype"] == "float32" and row["threads"] == facts["threads"]]
    single = [row for row in rows if row["threads"] == 1 != facts["threads"]]
    typed = [row for row in rows if row["dtype"] != "float32"]
    names = list(dict.fromkeys(name for row in floats for name in row["contenders"]))
    others = [name for name in names if name != RAW]
    tables.show(_bandwidths("Weighted sum of K float32 updates of D: GB/s", floats, others, turns))
    if "edgefl c" in names:
        tables.show(_against(floats, [name for name in others if name[:6] not in ("edgefl", "STREAM")]))
        tables.show("over bare c: the time that c takes longer than a direct call on one thread")
    if single:
        alone = [name for name in names if name in ONE_THREAD]
        tables.show(_bandwidths("On one thread: GB/s", single, alone, turns))
    if typed and "edgefl c" in names:
        tables.show(_types(floats, typed))
    tables.show(
        f"{here}; medians of {turns} turns, or of fewer if marked ~, in {result['seconds']:.0f} s\n"
        "* needs the updates stacked in one matrix"
    )
    if doubted := [row for row in rows if row["doubts"]]:
        tables.show("! does not count; measure on an idle machine:")
        tables.show(*(f"  {_size(row)} {_kind(row)}: {'; '.join(row['doubts'])}" for row in doubted[:DOUBTS]))
        if (more := len(doubted) - DOUBTS) > 0:
            tables.show(f"  and {more} more: see doubts in the JSON file")
    if result["skipped"]:
        sizes = dict.fromkeys(f"{short(d)}×{k}" for d, k, *_ in result["skipped"])
        tables.show(f"not measured, because they would need too much memory or time: {', '.join(sizes)}")


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    heads = (f">{name.removeprefix('edgefl ')}{'*' * (name in NEEDS_STACK)}" for name in names)
    return tables.table(["D × K", *heads], rows, title, short=SHORT)


def _bandwidths(title: str, rows: list[dict[str, Any]], names: list[str], turns: int) -> Any:
    cells = []
    for row in rows:
        found = [row["contenders"].get(name) for name in names]
        marks = ["~" if each and each["turns"] < turns else "" for each in found]
        rates = [tables.number(each["gbytes_per_s"]) if each else "" for each in found]
        cells.append([_marked(row), *map("".join, zip(marks, rates, strict=True))])
    return _table(title, names, cells)


def _against(rows: list[dict[str, Any]], others: list[str]) -> Any:
    """Return a table of the C back end: its speed relative to ``others`` and numba, and its call overhead."""
    cells = []
    for row in rows:
        seconds = {name: figures["seconds"] for name, figures in row["contenders"].items()}
        mine = seconds["edgefl c"]
        ratios = [_ratio(seconds.get(name), mine) for name in others]
        over = f"{(mine - seconds[RAW]) * 1e6:+.0f} μs"
        cells.append([_marked(row), *ratios, _ratio(mine, seconds.get("edgefl numba")), over])
    return _table("c: times as fast as", [*others, "numba ÷ c", "over bare c"], cells)


def _types(floats: list[dict[str, Any]], typed: list[dict[str, Any]]) -> Any:
    as_floats = {(row["parameters"], row["updates"]): row for row in floats}
    cells = []
    for row in typed:
        figures, same = row["contenders"]["edgefl c"], as_floats[row["parameters"], row["updates"]]
        cells.append(
            [
                f"{_size(row)} {row['dtype']}{MARK * bool(row['doubts'])}",
                tables.number(figures["updates_per_s"]),
                _ratio(same["contenders"]["edgefl c"]["seconds"], figures["seconds"]),
                _ratio(same["bytes"], row["bytes"]),
                tables.number(figures["gbytes_per_s"]),
                f"{figures['of_limit']:.2f}",
                _ratio(figures["seconds"], row["contenders"].get("edgefl numba", {}).get("seconds")),
            ]
        )
    heads = ["updates/s", "times as fast", "as bytes allow", "GB/s", "c ÷ read loop", "numba ÷ c"]
    return _table("Other types of updates, c: updates/s, and against float32", heads, cells)


def _ratio(value: float | None, to: float | None) -> str:
    return "" if value is None or to is None else f"{value / to:.2f}"


def _size(row: dict[str, Any]) -> str:
    return f"{short(row['parameters'])}×{row['updates']}"


def _kind(row: dict[str, Any]) -> str:
    return f"{row['dtype']} on {row['threads']}"


def _marked(row: dict[str, Any]) -> str:
    return _size(row) + MARK * bool(row["doubts"])


def short(parameters: int) -> str:
    """Format a number of parameters in thousands (k) or millions (M)."""
    return f"{parameters / 1e6:.3g}M" if parameters >= 1_000_000 else f"{parameters / 1e3:.3g}k"


MARKERS = {"float32": "o", "float16": "s", "bfloat16": "D", "int8": "^"}


def draw(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """Plot GB/s against the number of bytes that a sum moves, and save the plot to each of ``paths``.

    Each contender is shown by a line for float32 on all threads and by points for the other types. The lines
    of the limits are thick and grey. The points of unreliable rows are hollow.
    """
    from matplotlib.figure import Figure

    from edgefl.results.figure import COLOURS, DASHES

    rows = [row for row in result["rows"] if row["threads"] == result["host"]["threads"]]
    rows.sort(key=lambda row: int(row["bytes"]))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
    for place, name in enumerate(names):
        limit = name in LIMITS
        colour = ("0.2", "0.6")[LIMITS.index(name)] if limit else COLOURS[place % len(COLOURS)]
        dash = "-" if limit else DASHES[place % len(DASHES)]
        mine = [(row, row["bytes"] / 1e6, row["contenders"][name]["gbytes_per_s"])
                for row in rows if name in row["contenders"]]  # fmt: skip
        line = [(x, y) for row, x, y in mine if row["dtype"] == "float32"]
        axes.plot(*zip(*line, strict=True), linestyle=dash, color=colour, linewidth=1 + limit, label=name)
        for row, x, y in mine:
            fill = "none" if row["doubts"] else colour
            axes.plot(x, y, MARKERS[row["dtype"]], color=colour, markerfacecolor=fill, markersize=5)
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        axes.plot([], [], MARKERS[dtype], color="black", markerfacecolor="none", label=dtype)
    axes.set(xscale="log", yscale="log", xlabel="MB moved by one sum", ylabel="GB/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(
            lambda value, _: f"{value:g}" if f"{value:g}".strip("0.")[0] in "235" else ""
        )
    hollow = "; hollow: does not count" if any(row["doubts"] for row in rows) else ""
    axes.set_title(f"Weighted sum, {result['host']['cpu']}, {result['host']['threads']} threads{hollow}")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    axes.grid(visible=True, which="both", linewidth=0.3)
    for path in paths:
        figure.savefig(path, dpi=150)
