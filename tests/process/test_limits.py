"""Tests of throttles and memory limits on independent processes and in runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edgefl import ConfigError, Fleet, Stop, host
from edgefl.host import groups, probe
from edgefl.host.groups import Groups, find, read_words
from edgefl.host.throttle import cpu_ns
from edgefl.results.record import Record
from tests.process.runs import (
    DEVICES,
    UNPRIVILEGED,
    Command,
    experiment,
    needs_groups,
    needs_unprivileged,
    summary,
    wait_for_versions,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has them")

SHARE = 0.2
BOUND_S = 30.0


@pytest.fixture(params=["sigstop", "cgroup"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "cgroup":
        needs_groups("cpu")
    return str(request.param)


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes without a pause."""
    with probe.loaded() as child:
        yield child


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, for at most ``BOUND_S`` seconds."""
    for _ in range(int(BOUND_S / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError(f"not within {BOUND_S:g} s")


def test_a_busy_process_gets_its_share_until_the_throttle_is_closed(
    kind: str, busy: subprocess.Popen[bytes]
) -> None:
    began, before = time.monotonic_ns(), cpu_ns(busy.pid)

    def within_its_share() -> bool:
        return cpu_ns(busy.pid) - before <= SHARE * (time.monotonic_ns() - began)

    throttle = host.open(kind, busy.pid, SHARE)
    until(lambda: throttle.achieved().cpu_s > 0.2)
    # While the governor waits for a core, the process may exceed its share; the governor corrects this later.
    until(within_its_share)
    found = throttle.achieved()
    assert found.declared_cpu_s == pytest.approx(SHARE * found.wall_s, rel=1e-6)
    throttle.share = 0.02
    slow = throttle.achieved()
    until(lambda: throttle.achieved().wall_s > slow.wall_s + 0.3)
    slow = throttle.achieved()
    throttle.share = 0.5
    assert throttle.share == 0.5
    # At the old share of 0.02, this would take `BOUND_S` seconds.
    until(lambda: throttle.achieved().cpu_s > slow.cpu_s + 0.02 * BOUND_S)
    throttle.close()
    throttle.close()
    before = cpu_ns(busy.pid)
    until(lambda: cpu_ns(busy.pid) - before > 100_000_000)
    assert psutil.Process(busy.pid).status() != psutil.STATUS_STOPPED


def test_a_throttled_process_may_end(kind: str, busy: subprocess.Popen[bytes]) -> None:
    throttle = host.open(kind, busy.pid, SHARE)
    os.kill(busy.pid, signal.SIGKILL)  # also a stopped one
    assert busy.wait() == -signal.SIGKILL
    throttle.close()
    assert throttle.achieved().cpu_s >= 0.0


def test_two_processes_are_throttled_at_once(kind: str) -> None:
    with probe.loaded() as one, probe.loaded() as other:
        first = host.open(kind, one.pid, 0.05)
        second = host.open(kind, other.pid, 0.1)
        until(lambda: second.achieved().cpu_s > 0.05 and first.achieved().cpu_s > 0.025)
        first.close()
        was = second.achieved().cpu_s
        until(lambda: second.achieved().cpu_s > was + 0.02)  # still throttled
        second.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "edgefl-governor"]


@contextlib.contextmanager
def started(code: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process with Python ``code`` and pipes; kill it at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_children_of_a_process_are_in_its_control_group() -> None:
    needs_groups("cpu")
    code = "import subprocess; input(); print(subprocess.Popen(['sleep', '300']).pid, flush=True); input()"
    with started(code) as held, host.open("cgroup", held.pid, 0.05):
        assert held.stdin is not None
        held.stdin.write("\n")
        held.stdin.flush()
        child = psutil.Process(int(first_line(held)))
        try:
            assert find("cpu", child.pid) == find("cpu", held.pid) != find("cpu")
        finally:
            child.kill()


@pytest.mark.parametrize(("mib", "code", "peak"), [(128, -signal.SIGKILL, (60, 64)), (32, 0, (32, 48))])
def test_a_process_over_its_groups_memory_is_killed(mib: int, code: int, peak: tuple[int, int]) -> None:
    needs_groups("memory")
    with probe.loaded(mib) as child, host.open_memory(child.pid, 64) as held:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait() == code
        assert held.killed == (code != 0)
        assert peak[0] <= held.peak_mib <= peak[1]
    assert held.killed == (code != 0)


def test_only_groups_of_ended_owners_are_removed() -> None:
    needs_groups("cpu")
    outer = find("cpu").folder
    code = (
        "from edgefl.host.groups import Groups\n"
        "groups = Groups(['cpu']); groups.group('x'); print('made', flush=True); input()"
    )
    with started(code) as owner:
        assert first_line(owner) == "made\n"
        (name,) = (path.name for path in outer.glob(f"edgefl-{owner.pid}-*"))
        groups.remove_orphans(outer)
        assert (outer / name).exists()
        owner.kill()
        owner.wait()
        groups.remove_orphans(outer)
        until(lambda: not (outer / name).exists())  # another process may be removing it


def test_a_phone_of_a_killed_owner_is_killed_by_the_next_process_that_makes_groups() -> None:
    """If its process were moved out of the group instead, the phone's own run could no longer find it."""
    needs_groups("cpu")
    code = (
        "import subprocess\n"
        "from edgefl.host.groups import Groups\n"
        "phone = subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL)\n"
        "Groups(['cpu']).group('phone-0').enter(phone.pid); print(phone.pid, flush=True); input()"
    )
    with started(code) as owner:
        phone = psutil.Process(int(first_line(owner)))
    try:
        with Groups(["cpu"]) as own:
            own.group("x")
            assert not phone.is_running() or phone.status() == psutil.STATUS_ZOMBIE
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            phone.kill()


