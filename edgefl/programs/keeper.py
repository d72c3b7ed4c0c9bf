"""The keeper is the process that starts the phones' commands, limits them, and ends all their processes.

It is the parent of every command, and orphaned descendants become its children, so no process escapes. If its
channel is closed, edgefl's main process has ended; the keeper then kills all phones. If the keeper dies, the
kernel kills the first process of each command.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from edgefl.devices.presence import AlternatingRenewal
from edgefl.errors import EdgeflError, RunError
from edgefl.host.channel import Channel, Closed
from edgefl.host.children import ChildWatch, children_of, collect, end_children, fork
from edgefl.host.groups import ACCOUNTING, PHONE_GROUP, ControlGroup, GroupCpuTime, Groups, NoGroup
from edgefl.host.memory import GroupMemory, is_fork
from edgefl.host.pacing import set_time_slice, set_timer_slack
from edgefl.host.process import (
    STOPS,
    adopt_orphans,
    allow_open_files,
    become_child,
    outlive_parent,
)
from edgefl.host.throttle import Account, DutyCycle, Quota, Throttled, TurnQueue, reduce_wakeup_latency
from edgefl.programs import messages
from edgefl.programs.tree import ProcessTree, phone_of

CHECK_NS = 100_000_000
"""Interval between checks of the phones' memory and of orphans, in ns."""
REPORT_NS = 500_000_000
USUAL_SLACK_NS = 50_000
MAX_SAVED_NS = 100_000_000
"""Maximum CPU time, in ns, that a phone may save up while it has no core, and use later."""
NOT_FOUND, NOT_EXECUTED = 127, 126
SHELL = "/bin/sh"
LOOKED_AT = 1 << 10
"""Number of bytes at the start of a file that are searched for a zero byte; a script contains none there."""


