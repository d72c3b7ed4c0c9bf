"""The report at the end of a session: a table of 80 columns, JUnit properties, saved baselines."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from edgefl.errors import ConfigError
from edgefl.regression.baseline import BaselineEntry, save
from edgefl.regression.device import EdgeDevice
from edgefl.results.tables import number, short_time

WIDTH = 80
_COLUMNS = (("device", 10), ("host CPU", 10), ("MiB", 7), ("sent MiB", 10), ("J", 9), ("n", 4))
_VERDICT = 9
_METRICS = ("seconds", "host_cpu_s", "peak_mib", "sent_mib", "joules")


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one function on one device; plain data, sent between processes."""

    test: str
    function: str
    device: str
    outcome: str
    why: str
    seconds: float | None = None
    host_cpu_s: float | None = None
    peak_mib: float | None = None
    sent_mib: float | None = None
    joules: float | None = None
    repetitions: int = 0
    entry: BaselineEntry | None = None
    file: str = ""
    """The baseline entry to be saved, if any, and the path of its file."""


def rows(device: EdgeDevice, test: str, failed: str, invalid: str, baseline: str | None) -> list[ResultRow]:
    """Return the rows of a finished test; ``failed`` and ``invalid`` are reasons why it did not pass.

    If ``baseline`` names a file, rows that passed have an entry to be saved there.
    """
    found = [
        ResultRow(
            test=test,
            function=result.function,
            device=result.device,
            outcome=result.outcome,
            why=result.why,
            **{metric: getattr(result, metric) for metric in _METRICS},
            repetitions=result.repetitions,
            entry=device.entry(result) if baseline and result.outcome == "PASS" and not failed else None,
            file=baseline or "",
        )
        for result in device.results
    ]
    if (failed or invalid) and all(row.outcome == "PASS" for row in found):
        outcome, why = ("FAIL", failed) if failed else ("INVALID", invalid)
        found.append(ResultRow(test=test, function="", device=device.name, outcome=outcome, why=why))
    return found


def properties(row: ResultRow) -> Iterator[tuple[str, object]]:
    """Yield a row's properties for a JUnit file."""
    name = f"edgefl.{row.device}.{row.function}" if row.function else f"edgefl.{row.device}"
    yield f"{name}.outcome", row.outcome
    for metric in _METRICS:
        if (value := getattr(row, metric)) is not None:
            yield f"{name}.{metric}", float(f"{value:.5g}")
    if row.repetitions:
        yield f"{name}.repetitions", row.repetitions
    if row.why:
        yield f"{name}.why", row.why


def lines(found: Sequence[ResultRow]) -> Iterator[str]:
    """Yield the lines of the table: per test and function a row for each device, followed by its reason."""
    room = WIDTH - sum(width for _, width in _COLUMNS) - _VERDICT
    yield " " * room + "".join(f"{name:>{width}}" for name, width in _COLUMNS)
    before = None
    for row in found:
        test = row.test.partition("[")[0]
        if (test, row.function) != before:
            before = (test, row.function)
            known = row.function in ("", test.rpartition("::")[2])
            yield _short(test if known else f"{test}: {row.function}", WIDTH)
        cells = (
            _cell(row.seconds, short_time),
            _cell(row.host_cpu_s, short_time),
            _cell(row.peak_mib, lambda mib: f"{mib:.{int(mib < 1000)}f}"),
            _cell(row.sent_mib, number),
            _cell(row.joules, number),
            str(row.repetitions or "–"),
        )
        figures = "".join(f" {cell:>{width - 1}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
        yield f"  {_short(row.device, room - 3):<{room - 2}}{figures}  {row.outcome}"
        if row.why:
            why = textwrap.wrap(" ".join(row.why.split()), WIDTH - 4)
            yield from (f"    {line}" for line in why)


def _cell(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


def _short(name: str, width: int) -> str:
    """Shorten a long name to its end, the more specific part."""
    return name if len(name) <= width else f"…{name[-(width - 1) :]}"


def save_all(found: Iterable[ResultRow]) -> list[str]:
    """Save the entries of all rows that have one; return a line per file."""
    files: dict[str, list[BaselineEntry]] = {}
    for row in found:
        if row.entry is not None:
            files.setdefault(row.file, []).append(row.entry)
    notes = []
    for file, entries in sorted(files.items()):
        try:
            save(Path(file), entries)
            notes.append(f"saved {len(entries)} in {file}")
        except (ConfigError, OSError) as error:
            notes.append(f"NOT saved: {error}")
    return notes
