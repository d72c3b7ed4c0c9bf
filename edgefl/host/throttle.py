"""A CPU throttle for any process, started with `open` and ended with `Throttle.close`.

An `Account` compares the CPU time that a process was allowed with the time that it has used. Based on this,
`DutyCycle` stops and continues the process with signals, or `Quota` sets the CPU quota of its control group.
Each check of a process is called a turn; it returns the time at which the next turn is due. A `TurnQueue`
runs the turns in a thread of this process, or in the process that throttles a run's clients (the governor).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edgefl.errors import ConfigError, unknown
from edgefl.host.groups import Groups, NoGroup, Place, process_stat, write
from edgefl.host.pacing import set_time_slice, set_timer_slack
from edgefl.host.process import open_pidfd, signal_pidfd


class Achieved(NamedTuple):
    """CPU time that a process used under a throttle, and the CPU time that was declared for it."""

    wall_s: float
    cpu_s: float
    declared_cpu_s: float

    @property
    def error(self) -> float:
        """Used time divided by declared time, minus 1; a value above 0 means faster than declared.

        NaN as long as nothing has been declared.
        """
        return self.cpu_s / self.declared_cpu_s - 1.0 if self.declared_cpu_s > 0 else math.nan


class Account:
    """Compares the allowed CPU time (the integral of ``share`` over wall time) with the used CPU time.

    ``cores`` contains the speeds of the device's cores, fastest first, in cores of this host. A single number
    means one core, which all threads share. One core per runnable thread is in use, and ``share`` is the sum
    of their speeds. A sleeping process saves up at most ``most_saved_ns`` of CPU time, because a slow core is
    not faster after a rest.

    >>> account = Account(0.25, now_ns=0, used_ns=0, most_saved_ns=1_000)
    >>> account.ahead_ns(4_000, 1_500)            # used 1.5 µs, allowed 1 µs
    500.0
    >>> account.ahead_ns(1_000_000, 1_500)        # slept: keeps 1 µs of 250 µs
    -1000
    >>> account = Account((0.4, 0.4, 0.1), now_ns=0, used_ns=0)
    >>> for threads in (0, 1, 2, 8):
    ...     account.follow(threads)
    ...     print(round(account.share, 6))
    0.4
    0.4
    0.8
    0.9
    """

    def __init__(
        self, cores: float | Sequence[float], now_ns: int, used_ns: int, most_saved_ns: float = math.inf
    ) -> None:
        self.cores = tuple(map(checked_share, [cores] if isinstance(cores, (int, float)) else cores))
        self.threads, self.share = 1, self.cores[0]
        self.most_saved_ns = most_saved_ns
        self._began_ns = self.at_ns = self._since_ns = now_ns
        self._used_before_ns = self.used_ns = used_ns
        self._declared_ns = self._allowed_ns = self._granted_ns = 0.0
        self._busy_ns = [0] * len(self.cores)
        """Wall time in ns during which n + 1 cores were in use, at index n."""

    @property
    def in_use_ns(self) -> tuple[int, ...]:
        """Wall time during which each core was in use until the last call of `ahead_ns`, fastest core first.

        >>> account = Account((0.4, 0.1), now_ns=0, used_ns=0)
        >>> for threads, now_ns in ((1, 700), (2, 1_000)):
        ...     account.follow(threads)
        ...     _ = account.ahead_ns(now_ns, 0)
        >>> account.in_use_ns
        (1000, 300)
        """
        return tuple(sum(self._busy_ns[at:]) for at in range(len(self._busy_ns)))

    def change(self, share: float, now_ns: int) -> None:
        """Change the share at time ``now_ns``."""
        before, self.share = self.share, checked_share(share)
        self._granted_ns += before * (now_ns - self._since_ns)
        self._since_ns = now_ns

    def follow(self, threads: int) -> None:
        """Grant the cores that this number of threads can use, starting at the last call of `ahead_ns`."""
        self.threads = max(1, threads)
        self.share = math.fsum(self.cores[: self.threads])

    def ahead_ns(self, now_ns: int, used_ns: int) -> float:
        """Return the CPU time by which the process is ahead of its share, in ns (negative: behind it)."""
        granted = self._granted_ns + self.share * (now_ns - self._since_ns)
        self._busy_ns[min(self.threads, len(self.cores)) - 1] += now_ns - self.at_ns
        self.at_ns, self.used_ns, self._since_ns, self._granted_ns = now_ns, used_ns, now_ns, 0.0
        self._declared_ns += granted
        used = used_ns - self._used_before_ns
        self._allowed_ns = min(self._allowed_ns + granted, used + self.most_saved_ns)
        return used - self._allowed_ns

    def achieved(self) -> Achieved:
        """Return the used and the declared time as of the last call of `ahead_ns`."""
        wall_ns, used_ns = self.at_ns - self._began_ns, self.used_ns - self._used_before_ns
        return Achieved(wall_ns / 1e9, used_ns / 1e9, self._declared_ns / 1e9)


def checked_share(share: float) -> float:
    """Return ``share``, a number of host cores. Raises ValueError unless it is finite and above 0."""
    if not 0 < share < math.inf:
        raise ValueError(f"share must be a finite number of cores above 0 (got {share})")
    return share


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of process ``pid`` (0 for this process), in ns.

    Raises ProcessLookupError if the process has ended.
    """
    try:
        # CPUCLOCK_SCHED of a whole process, as clock_getcpuclockid(3) computes it
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        raise ProcessLookupError(f"no process {pid}") from None


