"""Tests of a process tree's estimate, from Linux's figures, of how long its threads wanted a core."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from edgefl.errors import ConfigError
from edgefl.host import groups
from edgefl.host.groups import GroupCpuTime, Place
from edgefl.host.process import ThreadSchedule
from edgefl.programs import tree
from edgefl.programs.tree import UNSEEN_NS, Child, ProcessTree

MS = 1_000_000
HANDLER_NS = 20_000
"""CPU time in which the first thread handles one signal of the throttle."""


class TwoThreads:
    """The first thread waits for the second one, and handles the signals that stop and continue both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
        self.first, self.second, self.state = ThreadSchedule(0, 0, 1), ThreadSchedule(0, 0, 1), state
        monkeypatch.setattr(tree, "threads_of", lambda _: [("1", self.first), ("2", self.second)])
        monkeypatch.setattr(tree, "process_stat", lambda which: self.stat(which))
        self.tree = ProcessTree(os.getpid())
        self.now_ns, _, _ = self.tree._seen

    def stat(self, which: object) -> list[str]:
        return [self.state if which == "2" else "S", *["0"] * 16, "2"]

    def slept_ns(self, wall_ns: int, used_ns: int) -> int:
        """Advance by ``wall_ns``, of which the threads use ``used_ns``; return the time both slept, in ns."""
        self.now_ns += wall_ns
        self.tree._used_ns += used_ns
        return self.now_ns - self.tree.wanting_ns(self.now_ns)


def test_a_thread_that_waits_for_a_core_does_not_sleep_while_another_handles_a_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux reports a thread's wait for a core only after the wait has ended.

    Regression: a few microseconds of the first thread made the second thread's wait count as sleep.
    """
    threads = TwoThreads(monkeypatch, "R")
    threads.slept_ns(MS, 0)
    for times in range(1, 5):
        threads.first = ThreadSchedule(times * HANDLER_NS, 0, 1 + times)
        assert threads.slept_ns(50 * MS, HANDLER_NS) == 0
    threads.second = ThreadSchedule(MS, 201 * MS, 2)
    assert threads.slept_ns(2 * MS, MS) == 0


@pytest.mark.parametrize("state", ["S", "D", "t"])
def test_the_sleep_of_all_threads_counts_as_sleep(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """State t: the thread is at a breakpoint, and its debugger waits for a command."""
    threads = TwoThreads(monkeypatch, state)
    threads.slept_ns(MS, 0)
    assert threads.slept_ns(50 * MS, HANDLER_NS) == pytest.approx(51 * MS, abs=HANDLER_NS)


def test_a_tree_sleeps_only_if_its_second_thread_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports the first thread's state as that of the process."""
    assert not TwoThreads(monkeypatch, "R").tree.sleeps()
    assert TwoThreads(monkeypatch, "S").tree.sleeps()


def test_processes_are_listed_again_only_if_one_was_started_or_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their control group counts the CPU time exactly, so an old list is as good as a new one."""
    (tmp_path / "cpuacct.usage").write_text("0\n")
    newest = [b"100"]
    monkeypatch.setattr(tree, "last_pid", lambda: newest[0])
    monkeypatch.setattr(tree, "REFRESH_NS", 0)
    monkeypatch.setattr(tree, "LONGEST_NS", math.inf)
    listed: list[int] = []
    children_of = tree.children_of
    monkeypatch.setattr(tree, "children_of", lambda pid: listed.append(pid) or children_of(pid))
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as first,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as second,
    ):
        kept = ProcessTree(first.pid, accounting=GroupCpuTime(Place(tmp_path, 1)))
        for _ in range(3):
            kept.used_ns()
        assert listed == [first.pid]
        newest[0] = b"101"
        kept.used_ns()
        assert listed == [first.pid] * 2
        with monkeypatch.context() as old:
            old.setattr(tree, "LONGEST_NS", 0)  # whatever the newest pid is
            kept.used_ns()
        assert listed == [first.pid] * 3
        kept.orphans.add(second.pid)  # which may have been started before the last listing
        kept.used_ns()
        assert len(kept) == 2
        second.communicate()
        kept.used_ns()
        assert len(kept) == 1
        first.communicate()
        with pytest.raises(ProcessLookupError):
            kept.cpu_ns()
        kept.close()


@pytest.mark.parametrize("place", ["edgefl.programs.tree.Target", "os.listdir"])
def test_too_many_open_files_do_not_make_a_process_look_ended(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Such a process would run without limit."""
    too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as first,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as second,
    ):
        kept = ProcessTree(first.pid)
        kept.orphans.add(second.pid)
        with monkeypatch.context() as full:
            full.setattr(place, Mock(side_effect=too_many))
            with pytest.raises(OSError, match="Too many open files"):
                kept.refresh()
        first.communicate()
        second.communicate()
        kept.close()


