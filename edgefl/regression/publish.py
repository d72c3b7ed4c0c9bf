"""Publishes a session's results as a JSON file, an HTML page, and GitHub's annotations and summary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from edgefl.errors import RunError
from edgefl.files import encodable, write_json, write_text
from edgefl.regression.baseline import path_of
from edgefl.regression.gate import GateResults, GateRow, place_of
from edgefl.regression.markdown import markdown, workflow_commands
from edgefl.regression.table import ResultRow, Written


class PlacedRow(NamedTuple):
    """A row and the location of its test: file, and line number, counted from 0 (None if not known)."""

    row: ResultRow
    file: Path
    line: int | None


class Outlets(NamedTuple):
    """The files to which results are written; None for a file that is not wanted."""

    json: Path | None = None
    page: Path | None = None


def gate_results(placed: Iterable[PlacedRow], base: str, top: Path, *, skip: bool) -> GateResults:
    """Return the results of the rows.

    If ``skip`` is true, a function that could not be judged does not count as a failure.
    """
    return GateResults(
        base=base,
        rows=tuple(
            GateRow(
                test=encodable(one.row.test),
                function=one.row.function,
                device=one.row.device,
                outcome=one.row.word,
                why=encodable(one.row.why),
                label=encodable(one.row.label),
                skipped=skip and one.row.outcome == "INVALID",
                file=encodable(place_of(one.file, top)),
                line=0 if one.line is None else one.line + 1,
                seconds=one.row.seconds,
                predicted=one.row.predicted,
                peak_mib=one.row.peak_mib,
                sent_mib=one.row.sent_mib,
                joules=one.row.joules,
            )
            for one in placed
        ),
    )


def publish(
    results: GateResults, tests: Iterable[Path], outlets: Outlets, environment: Mapping[str, str] = os.environ
) -> Written:
    """Write the files and GitHub's step summary. The returned lines include GitHub's annotations."""
    lines = [*workflow_commands(results)] if environment.get("GITHUB_ACTIONS") == "true" else []
    complete = True
    for file, write in _writers(results, tests, outlets, environment.get("GITHUB_STEP_SUMMARY")):
        try:
            write(file)
        except (OSError, RunError) as error:
            lines.append(f"NOT written: {error}")
            complete = False
        else:
            lines += [f"wrote {file}"] if file in outlets else []
    return Written(lines, complete)


def _writers(
    results: GateResults, tests: Iterable[Path], outlets: Outlets, summary: str | None
) -> Iterator[tuple[Path, Callable[[Path], object]]]:
    """Yield the files to be written, each with a function that writes it."""
    if outlets.json is not None:
        yield outlets.json, lambda file: write_json(file, msgspec.to_builtins(results))
    if outlets.page is not None:
        yield outlets.page, lambda file: write_text(file, _page(results, tests))
    if summary:
        yield Path(summary), lambda file: _append(file, markdown(results))


def _append(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(text)


def _page(results: GateResults, tests: Iterable[Path]) -> str:
    from edgefl.regression.gate_page import gate_page  # takes a while to import
    from edgefl.regression.history import history

    series = [one for file in sorted(set(tests)) for one in history(path_of(file))]
    return gate_page(results, series, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
