"""Runs side by side: a table for the terminal, and a folder with summary, page and trace."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from edgefl.results.comparison import FIGURES, Run, RunGroup, common_target, count, group, load, plain, share
from edgefl.results.files import write_text
from edgefl.results.measures import rounded, slow_group
from edgefl.results.run_folder import SUMMARY_FILE, require_free


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
    return table(rows)


def table(rows: Sequence[RunGroup]) -> Table:
    """The comparison for a terminal of 80 columns."""
    out = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    out.add_column("run", overflow="fold", min_width=10)
    for name in ("accuracy", "slow*", "trips", "versions", "stale", "weight†"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("", no_wrap=True)
    for row in rows:
        f = row.figures
        verdict = Text(row.verdict, {"VALID": "green", "INVALID": "bold red"}.get(row.verdict, ""))
        out.add_row(
            Text(row.label),
            share(f["accuracy"]),
            share(f["slow_accuracy"]),
            count(f["client_trips"]),
            count(f["versions"]),
            f"{plain(f['staleness_mean'].mean)}/{f['staleness_max'].mean:.0f}",
            plain(f["slow_weight"].mean),
            verdict,
        )
    slow = slow_group(rows[0].runs[0].record)
    held = (
        f"the classes only {', '.join(slow.profiles)} hold"
        if slow.labels
        else "classes only on slow phones: none"
    )
    out.caption = Text(
        f"* accuracy on {held}\n† applied weight of a slow client: 1 is fair\nstale: staleness, mean/max"
    )
    out.caption_justify = "left"
    return out


def write(out: Path, runs: Sequence[Run], rows: Sequence[RunGroup]) -> None:
    """Write ``out/summary.json``, ``out/report.html`` and ``out/trace.json``."""
    from edgefl.results import trace
    from edgefl.results.compare_page import comparison_page

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
