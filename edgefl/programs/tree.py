"""The processes of one phone: what its command is, what that has started, and what these have started.

A throttle looks at them as at one process. Those that lost their parent fall to the keeper, which gives them
back to the phone that they were seen in, or whose session or environment they have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from edgefl.errors import ConfigError
from edgefl.host import groups
from edgefl.host.children import children_of, kill_marked
from edgefl.host.groups import NoGroup, Place, find, process_stat, remove_orphans, throttled_ns
from edgefl.host.throttle import Target, cpu_ns
from edgefl.programs.phone import INDEX_VARIABLE

_PROC = Path("/proc")
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
LOOK_NS = 40_000_000
"""Age from which on what is known of the processes is looked at again."""
RUN_VARIABLE = "EDGEFL_RUN"
"""Marks every process of a run by its environment, so that none is missed where the keeper was killed."""
CERTAIN = 0.05
"""Share of a stretch that is not looked into: where no more was left, all of it counts as used."""


class ProcessTree:
    """The processes that ``root`` is the first of, as a `edgefl.host.throttle.ThrottleTarget`."""

    def __init__(
        self, root: int, place: Place | None = None, accounting: Place | None = None, before_ns: int = 0
    ) -> None:
        """``place``: the group whose quota holds them. ``accounting``: the group that counts their CPU time.

        ``before_ns`` is what that group had counted before they started.
        """
        self.root, self.stopped = root, False
        self._place, self._accounting, self._before_ns = place, accounting, before_ns
        self.uncounted_ns = 0
        """Upper estimate of the CPU time of children that nobody waited for and that no look saw."""
        self.unwaited: dict[int, int] = {}
        """Children that nobody waits for, and the CPU time of each when it was last seen, ns."""
        self.ended_ns = 0
        """CPU time of its processes that have ended and that nobody in it has waited for."""
        self.orphans: set[int] = set()
        self._members: dict[int, Target] = {root: Target(root)}
        self._looked_ns = self._awake_ns = 0
        self._used_ns = self._unsure_ns = self._waited_for_ns = 0
        self._waited_ns = (0, 0)
        self._halted_ns = self._stopped_at_ns = self._slept_ns = 0
        self._seen = time.monotonic_ns(), 0, 0  # of the last `wanting_ns`: when, CPU time, time halted

    def __len__(self) -> int:
        """The number of its processes when they were last looked at."""
        return len(self._members)

    def __contains__(self, pid: int) -> bool:
        return pid in self._members

    def look(self) -> None:
        """Look for processes that have come and gone."""
        self._looked_ns = time.monotonic_ns()
        before_ns, self._awake_ns = self._awake_ns, self._looked_ns - self._halted_until_ns(self._looked_ns)
        alive: dict[int, Target] = {}
        unwaited: dict[int, int] = {}
        waiting = [self.root, *self.orphans]
        for pid in waiting:
            if pid in alive:
                continue
            target = self._members.get(pid)
            if target is None:
                with contextlib.suppress(OSError, ConfigError):  # gone, or another user's
                    target = Target(pid)
                    if self.stopped:
                        target.stop()
            if target is not None:
                children = children_of(pid)
                if children is None:
                    target.close()
                else:
                    alive[pid] = target
                    waiting += children
                    if children and self._accounting is None and ignores_children(pid):
                        unwaited.update((child, self.unwaited.get(child, 0)) for child in children)
        for pid, target in self._members.items():
            if pid not in alive:
                target.close()
        self.orphans &= alive.keys()
        # The kernel discards the CPU time of children that nobody waits for. Looks are samples: a child that
        # is gone at the next look adds one interval to the estimate, which covers children that no look saw.
        for pid in self.unwaited.keys() - alive.keys():
            self.ended_ns += self.unwaited[pid]
            self.uncounted_ns += self._awake_ns - before_ns
        for pid in unwaited:
            with contextlib.suppress(ProcessLookupError):
                unwaited[pid] = cpu_ns(pid) + waited_for_ns(pid)
        self.unwaited = unwaited
        self._members = alive
        self._waited_for_ns = sum(map(waited_for_ns, alive))

    def _keep_up(self) -> None:
        if time.monotonic_ns() - self._looked_ns > LOOK_NS:
            self.look()

    def cpu_ns(self) -> int:
        """`used_ns`; ProcessLookupError once all are gone."""
        used_ns = self.used_ns()
        if not self._members:
            raise ProcessLookupError(f"no process {self.root}")
        return used_ns

    def used_ns(self) -> int:
        """CPU time of all of them so far, those that have ended too, ns.

        A control group makes it exact. Without one, an ended process that a living one waited for counts to
        a clock tick. One that nobody waited for counts up to the last look: see `uncounted_ns`.
        """
        self._keep_up()
        used_ns = self.ended_ns + self._waited_for_ns
        for target in self._members.values():
            with contextlib.suppress(ProcessLookupError):
                used_ns += target.cpu_ns()
        accounted_ns = 0 if self._accounting is None else groups.used_ns(self._accounting) - self._before_ns
        self._used_ns = max(self._used_ns, used_ns, accounted_ns)
        return self._used_ns

    def wanting_ns(self, now_ns: int) -> int:
        """``now_ns`` less the time in which none wanted a core: not stopped, did not run or wait for one.

        With several threads at a time this takes them for one that wants all that they want.
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
        """Find out how much of a stretch without a halt they slept.

        A wait for a core is told when it is over. So what is left of a stretch that ended with them awake may
        be one, until they have run again.
        """
        left_ns = max(0, ran_ns - used_ns)
        if left_ns <= CERTAIN * ran_ns and not self._unsure_ns:
            return
        unsure_ns = max(0, self._unsure_ns + left_ns - self._waited_since_ns())
        if not self.stopped and self.sleeps():
            self._unsure_ns = 0
        elif used_ns:
            self._unsure_ns = min(left_ns, unsure_ns)
        else:
            self._unsure_ns = unsure_ns
        self._slept_ns += unsure_ns - self._unsure_ns

    def _waited_since_ns(self) -> int:
        """Time since this was last asked in which they could have run and had no core, or no quota."""
        now = (
            sum(map(waited_for_core_ns, self._members)),
            0 if self._place is None else throttled_ns(self._place),
        )
        waited_ns = max(0, *(after - before for after, before in zip(now, self._waited_ns, strict=True)))
        self._waited_ns = now
        return waited_ns

    def sleeps(self) -> bool:
        """Returns True if the first thread of each of them waits for something else than a core."""
        return all(process_stat(pid)[:1] in (["S"], ["D"], ["Z"]) for pid in self._members)

    def stop(self) -> None:
        """Stop them all, parents first; and what they had started by then."""
        if not self.stopped:
            self.stopped, self._stopped_at_ns = True, time.monotonic_ns()
        self._each(Target.stop)
        self._keep_up()

    def resume(self) -> None:
        """Let them run on, children first."""
        if self.stopped:
            self.stopped = False
            self._halted_ns += time.monotonic_ns() - self._stopped_at_ns
        self._each(Target.resume)

    def skip(self, nanoseconds: int) -> None:
        """Count so much of the time as time in which none wanted a core."""
        self._slept_ns += nanoseconds

    def kill(self) -> None:
        """Kill all of them, standing still or not."""
        self.look()
        self._each(lambda target: target.send(signal.SIGKILL))

    def _each(self, do: Callable[[Target], None]) -> None:
        for target in [*self._members.values()][:: 1 if self.stopped else -1]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                do(target)

    def close(self) -> None:
        """Let them run on for good."""
        if self.stopped:
            self.resume()
        for target in self._members.values():
            target.close()
        self._members = {}

    def rss_mib(self) -> float:
        """Their resident memory that is neither a file's nor shared, MiB; a forked child's counts again."""
        self._keep_up()
        pages = 0
        for pid in self._members:
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (_PROC / f"{pid}/statm").read_bytes().split()
                pages += int(fields[1]) - int(fields[2])
        return pages * _PAGE_MIB


