"""The HTML page of a session: its outcomes, and the history of its functions' metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from edgefl.regression.gate import LONG, GateResults, GateRow
from edgefl.regression.history import Series
from edgefl.results.page import Picture, card, figure, html_table, page, stat
from edgefl.results.pictures import Canvas, colour, house_style
from edgefl.results.tables import many, number

MAX_PICTURES, MAX_TICKS = 60, 5


def gate_page(results: GateResults, series: Sequence[Series], when: str) -> str:
    """Return the HTML page with a session's results and the history of its baselines.

    ``when`` is the date and time that the page shows.
    """
    red = [row for row in results.worst_first if row.red]
    others = [row for row in results.worst_first if not row.red]
    headline = [
        stat("Gate", "RED" if results.red else "GREEN", "", "bad" if results.red else "good"),
        stat("Measured", str(len(results.rows)), "functions on devices"),
        stat("Red", str(len(red)), "of them", "bad" if red else ""),
    ]
    if series:
        headline.append(
            stat("Changes of level", str(sum(len(one.steps) for one in series)), "in the history")
        )
    ordered = sorted(series, key=lambda one: not one.steps)  # first those that have changed
    sections = {
        "Why it is red": [card("", "", _table(red))] if red else [],
        "Other functions" if red else "All functions": [card("", "", _table(others))] if others else [],
        "History": [_figure(one) for one in ordered[:MAX_PICTURES]],
    }
    base = f"Compared with {results.base}" if results.base else "Device tests"
    history = (
        "Each point is a commit that changed a baseline. A dashed line marks a change of level by 2% or more."
    )
    left = len(ordered) - MAX_PICTURES
    more = f" The page leaves out {many(left, 'more figure')}." if left > 0 else ""
    footer = f"{history}{more}" if series else ""
    return page("edgefl · device tests", results.headline, f"{base}, {when}", headline, sections, footer)


def _table(rows: Iterable[GateRow]) -> str:
    return html_table(
        ("Outcome", "Test", "Device", ">Time on the device", ">Peak memory, MiB", ">Sent, MiB", "Reason"),
        [
            (
                LONG.get(row.outcome, row.outcome),
                row.name,
                row.device,
                row.time or "–",
                number(row.peak_mib),
                number(row.sent_mib),
                row.why,
            )
            for row in rows
        ],
        wrap=(1, 6),
    )


def _figure(series: Series) -> str:
    last = [series.points[place] for place in series.steps[-1:]]
    about = "".join(f"Level last changed at {point.commit}: {point.subject}" for point in last)
    name = series.test if series.function in series.test else f"{series.test}: {series.function}"
    return figure(f"{name}: {series.figure}", about or "No change of level.", _picture(series))


@house_style()
def _picture(series: Series) -> Picture:
    values = np.array([point.value for point in series.points])
    places = range(len(values))
    canvas = Canvas(left=52.0, up=series.unit or series.figure)
    for start, end in zip([0, *series.steps], [*series.steps, len(values)], strict=True):
        level = float(values[start:end].mean())
        canvas.axes.plot([start, end - 1], [level, level], color=colour("muted"), linewidth=1.2)
    for place in series.steps:
        canvas.axes.axvline(place - 0.5, color=colour("bad"), linewidth=1.2, linestyle="--")
    for place, point in zip(places, series.points, strict=True):
        (dot,) = canvas.axes.plot([place], [point.value], "o", color=colour("c1"), markersize=5)
        canvas.tip(dot, f"{point.commit} {point.subject}: {number(point.value)} {series.unit}")
    canvas.axes.set_ylim(0, float(values.max()) * 1.15 or 1.0)
    canvas.axes.set_xlim(-0.6, max(1.0, len(values) - 0.4))
    wanted = places[:: -(-len(places) // MAX_TICKS)]
    canvas.axes.set_xticks(wanted, [series.points[place].commit[:7] for place in wanted])
    canvas.axes.set_xlabel("commit, oldest first")
    data = [
        ("commit", "subject", series.unit),
        *((one.commit, one.subject, one.value) for one in series.points),
    ]
    return Picture(canvas.svg(f"{series.test} {series.function} {series.figure}"), data=data)