class KeptPhone:
    """A phone and its processes."""

    def __init__(self, launch: messages.Launch, group: ControlGroup | None, *, accounted: bool) -> None:
        """Create a phone in the control group ``group``, which counts CPU time if ``accounted`` is True."""
        self.launch, self._group, self._accounted = launch, group, accounted
        self.presence: AlternatingRenewal | None = None
        self.tree: ProcessTree | None = None
        self.throttled: Throttled | None = None
        self.present, self.over = True, False
        self.leaving = False
        """True if the processes were killed because the phone went offline. The command is started again when
        the phone returns."""
        self.signals: list[int] = []
        """Signals that arrived before the new process had become the command; they are still to be sent."""
        self.stops = 0
        self.why = ""
        self._account: Account | None = None
        self.begun_ns = 0
        """Start of the run for this phone, online or not, in ns of the monotonic clock."""
        self._began_ns = self._away_ns = self._left_ns = 0
        self._before: tuple[int, ...] = (0,) * (5 + len(launch.cores))
        """Totals over the earlier runs of the command, in the order of `_times`."""
        self._peak_mib = 0.0
        self._unlimited = False
        self._memory: GroupMemory | None = None
        if group is not None and launch.memory == "cgroup" and launch.limit_mib is not None:
            self._memory = GroupMemory(group.place("memory"), launch.limit_mib)

    def start(self) -> None:
        """Start the command. It is limited from its first instruction on."""
        throttle = self.launch.throttle
        place = self._group.place("cpu") if self._group is not None and throttle == "cgroup" else None
        accounting = None
        if self._group is not None and self._accounted:
            accounting = GroupCpuTime(self._group.place(ACCOUNTING))
        self._began_ns = time.monotonic_ns()
        pid = fork("edgefl-phone", lambda: _become_command(self.launch, self._group))
        self.tree = ProcessTree(pid, place, accounting)
        self._account = Account(self.launch.cores, self._began_ns, 0, MAX_SAVED_NS)
        if place is not None:
            self.throttled = Quota(self.tree, self._account, place)
        elif throttle == "sigstop":
            self.throttled = DutyCycle(self.tree, self._account)

    def suspend(self) -> None:
        """Suspend the phone's processes."""
        assert self.tree is not None
        self._measure()
        self._left_ns = time.monotonic_ns()
        self.tree.stop()

    def resume(self) -> None:
        """Resume the phone's processes."""
        assert self.tree is not None
        self._count_absence()
        self.tree.resume()

    def _count_absence(self) -> None:
        if self.tree is not None and self._left_ns:
            away_ns = time.monotonic_ns() - self._left_ns
            self._away_ns += away_ns
            self._left_ns = 0
            self.tree.skip(away_ns)

    def watch(self) -> None:
        """Check the phone's memory, and kill its processes if they exceed the limit."""
        if self.tree is None:
            return
        limit_mib, rss_mib = self.launch.limit_mib, self.tree.rss_mib()
        self._peak_mib = max(self._peak_mib, rss_mib)
        if self.launch.memory == "watch" and limit_mib is not None and rss_mib > limit_mib:
            self.why = f"out of memory: it used {rss_mib:.0f} MiB; the device allows an app {limit_mib:g} MiB"
        elif not self._was_short_of_memory():
            return
        self.tree.kill()

    def _was_short_of_memory(self) -> bool:
        """Return True, and note why the phone ends, if the kernel killed a process at the memory limit."""
        if self._memory is None or not self._memory.kills:
            return False
        self.why = self.why or f"out of memory: the device allows an app {self.launch.limit_mib:g} MiB"
        return True

    def ended(self) -> None:
        """Add up the measurements after all processes have ended."""
        assert self.tree is not None
        self._count_absence()
        self._before = self._times()
        self._unlimited |= self.tree.unlimited
        self._was_short_of_memory()
        self.tree.close()
        self.tree = self.throttled = self._account = None

    def remove(self) -> None:
        """Remove the phone's control group."""
        if self._group is not None:
            self._group.remove()

    def state(self) -> messages.PhoneState:
        wall_ns, cpu_ns, wanting_ns, declared_ns, uncounted_ns, *in_use_ns = self._times()
        grouped_mib = 0.0 if self._memory is None else self._memory.peak_mib
        return messages.PhoneState(
            phone=self.launch.phone,
            state="ended" if self.over else "running" if self.present else "away",
            wall_s=wall_ns / 1e9,
            age_s=(time.monotonic_ns() - self.begun_ns) / 1e9,
            cpu_s=cpu_ns / 1e9,
            wanting_s=wanting_ns / 1e9,
            declared_cpu_s=declared_ns / 1e9,
            in_use_s=tuple(core_ns / 1e9 for core_ns in in_use_ns),
            rss_mib=self.tree.rss_mib() if self.tree is not None else 0.0,
            peak_mib=grouped_mib if grouped_mib > 0 else self._peak_mib,
            stops=self.stops,
            processes=len(self.tree) if self.tree is not None else 0,
            uncounted_s=uncounted_ns / 1e9,
            unlimited=self._unlimited or (self.tree is not None and self.tree.unlimited),
        )

    def _measure(self) -> None:
        """Record the CPU time used so far."""
        if self.tree is not None and self._account is not None and not self._left_ns:
            now_ns = time.monotonic_ns()
            used_ns = self.tree.used_ns()
            self._account.ahead_ns(self.tree.wanting_ns(now_ns), used_ns)

    def _times(self) -> tuple[int, ...]:
        """Return totals for this phone so far, in ns.

        They are the wall time, the CPU time, the time during which the phone ran or waited for a core, the
        CPU time that its share allowed during that time, the CPU time that was not counted, and the time
        during which each core was in use.
        """
        if self.tree is None or self._account is None:
            return self._before
        self._measure()
        wall_ns = (self._left_ns or time.monotonic_ns()) - self._began_ns - self._away_ns
        wanting_ns = self._account.at_ns - self._began_ns
        declared_ns = round(self._account.achieved().declared_cpu_s * 1e9)
        totals_ns = wall_ns, self._account.used_ns, wanting_ns, declared_ns, self.tree.uncounted_ns
        now = (*totals_ns, *self._account.in_use_ns)
        return tuple(before + more for before, more in zip(self._before, now, strict=True))


