"""The results of a pytest session: the JSON file for `edgefl gate`, and the content of the HTML report.

pytest --edgefl-json results.json
edgefl gate comment results.json
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from edgefl.errors import ConfigError
from edgefl.files import read
from edgefl.results.tables import short_time
from edgefl.validation import convert

MAX_BYTES = 64 << 20
Word = Literal["REGRESSION", "FAIL", "NOT JUDGED", "XFAIL", "OK"]
WORDS: tuple[Word, ...] = ("REGRESSION", "FAIL", "NOT JUDGED", "XFAIL", "OK")
"""Possible outcomes of a function on a device, worst first."""
LONG = {"NOT JUDGED": "COULD NOT BE JUDGED"}


def device_time(seconds: float | None, predicted: bool) -> str:
    """Return a time on a device as a string, with a leading ``~`` if it is predicted; empty if not known."""
    return "" if seconds is None else "~" * predicted + short_time(seconds)


class GateRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one function on one device."""

    test: str
    function: str
    device: str
    outcome: Word
    why: str = ""
    label: str = ""
    """The test's name with its parameters, without the device; empty if the results file lacks it."""
    skipped: bool = False
    """True if the function could not be judged, but this does not fail the session."""
    file: str = ""
    """Path of the test's file, relative to the repository's top folder; empty if it is not known."""
    line: int = 0
    """Line number of the test, counted from 1; 0 if it is not known."""
    seconds: float | None = None
    predicted: bool = False
    """True if ``seconds`` is predicted from counts, not measured."""
    peak_mib: float | None = None
    sent_mib: float | None = None
    joules: float | None = None

    @property
    def time(self) -> str:
        """The time on the device, as a string."""
        return device_time(self.seconds, self.predicted)

    @property
    def red(self) -> bool:
        """True if this row fails the session."""
        return self.outcome not in ("OK", "XFAIL") and not self.skipped

    @property
    def name(self) -> str:
        """The test's name and parameters without the device, and the function's name if it is another one."""
        test = self.test.partition("[")[0]
        shown = self.label or test
        return shown if self.function in ("", test.rpartition("::")[2]) else f"{shown}: {self.function}"


class GateResults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of one session."""

    edgefl_gate: Literal[1] = 1
    base: str = ""
    """The commit with which the working tree was compared; empty if there was no such comparison."""
    rows: tuple[GateRow, ...] = ()

    @property
    def worst_first(self) -> list[GateRow]:
        return sorted(self.rows, key=lambda row: (row.skipped, WORDS.index(row.outcome)))

    @property
    def headline(self) -> str:
        """The number of rows with each outcome, in words.

        >>> row = GateRow(test="a.py::test_a", function="a", device="pi-4", outcome="NOT JUDGED")
        >>> GateResults(rows=(row, row)).headline, GateResults().headline
        ('2 COULD NOT BE JUDGED', 'nothing was measured')
        """
        counts = Counter(row.outcome for row in self.rows)
        found = [f"{counts[word]} {LONG.get(word, word)}" for word in WORDS if counts[word]]
        return ", ".join(found) or "nothing was measured"

    @property
    def red(self) -> bool:
        """True if the gate is red: something failed, or nothing was measured."""
        return not self.rows or any(row.red for row in self.rows)


def load_results(path: Path) -> GateResults:
    """Read a results file. Raises ConfigError if it cannot be read or does not contain results."""
    try:
        return convert(msgspec.json.decode(read(path, MAX_BYTES)), GateResults)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ConfigError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a results file (pytest --edgefl-json): {error}") from None


def place_of(file: Path, top: Path) -> str:
    """Return a file's path relative to GitHub's workspace, or to ``top`` if it is not in the workspace."""
    workspace = os.environ.get("GITHUB_WORKSPACE")
    for folder in (*([Path(workspace)] if workspace else []), top):
        try:
            return file.resolve().relative_to(folder.resolve()).as_posix()
        except ValueError:
            continue
    return file.as_posix()
