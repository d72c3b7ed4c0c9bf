"""What ``bench aggregate`` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from edgefl.lab.aggregate_contenders import NEEDS_STACK, RAW

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
