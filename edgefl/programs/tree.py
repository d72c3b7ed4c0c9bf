"""The process tree of one phone: its command and all descendants, which a throttle treats as one process.

Orphaned descendants become children of the keeper. It assigns each of them to the phone in whose tree the
process was last seen, or else to the phone that its session, environment or control group indicates.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

from edgefl.errors import TOO_MANY_FILES, ConfigError
from edgefl.host.children import children_of, kill_marked
from edgefl.host.groups import (
    ACCOUNTING,
    GroupCpuTime,
    NoGroup,
    Place,
    find,
    group_phone,
    process_stat,
    remove_orphans,
    throttled_ns,
)
from edgefl.host.memory import is_fork, private_mib
from edgefl.host.pacing import Pauses
from edgefl.host.process import ThreadSchedule, read_kernel_file, threads_of
from edgefl.host.throttle import Target, cpu_ns
from edgefl.programs.phone import INDEX_VARIABLE

_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
REFRESH_NS = 40_000_000
"""Age at which the list of processes is refreshed, in ns, unless it is known to be complete."""
LONGEST_NS = 10 * REFRESH_NS
"""Age in ns at which the list is always refreshed: in some containers, /proc/loadavg lacks the newest pid."""
UNSEEN_NS = 10 * REFRESH_NS
"""If a parent loses two children (`ProcessTree._count_lost`) within this time in ns, not counting stops, it
is assumed to have had other children in between, which no refresh noticed."""
MEMORY_PAUSE = 20
"""Ratio of the minimum pause after a memory reading to the CPU time that the reading took."""
RUN_VARIABLE = "EDGEFL_RUN"
"""Environment variable that marks every process of a run, so that all are found if the keeper is killed."""
_ASLEEP = (["S"], ["D"], ["Z"], ["t"])  # t: stopped for its debugger, which decides when it goes on
CERTAIN = 0.05
"""If the CPU time is at least 1 − ``CERTAIN`` of an interval, the processes are assumed not to have slept."""


class ProcessTree:
    """Process ``root`` and all its descendants, which together are one `ThrottleTarget` for a throttle."""

    def __init__(self, root: int, place: Place | None = None, accounting: GroupCpuTime | None = None) -> None:
        """``place`` is the control group with the CPU quota; ``accounting`` counts the processes' CPU time.

        The tree closes ``accounting``.
        """
        self.root, self.stopped = root, False
        self._place, self._accounting = place, accounting
        self.uncounted_ns = 0
        """Upper estimate, in ns, of the CPU time that is lost because no process waited for a child: the time
        that such children used after they were last seen."""
        self.unlimited = False
        """True if the tree had a process of another user that neither signals nor a quota could limit."""
        self.children: dict[int, Child] = {}
        """Processes whose parent is in the tree, parents first; empty if a control group counts CPU time."""
        self._faults_before: dict[int, int] = {}
        """Result of `waited_faults` at the last refresh, keyed by parent, for the parents of ``children``."""
        self._losing: dict[int, int] = {}
        """Time in ns since a parent lost a child (see `_count_lost`), not counting stops, keyed by parent."""
        self.ended_ns = 0
        """CPU time, in ns, of ended processes that no process of the tree has waited for."""
        self.orphans: set[int] = set()
        self._members: dict[int, Target] = {root: Target(root)}
        self._refreshed_ns = self._checked_ns = self._awake_ns = 0
        self._last_pid = b""
        self._used_ns = self._unsure_ns = self._waited_for_ns = 0
        self._waited_ns = (0, 0)
        self._threads: dict[str, ThreadSchedule] = {}
        self._unchanged: list[str] = []
        """Threads that did not run between the last two updates of `_threads`."""
        self._ran: set[int] = set()
        """Processes whose threads were counted by the last call of `runnable`."""
        self._continued: dict[int, bytes] = {}
        """Scheduling statistics of single-threaded processes not in `_ran`, when they were last resumed."""
        self._memory_mib, self._memory_due_ns, self._pauses = 0.0, 0, Pauses(MEMORY_PAUSE)
        self._halted_ns = self._stopped_at_ns = self._slept_ns = 0
        self._seen = time.monotonic_ns(), 0, 0  # time, CPU time and stopped time at the last `wanting_ns`

    def __len__(self) -> int:
        """Return the number of processes at the last refresh."""
        return len(self._members)

    def __contains__(self, pid: int) -> bool:
        return pid in self._members

    def refresh(self) -> None:
        """Update the list of processes. Raises OSError if too many files are open."""
        self._refreshed_ns = self._checked_ns = time.monotonic_ns()
        self._last_pid = last_pid()
        before_ns, self._awake_ns = (
            self._awake_ns,
            self._refreshed_ns - self._halted_until_ns(self._refreshed_ns),
        )
        alive: dict[int, Target] = {}
        parents: dict[int, int] = {}
        faults: dict[int, int] = {}
        waiting = [self.root, *self.orphans]
        for pid in waiting:
            if pid in alive:
                continue
            target = self._members.get(pid)
            if target is None:
                try:
                    target = Target(pid)
                    if self.stopped:
                        target.stop()
                except ConfigError:  # it belongs to another user
                    self.unlimited |= self._place is None
                except OSError as error:  # it has ended, unless this process cannot see it
                    if error.errno in TOO_MANY_FILES:
                        raise
            if target is not None:
                children = children_of(pid)
                if children is None:
                    target.close()
                else:
                    alive[pid] = target
                    waiting += children
                    if children and self._accounting is None:
                        parents |= dict.fromkeys(children, pid)
                        # Read before the faults of the children: one reaped in between must not seem lost.
                        faults[pid] = waited_faults(pid) or 0
        self._count_lost(alive, self._awake_ns - before_ns)
        for pid, target in self._members.items():
            if pid not in alive:
                target.close()
        self.orphans &= alive.keys()
        stats = {pid: process_stat(pid) for pid in alive}
        self._waited_for_ns = sum(map(waited_for_ns, stats.values()))
        self.children = {}
        for pid, parent in parents.items():
            with contextlib.suppress(KeyError, ProcessLookupError):
                used_ns = cpu_ns(pid) + waited_for_ns(stats[pid])
                self.children[pid] = Child(parent, used_ns, sum(map(int, stats[pid][7:11])))
        self._members, self._faults_before = alive, faults

    def _count_lost(self, alive: Container[int], ran_ns: int) -> None:
        """Count the CPU time of lost children: those that no process waited for when they ended.

        The kernel discards the CPU time and the page faults of a lost child. If a process waits for a child,
        the kernel adds both to the totals of the process: the time in ticks, but the faults exactly. So if
        fewer faults were added than the child had at the last refresh, no process has waited for it. The
        upper estimate of the CPU time that it used since then is ``ran_ns``, the time since the last refresh,
        not counting stops. If the parent lost another child at most `UNSEEN_NS` ago, the estimate is the time
        since that loss, because other children may have run that no refresh noticed.
        """
        self._losing = {pid: since_ns + ran_ns for pid, since_ns in self._losing.items()}
        ended_parents = {pid: 0 for pid in self._losing if pid not in alive and has_ended(pid)}
        ended = {pid: child for pid, child in self.children.items() if pid not in alive and has_ended(pid)}
        added = {
            pid: now - before
            for pid, before in self._faults_before.items()
            if ended and pid in alive and (now := waited_faults(pid)) is not None
        }
        for child in ended.values():
            heirs = [pid for pid in self._ancestors(child) if pid not in ended]
            if heirs[0] not in added:  # it has ended too, or edgefl has waited for it
                if child.parent in ended_parents:
                    ended_parents[child.parent] += 1
                continue
            if heirs[0] == child.parent:  # otherwise any of them may have adopted the child
                del heirs[1:]
            faults = child.faults or int(child.parent in self._losing)  # 0 if it was stopped at its start
            for pid in heirs:
                if added.get(pid, -1) >= faults:
                    added[pid] -= faults
                    break
            else:
                self.ended_ns += child.used_ns
                self.uncounted_ns += max(ran_ns, self._unseen_ns(child.parent))
                if child.parent in alive or child.parent in ended_parents:
                    self._losing[child.parent] = 0
        for pid, children in ended_parents.items():  # that many children ended with it
            self.uncounted_ns += max(ran_ns * children, self._unseen_ns(pid))
            del self._losing[pid]

    def _unseen_ns(self, parent: int) -> int:
        """Return the time since a parent last lost a child, in ns; 0 if it is longer than `UNSEEN_NS`."""
        since_ns = self._losing.get(parent, 0)
        return since_ns if since_ns <= UNSEEN_NS else 0

    def _ancestors(self, child: Child | None) -> Iterator[int]:
        """Yield the parent of a child, the parent's parent and so on, as they were at the last refresh."""
        while child is not None:
            yield child.parent
            child = self.children.get(child.parent)

    def _refresh_if_old(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._checked_ns <= REFRESH_NS:
            return
        self._checked_ns = now_ns
        if (
            self._accounting is None
            or not self.orphans <= self._members.keys()
            or last_pid() != self._last_pid
            or now_ns - self._refreshed_ns > LONGEST_NS
        ):
            self.refresh()  # otherwise no process was started, and `used_ns` notices which have ended

    def _refresh_if_more(self) -> None:
        if last_pid() != self._last_pid:
            self.refresh()
        self._refresh_if_old()

    def cpu_ns(self) -> int:
        """Return the CPU time of all processes so far, in ns (`used_ns`).

        Raises ProcessLookupError if all processes have ended.
        """
        used_ns = self.used_ns()
        if not self._members:
            raise ProcessLookupError(f"no process {self.root}")
        return used_ns

    def used_ns(self) -> int:
        """Return the CPU time, in ns, of all processes so far, including those that have ended.

        With a control group, the result is exact. Without a control group, an ended process is counted in
        whole clock ticks if its parent waited for it, and otherwise only up to the last refresh (see
        `uncounted_ns`).
        """
        self._refresh_if_old()
        used_ns, ended = self._counted_ns()
        if ended:  # if edgefl has waited for a process, `ended_ns` includes the children it had waited for
            self.refresh()
            used_ns, _ = self._counted_ns()
        accounted_ns = 0 if self._accounting is None else self._accounting.used_ns()
        self._used_ns = max(self._used_ns, used_ns, accounted_ns)
        return self._used_ns

    def _counted_ns(self) -> tuple[int, bool]:
        """Return the CPU time in ns of the listed and the ended processes, and True if a listed one ended."""
        used_ns, ended = self.ended_ns + self._waited_for_ns, False
        for target in self._members.values():
            try:
                used_ns += target.cpu_ns()
            except ProcessLookupError:
                ended = True
        return used_ns, ended

    def wanting_ns(self, now_ns: int) -> int:
        """Return ``now_ns`` minus the time during which all processes were idle.

        During that time, all processes slept, and none was stopped, running or waiting for a core. Threads
        that run at the same time are treated as one thread that uses all of their CPU time.
        """
        last_ns, used_before_ns, halted_before_ns = self._seen
        if now_ns > last_ns:
            halted_ns = self._halted_until_ns(now_ns)
            ran_ns = now_ns - last_ns - (halted_ns - halted_before_ns)
            self._account_for(ran_ns, self._used_ns - used_before_ns)
            self._seen = now_ns, self._used_ns, halted_ns
        return now_ns - self._slept_ns

    def _halted_until_ns(self, now_ns: int) -> int:
        return self._halted_ns + (max(0, now_ns - self._stopped_at_ns) if self.stopped else 0)

    def _account_for(self, ran_ns: int, used_ns: int) -> None:
        """Estimate how long the processes slept in an interval of ``ran_ns``, from which stops are excluded.

        The processes used the CPU for ``used_ns`` of the interval; in the rest they slept or waited for a
        core. The kernel reports such a wait only when it is over. So if a process is awake at the end of the
        interval, the rest remains undecided until every thread that is ready to run has run again.
        """
        left_ns = max(0, ran_ns - used_ns)
        if left_ns <= CERTAIN * ran_ns and not self._unsure_ns:
            return
        unsure_ns = max(0, self._unsure_ns + left_ns - self._waited_since_ns())
        if not self.stopped and self.sleeps():
            self._unsure_ns = 0
        elif used_ns and not self._waits():
            self._unsure_ns = min(left_ns, unsure_ns)
        else:
            self._unsure_ns = unsure_ns
        self._slept_ns += unsure_ns - self._unsure_ns

    def _waited_since_ns(self) -> int:
        """Return how long threads were ready to run but had no core or quota since the last call, in ns."""
        before, self._threads = self._threads, dict(seen for pid in self._members for seen in threads_of(pid))
        self._unchanged = [name for name, seen in self._threads.items() if before.get(name, seen) == seen]
        now = (
            sum(seen.waited_ns for seen in self._threads.values()),
            0 if self._place is None else throttled_ns(self._place),
        )
        waited_ns = max(0, *(after - before for after, before in zip(now, self._waited_ns, strict=True)))
        self._waited_ns = now
        return waited_ns

    def _waits(self) -> bool:
        """Return True if a thread is ready to run but has not run since `_waited_since_ns` was called."""
        return any(process_stat(thread)[:1] == ["R"] for thread in self._unchanged)

    def sleeps(self) -> bool:
        """Return True if every thread waits for something other than a core."""
        return all(map(_sleeps, self._members))

    def runnable(self) -> int:
        """Return the number of threads, of all processes, that run or wait for a core.

        SIGCONT wakes sleeping processes, such as a shell that waits for its child, and Linux reports them as
        runnable until they get a core. Such a process is counted only if the last call counted it, too.
        """
        self._refresh_if_more()
        runs = {pid: number for pid, target in self._members.items() if (number := target.runnable())}
        if len(runs) > 1:
            for pid, schedule in self._continued.items():
                if pid in runs and _only_thread(pid) == schedule:
                    del runs[pid]
        self._ran = {*runs}
        return sum(runs.values())

    def stop(self) -> None:
        """Stop all processes, parents first, including those started in the meantime."""
        if not self.stopped:
            self.stopped, self._stopped_at_ns = True, time.monotonic_ns()
        self._each(Target.stop)
        self._refresh_if_more()

    def resume(self) -> None:
        """Resume all processes, children first."""
        if self.stopped:
            self.stopped = False
            self._halted_ns += time.monotonic_ns() - self._stopped_at_ns
        if len(self._members) > 1 and self._ran:
            others = self._members.keys() - self._ran
            self._continued = {pid: seen for pid in others if (seen := _only_thread(pid))}
        self._each(Target.resume)

    def skip(self, nanoseconds: int) -> None:
        """Treat ``nanoseconds`` as time during which all processes were idle."""
        self._slept_ns += nanoseconds

    def kill(self) -> bool:
        """Kill all processes, whether stopped or not; return False if none could be killed.

        A process cannot be killed if it now belongs to another user, as with ``sudo``.
        """
        killed = list[int]()

        def send(target: Target) -> None:
            target.send(signal.SIGKILL)
            killed.append(target.pid)

        self.refresh()
        self._each(send)
        return bool(killed)

    def _each(self, do: Callable[[Target], None]) -> None:
        for target in [*self._members.values()][:: 1 if self.stopped else -1]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                do(target)

    def close(self) -> None:
        """Resume the processes, and close their pidfds."""
        if self.stopped:
            self.resume()
        for target in self._members.values():
            target.close()
        self._members = {}
        if self._accounting is not None:
            self._accounting.close()
            self._accounting = None

    def rss_mib(self) -> float:
        """Return the private resident memory, in MiB. Reading it uses at most 5% of a core.

        Until the new process has become the command, its memory is a copy of the keeper's, and counts as 0.
        """
        if (now_ns := time.monotonic_ns()) >= self._memory_due_ns and not is_fork(self.root):
            self._refresh_if_old()
            start_ns = time.thread_time_ns()
            self._memory_mib = private_mib(self._members)
            self._memory_due_ns = now_ns + round(self._pauses.after(time.thread_time_ns() - start_ns))
        return self._memory_mib


def last_pid() -> bytes:
    """Return the pid of the newest process or thread. It changes whenever a process or thread is started."""
    with contextlib.suppress(OSError):
        return read_kernel_file("/proc/loadavg").rpartition(b" ")[2]
    return b""


class Child(NamedTuple):
    """A process whose parent is in the tree, as it was last seen."""

    parent: int
    used_ns: int
    """CPU time, including that of the children that it has waited for."""
    faults: int
    """Page faults, including those of the children that it has waited for."""


def waited_faults(pid: int) -> int | None:
    """Return the number of page faults of the children that a process has waited for; None if it has ended.

    The children's own children, which they have waited for, are included.
    """
    stat = process_stat(pid)
    return None if stat[:1] in ([], ["Z"], ["X"]) or stat[17] == "0" else int(stat[8]) + int(stat[10])


def has_ended(pid: int) -> bool:
    """Return True if a process has ended, and its parent has waited for it or does not wait for children."""
    try:
        cpu_ns(pid)
    except ProcessLookupError:
        return True
    return False


def waited_for_ns(stat: list[str]) -> int:
    """Return the CPU time, in ns, of the children that a process has waited for, including their children.

    The kernel reports whole ticks, rounded down, so half a tick is added to correct the mean.
    """
    return sum(int(ticks) * _TICK_NS + _TICK_NS // 2 for ticks in stat[13:15] if ticks != "0")


def _only_thread(pid: int) -> bytes:
    """Return the scheduling statistics of a process's thread; b"" if it has several threads or has ended."""
    with contextlib.suppress(OSError):
        if process_stat(pid)[17:18] == ["1"]:
            return read_kernel_file(f"/proc/{pid}/schedstat")
    return b""


def _sleeps(pid: int) -> bool:
    stat = process_stat(pid)
    if stat[:1] not in _ASLEEP or stat[17] == "1":
        return stat[:1] in _ASLEEP
    return all(process_stat(thread)[:1] in _ASLEEP for thread, _ in threads_of(pid))


def phone_of(pid: int) -> int | None:
    """Return the number of the phone that a process's environment or control group names.

    Return None if neither names one. Control groups that this process has not created are ignored.
    """
    with contextlib.suppress(OSError, ValueError):
        for entry in read_kernel_file(f"/proc/{pid}/environ").split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == INDEX_VARIABLE.encode():
                return int(value)
    return group_phone(pid)


def end_marked(run_id: str) -> None:
    """Kill all processes of a run whose keeper was killed, and remove its control groups.

    Processes that have cleared their environment are found by their phone's control group, if there is one.
    """
    kill_marked(f"{RUN_VARIABLE}={run_id}")
    for controller in (ACCOUNTING, "cpu", "memory"):
        with contextlib.suppress(NoGroup):
            remove_orphans(find(controller).folder)
