"""Fixtures of the process tests: a finished run, and processes that start quickly."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl.host.fork_server import ForkServer
from edgefl.host.process import start_process
from edgefl.regression import process as measuring
from tests.process import warm

from .runs import virtual


@pytest.fixture(scope="session", autouse=True)
def _warm(fork_server: ForkServer) -> None:
    """Start the fork server before other fixtures, so that it also forks the processes of their runs."""


@pytest.fixture(scope="session")
def warm_measuring(fork_server: ForkServer) -> Iterator[None]:
    """Fork the measuring processes of device tests from a process that has imported torch."""
    started, channel = start_process("tests.process.warm_measuring", int, dict(os.environ))
    cold, home = measuring.start_process, {"HOME": os.environ.get("HOME", "")}

    def forked(module: str, incoming: Any, environment: dict[str, str]) -> Any:
        if commands.fit(environment | home):  # pytester sets another home, which does not matter here
            return commands.start_process(module, incoming, {**environment, "PYTHONHASHSEED": "0"})
        return cold(module, incoming, environment)

    with warm.Commands(channel) as commands, pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "start_process", forked)
        yield
    started.wait()


@pytest.fixture(scope="module")
def process(warm_measuring: None) -> Iterator[measuring.MeasuringProcess]:
    with contextlib.closing(measuring.MeasuringProcess()) as started:
        yield started


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with twelve versions under the virtual clock; tests must not write into it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    edgefl.run(virtual(), folder)
    return folder
