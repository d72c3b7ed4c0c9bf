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

from edgefl.results.comparison import FIGURES, Run, RunGroup, common_target, count, group, load, plain, share
from edgefl.results.measures import (
    class_accuracy,
    label_accuracy,
    profile_of_trips,
    profiles_by_speed,
    rounded,
    slow_group,
)
from edgefl.results.page import (
    Canvas,
    Key,
    Picture,
    card,
    colour,
    figure,
    grid,
    heading,
    house_style,
    page,
    percent_axis,
    plain_axis,
    series,
    shorten,
    stat,
    stats,
)
from edgefl.results.record import EvaluationRow
from edgefl.results.run_folder import SUMMARY_FILE, require_free, write_text
from edgefl.results.tables import html_table, number, percent, seconds, table

VERDICT_COLOURS = {"VALID": "green", "INVALID": "bold red"}


def compare(folders: Sequence[str | Path], out: str | Path | None = None) -> Table:
    """A table of the runs in ``folders``, 80 columns wide; with ``out`` also a folder about them.

    Runs that differ in nothing but their seed are one row, mean ± half the 95% interval of the mean
    (Student's t). The slow phones' classes are those that only the first run's slow phones hold. ``out``
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
    return table(
        ("run", ">accuracy", ">slow*", ">trips", ">versions", ">stale", ">weight†", ""),
        [
            (
                row.label,
                share(row.figures["accuracy"]),
                share(row.figures["slow_accuracy"]),
                count(row.figures["client_trips"]),
                count(row.figures["versions"]),
                f"{plain(row.figures['staleness_mean'].mean)}/{row.figures['staleness_max'].mean:.0f}",
                plain(row.figures["slow_weight"].mean),
                Text(row.verdict, VERDICT_COLOURS.get(row.verdict, "")),
            )
            for row in rows
        ],
        caption=(
            f"* accuracy on {held}\n† applied weight of a slow client: 1 is fair\nstale: staleness, mean/max"
        ),
        fold=True,
        gap=1,
    )


def write(out: Path, runs: Sequence[Run], rows: Sequence[RunGroup]) -> None:
    """Write ``out/summary.json``, ``out/report.html`` and ``out/trace.json``."""
    from edgefl.results import trace

    text = json.dumps(document(out, runs, rows), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(out / SUMMARY_FILE, text + "\n")
    write_text(out / "report.html", comparison_page(out, runs, rows))
    trace.write_events(out / trace.FILE_NAME, [run.record for run in runs])


def document(out: Path, runs: Sequence[Run], rows: Sequence[RunGroup]) -> dict[str, Any]:
    """The comparison's summary.json: the first run's fields, then every run and how rows differ."""
    target = common_target(runs)
    first = rows[0]

    def estimates(row: RunGroup) -> dict[str, Any]:
        return {
            name: {"mean": rounded(e.mean), "half_95": None if e.half is None else rounded(e.half)}
            for name, e in row.figures.items()
        }

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
                    "figures": estimates(row),
                    "minus_first": {
                        name: rounded(row.figures[name].mean - first.figures[name].mean) for name in FIGURES
                    },
                }
                for row in rows
            ],
        },
    }


def comparison_page(out: Path, runs: Sequence[Run], rows: Sequence[RunGroup]) -> str:
    """The page: self-contained HTML that links to each run's own report where that lies under ``out``."""
    slow = runs[0].slow_labels
    meta = runs[0].record.meta
    title = " · ".join(row.label for row in rows[:4]) + (" …" if len(rows) > 4 else "")
    sub = " · ".join(part for part in (meta.data, meta.model, f"{len(runs)} runs") if part)
    invalid = [row.label for row in rows if not row.valid]
    banner = (
        f'<section class="banner"><b>INVALID:</b> {escape(", ".join(invalid))}. Do not use their figures as '
        "results; each run's own report says why.</section>"
    )
    parts = [
        heading("edgefl comparison", title, sub),
        banner if invalid else "",
        stats(_headline(rows)),
        "<h2>Side by side</h2>",
        grid([card("Runs", _about(rows), _table(rows)), card("Each run", "", _each(out, runs))]),
        "<h2>Learning</h2>",
        grid(
            [
                figure("Accuracy over emulated time", _lines_about(rows),
                       draw_accuracy(rows, "at_s", lambda e, _: e.accuracy)),
                figure("Accuracy over client trips", "What it cost in downloads, training and uploads.",
                       draw_accuracy(rows, "trips", lambda e, _: e.accuracy)),
                figure("Accuracy on the slow phones' classes", "Classes that no faster phone holds.",
                       draw_accuracy(rows, "trips", _slow_accuracy) if slow else None,
                       "Every class is held by a fast phone too."),
                figure("Applied weight by profile", "Mean share of applied weight, times n: 1 is fair.",
                       draw_by_profile(rows, weights, "of the fair share", fair=True),
                       "No update was applied."),
                figure("Staleness by profile", "Mean over applied updates.",
                       draw_by_profile(rows, staleness, "versions"),
                       "No update was applied."),
                figure("Accuracy by class", "At the last evaluation; mean over seeds.",
                       draw_by_class(rows), "No evaluation was made."),
            ]
        ),
        "<footer>Times are emulated seconds.</footer>",
    ]  # fmt: skip
    return page("Comparison · edgefl", parts)


