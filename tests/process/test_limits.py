"""Mechanisms on processes that know nothing of them, and runs whose phones a governor holds."""

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
from tests.process import runs
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
    """A process that computes all the time."""
    with probe.loaded() as child:
        yield child


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that comes about by itself, with a bound."""
    for _ in range(int(BOUND_S / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError(f"not within {BOUND_S:g} s")


def test_a_busy_process_gets_its_share_until_it_is_let_go(kind: str, busy: subprocess.Popen[bytes]) -> None:
    began, before = time.monotonic_ns(), cpu_ns(busy.pid)

    def within_its_share() -> bool:
        return cpu_ns(busy.pid) - before <= SHARE * (time.monotonic_ns() - began)

    throttle = host.open(kind, busy.pid, SHARE)
    until(lambda: throttle.achieved().cpu_s > 0.2)
    until(within_its_share)  # what it got while its governor had to wait for a core is taken back
    found = throttle.achieved()
    assert found.declared_cpu_s == pytest.approx(SHARE * found.wall_s, rel=1e-6)
    throttle.share = 0.01
    slow = throttle.achieved()
    until(lambda: throttle.achieved().wall_s > slow.wall_s + 0.3)
    slow = throttle.achieved()
    throttle.share = 0.5
    assert throttle.share == 0.5
    # At the share of before it would take as long as this may take.
    until(lambda: throttle.achieved().cpu_s > slow.cpu_s + 0.01 * BOUND_S)
    throttle.close()
    throttle.close()
    before = cpu_ns(busy.pid)
    until(lambda: cpu_ns(busy.pid) - before > 100_000_000)
    assert psutil.Process(busy.pid).status() != psutil.STATUS_STOPPED


def test_a_process_that_ends_while_it_is_held_is_no_trouble(kind: str, busy: subprocess.Popen[bytes]) -> None:
    throttle = host.open(kind, busy.pid, SHARE)
    os.kill(busy.pid, signal.SIGKILL)  # also a stopped one
    assert busy.wait() == -signal.SIGKILL
    throttle.close()
    assert throttle.achieved().cpu_s >= 0.0


def test_many_at_once(kind: str) -> None:
    with probe.loaded() as one, probe.loaded() as other:
        first = host.open(kind, one.pid, 0.05)
        second = host.open(kind, other.pid, 0.1)
        until(lambda: second.achieved().cpu_s > 0.05 and first.achieved().cpu_s > 0.025)
        first.close()
        was = second.achieved().cpu_s
        until(lambda: second.achieved().cpu_s > was + 0.02)  # still looked after
        second.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "edgefl-governor"]


def test_what_a_process_starts_is_held_with_it_by_a_control_group() -> None:
    needs_groups("cpu")
    code = "import subprocess,sys; subprocess.run([sys.executable,'-ISc','while True: pass'])"
    held = subprocess.Popen([sys.executable, "-ISc", f"input(); {code}"], stdin=subprocess.PIPE)
    assert held.stdin is not None
    try:
        with host.open("cgroup", held.pid, 0.05):
            held.stdin.write(b"\n")
            held.stdin.flush()
            until(lambda: bool(psutil.Process(held.pid).children()))
            (child,) = psutil.Process(held.pid).children()
            assert find("cpu", child.pid) == find("cpu", held.pid) != find("cpu")
    finally:
        for process in (*psutil.Process(held.pid).children(), psutil.Process(held.pid)):
            process.kill()
        held.wait()
        held.stdin.close()


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


def test_groups_of_a_killed_owner_are_swept_away_and_those_of_a_living_one_are_not() -> None:
    needs_groups("cpu")
    outer = find("cpu").folder
    code = (
        "from edgefl.host.groups import Groups\n"
        "groups = Groups(['cpu']); groups.group('x'); print('made', flush=True); input()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"made\n"
        (name,) = (path.name for path in outer.glob(f"edgefl-{owner.pid}-*"))
        assert name not in groups.remove_orphans(outer)
        assert (outer / name).exists()
        owner.kill()
        owner.wait()
        assert name in groups.remove_orphans(outer)
        assert not (outer / name).exists()
    finally:
        owner.kill()
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()


def test_a_phone_of_a_killed_owner_is_killed_by_the_next_process_that_makes_groups() -> None:
    """Programs side by side: it would be moved out of its group, and its own run would not find it."""
    needs_groups("cpu")
    code = (
        "import subprocess\n"
        "from edgefl.host.groups import Groups\n"
        "phone = subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL)\n"
        "Groups(['cpu']).group('phone-0').enter(phone.pid); print(phone.pid, flush=True); input()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None
    assert owner.stdout is not None
    phone = psutil.Process(int(owner.stdout.readline()))
    try:
        owner.kill()
        owner.wait()
        with Groups(["cpu"]) as own:
            own.group("x")
            assert not phone.is_running() or phone.status() == psutil.STATUS_ZOMBIE
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            phone.kill()
        owner.stdin.close()
        owner.stdout.close()


def test_processes_left_in_a_group_go_back_when_it_closes(busy: subprocess.Popen[bytes]) -> None:
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
def test_the_probe_says_what_it_saw(what: str) -> None:
    if what != "sigstop":
        needs_groups("cpu" if what == "cgroup" else what)
    found = probe.memory_group() if what == "memory" else probe.throttle(what)
    assert ("killed" in found.what) if what == "memory" else ("requested" in found.what)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("sigstp", 1, 0.5), ConfigError, "throttle 'sigstp' not found; did you mean 'sigstop'?"),
        (("sigstop", 0, 0.5), ValueError, "pid must be at least 1 (got 0)"),
        (("sigstop", 1, 0.0), ValueError, "share must be a finite number of cores above 0 (got 0.0)"),
        (("cgroup", 1, float("nan")), ValueError, "share must be a finite number of cores above 0 (got nan)"),
    ],
)
def test_misuse_is_said(arguments: tuple[str, int, float], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        host.open(*arguments)
    assert message in str(raised.value)


def test_a_process_that_is_gone_cannot_be_held(kind: str) -> None:
    child = subprocess.Popen([sys.executable, "-ISc", "pass"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        host.open(kind, child.pid, SHARE)


def unprivileged(code: str) -> str:
    """What ``code`` prints as a user who may read everything and write nothing."""
    needs_groups("cpu", "memory")
    needs_unprivileged()
    command = [*UNPRIVILEGED, sys.executable, "-B", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("open('cgroup', os.getpid(), 0.5)", "throttle 'cgroup' cannot be used here: no group can be"),
        ("open_memory(os.getpid(), 64)", "memory 'cgroup' cannot be used here: no group can be"),
        ("open('sigstop', os.getppid(), 0.5)", "belongs to another user and cannot be throttled"),
        ("open('sigstop', own.pid, 0.5).close()", ""),
    ],
)
def test_without_the_right_a_mechanism_is_refused_in_one_line(call: str, message: str) -> None:
    said = unprivileged(
        "import os, subprocess\n"
        "from edgefl import ConfigError\n"
        "from edgefl import host\n"
        "own = subprocess.Popen(['cat'], stdin=subprocess.PIPE)  # ends with this process\n"
        f"try: host.{call}\n"
        "except ConfigError as error: print(error)\n"
    )
    assert message in said
    assert said.count("\n") == (1 if message else 0)


def throttled(kind: Any, **changes: Any) -> Any:
    fleet = Fleet(devices=DEVICES, network="fios", throttle=kind)
    return experiment(fleet=fleet, **changes)


def test_a_throttled_run_is_whole_and_no_faster_than_its_phones(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Command.run(throttled(kind, stop=Stop(versions=20)), folder).ends()
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
def test_phones_that_are_held_end_too(kind: Any, how: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = Command.run(throttled(kind, stop=Stop(versions=10_000)), folder)
    wait_for_versions(folder, 3, command)
    if how == "Ctrl-C":
        command.interrupt()
        command.ends(130, "edgefl resume")
    else:
        command.child("edgefl-governor").send_signal(signal.SIGKILL)
        command.ends(1, f"the governor of fleet.throttle = '{kind}' ended early (signal 9)")


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
    psutil.wait_procs(family)
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
    assert err.startswith(f"edgefl: fleet.{key}: 'cgroup' cannot be used here: no group can be created in ")
    assert err.endswith(f"Permission denied; {others} no privileges\n")
    assert err.count("\n") == 1
    assert out == ""
    assert not (tmp_path / "run").exists()
