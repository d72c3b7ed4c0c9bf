"""The keeper: starts the phones' commands and holds them, and ends all that they have started.

It is the parent of every command and inherits orphans, so that nothing leaves it; its channel's end is the
death of the process that the user started, and then it kills what lives. A command's first process dies
with the keeper.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections import deque

from edgefl.devices.presence import AlternatingRenewal
from edgefl.errors import ConfigError, EdgeflError, RunError
from edgefl.host.channel import Channel, Closed
from edgefl.host.children import ChildWatch, children_of, collect, end_children, fork
from edgefl.host.groups import ACCOUNTING, ControlGroup, Groups, NoGroup, used_ns
from edgefl.host.memory import GroupMemory
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
from edgefl.seeds import stream

LOOK_NS = 100_000_000
"""Time between two looks at the phones' memory and at orphans."""
SAY_NS = 500_000_000
USUAL_SLACK_NS = 50_000
MOST_SAVED_NS = 100_000_000
"""CPU time by which a phone that wants a core and gets none may fall behind, to be made up for."""
NOT_FOUND, NOT_EXECUTED = 127, 126


class KeptPhone:
    """One phone and its processes."""

    def __init__(self, launch: messages.Launch, group: ControlGroup | None, *, accounted: bool) -> None:
        """``accounted``: the group accounts CPU time."""
        self.launch, self._group, self._accounted = launch, group, accounted
        self.presence: AlternatingRenewal | None = None
        self.tree: ProcessTree | None = None
        self.throttled: Throttled | None = None
        self.here, self.over = True, False
        self.leaving = False
        """It was killed because it left: its command is started again."""
        self.stops = 0
        self.why = ""
        self._account: Account | None = None
        self._began_ns = self._away_ns = self._left_ns = 0
        self._before: tuple[int, ...] = (0, 0, 0, 0)  # `_times` of earlier starts
        self._peak_mib = 0.0
        self._memory: GroupMemory | None = None
        if group is not None and launch.memory == "cgroup" and launch.limit_mib is not None:
            self._memory = GroupMemory(group.place("memory"), launch.limit_mib)

    def start(self) -> None:
        """Start the command, held from its first instruction on."""
        share, throttle = self.launch.share, self.launch.throttle
        place = self._group.place("cpu") if self._group is not None and throttle == "cgroup" else None
        accounting = self._group.place(ACCOUNTING) if self._group is not None and self._accounted else None
        before_ns = 0 if accounting is None else used_ns(accounting)
        pid = fork("edgefl-phone", lambda: _become_command(self.launch, self._group))
        self.tree = ProcessTree(pid, place, accounting, before_ns)
        self._began_ns = time.monotonic_ns()
        self._account = Account(share, self._began_ns, 0, MOST_SAVED_NS)
        if place is not None:
            self.throttled = Quota(self.tree, self._account, place)
        elif throttle == "sigstop":
            self.throttled = DutyCycle(self.tree, self._account)

    def leave(self) -> None:
        """Stand still from now on."""
        assert self.tree is not None
        self._measure()
        self._left_ns = time.monotonic_ns()
        self.tree.stop()

    def come_back(self) -> None:
        """Run on."""
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
        """Look at its memory, and kill it if it has too much."""
        if self.tree is None:
            return
        limit_mib, rss_mib = self.launch.limit_mib, self.tree.rss_mib()
        self._peak_mib = max(self._peak_mib, rss_mib)
        if self.launch.memory == "watch" and limit_mib is not None and rss_mib > limit_mib:
            self.why = f"out of memory: {rss_mib:.0f} MiB, the device gives an app {limit_mib:g} MiB"
            self.tree.kill()

    def ended(self) -> None:
        """Its processes are gone: take their figures in."""
        assert self.tree is not None
        self._count_absence()
        self._before = self._times()
        if self._memory is not None and self._memory.kills and not self.why:
            self.why = f"out of memory: the device gives an app {self.launch.limit_mib:g} MiB"
        self.tree.close()
        self.tree = self.throttled = self._account = None

    def remove(self) -> None:
        """Leave nothing of it."""
        if self._group is not None:
            self._group.remove()

    def state(self) -> messages.PhoneState:
        wall_ns, cpu_ns, wanting_ns, uncounted_ns = self._times()
        peak_mib = self._peak_mib
        if self._memory is not None and self._memory.peak_mib > 0:
            peak_mib = max(peak_mib, self._memory.peak_mib)
        return messages.PhoneState(
            phone=self.launch.phone,
            state="ended" if self.over else "running" if self.here else "away",
            wall_s=wall_ns / 1e9,
            cpu_s=cpu_ns / 1e9,
            wanting_s=wanting_ns / 1e9,
            rss_mib=self.tree.rss_mib() if self.tree is not None else 0.0,
            peak_mib=peak_mib,
            stops=self.stops,
            processes=len(self.tree) if self.tree is not None else 0,
            uncounted_s=uncounted_ns / 1e9,
        )

    def _measure(self) -> None:
        """Bring the account up to now."""
        if self.tree is not None and self._account is not None and not self._left_ns:
            now_ns = time.monotonic_ns()
            used_ns = self.tree.used_ns()
            self._account.ahead_ns(self.tree.wanting_ns(now_ns), used_ns)

    def _times(self) -> tuple[int, ...]:
        """Wall, CPU, wanting and uncounted time, ns."""
        if self.tree is None or self._account is None:
            return self._before
        self._measure()
        wall_ns = (self._left_ns or time.monotonic_ns()) - self._began_ns - self._away_ns
        wanting_ns = self._account.at_ns - self._began_ns
        now = wall_ns, self._account.used_ns, wanting_ns, self.tree.uncounted_ns
        return tuple(before + more for before, more in zip(self._before, now, strict=True))