class Keeper:
    """Runs all phones until its channel is closed."""

    def __init__(self, channel: Channel[messages.ToKeeper]) -> None:
        self._channel = channel
        self._phones: dict[int, KeptPhone] = {}
        self._groups: dict[tuple[str, ...], Groups] = {}
        """Control groups of the phones, keyed by their controllers."""
        self._accounts = True
        """True if control groups count the phones' CPU time; False once such a group could not be used."""
        self._queue = TurnQueue()
        self._begin: messages.Begin | None = None
        self._ends: ChildWatch
        self._ending = False
        self._codes: dict[int, int] = {}
        self._unreported: deque[messages.PhoneEnded] = deque()

    def serve(self) -> None:
        self._ends = ChildWatch()
        descriptors = self._channel.fileno(), self._ends.fileno()
        self._channel.send(messages.Started())
        try:
            next_check_ns = next_report_ns = 0
            while True:
                now_ns = time.monotonic_ns()
                due_ns = self._queue.run_due(now_ns)
                if now_ns >= next_check_ns:
                    self._report_ends()
                    self._check()
                    next_check_ns = now_ns + CHECK_NS
                if now_ns >= next_report_ns:
                    self._report_states()
                    next_report_ns = now_ns + REPORT_NS
                turn_ns = min(next_check_ns, next_report_ns, self._follow_presence(), due_ns or next_check_ns)
                wait_s = max(0.0, (turn_ns - time.monotonic_ns()) * 1e-9)
                ready, _, _ = select.select(descriptors, [], [], wait_s)
                if descriptors[1] in ready:
                    self._reap()
                if descriptors[0] in ready:
                    for message in self._channel.receive_ready():
                        self._handle(message)
        finally:
            self._ends.close()

    def close(self) -> None:
        """Kill all children, and remove the control groups."""
        end_children()
        for groups in self._groups.values():
            groups.close()

    def _handle(self, message: messages.ToKeeper) -> None:
        match message:
            case messages.Launch():
                self._phones[message.phone] = self._keep(message)
            case messages.Begin():
                self._start_all(message)
            case messages.Pass():
                for phone in self._phones.values():
                    self._pass(phone, message.number)
            case messages.SwitchOff():
                self._phones[message.phone].why = message.why
                self._kill(self._phones[message.phone])
            case messages.EndPhones():
                self._ending = True
                for phone in self._phones.values():
                    self._kill(phone)

    def _start_all(self, begin: messages.Begin) -> None:
        """Start the phones that are online.

        This takes seconds for hundreds of phones, so throttles run meanwhile, for at most half of the time.
        """
        self._begin = begin
        turns_ns = 0
        for number, phone in self._phones.items():
            phone.presence = begin.presence(number)
            phone.present = phone.presence is None or phone.presence.on(0.0)
            phone.stops = int(not phone.present)
            if phone.present:
                self._start(phone)
            phone.begun_ns = time.monotonic_ns()
            if phone.begun_ns >= turns_ns:
                self._queue.run_due(phone.begun_ns)
                turns_ns = 2 * time.monotonic_ns() - phone.begun_ns

    def _pass(self, phone: KeptPhone, number: int) -> None:
        """Send a signal to a phone's command.

        A suspended phone is resumed, and never suspended again, so that it can handle the signal.
        """
        if phone.tree is None:
            if not phone.over:  # the command is not running, but would restart: end it for good
                self._finish(phone, -number)
            return
        phone.signals.append(number)
        _send_signals(phone)
        phone.presence = None
        if phone.leaving:  # its processes are being killed; do not start them again
            phone.leaving = False
        elif not phone.present:
            self._change(phone)

    def _kill(self, phone: KeptPhone) -> None:
        """Kill a phone's processes, and do not start its command again."""
        if phone.tree is not None:
            phone.tree.kill()
        elif not phone.over:
            self._finish(phone, -signal.SIGKILL)

    def _keep(self, launch: messages.Launch) -> KeptPhone:
        limits = (("cpu", launch.throttle), ("memory", launch.memory))
        wanted = tuple(name for name, by in limits if by == "cgroup")
        if self._accounts:
            with contextlib.suppress(NoGroup):
                group = self._group((*wanted, ACCOUNTING), launch.phone)
                if _can_enter(group):
                    return KeptPhone(launch, group, accounted=True)
                group.remove()
            self._accounts = False
        return KeptPhone(launch, self._group(wanted, launch.phone) if wanted else None, accounted=False)

    def _group(self, wanted: tuple[str, ...], phone: int) -> ControlGroup:
        if wanted not in self._groups:
            self._groups[wanted] = Groups(wanted)
        return self._groups[wanted].group(f"{PHONE_GROUP}{phone}")

    def _start(self, phone: KeptPhone) -> None:
        phone.start()
        if phone.throttled is not None:
            self._queue.add(phone.throttled, time.monotonic_ns())

    def _follow_presence(self) -> int:
        """Take phones offline or online as scheduled; return the monotonic time of the next call, in ns."""
        next_ns = time.monotonic_ns() + REPORT_NS
        if self._begin is None or self._begin.absence is None:
            return next_ns
        scale_ns = self._begin.time_scale * 1e9
        at_s = (time.monotonic_ns() - self._begin.at_ns) / scale_ns
        for phone in self._phones.values():
            if phone.presence is None or phone.over or self._ending:
                continue
            if phone.presence.on(at_s) != phone.present:
                self._change(phone)
            next_ns = min(next_ns, self._begin.at_ns + int(phone.presence.changes_s(at_s) * scale_ns) + 1)
        return next_ns

    def _change(self, phone: KeptPhone) -> None:
        """Take an online phone offline (suspend or kill its processes), or an offline phone online."""
        assert self._begin is not None
        assert self._begin.absence is not None
        phone.present = not phone.present
        if phone.present:
            if phone.tree is None:
                self._start(phone)
                return
            if phone.leaving:  # its processes are still ending; `_end_phone` starts the command again
                return
            phone.resume()
            if phone.throttled is not None:
                self._queue.add(phone.throttled, time.monotonic_ns())
            return
        phone.stops += 1
        if phone.tree is None or phone.leaving:
            return
        if phone.throttled is not None:
            self._queue.drop(phone.throttled)
        if self._begin.absence.leave == "kill":
            phone.leaving = True
            phone.tree.kill()
        else:
            phone.suspend()

    def _check(self) -> None:
        """Check the phones' memory, send the signals that wait, and assign orphans to their phones."""
        for why in self._queue.trouble.values():
            raise RunError(f"a phone's CPU share can no longer be enforced: {why}")
        strangers = set(children_of(os.getpid()) or [])
        for phone in self._phones.values():
            phone.watch()
            _send_signals(phone)
            if phone.tree is not None:
                strangers -= {phone.tree.root, *phone.tree.orphans}
        for pid in strangers:
            self._adopt(pid)

    def _adopt(self, pid: int) -> KeptPhone | None:
        """Assign an orphan to its phone and return the phone; None if the phone cannot be determined."""
        session = os.getsid(pid)
        seen = (
            n
            for n, p in self._phones.items()
            if p.tree is not None and (pid in p.tree or p.tree.root == session)
        )
        number = 0 if len(self._phones) == 1 else next(seen, phone_of(pid))
        phone = self._phones.get(-1 if number is None else number)
        if phone is not None and phone.tree is not None:
            phone.tree.orphans.add(pid)
            return phone
        return None

    def _reap(self) -> None:
        """Reap the processes that have ended."""
        for pid in self._ends.ended():
            owner = next(
                (p for p in self._phones.values() if p.tree is not None and p.tree.root == pid), None
            )
            if owner is None:
                owner = self._adopt(pid)
            end = collect(pid)
            if owner is None or owner.tree is None:
                continue
            owner.tree.ended_ns += round(end.cpu_s * 1e9)
            owner.tree.orphans.discard(pid)
            owner.tree.children.pop(pid, None)
            if pid == owner.tree.root:
                self._codes[owner.launch.phone] = end.code
        for number in [*self._codes]:
            self._end_phone(self._phones[number])

    def _end_phone(self, phone: KeptPhone) -> None:
        """Kill the processes that an ended command has left behind.

        If no process is left that can be killed, end the phone, or start its command again after an absence.
        """
        assert phone.tree is not None
        self._check()
        if phone.tree.kill():
            return
        if phone.throttled is not None:
            self._queue.drop(phone.throttled)
        phone.ended()
        code = self._codes.pop(phone.launch.phone)
        again, phone.leaving = phone.leaving and code == -signal.SIGKILL, False
        if phone.why:  # the emulation ended the phone, even if its first process had exited before
            code = -signal.SIGKILL
        if not again or self._ending or phone.why:
            self._finish(phone, code)
        elif phone.present:
            self._start(phone)

    def _finish(self, phone: KeptPhone, code: int) -> None:
        phone.over = True
        if all(one.over for one in self._phones.values()):
            end_children()  # children that could not be assigned to a phone
        self._unreported.append(messages.PhoneEnded(phone.state(), code, phone.why))
        self._report_ends()
        phone.remove()
        for fd in {*phone.launch.stdio} - {0, 1, 2}:
            os.close(fd)

    def _report_ends(self) -> None:
        """Report the phones that have ended, without blocking, because the throttle must not wait."""
        while self._unreported and self._channel.has_room:
            self._channel.send(self._unreported.popleft())

    def _report_states(self) -> None:
        for phone in self._phones.values() if self._begin is not None else ():
            if not phone.over and not self._unreported and self._channel.has_room:
                self._channel.send(phone.state())


