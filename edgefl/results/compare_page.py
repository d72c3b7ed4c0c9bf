"""The page and the pictures of a comparison."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from edgefl.results.comparison import Run, RunGroup, count, plain, share
from edgefl.results.measures import (
    class_accuracy,
    class_name,
    label_accuracy,
    profile_of_trips,
    profiles_by_speed,
)
from edgefl.results.page import card, figure, grid, heading, page, stat, stats, table
from edgefl.results.rows import EvaluationRow
from edgefl.results.style import (
    Canvas,
    Key,
    Picture,
    colour,
    house_style,
    percent_axis,
    plain_axis,
    series,
    shorten,
)
from edgefl.results.tables import number, percent, seconds


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
    head = ["Run", "Accuracy", "Slow classes", "Trips", "Versions", "Staleness", "max", "Slow weight",
            "Trips to target", "Seconds to target", "Fidelity"]  # fmt: skip
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
    return table(head, cells, text=(0,))


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
    record = rows[0].runs[0].record
    axes.set_xticks(list(ticks), [shorten(class_name(record, label), 6) for label in ticks])
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