@pytest.mark.parametrize("limited", [False, True])
def test_only_a_control_group_limits_a_process_of_another_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limited: bool
) -> None:
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as first,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as second,
    ):
        kept = ProcessTree(first.pid, Place(tmp_path, 2) if limited else None)
        kept.orphans.add(second.pid)
        monkeypatch.setattr(tree, "Target", Mock(side_effect=ConfigError("it belongs to another user")))
        kept.refresh()
        assert (len(kept), kept.unlimited) == (1, not limited)
        first.communicate()
        second.communicate()
        kept.close()


def test_a_process_that_has_become_one_of_another_user_cannot_be_killed() -> None:
    """An example is ``sudo`` if a refresh listed it before it changed its user."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        kept = ProcessTree(process.pid)
        kept._members[process.pid].close()
        sudo = Mock(pid=process.pid, send=Mock(side_effect=PermissionError))
        kept._members[process.pid] = sudo
        assert not kept.kill()
        sudo.send.side_effect = None
        assert kept.kill()
        process.communicate()
        kept.close()


def test_the_children_of_an_ended_orphan_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When edgefl waits for the orphan, it gets CPU time that includes its children's. The last refresh has
    counted the children's CPU time, too."""

    def refresh(kept: ProcessTree) -> None:
        kept._members, kept._waited_for_ns = {}, 0

    monkeypatch.setattr(ProcessTree, "refresh", refresh)
    monkeypatch.setattr(ProcessTree, "_refresh_if_old", lambda _: None)
    kept = ProcessTree(os.getpid())
    kept._members = {1: Mock(cpu_ns=Mock(side_effect=ProcessLookupError))}
    kept._waited_for_ns = kept.ended_ns = 5_000 * MS
    assert kept.used_ns() == 5_000 * MS


def test_a_process_without_its_environment_is_of_the_phone_of_its_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutant: the control group of another run is accepted, too."""
    files = {"environ": b"A=1\0", "cgroup": f"0::/x/edgefl-{os.getpid()}-77/0-phone-3\n".encode()}
    for module in (tree, groups):
        monkeypatch.setattr(module, "read_kernel_file", lambda path: files[Path(path).name])
    assert tree.phone_of(9) == 3
    files["environ"] = b"A=1\0EDGEFL_PHONE=5\0"
    assert tree.phone_of(9) == 5
    files |= {"environ": b"", "cgroup": b"0::/x/edgefl-0-77/0-phone-3\n"}
    assert tree.phone_of(9) is None


def test_a_shell_that_was_only_continued_has_no_thread_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell waits for its busy child. SIGCONT wakes both, and the child has the only free core.

    Mutants: the shell counts as soon as it is woken; a process that waits longer for a core no longer counts.
    """
    shell, child = Mock(runnable=lambda: states[0]), Mock(runnable=lambda: states[1])
    schedules = {1: b"100 0 1", 2: b"100 0 1"}
    monkeypatch.setattr(tree, "_only_thread", schedules.__getitem__)
    monkeypatch.setattr(ProcessTree, "_refresh_if_more", lambda _: None)
    kept = ProcessTree(os.getpid())
    kept._members = {1: shell, 2: child}
    states = (0, 1)
    assert kept.runnable() == 1
    kept.resume()
    states = (1, 1)
    assert kept.runnable() == 1
    schedules[1] = b"200 0 2"  # the shell has run, so it does something itself
    assert kept.runnable() == 2
    kept.resume()
    assert kept.runnable() == 2


