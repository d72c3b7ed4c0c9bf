"""Runs that disturb themselves at a given training step, so that no run ends undisturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import edgefl
from edgefl import Model, RunError
from edgefl.core.events import Arrived, Died, Failed, Joined, Left, Ticked
from edgefl.results.record import Record
from edgefl.run import supervisor
from tests.process.runs import incidents

MODEL = """
import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
from torch import nn

HERE = Path(__file__).parent
TRAINS = ("edgefl-worker", "edgefl-client")
SIGNALS = {"kill it": signal.SIGKILL, "interrupt it": signal.SIGINT}


class Disturbed(nn.Sequential):
    calls = pid = 0

    def forward(self, inputs):
        if os.getpid() != self.pid:  # forked from one that has tried it
            self.pid, self.calls = os.getpid(), 0
        self.calls += 1
        file = HERE / f"at-{self.calls}"
        if file.exists() and Path("/proc/self/comm").read_text().startswith(TRAINS):
            disturb(file)
        return super().forward(inputs)


def disturb(file):
    mine = HERE / f"done-{os.getpid()}-{file.name}"
    try:
        file.rename(mine)
    except FileNotFoundError:  # the other worker was faster
        return
    if mine.read_text() == "wait":
        while not (HERE / "go").exists():
            time.sleep(0.05)
        return
    deed, _, whose = mine.read_text().partition(" of ")
    if deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    leader = psutil.Process(int(whose or os.getsid(0)))
    if deed == "stop it":
        for process in (leader, *leader.children(recursive=True)):
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if deed in SIGNALS:
        leader.send_signal(SIGNALS[deed])
        while deed == "kill it" and not whose:
            signal.pause()  # it dies with the process that it has killed, and must not finish its step first
        return
    name = "edgefl-" + deed.removeprefix("kill the ") if deed != "interrupt" else "edgefl-server"
    children = leader.children(recursive=True)
    process = next(process for process in children if named(process, name))
    if deed == "interrupt":
        os.killpg(0, signal.SIGINT)
    else:
        process.kill()
    process.wait()  # without this worker the run does not end by itself


def named(process, name):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith(name)
    return False


def make(input_shape, classes):
    return Disturbed(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))
"""

AGENDA = Arrived | Died | Failed | Joined | Left | Ticked
"""Types of the recorded events that the virtual clock schedules."""


def made_in(folder: Path) -> Model:
    """Return a model whose training carries out the plan in this folder."""
    (folder / "disturbed_model.py").write_text(MODEL)
    return Model(name="disturbed_model:make")


def plan(folder: Path, deeds: dict[int, str]) -> None:
    """Plan disturbances (deeds): the first worker that reaches its n-th step does the deed for n.

    The deeds are "die", "interrupt" (the worker's process group), "kill the server", "kill the zygote",
    "wait" (for a file "go"), and "kill it", "interrupt it" and "stop it", where "it" is the leader of the
    session. If " of PID" is added, the process PID takes the place of the leader.
    """
    for step, deed in deeds.items():
        (folder / f"at-{step}").write_text(deed)


def left(folder: Path) -> list[str]:
    """Return the names (``at-STEP``) of the planned deeds that were not done."""
    return [path.name for path in folder.glob("at-*")]


def killed(wanted: edgefl.Experiment, folder: Path, points: Sequence[str], patch: pytest.MonkeyPatch) -> int:
    """Make a run whose servers die, each at the next of these failpoints; return the number of deaths.

    The run replaces its servers. After three deaths in a row without a new version, it ends and is resumed.
    """
    points, deaths = list(points), 0
    while True:
        places = (point.split(":") for point in points[deaths:])
        named = (f"{name}:{server}:{at}" for server, (name, _, at) in enumerate(places))
        patch.setenv("EDGEFL_FAILPOINTS", ",".join(named))
        before = len(incidents(folder, "restart")) if folder.exists() else 0
        try:
            if folder.exists():
                supervisor.resume(folder, quiet=True)
            else:
                supervisor.run(wanted, folder, quiet=True, base=folder.parent)
            return deaths + len(incidents(folder, "restart")) - before
        except RunError as error:
            assert "ended early (signal 9), 3 times in a row without a new version" in str(error)
        deaths += len(incidents(folder, "restart")) - before + 1


def check_every_kill_was_certain(folder: Path, points: Sequence[str]) -> None:
    """Assert that the run has enough events for its kills, whatever checkpoints its servers started from.

    The age of a checkpoint depends on time. A server that is killed at its n-th event gets at most n events
    further than the server before it, so the sum of all n must be at most the number of events.
    """
    needed = sum(int(point.split(":")[2]) + 1 for point in points if point.startswith("event:"))
    with Record(folder) as record:
        taken = [event for _, event in record.events() if isinstance(event, AGENDA)]
    assert needed <= len(taken), f"kills need {needed} events of {len(taken)}, so some may be missed"
