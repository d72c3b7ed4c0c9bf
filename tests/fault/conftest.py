"""A small run under the virtual clock whose file changes are recorded; faults are simulated from these."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from edgefl import Checkpoint, Experiment, Stop
from edgefl.host.fork_server import ForkServer
from tests.fault import shim
from tests.fault.power_cut import Judge, record
from tests.fault.shim import Change
from tests.process.runs import virtual


@pytest.fixture(scope="session", autouse=True)
def _warm(fork_server: ForkServer) -> None:
    """Start the fork server first, so that the runs of fixtures are forked too."""


def small_run(versions: int = 40) -> Experiment:
    """Describe a run with three or four checkpoints and a few hundred writes."""
    return virtual(1, stop=Stop(versions=versions), checkpoint=Checkpoint(every_s=1e-6))


class Recorded(NamedTuple):
    """An undisturbed run, all its file changes, and the judge of states that a power cut leaves."""

    library: Path
    changes: list[Change]
    judge: Judge
    folder: Path


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    base = tmp_path_factory.mktemp("recorded")
    library = shim.build(base)
    changes = record(small_run(), base / "files", library)
    return Recorded(library, changes, Judge(small_run(), changes, base / "judge"), base / "files" / "run")