FAMILY = """
import ctypes, os, signal, sys, time
assert ctypes.CDLL(None).sigaction(signal.SIGCHLD, (ctypes.c_ulong * 20)(*[0] * 17, int(sys.argv[1])), 0) == 0
(end, keep), (read, ready) = os.pipe(), os.pipe()
if (child := os.fork()) == 0:
    if (grandchild := os.fork()) == 0:
        os.close(keep)
        while time.process_time() < 5e-3:
            pass
        os.write(ready, b"x")
        os.read(end, 1)
        os._exit(0)
    os.close(keep)
    try:
        os.waitpid(grandchild, 0)
    except ChildProcessError:
        pass
    os._exit(0)
os.read(read, 1)
print("computed", flush=True)
sys.stdin.readline()
os.close(keep)
for flags in (os.WNOWAIT, 0):
    try:
        os.waitid(os.P_PID, child, os.WEXITED | flags)
    except ChildProcessError:
        pass
    print("ended", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(("flags", "lost"), [(0, False), (2, True)])  # 2 is SA_NOCLDWAIT
def test_children_that_no_process_waits_for_are_noticed(flags: int, lost: bool) -> None:
    """A child and a grandchild end together; the child is a zombie before its parent waits for it."""
    command = [sys.executable, "-ISc", FAMILY, str(flags)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdin
        assert root.stdout
        kept, sizes = ProcessTree(root.pid), []
        for _ in range(3):
            root.stdout.readline()
            kept.refresh()
            sizes.append(len(kept))
            root.stdin.write(b"\n")
            root.stdin.flush()
        kept.close()
    assert sizes == ([3, 1, 1] if lost else [3, 2, 1])
    assert (kept.uncounted_ns > 0, kept.ended_ns >= 5 * MS) == (lost, lost)


@pytest.mark.parametrize(
    ("unseen_ns", "counted_ns"), [(100, 100), (UNSEEN_NS, UNSEEN_NS), (UNSEEN_NS + 1, 100)]
)
def test_a_short_time_between_two_lost_children_counts(
    unseen_ns: int, counted_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between refreshes that saw only child 9, other children of the parent may have started and ended."""
    monkeypatch.setattr(tree, "waited_faults", lambda pid: 0)
    monkeypatch.setattr(tree, "has_ended", lambda pid: True)
    kept, stays = ProcessTree(os.getpid()), {9: Child(1, 5, 5)}
    one = stays | {2: Child(1, 5, 5)}
    for children, ran_ns in ((one, 100), (stays, unseen_ns - 100), (one, 100)):
        kept.children, kept._faults_before = children, {1: 0}
        kept._count_lost([1, 9], ran_ns)
    assert kept.uncounted_ns == 100 + counted_ns
    kept.children = {}
    kept._count_lost([1], 30)
    assert kept.uncounted_ns == 100 + counted_ns
    kept._count_lost([], 40)
    assert kept.uncounted_ns == 100 + counted_ns + 30 + 40


def test_children_that_end_with_their_parent_count_if_the_parent_has_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree, "has_ended", lambda pid: True)
    kept = ProcessTree(os.getpid())
    kept.children = {2: Child(1, 5, 5), 4: Child(3, 5, 5), 5: Child(1, 5, 5)}
    kept._losing = {1: 0}
    kept._count_lost([], 100)
    assert kept.uncounted_ns == 200


def test_a_parent_out_of_reach_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is out of reach when its own parent has ended, until edgefl adopts it and a refresh lists it."""
    monkeypatch.setattr(tree, "has_ended", lambda pid: False)
    kept = ProcessTree(os.getpid())
    kept._losing = {1: 0}
    kept._count_lost([], 100)
    assert (kept.uncounted_ns, kept._losing) == (0, {1: 100})


@pytest.mark.parametrize(
    ("children", "waited", "lost"),
    [
        ({2: (1, 50), 3: (1, 60)}, {1: 110}, set()),
        ({2: (1, 50), 3: (1, 60)}, {1: 0}, {2, 3}),
        ({2: (1, 0), 3: (1, 60), 4: (1, 0)}, {1: 0}, {3, 4}),  # 4 is the second that its parent loses
        ({2: (1, 50), 3: (2, 60)}, {1: 115}, set()),
        ({2: (1, 50), 3: (2, 60)}, {1: 55}, {3}),
        ({2: (1, 50), 3: (2, 60)}, {1: 0}, {2, 3}),
        ({2: (1, 50)}, {1: None}, set()),  # its parent has ended too
        ({3: (2, 60)}, {1: 0}, set()),  # its parent was a child of edgefl
        ({2: (1, 10), 3: (2, 50), 4: (3, 60)}, {1: 60, 2: 50}, set()),  # 1 adopted it
        ({2: (1, 10), 3: (2, 60)}, {1: 60, 2: 0}, {3}),  # 1 has waited for another child
    ],
)
def test_page_faults_that_no_ancestor_got_are_those_of_lost_children(
    children: dict[int, tuple[int, int]],
    waited: dict[int, int | None],
    lost: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``children`` has the parent and the page faults of each process. Processes that are not in ``waited``
    have ended. For the others, ``waited`` has the page faults of the children for which they waited since
    the last refresh."""
    monkeypatch.setattr(tree, "waited_faults", lambda pid: None if waited[pid] is None else 7 + waited[pid])
    monkeypatch.setattr(tree, "has_ended", lambda pid: pid not in waited)
    kept = ProcessTree(os.getpid())
    kept.children = {pid: Child(parent, 10**pid, faults) for pid, (parent, faults) in children.items()}
    kept._faults_before = dict.fromkeys(waited, 7)
    kept._count_lost(waited, 100)
    assert kept.ended_ns == sum(10**pid for pid in lost)
    assert kept.uncounted_ns == 100 * len(lost)