def _about(rows: Sequence[RunGroup]) -> str:
    text = "To target: until the first evaluation with the highest accuracy that every run reached."
    several = any(len(row.runs) > 1 for row in rows)
    return text + (" ± is half the 95% interval of the mean over seeds." if several else "")


def _lines_about(rows: Sequence[RunGroup]) -> str:
    return (
        "Thin: each seed; thick: their mean."
        if any(len(row.runs) > 1 for row in rows)
        else "On test examples."
    )


def _headline(rows: Sequence[RunGroup]) -> list[str]:
    def best(name: str, text: Callable[[float], str], title: str, *, near: float | None = None) -> str:
        known = [row for row in rows if np.isfinite(row.figures[name].mean)]
        if not known:
            return stat(title, "–", "not measured")

        def merit(row: RunGroup) -> float:
            value = row.figures[name].mean
            return value if near is None else -abs(value - near)

        top = max(known, key=merit)
        return stat(title, text(top.figures[name].mean), top.label)

    def cheap(name: str, text: Callable[[float], str], title: str) -> str:
        known = [row for row in rows if np.isfinite(row.figures[name].mean)]
        if not known:
            return stat(title, "–", "not reached by all")
        top = min(known, key=lambda row: row.figures[name].mean)
        return stat(title, text(top.figures[name].mean), top.label)

    return [
        best("accuracy", percent, "Best accuracy"),
        best("slow_accuracy", percent, "Best on slow phones' classes"),
        best("slow_weight", number, "Fairest to slow phones", near=1.0),
        cheap("trips_to_target", lambda v: f"{v:,.0f}", "Fewest trips to target"),
        cheap("emulated_s_to_target", seconds, "Fastest to target"),
    ]


