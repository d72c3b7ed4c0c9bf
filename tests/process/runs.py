"""Small real runs for the process tests."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sized
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgefl import Clock, Data, Evaluation, Experiment, Fleet, Model, Server, Stop, Training, config, errors
from edgefl.host.groups import Groups, NoGroup
from edgefl.programs import Phone, ProgramOptions
from edgefl.results.record import Record
from edgefl.results.rows import IncidentRow
from tests.process import warm

MINUTE_S = 60.0
PATIENCE_S = 30.0
"""Time in seconds without a message after which a client is considered hung. Even a busy host does not delay
a client for so long."""
DEVICES = {"pi-zero-2w": 4, "watch-a7": 2}
"""Devices so slow that the host keeps up with them at a small time scale, which keeps runs short."""

BATCH_NORMALISED = """
from torch import nn
def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
"""
"""Source of a module whose function ``net`` makes a model with running statistics."""


def experiment(**changes: Any) -> Experiment:
    """Return a wall-clock experiment: six slow devices, a fast network, a small model, twelve versions."""
    given: dict[str, Any] = {
        "fleet": Fleet(devices=DEVICES, network="fios"),
        "data": Data(name="digits"),
        "model": Model(args={"hidden": [16]}),
        "training": Training(steps=3),
        "strategy": {"name": "fedbuff", "buffer_size": 3},
        "clock": Clock(kind="wall"),
        "server": Server(heartbeat_s=PATIENCE_S),
        "evaluation": Evaluation(every_versions=5),
        "stop": Stop(versions=12),
    }
    return Experiment(**{**given, **changes})


def virtual(workers: int | None = 2, **changes: Any) -> Experiment:
    """Return the same experiment under the virtual clock, with six phones of two profiles."""
    given: dict[str, Any] = {
        "fleet": Fleet(devices={"pixel-4": 4, "moto-g4": 2}, network="lte"),
        "clock": Clock(kind="virtual", workers=workers),
    }
    return experiment(**{**given, **changes})


def needs_groups(*controllers: str) -> None:
    """Skip the test, with the reason, if control groups cannot be made."""
    try:
        Groups(controllers).close()
    except NoGroup as why:
        pytest.skip(str(why))


UNPRIVILEGED = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
]
"""Command prefix: the command runs as a user who may read all files, but not write files of other users."""


def needs_unprivileged() -> None:
    """Skip the test, with the reason, if a command cannot be run as another user."""
    try:
        done = subprocess.run([*UNPRIVILEGED, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("setpriv is not installed")
    if done.returncode:
        pytest.skip(done.stderr.strip() or "setpriv was refused")


class Command:
    """The command ``edgefl``, a process in a new process group.

    It is forked from a process that has imported everything (see `warm`), unless there is a command prefix
    ``before``, or the environment has changes that a process reads only when it starts.
    """

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        before: list[str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        whole = {**os.environ, **(environment or {})}
        if warm.commands is not None and before is None and warm.commands.fit(whole):
            wanted = warm.Wanted(arguments, whole, str(cwd or Path.cwd()))
            self.process: subprocess.Popen[str] = warm.WarmCommand(warm.commands, wanted)
            return
        self.process = subprocess.Popen(
            [*(before or []), sys.executable, "-m", "edgefl", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=whole,
            cwd=cwd,
        )

    @classmethod
    def run(cls, wanted: Experiment, folder: Path, *, environment: dict[str, str] | None = None) -> Command:
        arguments = ("run", str(cls.write(wanted, folder)), "--accept-invalid", "--out", str(folder))
        return cls(*arguments, environment=environment)

    @staticmethod
    def write(wanted: Experiment, folder: Path) -> Path:
        """Write the experiment's file beside the run's folder."""
        file = folder.parent / f"{folder.name}.toml"
        file.write_text(config.dump(wanted))
        return file

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, stdout and stderr."""
        out, err = self.process.communicate()
        return self.process.returncode, out, err

    def ends(self, expected: int = 0, *says: str) -> str:
        """Check the exit code, and that stderr contains these words and no traceback; return stderr."""
        code, _, err = self.finish()
        assert code == expected, err
        assert "Traceback" not in err
        assert all(words in err for words in says), err
        return err

    def interrupt(self) -> None:
        """Send SIGINT to the process group, as a terminal does for Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill_group(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def named(self, name: str) -> list[psutil.Process]:
        """The run's processes with this name, such as ``edgefl-worker``, that have not ended."""
        found = []
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith(name):
                    found.append(process)
        return found

    def child(self, name: str) -> psutil.Process:
        """The run's process with this name, such as ``edgefl-server``."""
        return self.named(name)[0]


def phone(*command: str, **changes: object) -> Phone:
    return Phone(**{"device": "moto-g4", "command": command, "share": 0.3, **changes})  # type: ignore[arg-type]


def python(code: str, **changes: object) -> Phone:
    return phone(sys.executable, "-I", "-S", "-c", code, **changes)


def options(**changes: object) -> ProgramOptions:
    return ProgramOptions(**{"time_scale": 1.0, "throttle": "sigstop", "memory": "watch", **changes})  # type: ignore[arg-type]


def incidents(folder: Path, kind: str) -> list[IncidentRow]:
    """Incidents of this kind in the record."""
    with Record(folder) as record:
        return [row for row in record.incidents if row.kind == kind]


def wait_for_versions(folder: Path, versions: int, command: Command) -> None:
    """Wait until the record on disk has at least this many versions."""
    wait_for(lambda: versions_of(folder) >= versions, f"version {versions}", command)


def wait_for(there: Callable[[], bool], what: str, command: Command) -> None:
    """Poll the condition until it is true; fail if the run ends first."""
    while not there():
        try:
            command.process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the run ended before {what}: {command.finish()}")


def versions_of(folder: Path) -> int:
    """Number of versions in the record; 0 if there is no readable record yet."""
    return _rows(folder, lambda record: record.versions["version"])


def trips_of(folder: Path) -> int:
    """Number of trips in the record; 0 if there is no readable record yet."""
    return _rows(folder, lambda record: record.trips["task"])


def _rows(folder: Path, column: Callable[[Record], Sized]) -> int:
    try:
        with Record(folder) as record:
            return len(column(record))
    except errors.ConfigError:
        return 0


def alter(folder: Path, statement: str) -> None:
    """Execute a statement that changes one row of a record, and remove the record's seal."""
    (folder / "record.sqlite-seal").unlink(missing_ok=True)
    with closing(sqlite3.connect(folder / "record.sqlite")) as db, db:
        assert db.execute(statement).rowcount == 1


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found
