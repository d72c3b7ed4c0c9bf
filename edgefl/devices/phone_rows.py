"""Reads inference times that were measured on phones.

A CSV file has one line per phone and network, with the columns ``model``, ``unit``, ``core``, ``max_ghz``,
``ram_gib``, ``network`` and ``median_ms`` (over all runs). Core, clock and RAM may be empty. ``unit`` names a
phone: no two phones may have the same one. Other columns, such as ``p90_ms``, are kept in `PhoneRow.keys`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgefl.devices.csv_lines import csv_lines, positive
from edgefl.devices.phones import About
from edgefl.errors import ConfigError

COLUMNS = ("model", "unit", "core", "max_ghz", "ram_gib", "network", "median_ms")
MAX_GHZ, MAX_GIB = 100.0, 1024.0
MIN_MS, MAX_MS = 1e-3, 1e7
"""Shortest and longest plausible time of an inference, in milliseconds: 1 µs and about three hours."""


class PhoneRow(msgspec.Struct, frozen=True, kw_only=True):
    """The inference time of one network on one phone."""

    about: About
    network: str
    seconds: float
    """Median time over all runs."""
    keys: dict[str, str]
    """All fields of the line as strings, keyed by column name."""


def read_rows(path: Path) -> list[PhoneRow]:
    """Read the rows of a file. Raises `ConfigError` if it is invalid or empty."""
    rows, known = list[PhoneRow](), dict[str, About]()
    for place, line in csv_lines(path, COLUMNS):
        rows.append(_row(line, place))
        about = rows[-1].about
        if (other := known.setdefault(about.unit, about)) != about:
            models = f"{about.model!r} and {other.model!r}"
            same = "all lines of a unit must have the same model, core, clock and RAM"
            raise ConfigError(f"{place}: unit {about.unit!r} names two phones, {models}: {same}")
    return rows


def _row(line: Mapping[str, str], place: str) -> PhoneRow:
    ghz, ram_gib = positive(line, "max_ghz", place, MAX_GHZ), positive(line, "ram_gib", place, MAX_GIB)
    milliseconds = positive(line, "median_ms", place, MAX_MS)
    if milliseconds is None or milliseconds < MIN_MS:
        allowed = f"a number from {MIN_MS:g} to {MAX_MS:g}"
        raise ConfigError(f"{place}: median_ms must be {allowed}, got {line['median_ms']!r}")
    about = About(line["core"], ghz, ram_gib, line["model"], line["unit"])
    return PhoneRow(about=about, network=line["network"], seconds=milliseconds / 1e3, keys=dict(line))