def ignores_children(pid: int) -> bool:
    """Returns True if process ``pid`` ignores SIGCHLD: the CPU time of its children is added to nobody's."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigIgn:"):
                return bool(int(line.split()[1], 16) >> signal.SIGCHLD - 1 & 1)
    return False


def waited_for_ns(pid: int) -> int:
    """CPU time of the children that process ``pid`` has waited for, and of theirs, ns.

    The system tells it in whole ticks, cut off: half a tick is what is missing in the mean.
    """
    return sum(int(ticks) * _TICK_NS + _TICK_NS // 2 for ticks in process_stat(pid)[13:15] if ticks != "0")


def waited_for_core_ns(pid: int) -> int:
    """Time in which the threads of process ``pid`` could have run and had no core, also for want of quota."""
    waited = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError, IndexError),
                open(f"/proc/{pid}/task/{task}/schedstat", "rb") as file,
            ):
                waited += int(file.read().split()[1])
    return waited


def phone_of(pid: int) -> int | None:
    """The number of the phone that a process was started in, by its environment; None if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for entry in (_PROC / f"{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == INDEX_VARIABLE.encode():
                return int(value)
    return None


def end_marked(run_id: str) -> None:
    """Kill all processes of a run whose keeper was killed, and remove its control groups."""
    kill_marked(f"{RUN_VARIABLE}={run_id}")
    for controller in ("cpu", "memory"):
        with contextlib.suppress(NoGroup):
            remove_orphans(find(controller).folder)
