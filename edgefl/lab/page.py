"""The output of a reproduction: summary.json, report.html, and a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from edgefl.lab.study import Curves, Finding
from edgefl.results import compare, comparison, page, tables
from edgefl.results.measures import rounded, slow_group
from edgefl.results.run_folder import SUMMARY_FILE, write_text
from edgefl.results.summary import summarize

COLOURS = {"reproduced": "green", "not reproduced": "bold red", "out of reach": "yellow"}


def table(findings: Sequence[Finding]) -> Table:
    """The claims for a terminal of 80 columns."""
    cells = []
    for one in findings:
        ours = one.ours + (f"\n({one.note})" if one.note else "")
        cells.append((one.claim, one.paper, ours, Text(one.verdict, COLOURS[one.verdict])))
    return tables.table(("claim", "paper", "here", "verdict"), cells, fold=True)


def rows_of(curves: Curves) -> list[comparison.RunGroup]:
    """The arms as rows of a comparison."""
    first = next(iter(curves.records.values()))[0]
    slow = slow_group(first).labels
    arms = {
        label: tuple(comparison.Run(record.folder, record, summarize(record), slow) for record in records)
        for label, records in curves.records.items()
    }
    target = comparison.common_target([run for runs in arms.values() for run in runs])
    return [comparison.run_group(label, runs, target) for label, runs in arms.items()]


def write(
    out: Path,
    title: str,
    citation: str,
    findings: Sequence[Finding],
    *,
    rows: Sequence[comparison.RunGroup] = (),
    notes: Sequence[str] = (),
    extra: dict[str, Any] | None = None,
) -> None:
    """Write ``summary.json`` and ``report.html`` into ``out``."""
    target = comparison.common_target([run for row in rows for run in row.runs]) if rows else None
    document = {
        "title": title,
        "citation": citation,
        **(extra or {}),
        "target_accuracy": None if target is None else rounded(target),
        "findings": [one._asdict() for one in findings],
        "arms": {
            row.label: {
                "seeds": [run.record.meta.seed for run in row.runs],
                "model_sha256": [run.summary["model_sha256"] for run in row.runs],
                "figures": row.estimates(),
            }
            for row in rows
        },
        "notes": list(notes),
    }
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(out / SUMMARY_FILE, text + "\n")
    write_text(out / "report.html", _page(title, citation, findings, rows, notes))


def _page(
    title: str,
    citation: str,
    findings: Sequence[Finding],
    rows: Sequence[comparison.RunGroup],
    notes: Sequence[str],
) -> str:
    counts = [(verdict, sum(one.verdict == verdict for one in findings)) for verdict in COLOURS]
    tones = {"reproduced": "good", "not reproduced": "bad"}
    figures: list[str] = []
    if rows:
        lines = "Thin: each seed; thick: their mean."
        figures = [
            page.figure("Accuracy over client trips", lines, compare.draw_accuracy(rows, "trips")),
            page.figure("Accuracy over emulated time", lines, compare.draw_accuracy(rows, "at_s")),
            *compare.profile_figures(rows),
        ]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return page.page(
        "edgefl reproduction",
        title,
        citation,
        [
            page.stat(name.capitalize(), str(count), "of the claims", tones.get(name, "") if count else "")
            for name, count in counts
        ],
        {
            "Claims": [page.card("", "", _claims(findings))],
            "Pictures": figures,
            "What differs from the paper": [page.card("", "", f"<ul>{items}</ul>")] if notes else [],
        },
        "Times are emulated seconds; ± is half the 95% interval of the mean over seeds.",
    )


def _claims(findings: Sequence[Finding]) -> str:
    head = ["Claim", "Paper", "Here", "Verdict", "Source and note"]
    cells = [
        [one.claim, one.paper, one.ours, one.verdict, "; ".join(filter(None, (one.source, one.note)))]
        for one in findings
    ]
    return tables.html_table(head, cells, wrap=(0, 1, 2, 4))