class ThrottleTarget(Protocol):
    """A process, or several that are throttled as one."""

    stopped: bool

    def cpu_ns(self) -> int:
        """Return the CPU time used so far, in ns. Raises ProcessLookupError once the process has ended."""

    def wanting_ns(self, now_ns: int) -> int:
        """Return ``now_ns`` minus the time during which the process is known to have been idle.

        An idle process neither runs nor waits for a core.
        """

    def sleeps(self) -> bool:
        """Return True if the process is waiting for something other than a core."""

    def runnable(self) -> int:
        """Return the number of threads that run or wait for a core."""

    def stop(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class Target:
    """One process, identified by a pidfd, so that signals cannot reach another process that reuses its pid.

    Raises ProcessLookupError if there is no such process, ConfigError if it belongs to another user, and
    ValueError if ``pid`` is below 1.
    """

    def __init__(self, pid: int) -> None:
        if pid < 1:
            raise ValueError(f"pid must be at least 1 (got {pid})")
        self.pid, self.stopped = pid, False
        self._fd = open_pidfd(pid)
        try:
            signal_pidfd(self._fd, 0)
        except OSError as error:
            os.close(self._fd)
            if not isinstance(error, PermissionError):
                raise
            raise ConfigError(f"process {pid} belongs to another user and cannot be throttled") from None

    def cpu_ns(self) -> int:
        """Return the CPU time used so far, in ns. Raises ProcessLookupError once the process has ended."""
        return cpu_ns(self.pid)

    def wanting_ns(self, now_ns: int) -> int:
        """Return ``now_ns`` itself: this class does not measure how long the process has been idle."""
        return now_ns

    def sleeps(self) -> bool:
        """Return True if the process's first thread waits for something other than a core."""
        return process_stat(self.pid)[:1] in (["S"], ["D"])

    def runnable(self) -> int:
        """Return the number of the process's threads that run or wait for a core."""
        stat = process_stat(self.pid)
        if stat[17:18] in ([], ["1"]):
            return int(stat[:1] == ["R"])
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{self.pid}/task")
            return sum(process_stat(f"{self.pid}/task/{thread}")[:1] == ["R"] for thread in threads)
        return 0

    def send(self, number: int) -> None:
        """Send a signal to the process. Raises ProcessLookupError once it has ended."""
        signal_pidfd(self._fd, number)

    def stop(self) -> None:
        self.stopped = True
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.stopped = False
        self.send(signal.SIGCONT)

    def close(self) -> None:
        """Let the process run freely, if it is alive."""
        if self._fd < 0:
            return
        if self.stopped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self.resume()
        os.close(self._fd)
        self._fd = -1


SLICE_NS = 2_000_000  # CPU time that a process may use before it is stopped
SHORTEST_NS = 100_000
"""Minimum time in ns for which a process is left running, or is left stopped before its CPU clock is read. It
is well above the 20 µs that a signal takes."""
MIN_GAIN = 0.05
"""Minimum rate, in cores, at which a process is assumed to get ahead of its share."""
IDLE = 0.1  # a process that used less than this fraction of half a slice since it was resumed may be asleep

HOST_CORES = os.cpu_count() or 1
LONGEST_REST_NS = 10_000_000
"""Maximum time in ns between two checks of a sleeping process: if it wakes up, it runs unchecked for at most
this time."""


class DutyCycle:
    """Stops the process when it is half a slice ahead of its share; resumes it when half a slice behind.

    A slice is an amount of CPU time. Because used CPU time is measured, the error is at most one slice,
    regardless of the run time. (With fixed time slots, the delays of the signals add up: the error was +63%
    at a tenth of a core.) The CPU clock of a running process advances only at ticks. Therefore the stop is
    scheduled as if the process had a core to itself, and the clock is read after the stop.
    """

    def __init__(self, target: ThrottleTarget, account: Account, slice_ns: int = SLICE_NS) -> None:
        self.target, self._half_ns, self._idle = target, slice_ns / 2, False
        self._rest_ns = SHORTEST_NS
        self.renew(account)

    def renew(self, account: Account) -> bool:
        """Charge another account from now on. Return True: the next turn must run immediately."""
        self.account = account
        self._plan(account.at_ns, account.used_ns, 0.0)
        return True

    def turn(self, now_ns: int) -> int:
        """Check, stop or continue the process; return the time of the next turn. Raises ProcessLookupError
        once the process has ended."""
        if self.target.stopped:
            used_ns = self.target.cpu_ns()
            ahead_ns = self.account.ahead_ns(self.target.wanting_ns(now_ns), used_ns)
            wait_ns = (ahead_ns + self._half_ns) / self.account.share
            if ahead_ns > 0 and wait_ns > SHORTEST_NS:  # false if the process got no core, or slept
                return now_ns + int(wait_ns)
            self._idle = used_ns - self._went_at_ns < IDLE * self._half_ns
            self.target.resume()
            return self._plan(now_ns, used_ns, ahead_ns)
        if now_ns < self._stop_ns:
            return self._stop_ns
        if self._idle and self.target.sleeps():  # stopping it would only delay its wake-up
            used_ns = self.target.cpu_ns()
            ahead_ns = self.account.ahead_ns(self.target.wanting_ns(now_ns), used_ns)
            if ahead_ns < self._half_ns:  # otherwise stop it even though it sleeps
                self._rest_ns = min(2 * self._rest_ns, LONGEST_REST_NS)
                return max(self._plan(now_ns, used_ns, ahead_ns), now_ns + self._rest_ns)
        self._rest_ns = SHORTEST_NS
        if len(self.account.cores) > 1:
            self.account.follow(self.target.runnable())
        self.target.stop()
        return now_ns + SHORTEST_NS

    def _plan(self, now_ns: int, used_ns: int, ahead_ns: float) -> int:
        """Schedule the stop for when the process will be half a slice ahead of its share.

        It is assumed that each thread has a core to itself.
        """
        share = self.account.share
        used = max(math.floor(share) + 1.0, min(self.account.threads, HOST_CORES))
        gains = max(used - share, MIN_GAIN)
        self._went_at_ns = used_ns
        self._stop_ns = now_ns + max(SHORTEST_NS, int((self._half_ns - ahead_ns) / gains))
        return self._stop_ns

    def close(self) -> None:
        self.target.close()


PERIOD_US = 10_000  # shorter periods lose quota: 10 to 19% was lost at 5 ms
MIN_QUOTA_US, LONGEST_PERIOD_US = 1_000, 1_000_000
"""The minimum quota and the maximum period that the kernel accepts, in µs."""
MAX_CORRECTION = 0.5  # largest correction of the quota in one turn, as a fraction of the share
WORTHWHILE = 0.02
"""Relative change of a quota below which the old quota is kept. When a quota is set, the kernel forgives CPU
time that was used in excess, and grants the new quota for a full period."""
HALF_BURST_NS = 1_300_000
"""CPU time in ns by which a running process exceeds its quota on average, because the kernel preempts it only
at a tick (Linux 6.18)."""
BURSTS_PER_TURN = 80
"""CPU time between two corrections of a quota, in units of `HALF_BURST_NS`. Over a shorter interval, the
measurement would depend mainly on the position within a burst."""
FOLLOW_NS = 2_000 * PERIOD_US
"""Interval in ns at which the runnable threads of a device with several cores are counted."""


def set_quota(place: Place, quota_us: int | None, period_us: int = PERIOD_US) -> None:
    """Allow a control group ``quota_us`` of CPU time per ``period_us`` of wall time (None: no limit)."""
    folder, version = place
    if version == 2:
        write(folder / "cpu.max", "max" if quota_us is None else f"{quota_us} {period_us}")
    elif quota_us is None:
        write(folder / "cpu.cfs_quota_us", "-1")
    else:
        write(folder / "cpu.cfs_period_us", str(period_us))
        write(folder / "cpu.cfs_quota_us", str(quota_us))


def period(share: float) -> int:
    """Return a period in µs for which the quota of ``share`` cores is not below the kernel's minimum.

    >>> period(0.5), period(0.05)
    (10000, 30000)
    """
    return int(min(max(PERIOD_US, 1.5 * MIN_QUOTA_US / share), LONGEST_PERIOD_US))


class Quota:
    """Limits a process to its share by the CPU quota of its control group.

    The quota is corrected according to the CPU time that the process has used.
    """

    def __init__(self, target: ThrottleTarget, account: Account, place: Place) -> None:
        self.target, self.account, self._place = target, account, place
        self._period_us, self._quota_us = period(account.share), 0
        self._correction, self._corrects_ns = 0.0, account.at_ns

    def turn(self, now_ns: int) -> int:
        """Count the runnable threads and correct the quota; return the time of the next turn.

        Raises ProcessLookupError once the process has ended.
        """
        several = len(self.account.cores) > 1
        if several:
            self.account.follow(self.target.runnable())
        ahead_ns = self.measure(now_ns)
        share = self.account.share
        turn_ns = int(BURSTS_PER_TURN * HALF_BURST_NS / share)
        if now_ns >= self._corrects_ns:
            correction = ahead_ns / turn_ns / share
            self._correction = min(max(correction, -MAX_CORRECTION), MAX_CORRECTION)
            self._corrects_ns = now_ns + turn_ns
        self._set(share * (1.0 - self._correction))
        return min(self._corrects_ns, now_ns + FOLLOW_NS) if several else self._corrects_ns

    def _set(self, wanted: float) -> None:
        if wanted * self._period_us < MIN_QUOTA_US:
            self._period_us = period(wanted)
        quota_us = max(MIN_QUOTA_US, round(wanted * self._period_us))
        if abs(quota_us - self._quota_us) > WORTHWHILE * self._quota_us:
            try:
                set_quota(self._place, quota_us, self._period_us)
            except NoGroup:
                self.target.cpu_ns()  # raises ProcessLookupError if the group was removed with its process
                raise
            self._quota_us = quota_us

    def measure(self, now_ns: int) -> float:
        """Return the CPU time by which the process is ahead of its share, in ns.

        Raises ProcessLookupError if the process has ended.
        """
        used_ns = self.target.cpu_ns()
        return self.account.ahead_ns(self.target.wanting_ns(now_ns), used_ns)

    def renew(self, account: Account) -> bool:
        """Charge another account from now on. Return False: the next turn runs as scheduled."""
        self.account = account
        return False

    def close(self) -> None:
        with contextlib.suppress(NoGroup):  # the group may have been removed with its process
            set_quota(self._place, None)
        self.target.close()


Throttled = DutyCycle | Quota
LATE_NS = 50_000  # turns that are due within this time are run immediately


def reduce_wakeup_latency() -> None:
    """Reduce this thread's wake-up latency, so that it acts on time.

    Without privileges, the latency is reduced less.
    """
    set_timer_slack()
    set_time_slice()
    with contextlib.suppress(OSError):  # without privileges, the short time slice must suffice
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


class TurnQueue:
    """Throttled processes, ordered by the time of their next turn."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Throttled]] = []
        self._order = itertools.count()
        self._entry: dict[Throttled, int] = {}  # id of each member's current heap entry; others are stale
        self.trouble: dict[Throttled, str] = {}  # live processes that can no longer be throttled, and why

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, throttled: Throttled) -> bool:
        return throttled in self._entry

    def add(self, throttled: Throttled, at_ns: int) -> None:
        """Schedule the next turn of ``throttled`` for ``at_ns``, instead of any turn scheduled before."""
        self._entry[throttled] = number = next(self._order)
        heapq.heappush(self._heap, (at_ns, number, throttled))

    def drop(self, throttled: Throttled) -> None:
        """Stop scheduling ``throttled`` without closing it."""
        self._entry.pop(throttled, None)
        self.trouble.pop(throttled, None)

    def run_due(self, now_ns: int) -> int | None:
        """Run all turns that are due; return the time of the next one, or None if there is none."""
        while self._heap:
            at_ns, number, throttled = self._heap[0]
            current = self._entry.get(throttled) == number
            if current and at_ns > now_ns + LATE_NS:
                return at_ns
            heapq.heappop(self._heap)
            if current:
                try:
                    self.add(throttled, max(throttled.turn(now_ns), now_ns + LATE_NS + 1))
                except (OSError, NoGroup) as error:
                    del self._entry[throttled]
                    if not isinstance(error, ProcessLookupError):
                        self.trouble[throttled] = str(error)
        return None


class ThrottleThread:
    """A thread that runs a `TurnQueue`, as long as there are processes to throttle."""

    def __init__(self) -> None:
        self.queue = TurnQueue()
        self.changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, throttled: Throttled) -> None:
        """Start throttling a process."""
        with self.changed:
            self.queue.add(throttled, time.monotonic_ns())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="edgefl-governor", daemon=True)
                self._thread.start()
            self.changed.notify_all()

    def drop(self, throttled: Throttled) -> None:
        """Stop scheduling a process. If it was the last process, wait until the thread has ended."""
        with self.changed:
            self.queue.drop(throttled)
            self.changed.notify_all()
            thread = self._thread
            if thread is None or thread is threading.current_thread():
                return
            self.changed.wait_for(lambda: self._thread is not thread or len(self.queue))
            ended = self._thread is not thread
        if ended:
            thread.join()

    def _run(self) -> None:
        reduce_wakeup_latency()
        with self.changed:
            while (due_ns := self.queue.run_due(time.monotonic_ns())) is not None:
                self.changed.wait(max(0.0, (due_ns - time.monotonic_ns()) * 1e-9))
            self._thread = None
            self.changed.notify_all()


KINDS = ("sigstop", "cgroup")
SAVED_NS = 2_000_000  # CPU time that a sleeping process may save up

_thread = ThrottleThread()


def _begin_fork() -> None:
    """Replace the thread in a forked process, in which the threads of its parent do not run."""
    global _thread
    _thread = ThrottleThread()


os.register_at_fork(after_in_child=_begin_fork)


def open(kind: str, pid: int, share: float) -> Throttle:
    """Limit process ``pid`` to ``share`` cores of this host (0.2 is a fifth of one) until `Throttle.close`.

    The kind ``sigstop`` needs no privileges. It stops all threads of the process for milliseconds at a time,
    but not its children, and the caller cannot throttle itself. The kind ``cgroup`` needs a writable control
    group. It also limits the processes that ``pid`` starts.
    Raises ConfigError if the mechanism is unknown or does not work here, ProcessLookupError if there is no
    such process, and ValueError if ``share`` is not a finite number above 0.
    """
    checked_share(share)
    if kind not in KINDS:
        raise ConfigError(unknown("throttle", kind, KINDS))
    if kind == "sigstop" and pid == os.getpid():
        raise ConfigError(
            "throttle 'sigstop': a process cannot stop itself; use 'cgroup', or another process"
        )
    with contextlib.ExitStack() as undo:
        target = Target(pid)
        undo.callback(target.close)
        account = Account(share, time.monotonic_ns(), target.cpu_ns(), SAVED_NS)
        throttled: Throttled = DutyCycle(target, account)
        groups = None
        if kind == "cgroup":
            try:
                groups = undo.enter_context(Groups(["cpu"]))
            except NoGroup as why:
                raise ConfigError(f"throttle 'cgroup' cannot be used here: {why}") from None
            group = groups.group(f"cpu-{pid}")
            group.enter(pid)
            throttled = Quota(target, account, group.place("cpu"))
        undo.pop_all()
        return Throttle(kind, throttled, groups)


class Throttle(contextlib.AbstractContextManager["Throttle"]):
    """Throttles a process to a CPU share. Created by `open`; `close` or a ``with`` block ends it."""

    def __init__(self, kind: str, throttled: Throttled, groups: Groups | None) -> None:
        self.kind, self._throttled, self._groups, self._open = kind, throttled, groups, True
        _thread.add(throttled)

    @property
    def share(self) -> float:
        """Share of the process, in cores of this host; it can be changed while the throttle is open."""
        return self._throttled.account.share

    @share.setter
    def share(self, share: float) -> None:
        with _thread.changed:
            self._throttled.account.change(share, time.monotonic_ns())
            _thread.add(self._throttled)

    @property
    def trouble(self) -> str:
        """Reason why the process is no longer limited, such as a removed control group; "" if it still is."""
        return _thread.queue.trouble.get(self._throttled, "")

    def achieved(self) -> Achieved:
        """Return the used and the declared CPU time; for ``sigstop``, as of the last stop."""
        if self._open and isinstance(self._throttled, Quota):
            with _thread.changed, contextlib.suppress(ProcessLookupError):  # the process has ended
                self._throttled.measure(time.monotonic_ns())
        return self._throttled.account.achieved()

    def close(self) -> None:
        """Let the process run freely. A second call does nothing."""
        if self._open:
            self._open = False
            _thread.drop(self._throttled)
            self._throttled.close()
            if self._groups is not None:
                self._groups.close()

    def __exit__(self, *_: object) -> None:
        self.close()
