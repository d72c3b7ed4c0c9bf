"""The picture of ``bench fidelity``: rates, their errors, delays and heat, declared beside achieved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.lab.fidelity_links import JITTER, cdf

BAR = 3.0
"""The compute rate's 95th percentile, %."""
HOT = 4
"""Devices whose heat is drawn."""


def draw(result: dict[str, Any], paths: Sequence[Path]) -> None:
    """Four panels, to each of ``paths``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (left, right), (below, beside) = figure.subplots(2, 2)
    curves = result["curves"]
    _ranks(left, curves["ranks"])
    _errors(right, curves["rates"])
    _delays(below, curves["delays_ms"])
    _heat(beside, curves["heat"])
    figure.suptitle(f"Fidelity on {result['host']['cpu']}, {result['host']['cores']} cores", fontsize=10)
    for path in paths:
        figure.savefig(path, dpi=130)


def _ranks(axes: Any, ranks: dict[str, Any]) -> None:
    declared = np.array(ranks["declared"]) / 1e9
    measured = np.array(ranks["measured"], dtype=np.float64) / 1e9
    span = (0.8 * declared.min(), 1.25 * declared.max())
    axes.plot(span, span, color="0.6", linewidth=1)
    axes.plot(declared, measured, "o", markersize=4)
    for name, x, y in zip(ranks["devices"], declared, measured, strict=True):
        if x in (declared.min(), declared.max()):
            axes.annotate(
                name, (x, y), fontsize=7, textcoords="offset points", xytext=(-4, 4), ha="right", va="bottom"
            )
    axes.set(
        xscale="log", yscale="log", xlim=span, ylim=span, xlabel="declared GFLOPS", ylabel="measured GFLOPS"
    )
    axes.set_title(f"Training rate of {len(declared)} devices", fontsize=10)


def _errors(axes: Any, rates: dict[str, dict[str, list[float]]]) -> None:
    for name, found in rates.items():
        errors = np.sort(np.abs(np.array(found["achieved"]) / np.array(found["declared"]) - 1.0)) * 100
        axes.step(np.maximum(errors, 1e-3), np.arange(1, len(errors) + 1) / len(errors), label=name)
    axes.axvline(BAR, color="0.6", linewidth=1, linestyle="--")
    axes.axhline(0.95, color="0.6", linewidth=1, linestyle="--")
    axes.set(xscale="log", xlabel="error of a trip's compute rate, %", ylabel="share of trips below it")
    axes.set_title("Errors by mechanism; dashed: the 95th percentile's bar", fontsize=10)
    axes.legend(fontsize=8)


def _delays(axes: Any, delays_ms: dict[str, list[float]]) -> None:
    for i, (kind, found) in enumerate(delays_ms.items()):
        delay, spread = JITTER[kind]
        grid = np.linspace(max(0.0, delay - 4 * spread), delay + 6 * spread, 300)
        axes.plot(grid, cdf(kind, grid), color=f"C{i}", linewidth=3, alpha=0.3)
        axes.step(found, np.arange(1, len(found) + 1) / len(found), color=f"C{i}", linewidth=1, label=kind)
    axes.set(xlabel="one-way delay, ms", ylabel="share of messages below it", xlim=(0, 100))
    axes.set_title("Jitter; broad: as declared", fontsize=10)
    axes.legend(fontsize=8)


def _heat(axes: Any, heat: dict[str, dict[str, list[float]]]) -> None:
    falls = sorted(heat, key=lambda name: min(heat[name]["predicted"], default=1.0))
    for i, name in enumerate(falls[:HOT]):
        found = heat[name]
        minutes = np.array(found["at_s"]) / 60
        axes.plot(minutes, found["predicted"], color=f"C{i}", linewidth=4, alpha=0.3)
        axes.plot(minutes, found["achieved"], ".", color=f"C{i}", markersize=3, label=name)
    axes.set(xlabel="emulated minutes of training", ylabel="speed, of a cold device's")
    axes.set_title("Heat; broad: simulated in small steps", fontsize=10)
    axes.legend(fontsize=8)
