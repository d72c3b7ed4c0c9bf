"""Results as GitHub shows them: annotations in a job's log, and Markdown for its summary or a comment."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgefl.regression.gate import LONG, GateResults, GateRow
from edgefl.results.tables import number

MARKER = "<!-- edgefl gate -->"
"""First line of each comment, by which a workflow finds the comment that it should replace."""
MAX_CHARACTERS = 60_000
"""Maximum length of a comment. GitHub rejects comments of 65,536 characters or more."""


def workflow_commands(results: GateResults) -> Iterator[str]:
    """Yield GitHub's workflow commands: an error for each row that fails the session, and a warning for each
    other row that could not be judged.

    >>> row = GateRow(test="t.py::test_a", function="a", device="pi-4", outcome="REGRESSION",
    ...     why="time +9%", file="t.py", line=3)
    >>> next(workflow_commands(GateResults(rows=(row,))))
    '::error file=t.py,line=3,title=edgefl%3A REGRESSION::a on pi-4: time +9%25'
    """
    for row in results.worst_first:
        if row.outcome in ("OK", "XFAIL"):
            continue
        place = f"file={_property(row.file)},line={max(1, row.line)}," if row.file else ""
        title = _property(f"edgefl: {LONG.get(row.outcome, row.outcome)}")
        level = "error" if row.red else "warning"
        text = f"{row.function or row.name} on {row.device}: {row.why}"
        yield f"::{level} {place}title={title}::{_data(text)}"


def markdown(results: GateResults) -> str:
    """Return a heading and a table with one row per function and device, worst first."""
    lines = [f"### edgefl: {results.headline}", ""]
    if results.base:
        lines += [f"Compared with {_cell(results.base)}.", ""]
    if results.rows:
        lines += ["| outcome | test | device | on the device | why |", "|---|---|---|---:|---|"]
    left = MAX_CHARACTERS
    for place, row in enumerate(results.worst_first):
        line = _line(row)
        left -= len(line) + 1
        if left < 0:
            lines += ["", f"{len(results.rows) - place} more are left out."]
            break
        lines.append(line)
    return "\n".join(lines) + "\n"


def comment(results: GateResults) -> str:
    """Return the Markdown of a comment on a pull request."""
    return f"{MARKER}\n{markdown(results)}"


def _line(row: GateRow) -> str:
    word = LONG.get(row.outcome, row.outcome)
    figures = (
        row.time,
        f"{number(row.peak_mib)} MiB" if row.peak_mib is not None else "",
        f"{number(row.sent_mib)} MiB sent" if row.sent_mib else "",
    )
    cells = (
        f"**{word}**" if row.red else word,
        f"`{_code(row.name)}`",
        _cell(row.device),
        ", ".join(filter(None, figures)),
        _cell(row.why),
    )
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Return text as a table cell: one line, with the special characters of Markdown and HTML escaped.

    GitHub looks for users (``@name``) and issues (``#1``) after it has removed backslashes, so an empty HTML
    comment is inserted after each of these characters.
    """
    line = re.sub(r"([\\`*_\[\]<>|~&])", r"\\\1", " ".join(text.split()))
    return re.sub("[@#]", r"\g<0><!-- -->", line)


def _code(text: str) -> str:
    """Return text for a code span in a table cell, where only backticks and bars are special characters."""
    return " ".join(text.split()).replace("`", "'").replace("|", "\\|")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
