"""Runs whose phones are held by a governor instead of waiting: right results, right ends, nothing left."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edgefl import Fleet, Stop
from edgefl.limits import groups
from edgefl.limits.groups import find
from edgefl.results.record import Record
from tests.process import runs
from tests.process.runs import DEVICES, Command, experiment, needs_groups, summary, wait_for_versions

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has them")


@pytest.fixture(params=["sigstop", "cgroup"])
def throttle(request: pytest.FixtureRequest) -> Any:
    if request.param == "cgroup":
        needs_groups("cpu")
    return request.param


def throttled(throttle: Any, **changes: Any) -> Any:
    fleet = Fleet(devices=DEVICES, network="fios", throttle=throttle)
    return experiment(fleet=fleet, **changes)


def test_a_throttled_run_is_whole_and_no_faster_than_its_phones(throttle: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Command.run(throttled(throttle, stop=Stop(versions=20)), folder).ends()
    figures, trips = summary(folder), Record(folder).trips
    assert figures["versions"] == 20
    assert figures["integrity"] == {"checked": 60, "checksum_mismatches": 0, "version_mismatches": 0}
    assert figures["incidents"] == {}
    done = ~np.isnan(trips["trip_achieved_s"])
    assert done.sum() >= 60
    assert (trips["trip_achieved_s"][done] >= trips["trip_declared_s"][done] - 1e-6).all()
    # what trained in a burst waits for its device before it uploads
    assert trips["compute_s"][done].sum() > 0.85 * trips["compute_declared_s"][done].sum()


@pytest.mark.parametrize("how", ["the governor dies", "Ctrl-C"])
def test_phones_that_are_held_end_too(throttle: Any, how: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(throttled(throttle, stop=Stop(versions=10_000)), folder)
    wait_for_versions(folder, 3, command)
    if how == "Ctrl-C":
        command.interrupt()
        command.ends(130, "edgefl resume")
    else:
        command.child("edgefl-governor").send_signal(signal.SIGKILL)
        command.ends(1, f"the governor of fleet.throttle = '{throttle}' ended early (signal 9)")


def test_groups_of_a_run_that_was_killed_whole_are_swept_away_by_the_next(tmp_path: Path) -> None:
    needs_groups("cpu", "memory")
    fleet = Fleet(devices={"pi-zero-2w": 4}, network="fios", throttle="cgroup", memory="cgroup")
    command = Command.run(experiment(fleet=fleet, stop=Stop(versions=10_000)), tmp_path / "killed")
    wait_for_versions(tmp_path / "killed", 3, command)
    outer = [find(controller).folder for controller in ("cpu", "memory")]
    family = command.family()
    made = [
        folder / f"edgefl-{command.process.pid}-{groups.started(command.process.pid)}" for folder in outer
    ]
    assert all(sum(leaf.is_dir() for leaf in folder.iterdir()) >= 4 for folder in made)
    command.kill_group()
    psutil.wait_procs(family, timeout=20)
    command.finish()
    Command.run(experiment(fleet=fleet), tmp_path / "next").ends()
    assert not any(folder.exists() for folder in made)


@pytest.mark.parametrize(
    ("key", "others"), [("throttle", "'paced' and 'sigstop' need"), ("memory", "'rlimit' needs")]
)
def test_a_mechanism_without_the_right_is_refused_at_once(key: str, others: str, tmp_path: Path) -> None:
    needs_groups("cpu", "memory")
    runs.needs_unprivileged()
    public = Path(tempfile.gettempdir())  # this test's own, which ``nothing_left`` removes
    public.chmod(0o755)
    file = Command.write(experiment(), public / "run")
    arguments = ["run", str(file), "--set", f"fleet.{key}=cgroup", "--out", str(tmp_path / "run")]
    code, out, err = Command(*arguments, before=runs.UNPRIVILEGED).finish()
    assert code == 2
    assert err.startswith(f"edgefl: fleet.{key}: 'cgroup' cannot be used here: no group can be made in ")
    assert err.endswith(f"Permission denied; {others} no privileges\n")
    assert err.count("\n") == 1
    assert out == ""
    assert not (tmp_path / "run").exists()
