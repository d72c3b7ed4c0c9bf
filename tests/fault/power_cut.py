"""Simulates power cuts: records a run, and judges the states of its files that a cut may leave.

A state is good if ``edgefl resume`` continues from the latest flushed checkpoint or a later one, and restores
the numbers and rows that the recorded run had at that moment. It is also good if the run had not begun.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from edgefl import Experiment, config, seeds
from edgefl.core import Core
from edgefl.devices.dynamics import dynamics_of
from edgefl.devices.fleet import Trips, fleet_of
from edgefl.errors import EdgeflError
from edgefl.parameters import checkpoint
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.results.record import Record
from edgefl.results.run_folder import CHECKPOINTS, EXPERIMENT_FILE, RESULTS
from edgefl.results.store import Store
from edgefl.run import resume, supervisor
from edgefl.run.aggregator import Aggregator
from edgefl.run.demands import shape_of
from edgefl.run.timeline import Restored
from edgefl.run.workload import Workload
from edgefl.strategies import resolve
from tests.fault import disk, shim
from tests.fault.disk import Disk
from tests.fault.shim import Change, Kind
from tests.process.test_virtual_resume import outcome

RUN = "run"
_load = config.load
COLUMNS = (
    "task", "client", "base_version", "trip", "sent_s", "arrived_s", "staleness", "applied_version", "weight",
    "fate", "steps", "examples", "loss", "checksum_sent",
)  # fmt: skip
"""Columns of a trip that do not change after the trip is on record."""


def record(wanted: Experiment, folder: Path, library: Path) -> list[Change]:
    """Run the experiment into ``folder / RUN`` under the shim; return all its file changes."""
    run, log = recording(wanted, folder)
    ((code, err),) = shim.run(library, [run])
    assert code == 0, err
    return list(shim.changes(log, folder))


def recording(wanted: Experiment, folder: Path) -> tuple[shim.Run, Path]:
    """Describe a run into ``folder / RUN`` whose file changes are logged; also return the log's path."""
    folder.mkdir()
    file, log = folder.with_suffix(".toml"), folder.with_suffix(".log")
    file.write_text(config.dump(wanted))
    watched = {"EDGEFL_SHIM_FOLDER": str(folder), "EDGEFL_SHIM_LOG": str(log)}
    return shim.Run(file, folder / RUN, watched), log


class Cut(NamedTuple):
    """A state of a run's files that a power cut may leave."""

    after: int
    """Number of changes before the cut."""
    files: dict[str, bytes]
    begun: bool
    """True if the run's folder and experiment were flushed, so that the run must be resumable."""
    floor: int
    """Journal number of the newest flushed checkpoint; −1 if there is none."""


def cuts(
    changes: Iterable[Change], states: int, chosen: Container[int] | None = None, seed: int = 0
) -> Iterator[Cut]:
    """For each of the ``chosen`` changes (default: all), draw ``states`` states after a power cut."""
    here, floor, named, experiment = Disk(), -1, -1, False
    begun = False
    for number, change in enumerate(changes):
        here.apply(change)
        if change.kind is Kind.RENAME and change.other.startswith(f"{RUN}/{CHECKPOINTS}/journal-"):
            named = int(Path(change.other).stem.partition("-")[2])
        if change.kind is Kind.SYNC and change.path == f"{RUN}/{EXPERIMENT_FILE}":
            experiment = True
        if change.kind is Kind.SYNC and change.flag:
            floor = max(floor, named) if change.path == f"{RUN}/{CHECKPOINTS}" else floor
            begun = begun or (experiment and change.path == RUN)
        for state in range(states if chosen is None or number in chosen else 0):
            rng = seeds.stream(seed, "power-cut", number, state)
            yield Cut(number + 1, here.left(rng), begun, floor)