def _send_signals(phone: KeptPhone) -> None:
    """Send the signals that wait to the phone's command, unless its process has not become the command yet.

    Until then, the process has no process group of its own, or ignores signals.
    """
    if phone.signals and phone.tree is not None and not is_fork(phone.tree.root):
        for number in phone.signals:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(phone.tree.root, number)
        phone.signals.clear()


def _can_enter(group: ControlGroup) -> bool:
    """Return True if a process of this user may move itself into the control group."""

    def enter() -> int:
        _run_as_usual()
        with contextlib.suppress(OSError, EdgeflError):
            group.enter()
            return 0
        return 1

    return collect(fork("edgefl-probe", enter)).code == 0


def _run_as_usual() -> None:
    """Leave the keeper's real-time scheduling class: a CPU control group rejects real-time processes."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _become_command(launch: messages.Launch, group: ControlGroup | None) -> int:
    """Turn this process into the phone's command, in its own session, with the settings a shell would use."""
    code = NOT_EXECUTED
    try:
        os.setsid()
        for number in (*STOPS, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTSTP):
            signal.signal(number, signal.SIG_IGN if number in launch.ignored else signal.SIG_DFL)
        _run_as_usual()
        set_time_slice(0)
        set_timer_slack(USUAL_SLACK_NS)
        if group is not None:
            group.enter()
        for place, fd in enumerate(launch.stdio):
            os.dup2(fd, place)
        # Close all other descriptors, which belong to the channel and to the pipes of other phones. The loop
        # ends at the highest open one, because the limit may be a billion, and a Python that was built for an
        # old C library would try each number.
        highest = max(map(int, os.listdir("/proc/self/fd")))
        for before, kept in itertools.pairwise((2, *launch.descriptors, highest + 1)):
            os.closerange(before + 1, kept)
        if launch.open_files is not None:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (launch.open_files, most))
        if launch.folder is not None:
            os.chdir(launch.folder)
        _execute(launch.command, launch.environment)  # does not return
    except Exception as error:  # a traceback and exit code 1 would look like the command's own
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTED
        why = error.strerror if isinstance(error, OSError) else error
        os.write(2, b"edgefl: %b: %b\n" % (launch.command[0], str(why).encode()))
    return code


