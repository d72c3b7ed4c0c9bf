"""Reads inference times that were measured on phones.

A CSV has a line per phone and network with the columns ``model``, ``unit``, ``core``, ``max_ghz``,
``ram_gib``, ``network``, and of its runs ``first_ms``, ``median_ms``, ``p10_ms`` and ``p90_ms``. Core, clock
and RAM may be empty.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgefl.devices.measurements import UNREADABLE
from edgefl.devices.phones import About
from edgefl.errors import ConfigError


class PhoneRow(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one network on one phone."""

    about: About
    network: str
    seconds: float
    """Median of the runs."""
    keys: dict[str, str]
    """The line's columns as in the file."""


def read_rows(path: Path) -> list[PhoneRow]:
    """Read the rows of a file; `ConfigError` if it is invalid or empty."""
    rows = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for number, line in enumerate(csv.DictReader(file), 2):
                rows.append(_row(line, f"{path}, line {number}"))
    except KeyError as error:
        raise ConfigError(f"{path}: no column {error}") from None
    except UNREADABLE as error:
        raise ConfigError(f"{path}: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: no rows; at least one measured network is needed")
    return rows


def _row(line: Mapping[str, str], place: str) -> PhoneRow:
    ghz, ram_gib = (_number(line, name, place) for name in ("max_ghz", "ram_gib"))
    milliseconds = _number(line, "median_ms", place)
    if milliseconds is None:
        raise ConfigError(f"{place}: median_ms must be above 0, got nothing")
    about = About(line["core"] or "", ghz, ram_gib, line["model"], line["unit"])
    return PhoneRow(about=about, network=line["network"], seconds=milliseconds / 1e3, keys=dict(line))


def _number(line: Mapping[str, str], name: str, place: str) -> float | None:
    """A positive number, or None for an empty field."""
    text = line[name]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{place}: {name} must be a number above 0, got {text!r}")
    return value