def _table(rows: Sequence[RunGroup]) -> str:
    head = ["Run", ">Accuracy", ">Slow classes", ">Trips", ">Versions", ">Staleness", ">max", ">Slow weight",
            ">Trips to target", ">Seconds to target", ">Fidelity"]  # fmt: skip
    cells = []
    for row in rows:
        f = row.figures
        cells.append(
            [row.label, share(f["accuracy"]), share(f["slow_accuracy"]), count(f["client_trips"]),
             count(f["versions"]), plain(f["staleness_mean"].mean), plain(f["staleness_max"].mean),
             str(f["slow_weight"]) if np.isfinite(f["slow_weight"].mean) else "–",
             count(f["trips_to_target"]),
             plain(f["emulated_s_to_target"].mean), row.verdict]
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
        items.append(
            f'<dt>{link}</dt><dd>{figures} <span class="hash">{escape(meta.model_sha256[:16])}</span></dd>'
        )
    return f"<dl>{''.join(items)}</dl>"


@house_style
def draw_accuracy(
    rows: Sequence[RunGroup], over: str, value: Callable[[EvaluationRow, Run], float]
) -> Picture | None:
    """A line a row: thin for each seed, thick for the mean over the part that all its seeds cover."""
    canvas = Canvas()
    axes = canvas.axes
    keys, farthest = [], 0.0
    for k, row in enumerate(rows):
        curves = []
        for run in row.runs:
            points = [(getattr(e, over), value(e, run)) for e in run.record.evaluations]
            points = [(x, y) for x, y in points if np.isfinite(y)]
            if points:
                curves.append(np.array(points, dtype=np.float64).T)
        if not curves:
            continue
        role = series(k)
        keys.append(Key(role, row.label))
        if len(curves) > 1:
            for x, y in curves:
                axes.plot(x, y, color=colour(role), linewidth=0.8, alpha=0.45)
            grid_x = np.unique(np.concatenate([x for x, _ in curves]))
            grid_x = grid_x[grid_x <= min(x[-1] for x, _ in curves)]
            mean = (grid_x, np.mean([np.interp(grid_x, x, y) for x, y in curves], axis=0))
        else:
            mean = (curves[0][0], curves[0][1])
        (line,) = axes.plot(*mean, color=colour(role), linewidth=2.2)
        axes.plot(mean[0][-1:], mean[1][-1:], "o", color=colour(role), markersize=5)
        canvas.tip(line, f"{row.label}: {mean[1][-1]:.1%} at the end")
        farthest = max(farthest, *(float(x[-1]) for x, _ in curves))
    if not keys:
        return None
    axes.set_xlim(0, (farthest or 1.0) * 1.04)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("emulated seconds" if over == "at_s" else "client trips")
    percent_axis(axes.yaxis)
    plain_axis(axes.xaxis)
    return Picture(canvas.svg("Accuracy by run"), tuple(keys))


def _slow_accuracy(row: EvaluationRow, run: Run) -> float:
    return label_accuracy(row, run.slow_labels)


@house_style
def draw_by_class(rows: Sequence[RunGroup]) -> Picture | None:
    """Accuracy in each class, a mark a row."""
    canvas = Canvas()
    axes, keys, classes = canvas.axes, [], 0
    for k, row in enumerate(rows):
        found = [class_accuracy(run.record.evaluations[-1]) for run in row.runs if run.record.evaluations]
        if not found or not found[0].size:
            continue
        mean, classes = np.mean(found, axis=0), found[0].size
        role = series(k)
        (marks,) = axes.plot(mean, "o", color=colour(role), markersize=6 if classes <= 20 else 3)
        canvas.tip(marks, row.label)
        keys.append(Key(role, row.label))
    if not keys:
        return None
    ticks = range(0, classes, max(1, -(-classes // 12)))
    axes.set_xticks(list(ticks), [str(label) for label in ticks])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("class")
    percent_axis(axes.yaxis)
    return Picture(canvas.svg("Accuracy by class"), tuple(keys))


def weights(run: Run) -> dict[str, float]:
    """Mean applied weight by profile, times n."""
    return {
        name: value
        for name, value in run.summary["applied_weight"]["by_profile"].items()
        if value is not None
    }


def staleness(run: Run) -> dict[str, float]:
    """Mean staleness of applied updates by profile."""
    used, profile = run.record.trips["uses"] > 0, profile_of_trips(run.record)
    values = run.record.trips["staleness"]
    return {
        name: float(values[chosen].mean())
        for name in profiles_by_speed(run.record)
        if (chosen := used & (profile == name)).any()
    }


@house_style
def draw_by_profile(
    rows: Sequence[RunGroup], value: Callable[[Run], dict[str, float]], unit: str, *, fair: bool = False
) -> Picture | None:
    """A figure by profile, a bar a row side by side."""
    found = [[value(run) for run in row.runs] for row in rows]
    names: list[str] = []
    for row in rows:
        names += [name for name in reversed(profiles_by_speed(row.runs[0].record)) if name not in names]
    names = [name for name in names if any(name in figures for seeds in found for figures in seeds)]
    if not names:
        return None
    pitch = max(34.0, 13.0 * len(rows) + 14)
    canvas = Canvas(
        height=max(200, 48 + pitch * len(names)), left=16 + 5.9 * max(len(shorten(n)) for n in names)
    )
    axes = canvas.axes
    height = 0.78 / len(rows)
    top = 0.0
    for k, (row, seeds) in enumerate(zip(rows, found, strict=True)):
        for position, name in enumerate(names):
            values = [figures[name] for figures in seeds if name in figures]
            if not values:
                continue
            mean = float(np.mean(values))
            y = -position + 0.39 - height * (k + 0.5)
            (bar,) = axes.barh([y], [mean], height=height * 0.86, color=colour(series(k)))
            canvas.tip(bar, f"{row.label}, {name}: {mean:.3g} {unit}")
            axes.annotate(
                f"{mean:.3g}", (mean, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5
            )
            top = max(top, mean)
    if fair:
        axes.axvline(1.0, color=colour("ink"), linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_yticks([-k for k in range(len(names))], [shorten(name) for name in names])
    axes.tick_params(axis="y", labelcolor=colour("ink"))
    axes.set_ylim(-len(names) + 0.45, 0.55)
    axes.set_xlim(0, max(top * 1.14, 1.2 if fair else 1e-9))
    axes.grid(False, axis="y")
    axes.set_xlabel(unit)
    plain_axis(axes.xaxis)
    return Picture(canvas.svg("By profile"), tuple(Key(series(k), row.label) for k, row in enumerate(rows)))
