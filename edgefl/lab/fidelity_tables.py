"""What ``bench fidelity`` prints: a line a quantity, and a word on each that misses its bar."""

from __future__ import annotations

from typing import Any

from edgefl.results.tables import show as show_tables
from edgefl.results.tables import table

SLOWED = "off"
"""Only lines of slowed runs have this figure."""


def show(result: dict[str, Any]) -> None:
    """Print it."""
    lines = result["lines"]
    slowed = any(SLOWED in line["figures"] for line in lines)
    made = _slowed_table(lines) if slowed else _table(lines)
    show_tables(made)
    for line in lines:
        if line["why"]:
            show_tables(f"{line['quantity'] if slowed else _name(line)}: {line['why']}")
    for skipped in result["skipped"]:
        show_tables(f"left out, {skipped}")
    facts = result["host"]
    show_tables(
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']} before; {result['seconds']:g} s. "
        f"{result['verdict']}"
    )


def _table(lines: list[dict[str, Any]]) -> Any:
    rows = [
        (_name(line), f"{line['measured']:,}", found(line["figures"]), line["bar"], line["verdict"])
        for line in lines
    ]
    return table(["quantity", ">n", "error or figure", "bar", ""], rows)


def _name(line: dict[str, Any]) -> str:
    """The quantity, and of what: a mechanism where several have it, else what was declared."""
    several = line["quantity"] in ("compute rate", "whole trip", "isolation", "core share")
    return f"{line['quantity']}, {line['mechanism'] if several else line['declared'].partition(',')[0]}"


def _slowed_table(lines: list[dict[str, Any]]) -> Any:
    rows = [
        (
            line["quantity"],
            f"{line['figures']['time_scale']:.3g}",
            *(_share(line["figures"].get(name)) for name in ("load", "others", "throttled")),
            _share(line["figures"]["off"], ".1%"),
            "INVALID" if line["why"].startswith("says") else "VALID",
            line["verdict"],
        )
        for line in lines
    ]
    heads = ["host", ">scale", ">asked", ">others", ">stopped", ">off by", "run says", ""]
    return table(heads, rows)


def _share(value: float | None, form: str = ".0%") -> str:
    return "–" if value is None else format(value, form)


def found(figures: dict[str, float | None]) -> str:
    """The figures of a line in a few words.

    >>> found({"median": 0.0004, "p95": 0.0123, "signed": 0.0001})
    '0.04%, p95 1.23%'
    >>> found({"lost": 612.0, "sent": 30000.0, "share": 0.0204})
    '612 lost'
    """
    known = {name: value for name, value in figures.items() if value is not None}
    if known.keys() < figures.keys() or not known:
        return "–"
    if "rmse" in known:
        return f"RMSE {known['rmse']:.2%}"
    if "median" in known:
        return f"{known['median']:.2%}, p95 {known['p95']:.2%}"
    if "p95_ms" in known:
        return f"{known['median_ms']:.2f}, p95 {known['p95_ms']:.2f} ms"
    if "ks" in known:
        return f"D {known['ks']:.3f}, p {known['p_value']:.2f}"
    if "lost" in known:
        return f"{known['lost']:.0f} lost"
    if "rho" in known:
        return f"ρ {known['rho']:.4f}"
    return f"{max(known.values()):.2%} at most"
