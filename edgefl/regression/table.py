"""The report at the end of a session: a table for the terminal, JUnit properties, saved baselines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edgefl.errors import ConfigError
from edgefl.host.verdict import Outcome
from edgefl.regression.baseline import BaselineEntry, save
from edgefl.regression.counts import FIGURES, INSTRUCTIONS, NOT_COUNTED, CountedEntry, summary
from edgefl.regression.device import EdgeDevice
from edgefl.regression.gate import Word, device_time
from edgefl.results.tables import number, short_time

MIN_WIDTH, WHOLE_WIDTH, MAX_WIDTH = 60, 80, 120
"""Widths of the table in terminal columns: the minimum, the minimum at which all metrics are shown, and the
maximum."""
_COLUMNS = (("device", "time", 10), ("host CPU", "time", 10), ("memory", "MiB", 7), ("sent", "MiB", 9),
            ("energy", "J", 9), ("runs", "", 5))  # fmt: skip
_SPARE = ("host CPU", "energy")
_VERDICT = 12
NAME_WIDTH = 18
WORDS: Mapping[Outcome, Word] = {"PASS": "OK", "FAIL": "FAIL", "INVALID": "NOT JUDGED"}
"""The word that the table shows for each outcome, unless `ResultRow.word` uses REGRESSION or XFAIL."""
NOT_JUDGED = "COULD NOT BE JUDGED"
PROPERTIES = "edgefl."
"""Prefix of the property names in a JUnit file."""
_METRICS = ("seconds", "host_cpu_s", "peak_mib", "sent_mib", "joules")


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one function on one device, as plain data that can be sent between processes."""

    test: str
    label: str
    """The test's name with its parameters, without the device."""
    function: str
    device: str
    outcome: Outcome
    why: str
    grew: bool = False
    """True if a metric grew since the baseline."""
    expected: bool = False
    """True if the test is expected to fail, because of its mark ``xfail`` or a call of `pytest.xfail`."""
    counts: str = ""
    """The counted work, in one line."""
    figures: dict[str, int] = {}
    """The counts, keyed by name."""
    seconds: float | None = None
    host_cpu_s: float | None = None
    peak_mib: float | None = None
    sent_mib: float | None = None
    joules: float | None = None
    repetitions: int = 0
    entry: BaselineEntry | None = None
    """The baseline entry with times that is to be saved, if any."""
    counted: CountedEntry | None = None
    """The baseline entry with counted work that is to be saved, if any."""
    file: str = ""
    """Path of the file in which ``entry`` and ``counted`` are to be saved."""

    @property
    def predicted(self) -> bool:
        """True if ``seconds`` is predicted from the counts, not measured."""
        return self.seconds is not None and not self.repetitions

    @property
    def word(self) -> Word:
        """The outcome, as the table shows it."""
        if self.expected and self.outcome != "PASS":
            return "XFAIL"
        return "REGRESSION" if self.grew else WORDS[self.outcome]


def rows(device: EdgeDevice, test: str, failed: str, invalid: str, baseline: str | None) -> list[ResultRow]:
    """Return the rows of a finished test; ``failed`` and ``invalid`` are reasons why it did not pass.

    A failure that a test expects (``pytest.raises``) does not fail its row. If ``baseline`` is
    the path of a file, rows that passed contain the baseline entries to be saved there.
    """
    found = []
    passed = not (failed or invalid)
    for result in device.results:
        caught = passed and result.outcome == "FAIL"
        outcome: Outcome = "PASS" if caught else result.outcome
        kept = baseline and outcome == "PASS" and passed
        figures: dict[str, Any] = {}
        if result.timed is not None:
            figures = {name: result.timed.median(name) for name in _METRICS}
            figures["repetitions"] = result.repetitions
        elif result.counted is not None:
            figures = {"seconds": result.counted.seconds}
        row = ResultRow(
            test=test,
            label=device.label,
            function=result.function,
            device=result.device,
            outcome=outcome,
            why=f"the test caught this: {result.why}" if caught else result.why,
            grew=result.grew and not caught,
            counts="" if result.counted is None else summary(result.counted),
            figures={} if result.counted is None else result.counted.first.all(),
            **figures,
            entry=device.entry(result) if kept and not caught else None,
            counted=device.counted_entry(result) if kept else None,
            file=baseline or "",
        )
        found.append(row)
    if not passed and all(row.outcome == "PASS" for row in found):
        outcome = "FAIL" if failed else "INVALID"
        why = failed or invalid
        if found:
            found[-1] = msgspec.structs.replace(found[-1], outcome=outcome, why=why)
        else:
            row = ResultRow(
                test=test, label=device.label, function="", device=device.name, outcome=outcome, why=why
            )
            found.append(row)
    return found