def _execute(command: tuple[bytes, ...], environment: Mapping[bytes, bytes]) -> NoReturn:
    """Execute a command as `env` and shells do: a text file without a ``#!`` line is run by the shell."""
    path = os.fsdecode(environment.get(b"PATH", os.fsencode(os.defpath)))
    file = command[0] if b"/" in command[0] else shutil.which(command[0], path=path)
    if file is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    try:
        os.execve(file, command, environment)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        with Path(os.fsdecode(file)).open("rb") as script:
            if b"\0" in script.read(LOOKED_AT):
                raise
        os.execve(SHELL, [os.fsencode(SHELL), file, *command[1:]], environment)


def main() -> None:
    """Entry point of the keeper process."""
    become_child(int(sys.argv[2]), "edgefl-keeper")
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    adopt_orphans()
    outlive_parent()
    os.setsid()  # a signal to the main process's group must not end the keeper before it has cleaned up
    allow_open_files()
    reduce_wakeup_latency()
    # select() rejects high descriptors, such as that of the channel in a large fleet.
    keeper = Keeper(Channel.inherit(os.dup(int(sys.argv[1])), messages.ToKeeper))
    os.close(int(sys.argv[1]))
    try:
        keeper.serve()
    except Closed:
        pass
    except (EdgeflError, OSError) as error:  # for example, no more processes can be started
        sys.exit(f"edgefl: {error}")
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
