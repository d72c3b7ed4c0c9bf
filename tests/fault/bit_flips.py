"""Flips single bits in a run's files and reads the files: a flip must be noticed or change no result."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from edgefl import config, seeds
from edgefl.errors import EdgeflError
from edgefl.lab import verify
from edgefl.parameters import checkpoint
from edgefl.results import run_folder
from edgefl.results.record import Record
from edgefl.results.result import Result
from edgefl.results.rows import TABLES
from edgefl.results.run_folder import CHECKPOINTS, EXPERIMENT_FILE
from tests.fault import disk
from tests.fault.power_cut import plain
from tests.fault.shim import Change, Kind

NOTICED, SAME, EARLIER = GOOD = "noticed", "the same", "an earlier moment of the run"


class Flip(NamedTuple):
    """A bit to flip: the name of its file, and its number in the file."""

    name: str
    bit: int


def flips(folder: Path, count: int, seed: int = 0) -> Iterator[Flip]:
    """Draw ``count`` bits, in files drawn alternately with equal probability and in proportion to size."""
    rng = seeds.stream(seed, "bit-flips")
    sizes = {str(path.relative_to(folder)): 8 * path.stat().st_size for path in files(folder)}
    names, whole = list(sizes), sum(sizes.values())
    for number in range(count):
        weights = [size / whole for size in sizes.values()] if number % 2 else None
        name = names[rng.choice(len(names), p=weights)]
        yield Flip(name, int(rng.integers(sizes[name])))


def files(folder: Path) -> list[Path]:
    """Return all files that are not empty, except the index of SQLite's log, which SQLite rebuilds."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return sorted(path for path in found if path.stat().st_size)


class Reader:
    """Flips a bit in a copy of a run's folder, and reads the file with the code that edgefl uses."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.whole, self._place = folder, place
        shutil.copytree(folder, place)
        self._earlier = set(map(str, _moments(folder, place.with_name("moments"))))
        self._same: dict[str, str] = {}
        self._made: dict[str, str] = {}
        for path in files(folder):
            name = str(path.relative_to(folder))
            self._same[name] = self._read(name)

    def __call__(self, flip: Flip) -> str:
        """Flip the bit and read the file; return one of `GOOD`, or a description of the problem."""
        path = self._place / flip.name
        whole = (self.whole / flip.name).read_bytes()
        spoilt = bytearray(whole)
        spoilt[flip.bit // 8] ^= 1 << flip.bit % 8
        path.write_bytes(spoilt)
        try:
            found = self._read(flip.name)
        except EdgeflError as error:
            return NOTICED if "\n" not in str(error) else f"more than one line: {error}"
        except Exception as error:
            return f"a traceback: {type(error).__name__}: {error}"
        finally:
            path.write_bytes(whole)
            for ending in ("-shm", "-journal"):  # files that reading may have created
                (self._place / f"record.sqlite{ending}").unlink(missing_ok=True)
        if found == self._same[flip.name]:
            return SAME
        return EARLIER if found in self._earlier else f"another result: {flip}"

    def _read(self, name: str) -> str:
        folder = self._place
        kinds: dict[str, Callable[[], Any]] = {
            EXPERIMENT_FILE: lambda: (run_folder.restore_experiment(folder), config.load(folder / name)),
            "record": lambda: contents(folder),
            "final": lambda: {key: plain(value) for key, value in Result(folder).model().items()},
            "journal-": lambda: plain(checkpoint.latest(folder / CHECKPOINTS)),
        }
        kind = next((kind for kind in kinds if Path(name).name.startswith(kind)), None)
        return str(kinds[kind]() if kind else self._check_results())

    def _check_results(self) -> None:
        """Check results as `edgefl verify` does, but compute the expected texts only in the first call."""
        with Record(self._place) as record:
            for name in ("summary_text", "trace_text"):
                if name not in self._made:
                    run = [record] if name == "trace_text" else record
                    self._made[name] = getattr(verify, name)(run)
            with (
                patch.object(verify, "summary_text", lambda _: self._made["summary_text"]),
                patch.object(verify, "trace_text", lambda _: self._made["trace_text"]),
            ):
                verify.check_results(self._place, record)


def commanded(folder: Path, flip: Flip, place: Path) -> str:
    """Run ``edgefl verify`` on a finished run, or ``edgefl resume`` on a killed one, after a flip."""
    command = "verify" if (folder / "summary.json").exists() else "resume"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place)
    spoilt = bytearray((place / flip.name).read_bytes())
    spoilt[flip.bit // 8] ^= 1 << flip.bit % 8
    (place / flip.name).write_bytes(spoilt)
    more = [] if command == "verify" else ["--accept-invalid", "--quiet"]
    words = [sys.executable, "-m", "edgefl", command, str(place), *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return f"{command}: exit code 0"
    if len(done.stderr.splitlines()) == 1 and done.stderr.startswith("edgefl: "):
        return f"{command}: one line"
    return f"{command}: exit code {done.returncode}, {flip}: {done.stderr}"


def contents(folder: Path) -> str:
    """Return all cells of the record."""
    with Record(folder) as record:
        tables = ("meta", "journal", "sums", *TABLES)
        return str([record.select(f"SELECT * FROM {table} ORDER BY 1") for table in tables])


def _moments(folder: Path, place: Path) -> Iterator[str]:
    """Yield the record's contents after each commit in its log, and the contents of older checkpoints."""
    log = folder / "record.sqlite-wal"
    content = log.read_bytes() if log.exists() else b""
    frame = 24 + 4096
    for end in range(32, len(content), frame) if content else ():
        shutil.copytree(folder, place)
        (place / "record.sqlite-wal").write_bytes(content[:end])
        (place / "record.sqlite-shm").unlink(missing_ok=True)
        yield contents(place)
        shutil.rmtree(place)
    older = sorted((folder / CHECKPOINTS).glob("journal-*"))[:-1]
    for path in older:  # read if the newest is damaged
        yield str(plain(checkpoint._read(path)))


def killed(changes: Iterable[Change]) -> dict[str, bytes]:
    """Return the files of a run that is killed just before it writes its last checkpoint."""
    changes, here = list(changes), disk.Disk()
    named = [
        number
        for number, change in enumerate(changes)
        if change.kind is Kind.RENAME and Path(change.other).name.startswith("journal-")
    ]
    writes = (number for number in range(named[-1] - 1, 0, -1) if changes[number].kind is Kind.UNLINK)
    for change in changes[: next(writes)]:  # before the record's seal is removed for the last checkpoint
        here.apply(change)
    return {name: content for name, content in here.files().items() if not name.endswith("-shm")}