class Keeper:
    """Keeps all phones until its channel ends."""

    def __init__(self, channel: Channel[messages.ToKeeper]) -> None:
        self._channel = channel
        self._phones: dict[int, KeptPhone] = {}
        self._groups: dict[tuple[str, ...], Groups] = {}
        """Control groups of phones, by their controllers."""
        self._accounts = True
        """Control groups that account CPU time can be made, as far as is known."""
        self._queue = TurnQueue()
        self._begin: messages.Begin | None = None
        self._ends: ChildWatch
        self._ending = False
        self._codes: dict[int, int] = {}
        self._unsaid: deque[messages.PhoneEnded] = deque()

    def serve(self) -> None:
        self._ends = ChildWatch()
        listened = self._channel.fileno(), self._ends.fileno()
        self._channel.send(messages.Started())
        try:
            next_look_ns = next_say_ns = 0
            while True:
                now_ns = time.monotonic_ns()
                due_ns = self._queue.run_due(now_ns)
                if now_ns >= next_look_ns:
                    self._tell()
                    self._look()
                    next_look_ns = now_ns + LOOK_NS
                if now_ns >= next_say_ns:
                    self._say()
                    next_say_ns = now_ns + SAY_NS
                turn_ns = min(next_look_ns, next_say_ns, self._come_and_go(), due_ns or next_look_ns)
                wait_s = max(0.0, (turn_ns - time.monotonic_ns()) * 1e-9)
                ready, _, _ = select.select(listened, [], [], wait_s)
                if listened[1] in ready:
                    self._reap()
                if listened[0] in ready:
                    for message in self._channel.receive_ready():
                        self._hear(message)
        finally:
            self._ends.close()

    def close(self) -> None:
        """Kill what lives and leave nothing."""
        end_children()
        for groups in self._groups.values():
            groups.close()

    def _hear(self, message: messages.ToKeeper) -> None:
        match message:
            case messages.Launch():
                self._phones[message.phone] = self._kept(message)
            case messages.Begin():
                self._begin = message
                for number, phone in self._phones.items():
                    if message.absence is not None:
                        rng = stream(message.seed, "churn", number)
                        means_s = message.absence.mean_online_s, message.absence.mean_offline_s
                        phone.presence = AlternatingRenewal(*means_s, rng)
                        phone.here = phone.presence.on(0.0)
                    if phone.here:
                        self._start(phone)
            case messages.Pass():
                for phone in self._phones.values():
                    if phone.tree is not None:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.killpg(phone.tree.root, message.number)
                    elif not phone.over:  # away, and to be started again: it is not any more
                        self._over(phone, -message.number)
            case messages.SwitchOff():
                self._phones[message.phone].why = message.why
                self._kill(self._phones[message.phone])
            case messages.EndPhones():
                self._ending = True
                for phone in self._phones.values():
                    self._kill(phone)

    def _kill(self, phone: KeptPhone) -> None:
        """End a phone for good."""
        if phone.tree is not None:
            phone.tree.kill()
        elif not phone.over:
            self._over(phone, -signal.SIGKILL)

    def _kept(self, launch: messages.Launch) -> KeptPhone:
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
        return self._groups[wanted].group(f"phone-{phone}")

    def _start(self, phone: KeptPhone) -> None:
        phone.start()
        if phone.throttled is not None:
            self._queue.add(phone.throttled, time.monotonic_ns())

    def _come_and_go(self) -> int:
        """Have phones leave and come back whose time it is; returns when the next one is to."""
        next_ns = time.monotonic_ns() + SAY_NS
        if self._begin is None or self._begin.absence is None:
            return next_ns
        scale_ns = self._begin.time_scale * 1e9
        at_s = (time.monotonic_ns() - self._begin.at_ns) / scale_ns
        for phone in self._phones.values():
            if phone.presence is None or phone.over or self._ending:
                continue
            if phone.presence.on(at_s) != phone.here:
                self._change(phone)
            next_ns = min(next_ns, self._begin.at_ns + int(phone.presence.changes_s(at_s) * scale_ns) + 1)
        return next_ns

    def _change(self, phone: KeptPhone) -> None:
        """Have a phone leave or come back."""
        assert self._begin is not None
        assert self._begin.absence is not None
        phone.here = not phone.here
        if phone.here:
            if phone.tree is None:
                self._start(phone)
                return
            if phone.leaving:  # its end is not in yet, and starts it again
                return
            phone.come_back()
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
            phone.leave()

    def _look(self) -> None:
        """Look at the phones' memory, and give orphans back to their phones."""
        for why in self._queue.trouble.values():
            raise RunError(f"a phone cannot be held to its share any more: {why}")
        strangers = set(children_of(os.getpid()) or [])
        for phone in self._phones.values():
            phone.watch()
            if phone.tree is not None:
                strangers -= {phone.tree.root, *phone.tree.orphans}
        for pid in strangers:
            self._adopt(pid)

    def _adopt(self, pid: int) -> KeptPhone | None:
        """Give an orphan back to its phone, if it is known: all are the only one's."""
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
        """Collect the processes that have ended."""
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
            owner.tree.unwaited.pop(pid, None)
            if pid == owner.tree.root:
                self._codes[owner.launch.phone] = end.code
        for number in [*self._codes]:
            self._let_go(self._phones[number])

    def _let_go(self, phone: KeptPhone) -> None:
        """End what the command has left running; once nothing is, the phone has ended, or is to be back."""
        assert phone.tree is not None
        self._look()
        phone.tree.look()
        if len(phone.tree):
            phone.tree.kill()
            return
        if phone.throttled is not None:
            self._queue.drop(phone.throttled)
        phone.ended()
        code = self._codes.pop(phone.launch.phone)
        again, phone.leaving = phone.leaving and code == -signal.SIGKILL, False
        if not again or self._ending or phone.why:
            self._over(phone, code)
        elif phone.here:
            self._start(phone)

    def _over(self, phone: KeptPhone, code: int) -> None:
        phone.over = True
        if all(one.over for one in self._phones.values()):
            end_children()  # that hid whose they are
        self._unsaid.append(messages.PhoneEnded(phone.state(), code, phone.why))
        self._tell()
        phone.remove()
        for fd in {*phone.launch.stdio} - {0, 1, 2}:
            os.close(fd)

    def _tell(self) -> None:
        """Say which phones have ended, as far as that is heard: whoever holds phones waits for nobody."""
        while self._unsaid and self._channel.has_room:
            self._channel.send(self._unsaid.popleft())

    def _say(self) -> None:
        for phone in self._phones.values() if self._begin is not None else ():
            if not phone.over and not self._unsaid and self._channel.has_room:
                self._channel.send(phone.state())