def properties(row: ResultRow) -> Iterator[tuple[str, object]]:
    """Yield the properties of a row for a JUnit file, as (name, value) pairs."""
    name = PROPERTIES + (f"{row.device}.{row.function}" if row.function else row.device)
    yield f"{name}.outcome", row.outcome
    for metric in _METRICS:
        if (value := getattr(row, metric)) is not None:
            yield f"{name}.{metric}", float(f"{value:.5g}")
    if row.repetitions:
        yield f"{name}.repetitions", row.repetitions
    yield from ((f"{name}.{figure}", count) for figure, count in row.figures.items())
    if row.why:
        yield f"{name}.why", row.why


def lines(found: Sequence[ResultRow], columns: int = WHOLE_WIDTH) -> Iterator[str]:
    """Yield the lines of the table.

    For each test and function, there is a row for each device, followed by the reason for the outcome.
    ``columns`` is the available width in characters. Columns of the table that have no values are left out.
    If the width is below `WHOLE_WIDTH`, the columns in `_SPARE` are also left out.
    """
    columns = min(max(columns, MIN_WIDTH), MAX_WIDTH)
    cells = [_cells(row) for row in found]
    left_out = _SPARE if columns < WHOLE_WIDTH else ()
    shown = [
        one for one in _COLUMNS
        if one[0] == "device" or (one[0] not in left_out and any(row[one[0]] != "–" for row in cells))
    ]  # fmt: skip
    longest = max((len(row.device) for row in found), default=0)
    room = min(columns - sum(width for *_, width in shown) - _VERDICT, max(NAME_WIDTH, longest + 3))
    for line in (0, 1):
        yield (" " * room + "".join(f"{one[line]:>{one[2]}}" for one in shown)).rstrip()
    before = None
    for row, texts in zip(found, cells, strict=True):
        if (row.label, row.function) != before:
            before = (row.label, row.function)
            known = row.function in ("", row.test.partition("[")[0].rpartition("::")[2])
            yield _short(row.label if known else f"{row.label}: {row.function}", columns)
        figures = "".join(f" {texts[name]:>{width - 1}}" for name, _, width in shown)
        yield f"  {_short(row.device, room - 3):<{room - 2}}{figures}  {row.word}"
        why = f"{NOT_JUDGED}: {row.why}" if row.outcome == "INVALID" else row.why
        for text in (why, row.counts):
            yield from (f"    {line}" for line in textwrap.wrap(" ".join(text.split()), columns - 4))


def _cells(row: ResultRow) -> dict[str, str]:
    """Return the row's values as strings, keyed by column."""
    return {
        "device": device_time(row.seconds, row.predicted) or "–",
        "host CPU": "–" if row.host_cpu_s is None else short_time(row.host_cpu_s),
        "memory": "–" if row.peak_mib is None else f"{row.peak_mib:.{int(row.peak_mib < 1000)}f}",
        "sent": number(row.sent_mib),
        "energy": number(row.joules),
        "runs": str(row.repetitions or "–"),
    }


def _short(name: str, width: int) -> str:
    """Cut off the start of a long name, because its end is more specific."""
    return name if len(name) <= width else f"…{name[-(width - 1) :]}"


class Written(NamedTuple):
    """The outcome of writing files at the end of a session."""

    lines: list[str]
    """Lines for the terminal summary."""
    complete: bool
    """False if a file could not be written."""


def save_all(found: Iterable[ResultRow]) -> Written:
    """Save the baseline entries in all rows; return lines that list what was saved and what was not."""
    files: dict[str, list[ResultRow]] = {}
    for row in found:
        if row.counted is not None or row.entry is not None:
            files.setdefault(row.file, []).append(row)
    notes, complete = [], True
    for file, kept in sorted(files.items()):
        timed = [row.entry for row in kept if row.entry is not None]
        counted = [row.counted for row in kept if row.counted is not None]
        try:
            save(Path(file), timed, counted)
        except (ConfigError, OSError) as error:
            notes.append(f"NOT saved: {error}")
            complete = False
            continue
        notes.append(f"saved {len(kept)} in {file}")
        notes += [note for one in counted for note in _left_out(one)]
    return Written(notes, complete)


def _left_out(entry: CountedEntry) -> Iterator[str]:
    """Yield a line for each reason why metrics of an entry were not saved."""
    start = f"not saved for {entry.function} of {entry.test}, because "
    if entry.varying:
        names = ", ".join(FIGURES[name].text for name in entry.varying)
        yield f"{start}two counts of one call differ: {names}"
    if entry.uncounted:
        yield f"{start}{FIGURES[INSTRUCTIONS].text} were {NOT_COUNTED}"
