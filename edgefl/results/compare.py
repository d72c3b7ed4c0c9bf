"""Runs side by side: a table for the terminal, and a folder with summary, page and trace."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from edgefl.results import page, trace
from edgefl.results.comparison import (
    FIGURES,
    Run,
    RunGroup,
    common_target,
    count,
    estimate,
    group,
    load,
    share,
)
from edgefl.results.measures import label_accuracy, profiles_by_speed, rounded, slow_group
from edgefl.results.page import Curve, Picture, house_style, series
from edgefl.results.run_folder import SUMMARY_FILE, require_free, write_text
from edgefl.results.tables import html_table, number, percent, table

VERDICT_COLOURS = {"VALID": "green", "INVALID": "bold red"}


def compare(folders: Sequence[str | Path], out: str | Path | None = None) -> Table:
    """A table of the runs in ``folders``, 80 columns wide; with ``out`` also a folder about them.

    Runs that differ in nothing but their seed are one row, mean ± half the 95% interval of the mean
    (Student's t). The slow phones' classes are those that only the first run's slowest profiles hold. ``out``
    gets summary.json (the first run's, with ``runs`` and ``comparison``), report.html and trace.json.
    Raises `ConfigError` if a folder is not a run's, is named twice, or holds a run on other data, and if
    ``out`` is a file, or holds a run or a reproduction.
    """
    if out is not None:
        require_free(Path(out), "comparison")
    runs = load(folders)
    rows = group(runs)
    if out is not None:
        write(Path(out), runs, rows)
    return comparison_table(rows)


def comparison_table(rows: Sequence[RunGroup]) -> Table:
    """The comparison for a terminal of 80 columns."""
    slow = slow_group(rows[0].runs[0].record)
    held = (
        f"the classes only {', '.join(slow.profiles)} hold"
        if slow.labels
        else "classes only on slow phones: none"
    )
    cells = []
    for row in rows:
        f = row.figures
        stale = f"{number(f['staleness_mean'].mean)}/{f['staleness_max'].mean:.0f}"
        verdict = Text(row.verdict, VERDICT_COLOURS.get(row.verdict, ""))
        cells.append(
            (row.label, share(f["accuracy"]), share(f["slow_accuracy"]), count(f["client_trips"]),
             count(f["versions"]), stale, number(f["slow_weight"].mean), verdict)
        )  # fmt: skip
    return table(
        ("run", ">accuracy", ">slow*", ">trips", ">versions", ">stale", ">weight†", ""),
        cells,
        caption=f"* accuracy on {held}\n"
        "† applied weight of a slow client: 1 is fair\n"
        "stale: staleness, mean/max",
        fold=True,
        gap=1,
    )


def write(out: Path, runs: Sequence[Run], rows: Sequence[RunGroup]) -> None:
    """Write ``out/summary.json``, ``out/report.html`` and ``out/trace.json``."""
    text = json.dumps(document(out, runs, rows), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(out / SUMMARY_FILE, text + "\n")
    write_text(out / "report.html", comparison_page(out, runs, rows))
    page.close_fonts()
    trace.write_events(out / trace.FILE_NAME, [run.record for run in runs])


def document(out: Path, runs: Sequence[Run], rows: Sequence[RunGroup]) -> dict[str, Any]:
    """The comparison's summary.json: the first run's fields, then every run and how rows differ."""
    target = common_target(runs)
    first = rows[0].figures
    return {
        **runs[0].summary,
        "runs": [{"folder": os.path.relpath(run.folder, out), **run.summary} for run in runs],
        "comparison": {
            "target_accuracy": None if target is None else rounded(target),
            "slow_phones_labels": list(runs[0].slow_labels),
            "rows": [
                {
                    "label": row.label,
                    "seeds": [run.record.meta.seed for run in row.runs],
                    "valid": row.valid,
                    "figures": row.estimates(),
                    "minus_first": {
                        name: rounded(row.figures[name].mean - first[name].mean) for name in FIGURES
                    },
                }
                for row in rows
            ],
        },
    }


def comparison_page(out: Path, runs: Sequence[Run], rows: Sequence[RunGroup]) -> str:
    """The page: self-contained HTML that links to each run's own report where that lies under ``out``."""
    meta = runs[0].record.meta
    several = any(len(row.runs) > 1 for row in rows)
    about = "To target: until the first evaluation with the highest accuracy that every run reached."
    if several:
        about += " ± is half the 95% interval of the mean over seeds."
    lines = "Thin: each seed; thick: their mean." if several else "On test examples."
    invalid = ", ".join(row.label for row in rows if not row.valid)
    slow = draw_accuracy(rows, "trips", slow=True) if runs[0].slow_labels else None
    sections = {
        "Side by side": [page.card("Runs", about, _table(rows)), page.card("Each run", "", _each(out, runs))],
        "Learning": [
            page.figure("Accuracy over emulated time", lines, draw_accuracy(rows, "at_s")),
            page.figure("Accuracy over client trips", "What it cost in downloads, training and uploads.",
                        draw_accuracy(rows, "trips")),
            page.figure("Accuracy on the slow phones' classes", "Classes that no faster phone holds.", slow,
                        "Every class is held by a fast phone too."),
            *profile_cards(rows),
        ],
    }  # fmt: skip
    return page.page(
        "edgefl comparison",
        " · ".join(row.label for row in rows[:4]) + (" …" if len(rows) > 4 else ""),
        " · ".join(part for part in (meta.data, meta.model, f"{len(runs)} runs") if part),
        (),
        sections,
        "Times are emulated seconds.",
        banner=f"<b>INVALID:</b> {escape(invalid)}. Do not use their figures as results; each run's own "
        "report says why."
        if invalid
        else "",
    )


def profile_cards(rows: Sequence[RunGroup]) -> list[str]:
    """Cards with applied weight and staleness by profile, slowest first, a column a row of the comparison."""
    names = dict.fromkeys(name for row in rows for name in profiles_by_speed(row.runs[0].record))

    def by_profile(title: str, about: str, value: Callable[[dict[str, Any]], dict[str, float]]) -> str:
        found = [[value(run.summary) for run in row.runs] for row in rows]
        cells = [
            [name, *(_mean([figures[name] for figures in seeds if name in figures]) for seeds in found)]
            for name in names
        ]
        return page.card(title, about, html_table(["Profile", *(f">{row.label}" for row in rows)], cells))

    return [
        by_profile("Applied weight by profile", "Mean share of applied weight, times n: 1 is fair.",
                   lambda summary: summary["applied_weight"]["by_profile"]),
        by_profile("Staleness by profile", "Mean over applied updates.",
                   lambda summary: {name: found["mean"]
                                    for name, found in summary["staleness"]["by_profile"].items()}),
    ]  # fmt: skip


def _mean(values: Sequence[float]) -> str | None:
    return str(estimate(values)) if values else None


def _table(rows: Sequence[RunGroup]) -> str:
    head = ["Run", ">Accuracy", ">Slow classes", ">Trips", ">Versions", ">Staleness", ">max", ">Slow weight",
            ">Trips to target", ">Seconds to target", ">Fidelity"]  # fmt: skip
    cells = []
    for row in rows:
        f = row.figures
        weight = str(f["slow_weight"]) if np.isfinite(f["slow_weight"].mean) else None
        cells.append(
            [row.label, share(f["accuracy"]), share(f["slow_accuracy"]), count(f["client_trips"]),
             count(f["versions"]), number(f["staleness_mean"].mean), number(f["staleness_max"].mean),
             weight, count(f["trips_to_target"]), number(f["emulated_s_to_target"].mean), row.verdict]
        )  # fmt: skip
    return html_table(head, cells)


def _each(out: Path, runs: Sequence[Run]) -> str:
    items = []
    for run in runs:
        path = os.path.relpath(run.folder / "report.html", out)
        meta = run.record.meta
        name = escape(f"{meta.strategy or run.folder.name}, seed {meta.seed}")
        inside = not path.startswith("..") and (run.folder / "report.html").is_file()
        link = f'<a href="{escape(Path(path).as_posix())}">{name}</a>' if inside else name
        figures = f"{percent(run.summary['accuracy'])}, {run.summary['client_trips']:,} trips"
        sha256 = escape(meta.model_sha256[:16])
        items.append(f'<dt>{link}</dt><dd>{figures} <span class="hash">{sha256}</span></dd>')
    return f"<dl>{''.join(items)}</dl>"


@house_style()
def draw_accuracy(rows: Sequence[RunGroup], over: str, slow: bool = False) -> Picture | None:
    """A curve a row over ``at_s`` or ``trips``: thin for each seed, thick for the mean of all.

    With ``slow`` the accuracy on the classes that only slow clients hold.
    """
    curves = []
    for k, row in enumerate(rows):
        points = [
            [
                (getattr(e, over), y)
                for e in run.record.evaluations
                if np.isfinite(y := label_accuracy(e, run.slow_labels) if slow else e.accuracy)
            ]
            for run in row.runs
        ]
        seeds = [np.array(found, dtype=np.float64).T for found in points if found]
        if len(seeds) == 1:
            curves.append(Curve(series(k), row.label, *seeds[0]))
        elif seeds:
            x = np.unique(np.concatenate([seed[0] for seed in seeds]))
            x = x[x <= min(seed[0][-1] for seed in seeds)]
            mean = np.mean([np.interp(x, *seed) for seed in seeds], axis=0)
            curves.append(Curve(series(k), row.label, x, mean, seeds))
    what = "Accuracy on slow phones' classes" if slow else "Accuracy"
    return page.accuracy_picture(curves, over, what)
