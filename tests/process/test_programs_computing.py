"""Tests of phones' shares of cores, memory and batteries with real commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgefl.devices import load_device
from edgefl.host.memory import private_mib
from edgefl.programs import run, start
from edgefl.programs.options import no_group
from edgefl.programs.result import MIN_CPU_S
from edgefl.programs.tree import ProcessTree
from edgefl.regression.memory import _started_kib

from .runs import UNPRIVILEGED, Command, needs_unprivileged, options, phone, python


@pytest.fixture(params=["sigstop", "cgroup"])
def throttle(request: pytest.FixtureRequest) -> str:
    if request.param == "cgroup" and (why := no_group("cpu") or no_group("memory")):
        pytest.skip(f"control groups: {why}")
    return str(request.param)


def test_all_processes_of_a_phone_share_its_share(throttle: str) -> None:
    """While the keeper, which enforces the share, waits for a core, the processes may get too much CPU time.
    The keeper later corrects nearly all of this."""
    busy = "while :; do :; done"
    two = phone("sh", "-c", f"({busy}) & {busy}", share=0.2)
    with start([two], options(throttle=throttle)) as running:
        while (state := running.states.get(0)) is None or not 0.4 < state.cpu_s <= 0.2 * state.wall_s + 0.1:
            running.turn(0.5)
    (one,) = running.result().phones
    assert one.wanting_s <= one.wall_s
    assert one.declared_share == 0.2


LOOP = "while :; do :; done"


@pytest.mark.parametrize(
    ("command", "processes", "least", "most"),
    [
        pytest.param(LOOP, 1, 0.095, 0.105, marks=pytest.mark.slow),
        pytest.param(f"({LOOP}) & {LOOP}", 2, 0.19, 0.21, marks=pytest.mark.slow),
        (f"({LOOP}) & ({LOOP}) & ({LOOP}) & {LOOP}", 4, 0.24, 0.26),
        (f"sleep 1000 & {LOOP}", 2, 0.095, 0.195),  # signals wake it, and it may wait for a core
    ],
)
def test_each_busy_process_has_a_core_of_the_device(
    throttle: str, command: str, processes: int, least: float, most: float
) -> None:
    """A new process gets a core of its own when the throttle next stops the phone."""
    with start([phone("sh", "-c", command, share=(0.05, 0.1, 0.1))], options(throttle=throttle)) as running:
        while (begun := running.states.get(0)) is None or begun.processes < processes:
            running.turn(0.5)
        # Some processes may have started since the last stop.
        while (first := running.states[0]).wall_s <= begun.wall_s + 0.5:
            running.turn(0.5)
        while not first.cpu_s + 0.4 < (last := running.states[0]).cpu_s <= last.declared_cpu_s + 0.1:
            running.turn(0.5)
    share = (last.declared_cpu_s - first.declared_cpu_s) / (last.wanting_s - first.wanting_s)
    assert least <= share <= most


def test_threads_of_processes_started_since_the_last_refresh_count() -> None:
    """A phone that starts several busy loops between two stops gets a core for each of them."""
    command = "read line; (while :; do :; done) & (while :; do :; done) & echo started; read line"
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        tree = ProcessTree(shell.pid)
        try:
            tree.refresh()
            assert len(tree) == 1
            assert shell.stdin
            assert shell.stdout
            shell.stdin.write(b"go\n")
            shell.stdin.flush()
            assert shell.stdout.readline() == b"started\n"
            assert tree.runnable() >= 2
        finally:
            tree.kill()
            tree.close()


def test_a_phone_that_sleeps_wants_no_core(throttle: str) -> None:
    (one,) = run([phone("sleep", "1")], options(throttle=throttle)).phones
    assert one.wall_s >= 1.0
    assert one.wanting_s < one.wall_s
    # if the host stalls, the start of the phone may be charged with more CPU time
    assert one.cpu_error is None or one.cpu_s >= MIN_CPU_S


SHORT_CHILDREN = """
import ctypes, os, signal, time
DEFAULT, IGNORED, NO_CLDWAIT = 0, 1, 2
# struct sigaction of the C library: the handler, 1024 bits of a mask, the flags, the restorer
handler, flags = {}
action = (ctypes.c_ulong * 20)(handler, *[0] * 16, flags)
assert ctypes.CDLL(None).sigaction(signal.SIGCHLD, action, None) == 0
for _ in range(150):
    if (pid := os.fork()) == 0:
        while time.process_time() < 3e-3:
            pass
        os._exit(0)
    try:
        os.waitpid(pid, 0)  # returns when the child has ended
    except ChildProcessError:
        pass
