"""The roofline of ``bench aggregate``: how far each sum is from what the memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MARKERS = {"float32": "o", "float16": "s", "bfloat16": "D", "int8": "^"}
_LIMITS = ("read loop", "STREAM triad", "copy")


def draw(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """Gflop/s over flop per byte, one point a row and contender, to each of ``paths``.

    A sum is K·D products and as many additions over the bytes that it moves; a roof is a limit's median
    bandwidth times flop per byte, once for the largest row (memory) and once for the smallest (cache).
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["threads"] == result["host"]["threads"]]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"] if name not in _LIMITS))
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
        for limit, shade in zip(_LIMITS, ("0.2", "0.45", "0.65"), strict=True):
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