class Judge:
    """Compares states with the recorded run, which it rebuilds from the run's file changes."""

    def __init__(self, wanted: Experiment, changes: Iterable[Change], folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        here = Disk()
        self._saved: dict[int, list[Any]] = {}
        probe = folder / "probe.safetensors"
        for change in changes:
            here.apply(change)
            if change.kind is Kind.RENAME and Path(change.other).name.startswith("journal-"):
                probe.write_bytes(here.names[change.other].now())
                saved = checkpoint._read(probe)
                self._saved.setdefault(saved.journal_seq, []).append(plain(saved))
        self._final = here.files()
        self._clients = fleet_of(wanted)
        self._workload = Workload(wanted, self._clients, Path.cwd())
        self._known = self._workload.known
        self._rows: dict[int, dict[str, Any]] = {}
        self._loaded: dict[bytes, Experiment] = {}
        disk.write(self._final, folder / "final")
        self.toml = (folder / "final" / RUN / EXPERIMENT_FILE).read_text()

    def __call__(self, cut: Cut) -> str:
        """Return what is wrong with the state, or an empty text if it is good."""
        try:
            return self._judged(cut)
        except EdgeflError as error:
            return f"unreadable: {error}"

    def _judged(self, cut: Cut) -> str:
        place = self._folder / "cut"
        shutil.rmtree(place, ignore_errors=True)
        disk.write(cut.files, place)
        found: list[tuple[Restored, dict[str, Any]] | None] = []
        judge = self

        class Restoring:
            """Replaces the supervisor: restores the state as its server does, and starts no process."""

            def __init__(self, *parts: Any, resuming: bool = False, **more: Any) -> None:
                self.resuming = resuming

            def run(self) -> Any:
                found.append(judge.restored(place / RUN) if self.resuming else None)

        try:
            with (
                patch.object(supervisor, "_Supervisor", Restoring),
                patch.object(supervisor, "write_results", self._write_results),
                patch.object(config, "load", self._load),
            ):
                supervisor.resume(place / RUN, quiet=True)
        except EdgeflError as error:
            if "this run is over" in str(error):
                return self._whole(place / RUN)
            return f"not resumable: {error}" if cut.begun else ""
        except Exception as error:
            return f"a traceback: {type(error).__name__}: {error}"
        if not found:  # the run was over, and its results have been written
            return self._whole(place / RUN)
        if (place / RUN / EXPERIMENT_FILE).read_text() != self.toml:
            return "another experiment"
        if found[0] is None:
            return "" if cut.floor < 0 else f"begins anew, after the checkpoint of event {cut.floor}"
        restored, here = found[0]
        state, there = restored.checkpoint, self.rows_at(restored.checkpoint.journal_seq)
        if state.journal_seq < cut.floor:
            return f"goes on from event {state.journal_seq}, not from {cut.floor}"
        if plain(state) not in self._saved[state.journal_seq]:
            return f"goes on from other numbers at event {state.journal_seq}"
        # A pending evaluation may have no row, since the resumed run repeats it. Before the first event, the
        # same holds for the evaluation of version 0.
        expected = there["evaluations"]
        there["evaluations"] = {
            version: row
            for version, row in expected.items()
            if version in here["evaluations"] or (version and version not in restored.assessing)
        }
        return _different(here, there)

    def resumes(self, cut: Cut) -> str:
        """Judge the state with ``edgefl resume``: its outcome must be that of the undisturbed run."""
        place = self._folder / "resumed"
        shutil.rmtree(place, ignore_errors=True)
        disk.write(cut.files, place)
        command = [sys.executable, "-m", "edgefl", "resume", str(place / RUN), "--accept-invalid", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode and "this run is over" not in done.stderr:
            return f"exit code {done.returncode}: {done.stderr}" if cut.begun else ""
        same = outcome(place / RUN) == outcome(self._folder / "final" / RUN)
        return "" if same else "ends with another outcome"

    def _load(self, path: Path, **how: bool) -> Experiment:
        """Cache the result of `config.load` by file content, since loading would take most of the time."""
        text = path.read_bytes() if path.is_file() else b""
        if not text:
            return _load(path, **how)
        if text not in self._loaded:
            self._loaded[text] = _load(path, **how)
        return self._loaded[text]

    def _write_results(self, folder: Path, names: Iterable[str]) -> None:
        """Copy the recorded run's results; other tests check how results are made from a record."""
        for name in names:
            shutil.copy(self._folder / "final" / RUN / name, folder / name)

    def restored(self, folder: Path) -> tuple[Restored, dict[str, Any]]:
        """Return the state that a resumed run's server restores, and the record's rows after that."""
        experiment = self._load(folder / EXPERIMENT_FILE)
        strategy = resolve(experiment.strategy, [Path.cwd()])
        core = Core(strategy, self._known, experiment.seed, experiment.stop, experiment.evaluation)
        size = self._workload.flat.size
        shape = shape_of(experiment, strategy, size, len(self._clients))
        with closing(ParameterBuffer.create(shape)) as buffer, Store(folder, create=False) as store:
            aggregator = Aggregator.of(experiment, strategy, buffer, size)
            examples = [known.examples for known in self._known]
            down_bytes, up_bytes = 4 * buffer.shape.size, buffer.shape.update_bytes
            trips = Trips(experiment, self._clients, examples, self._workload.work, down_bytes, up_bytes)
            dynamics = dynamics_of(experiment, self._clients, trips)
            restored = resume.restore(folder, core, aggregator, store, dynamics)
        return restored, rows(folder)

    def rows_at(self, seq: int) -> dict[str, Any]:
        """Return the recorded run's rows at this journal number."""
        if seq not in self._rows:
            place = self._folder / "then"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self._folder / "final" / RUN, place)
            with Store(place, create=False) as store:
                store.truncate(seq)
            self._rows[seq] = rows(place)
        return dict(self._rows[seq])

    def _whole(self, folder: Path) -> str:
        """Compare a finished run's record, model and results with the recorded run's; return what differs."""
        final = self._folder / "final" / RUN
        if wrong := _different(rows(folder), rows(final)):
            return f"over, with {wrong}"
        for name in (f"{CHECKPOINTS}/final.safetensors", *RESULTS):
            if not (folder / name).is_file():
                return f"over, without {name}"
            if (folder / name).read_bytes() != (final / name).read_bytes():
                return f"over, with another {name}"
        return ""


def _different(here: dict[str, Any], there: dict[str, Any]) -> str:
    wrong = [name for name in there if there[name] != here[name]]
    return f"other rows: {', '.join(wrong)}" if wrong else ""


def rows(folder: Path) -> dict[str, Any]:
    """Return the contents of a run's record that a resumed run must reproduce, by name."""
    with Record(folder) as record:
        trips = [record.trips[name].tolist() for name in COLUMNS]
        return {
            "journal": list(record.select("SELECT seq, event FROM journal ORDER BY seq")),
            "trips": str(list(zip(*trips, strict=True))),  # as text, since nan != nan
            "sums": record.select("SELECT * FROM sums ORDER BY version"),
            "versions": str([record.versions[name].tolist() for name in ("version", "at_s", "updates")]),
            "evaluations": {row.version: (row.at_s, row.trips, row.loss) for row in record.evaluations},
            "clients": str(record.clients),
            "seed": record.meta.seed,
        }


def plain(value: Any) -> Any:
    """Convert the arrays in a saved state to bytes."""
    if isinstance(value, checkpoint.SavedState):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.tobytes() if isinstance(value, np.ndarray) else value


def without_flushes(changes: Iterable[Change], of: str) -> list[Change]:
    """Return the changes of a run that never flushes its ``checkpoint``, ``folder`` or ``record``."""
    paths = {
        "checkpoint": lambda change: change.path.endswith(".partial"),
        "folder": lambda change: change.flag,
        "record": lambda change: "record.sqlite" in change.path,
    }
    return [change for change in changes if change.kind is not Kind.SYNC or not paths[of](change)]


def renamed_too_early(changes: Iterable[Change]) -> list[Change]:
    """Return the changes of a run that renames a file before it flushes it."""
    made: list[Change] = []
    for change in changes:
        if change.kind is Kind.RENAME and made[-1].kind is Kind.SYNC:
            made.insert(-1, change)
        else:
            made.append(change)
    return made