"""
CHILDREN_S = 150 * 3e-3
IGNORES = SHORT_CHILDREN.format("IGNORED, 0")
KEEPS_NO_CHILDREN = SHORT_CHILDREN.format("DEFAULT, NO_CLDWAIT")
"""Source of a program whose children's CPU time the kernel discards. /proc shows why for `IGNORES`, but not
for this program."""
WAITS = SHORT_CHILDREN.format("DEFAULT, 0")


@pytest.mark.parametrize("code", [IGNORES, KEEPS_NO_CHILDREN])
def test_cpu_time_of_children_without_a_waiting_parent_counts(throttle: str, code: str) -> None:
    (one,) = run([python(code, share=0.5)], options(throttle=throttle)).phones
    if no_group("cpuacct"):
        assert one.uncounted
    else:
        assert one.cpu_s >= CHILDREN_S
        assert one.uncounted_s == 0.0


@pytest.mark.parametrize("code", [IGNORES, KEEPS_NO_CHILDREN])
def test_without_control_groups_uncounted_cpu_time_of_children_is_invalid(code: str) -> None:
    exit_code, err, found = without_control_groups(code)
    assert (exit_code, "INVALID: phone 0: a process ignores SIGCHLD" in err) == (3, True), err
    assert found["uncounted_s"] >= CHILDREN_S - found["cpu_s"]
    assert found["cpu_error"] is None


def test_without_control_groups_the_cpu_time_of_children_that_are_waited_for_is_counted() -> None:
    _, err, found = without_control_groups(WAITS)
    assert "SIGCHLD" not in err
    assert found["uncounted_s"] == 0.0
    assert found["cpu_s"] >= 0.9 * CHILDREN_S  # it is known in ticks


def without_control_groups(code: str) -> tuple[int, str, dict[str, Any]]:
    """Run a Python program as a user without control groups.

    Return the exit code, standard error, and the phone's entry in summary.json.
    """
    needs_unprivileged()
    out = Path(tempfile.gettempdir()) / "out"  # `nothing_left` removes this folder
    out.parent.chmod(0o755)
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    fixed = ["--throttle", "sigstop", "--memory", "off", "--time-scale", "1", "--share", "0.5"]
    command = ["exec", *fixed, "-d", "moto-g4", "--out", str(out / "run"), "--", "python3", "-IBSc"]
    exit_code, _, err = Command(*command, code, before=UNPRIVILEGED).finish()
    (found,) = json.loads((out / "run" / "summary.json").read_text())["phones"]
    return exit_code, err, found


def test_a_phone_over_its_memory_is_ended(throttle: str) -> None:
    """The phone ends, although Linux kills only the shell's child and the shell itself exits with 0."""
    hog = "b = bytearray(700 << 20); b[::4096] = b'x' * len(b[::4096]); import time; time.sleep(60)"
    by = {"sigstop": "watch", "cgroup": "cgroup"}[throttle]
    shell = '"$0" -I -S -c "$1"; exit 0'
    starts = phone("sh", "-c", shell, sys.executable, hog, share=1.0)
    (one,) = run([starts], options(throttle="off", memory=by)).phones
    assert one.exit_code == 137
    assert one.why.startswith("out of memory")
    assert one.limit_mib == 512


FORKS = """
import os, sys
block = b"x" * (150 << 20)
read, write = os.pipe()
for _ in range(6):
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
open(sys.argv[1]).read()  # until the test has seen the forks
"""


def test_memory_shared_by_forks_counts_once(tmp_path: Path) -> None:
    """If it were counted for each process, the phone would use twice its limit."""
    os.mkfifo(fifo := tmp_path / "fifo")
    forks = phone(sys.executable, "-I", "-S", "-c", FORKS, str(fifo))
    with start([forks], options(throttle="off")) as running:
        seen = None  # the memory is measured less often than the processes are counted
        while not running.ended and (seen is None or seen.processes < 7 or seen.rss_mib < 150):
            running.turn(0.1)
            seen = running.states.get(0)
        assert running.ended == []
        fifo.write_bytes(b"")
        running.wait()
    (one,) = running.result().phones
    assert (one.exit_code, one.why) == (0, "")
    assert seen is not None
    assert seen.rss_mib <= one.peak_mib < 250


@contextmanager
def ready(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start Python ``code``, and wait until it has printed "ready"."""
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield child


SPAWNS = """
import os, sys
block = b"x" * (100 << 20)
opens = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
print("ready", flush=True)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=opens)
"""


def test_the_memory_between_vfork_and_exec_counts_once(tmp_path: Path) -> None:
    """Until its exec, the child uses its parent's memory. Its exec waits until the fifo has a writer."""
    os.mkfifo(fifo := tmp_path / "fifo")
    with ready(SPAWNS, str(fifo)) as child:
        parent = psutil.Process(child.pid)
        while not parent.children() or parent.status() != psutil.STATUS_DISK_SLEEP:
            assert child.poll() is None
        used_mib = private_mib([child.pid, parent.children()[0].pid])
        fifo.write_bytes(b"")
    assert 100 < used_mib < 150


THREAD = """
import ctypes, sys, threading

def hold():
    kept = bytearray(100 << 20)
    print("ready", flush=True)
    sys.stdin.read()

threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_the_memory_of_a_process_whose_first_thread_has_ended_counts() -> None:
    """In this state, /proc/PID/statm shows no memory."""
    with ready(THREAD) as child:
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            assert child.poll() is None
        used_mib, in_a_device_test_mib = private_mib([child.pid]), _started_kib(child.pid) / 1024
        child.kill()
    assert 100 < used_mib < 150
    assert 100 < in_a_device_test_mib < 150


def test_a_phone_with_a_low_battery_is_switched_off() -> None:
    """Its charge is just above the minimum, and computing uses the difference."""
    battery = load_device("moto-g4").battery
    assert battery is not None
    assert battery.min_soc is not None
    charge = battery.min_soc + 1e-5  # 0.4 J
    result = run([phone("sh", "-c", "while :; do :; done")], options(charge=charge))
    (one,) = result.phones
    assert one.exit_code == 137
    assert one.why.startswith("battery low")
    assert one.energy_j is not None
    assert one.energy_j > 0.3