def test_processes_return_to_their_former_group_when_a_group_is_closed(busy: subprocess.Popen[bytes]) -> None:
    needs_groups("cpu", "memory")
    before = find("cpu")
    made = Groups(["cpu", "memory"])
    group = made.group("x")
    group.enter(busy.pid)
    assert str(busy.pid) in read_words(group.place("memory").folder / "cgroup.procs")
    made.close()
    made.close()
    assert find("cpu", busy.pid) == before
    assert not group.place("cpu").folder.exists()
    assert not group.place("memory").folder.exists()


@pytest.mark.parametrize("what", ["sigstop", "cgroup", "memory"])
def test_the_probe_describes_its_measurement(what: str) -> None:
    if what != "sigstop":
        needs_groups("cpu" if what == "cgroup" else what)
    found = probe.memory_group() if what == "memory" else probe.throttle(what)
    assert ("killed" in found.what) if what == "memory" else ("requested" in found.what)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("sigstp", 1, 0.5), ConfigError, "throttle 'sigstp' not found; did you mean 'sigstop'?"),
        (("sigstop", 0, 0.5), ValueError, "pid must be at least 1 (got 0)"),
        (("cgroup", 1, float("nan")), ValueError, "share must be a finite number of cores above 0 (got nan)"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[str, int, float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        host.open(*arguments)
    assert message in str(raised.value)


def test_an_ended_process_cannot_be_throttled(kind: str) -> None:
    child = subprocess.Popen([sys.executable, "-ISc", "pass"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        host.open(kind, child.pid, SHARE)


WITHOUT_RIGHTS = {
    "open('cgroup', os.getpid(), 0.5)": "throttle 'cgroup' cannot be used here: no group can be",
    "open_memory(os.getpid(), 64)": "memory 'cgroup' cannot be used here: no group can be",
    "open('sigstop', os.getppid(), 0.5)": "belongs to another user and cannot be throttled",
    "open('sigstop', own.pid, 0.5).close()": "nothing refused",
}
REFUSED = f"""
import os, subprocess, sys
from edgefl import ConfigError, host
from edgefl.cli import main
own = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with this process
for call in {list(WITHOUT_RIGHTS)!r}:
    try: exec("host." + call)
    except ConfigError as error: print(error)
    else: print("nothing refused")
for key in ("throttle", "memory"):
    assert main(["run", *sys.argv[1:], "--set", "fleet." + key + "=cgroup"]) == 2
"""


def test_without_the_rights_a_mechanism_and_a_run_with_it_are_refused_in_one_line(tmp_path: Path) -> None:
    """The user may read everything and write nothing."""
    needs_groups("cpu", "memory")
    needs_unprivileged()
    public = Path(tempfile.gettempdir())  # this test's own, which ``nothing_left`` removes
    public.chmod(0o755)
    file = Command.write(experiment(), public / "run")
    command = [*UNPRIVILEGED, sys.executable, "-B", "-c", REFUSED, str(file), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, message in zip(done.stdout.splitlines(), WITHOUT_RIGHTS.values(), strict=True):
        assert message in line
    others = {"throttle": "'paced' and 'sigstop' need", "memory": "'rlimit' needs"}
    for line, (key, other) in zip(done.stderr.splitlines(), others.items(), strict=True):
        assert line.startswith(
            f"edgefl: fleet.{key}: 'cgroup' cannot be used here: no group can be created in "
        )
        assert line.endswith(f"Permission denied; {other} no privileges")
    assert not (tmp_path / "run").exists()


def throttled(kind: Any, **changes: Any) -> Any:
    fleet = Fleet(devices=DEVICES, network="fios", throttle=kind)
    return experiment(fleet=fleet, **changes)


def test_a_throttled_run_is_complete_and_no_faster_than_its_phones(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Command.run(throttled(kind), folder).ends()
    figures, trips = summary(folder), Record(folder).trips
    assert figures["versions"] == 12
    assert figures["integrity"] == {"checked": 36, "checksum_mismatches": 0, "version_mismatches": 0}
    assert figures["incidents"] == {}
    done = ~np.isnan(trips["trip_achieved_s"])
    assert done.sum() >= 36
    assert (trips["trip_achieved_s"][done] >= trips["trip_declared_s"][done] - 1e-6).all()
    # After a burst of training, a client waits for its device before it uploads.
    assert trips["compute_s"][done].sum() > 0.85 * trips["compute_declared_s"][done].sum()


@pytest.mark.parametrize("how", ["the governor dies", "Ctrl-C"])
def test_throttled_phones_end_with_their_run(kind: Any, how: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(throttled(kind, stop=Stop(versions=10_000)), folder)
    wait_for_versions(folder, 3, command)
    if how == "Ctrl-C":
        command.interrupt()
        command.ends(130, "edgefl resume")
    else:
        command.child("edgefl-governor").send_signal(signal.SIGKILL)
        command.ends(1, f"the governor of fleet.throttle = '{kind}' ended early (signal 9)")


def test_a_run_removes_the_groups_of_a_run_whose_processes_were_all_killed(tmp_path: Path) -> None:
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
    psutil.wait_procs(family)
    command.finish()
    Command.run(experiment(fleet=fleet), tmp_path / "next").ends()
    assert not any(folder.exists() for folder in made)