def _can_enter(group: ControlGroup) -> bool:
    """Returns True if a process of this user may move into a group that it was able to make."""

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
    """Become the phone's command, in a session of its own, as if a shell had started it."""
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
        os.closerange(len(launch.stdio), os.sysconf("SC_OPEN_MAX"))  # the channel, and other phones' pipes
        if launch.open_files is not None:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (launch.open_files, most))
        if launch.folder is not None:
            os.chdir(launch.folder)
        os.execvpe(launch.command[0], launch.command, launch.environment)  # does not return
    except (OSError, ConfigError) as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTED
        why = error.strerror if isinstance(error, OSError) else error
        os.write(2, b"edgefl: %b: %b\n" % (launch.command[0], str(why).encode()))
    return code


def main() -> None:
    """Live the whole life of the keeper's process."""
    become_child(int(sys.argv[2]), "edgefl-keeper")
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    adopt_orphans()
    outlive_parent()
    os.setsid()  # what ends the group of the process that the user started leaves it to tidy up
    allow_open_files()
    reduce_wakeup_latency()
    # select() takes no high numbers, as the channel's is where phones are many.
    keeper = Keeper(Channel.inherit(os.dup(int(sys.argv[1])), messages.ToKeeper))
    os.close(int(sys.argv[1]))
    try:
        keeper.serve()
    except Closed:
        pass
    except (EdgeflError, OSError) as error:  # such as no more processes
        sys.exit(f"edgefl: {error}")
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
