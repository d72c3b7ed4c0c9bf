"""A small run under the virtual clock whose file changes are recorded; faults are simulated from these."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NamedTuple

import pytest

from edgefl import Checkpoint, Experiment, Stop, config
from edgefl.host.fork_server import ForkServer
from tests.fault import shim
from tests.fault.power_cut import Judge, recording
from tests.fault.shim import Change
from tests.process.runs import virtual


@pytest.fixture(scope="session", autouse=True)
def _warm(fork_server: ForkServer) -> None:
    """Start the fork server before other fixtures, so that it also forks the runs that they make."""


def small_run(versions: int = 40) -> Experiment:
    """Describe a run with three or four checkpoints and a few hundred writes."""
    return virtual(1, stop=Stop(versions=versions), checkpoint=Checkpoint(every_s=1e-6))


FAULTS = (
    # Only the server reaches the fault after 40 writes: the main process makes 36 such writes, and the
    # server 59 to 80, depending on how it groups rows.
    f"write:record.sqlite-wal:{errno.ENOSPC}:40",
    f"write:checkpoints/:{errno.EIO}:8",
    f"open:checkpoints/:{errno.EMFILE}:2",
    f"write:summary:{errno.ENOSPC}:0",
)


class Faulty(NamedTuple):
    """A run in which a system call fails."""

    fault: str
    folder: Path
    code: int
    stderr: str


class Recorded(NamedTuple):
    """An undisturbed run, all its file changes, and runs in which one of the ``FAULTS`` was injected."""

    changes: list[Change]
    judge: Judge
    folder: Path
    faulty: list[Faulty]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    base = tmp_path_factory.mktemp("recorded")
    library = shim.build(base)
    run, log = recording(small_run(), base / "files")
    file, runs = base / "faulty.toml", base / "runs"
    file.write_text(config.dump(small_run(12)))
    runs.mkdir()
    faulty = [
        shim.Run(file, runs / str(number), {"EDGEFL_SHIM_FOLDER": str(runs), "EDGEFL_SHIM_FAIL": fault})
        for number, fault in enumerate(FAULTS)
    ]
    (code, err), *ends = shim.run(library, [run, *faulty])
    assert code == 0, err
    changes = list(shim.changes(log, base / "files"))
    found = [Faulty(fault, one.out, *end) for fault, one, end in zip(FAULTS, faulty, ends, strict=True)]
    return Recorded(changes, Judge(small_run(), changes, base / "judge"), run.out, found)
