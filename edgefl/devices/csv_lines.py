"""Reads measurement files: CSV files in UTF-8 whose first line contains the column names."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError, shortened


def csv_lines(path: Path, columns: Collection[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the location of each line (for error messages) and its fields, keyed by column name.

    Raises `ConfigError` if the file cannot be read, has no data or lacks one of the ``columns``, or if a line
    has fewer or more fields than the first.
    """
    number = 1
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            for name in columns:
                if name not in (reader.fieldnames or ()):
                    wanted = f"must be a CSV file with the columns {', '.join(columns)}"
                    raise ConfigError(f"{path}: {wanted}; the column {name} is missing")
            for line in reader:
                number = reader.line_num  # blank lines count
                place = f"{path}, line {number}"
                check_whole(line, place)
                yield place, line
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if number == 1:
        raise ConfigError(f"{path}: has a header but no lines of data")


def check_whole(line: Mapping[str | None, Any], place: str) -> None:
    """Raise `ConfigError` if a line has fewer or more fields than the first line of the file.

    ``line`` is from `csv.DictReader`, which stores extra fields under the key None.
    """
    missing, more = list(line.values()).count(None), line.get(None, ())
    if missing or more:
        fields = len(line) - bool(more)
        got = fields - missing + len(more)
        raise ConfigError(f"{place}: must have {fields} fields, like the first line, got {got}")


def positive(line: Mapping[str, str], name: str, place: str, most: float) -> float | None:
    """Return the field ``name`` as a number, or None if it is empty.

    Raises `ConfigError` unless the number is above 0 and at most ``most``.
    """
    text = line.get(name) or ""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        allowed = f"a number above 0 and at most {most:g}, or empty"
        raise ConfigError(f"{place}: {name} must be {allowed}, got {shortened(text)!r}")
    return value
