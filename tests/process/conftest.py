"""One finished run that all tests which only read may share."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgefl
from edgefl.host.fork_server import ForkServer

from .runs import virtual


@pytest.fixture(scope="session", autouse=True)
def _warm(fork_server: ForkServer) -> None:
    """Have the fork server before all else, so that fixtures' runs are forked too."""


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of twelve versions under the virtual clock; not to be written into."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    edgefl.run(virtual(), folder)
    return folder
