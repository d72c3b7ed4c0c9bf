"""Tests of throttles, held phases and their governor, with simulated clocks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from trip_parts import device, network, paced, plan, rng

from edgefl.errors import ConfigError, RunError
from edgefl.host import held, throttle
from edgefl.host.forked import call_forked
from edgefl.host.groups import NoGroup, Place
from edgefl.host.held import EARLY, MAX_SHARE, Cost, Governor, HeldPhase, HoldRequest
from edgefl.host.pacing import Pacer
from edgefl.host.throttle import SLICE_NS, Account, DutyCycle, Quota, ThrottleThread, TurnQueue, period
from edgefl.run import messages
from edgefl.run.client import ClientProcess
from edgefl.run.connection import Cancelled

MS = 1_000_000
S = 1_000_000_000
TICK_NS = 4 * MS


class Simulated:
    """A process that has a core for itself: it runs unless it is stopped, sleeps, or has used up its quota.

    As on Linux, its CPU clock is updated at ticks and when it leaves its core.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.used_ns = 0.0
        self._read_ns = 0
        self.stopped = False
        self.share_allowed = 1.0
        self.asleep = False
        self.threads, self.host_cores = 1, 2
        self.stops = 0
        self.pid = 1

    def pass_time(self, until_ns: int) -> None:
        if not self.stopped and not self.asleep:
            cores = min(self.threads, self.host_cores)
            ticked_ns = until_ns // TICK_NS * TICK_NS
            if ticked_ns > self.now_ns:
                self._read_ns = int(self.used_ns + (ticked_ns - self.now_ns) * min(self.share_allowed, cores))
            self.used_ns += (until_ns - self.now_ns) * min(self.share_allowed, cores)
        self.now_ns = until_ns

    def cpu_ns(self) -> int:
        if self.stopped or self.asleep or self.share_allowed < 1.0:
            self._read_ns = int(self.used_ns)
        return self._read_ns

    def wanting_ns(self, now_ns: int) -> int:
        return now_ns

    def sleeps(self) -> bool:
        return self.asleep

    def runnable(self) -> int:
        return self.threads

    def stop(self) -> None:
        self.stopped = True
        self.stops += 1

    def resume(self) -> None:
        self.stopped = False

    def close(self) -> None:
        self.stopped = False


def steered(throttled: Any, process: Simulated, seconds: float, late_ns: Any = lambda: 0) -> None:
    """Throttle a simulated process for ``seconds``, with turns that are ``late_ns()`` late."""
    due_ns = process.now_ns
    while due_ns < seconds * S:
        process.pass_time(due_ns + int(late_ns()))
        due_ns = throttled.turn(process.now_ns)
        assert due_ns > process.now_ns


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("late_ms", [0.0, 0.1, 5.0])
def test_a_duty_cycles_error_is_at_most_a_slice_and_the_lateness(share: float, late_ms: float) -> None:
    rng = np.random.default_rng(0)
    process = Simulated()
    duty = DutyCycle(process, Account(share, 0, 0))
    steered(duty, process, 20.0, lambda: rng.uniform(0, late_ms * MS))
    achieved = duty.account.achieved()
    assert abs(process.used_ns - share * process.now_ns) <= SLICE_NS + late_ms * MS
    assert achieved.declared_cpu_s == pytest.approx(share * achieved.wall_s)


def test_a_process_with_a_whole_core_or_more_is_hardly_stopped() -> None:
    process = Simulated()
    steered(DutyCycle(process, Account(1.5, 0, 0, most_saved_ns=SLICE_NS)), process, 1.0)
    assert process.used_ns > 0.98 * process.now_ns


def test_a_share_can_change_and_a_released_process_runs() -> None:
    process = Simulated()
    duty = DutyCycle(process, Account(0.1, 0, 0))
    steered(duty, process, 2.0)
    duty.account.change(0.4, process.now_ns)
    steered(duty, process, 4.0)
    assert process.used_ns == pytest.approx((0.1 * 2.0 + 0.4 * 2.0) * S, abs=2 * SLICE_NS)
    process.stop()
    duty.close()
    assert not process.stopped


CORES = (0.3, 0.3, 0.1)
THREADS = [(1, 0.3), (2, 0.6), (3, 0.7), (8, 0.7), (1, 0.3), (2, 0.6)]
"""For each phase: number of runnable threads, and their total share of a core on a device with `CORES`."""


def test_each_runnable_thread_gets_the_fastest_free_core() -> None:
    process = Simulated()
    process.share_allowed = math.inf
    duty = DutyCycle(process, Account(CORES, 0, 0, most_saved_ns=SLICE_NS))
    for second, (process.threads, share) in enumerate(THREADS):
        before_ns = process.used_ns
        steered(duty, process, second + 1.0)
        assert process.used_ns - before_ns == pytest.approx(share * S, abs=5 * SLICE_NS)
    assert duty.account.achieved().error == pytest.approx(0.0, abs=0.01)


def test_a_quota_follows_the_number_of_runnable_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    process, asked = Simulated(), list[float]()

    def set_quota(place: object, quota_us: int, period_us: int) -> None:
        asked.append(quota_us / period_us)
        process.share_allowed = 0.9 * asked[-1]

    monkeypatch.setattr(throttle, "set_quota", set_quota)
    quota = Quota(process, Account(CORES, 0, 0), Place(Path("cpu"), 1))
    for second, (process.threads, share) in enumerate(THREADS * 2):
        before_ns = process.used_ns
        steered(quota, process, 2.0 * (second + 1))
        assert process.used_ns - before_ns == pytest.approx(2 * share * S, rel=0.2)
        assert asked[-1] == pytest.approx(share, rel=0.2)
    assert quota.account.achieved().error == pytest.approx(0.0, abs=0.02)


def test_runnable_threads_of_a_process_are_counted() -> None:
    """Two of the three threads sleep. A process that has ended has no runnable threads."""
    code = "import threading; [threading.Thread(target=input).start() for _ in range(2)]\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE) as process:
        target = throttle.Target(process.pid)
        try:
            while len(os.listdir(f"/proc/{process.pid}/task")) < 3 or target.runnable() != 1:
                assert process.poll() is None
        finally:
            process.kill()
            process.wait()
        assert target.runnable() == 0
        target.close()


def test_time_before_a_change_counts_with_the_share_before_it() -> None:
    account = Account(0.1, 0, 0)
    assert account.ahead_ns(S, 0) == -0.1 * S
    account.change(0.5, 9 * S)  # eight seconds after the last look
    account.change(0.2, 10 * S)
    assert account.ahead_ns(11 * S, 0) == pytest.approx(-(0.9 + 0.5 + 0.2) * S)
    assert account.achieved().declared_cpu_s == pytest.approx(1.6)
    with pytest.raises(ValueError, match="share must be"):
        account.change(0.0, 12 * S)


def test_a_process_does_not_run_at_full_speed_after_a_sleep() -> None:
    process = Simulated()
    duty = DutyCycle(process, Account(0.25, 0, 0, most_saved_ns=SLICE_NS))
    process.asleep = True
    steered(duty, process, 10.0)
    assert process.stops <= 2  # a sleeping process is not stopped
    process.asleep = False
    steered(duty, process, 11.0)
    assert process.used_ns == pytest.approx(0.25 * S, abs=3 * SLICE_NS)


@pytest.mark.parametrize("given", [0.75, 0.86, 1.0, 1.2])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.8])
def test_a_quota_corrects_its_error(given: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels grant up to a quarter less CPU time than the quota, or up to a fifth more."""
    process = Simulated()

    def set_quota(place: object, quota_us: int | None, period_us: int = 10_000) -> None:
        if quota_us is None:
            process.share_allowed = 1.0
            return
        assert quota_us >= 1000
        assert 1000 <= period_us <= 1_000_000
        process.share_allowed = min(1.0, given * quota_us / period_us)

    monkeypatch.setattr(throttle, "set_quota", set_quota)
    quota = Quota(process, Account(share, 0, 0), Place(Path("cpu"), 1))
    steered(quota, process, 200.0)
    assert quota.account.achieved().error == pytest.approx(0.0, abs=0.01)
    quota.close()
    assert process.share_allowed == 1.0


@pytest.mark.parametrize("alive", [True, False])
def test_a_quota_that_cannot_be_set_is_trouble_unless_the_process_has_just_ended(
    alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, queue = Simulated(), TurnQueue()

    def set_quota(*_: object) -> None:
        if not alive:
            monkeypatch.setattr(process, "cpu_ns", Mock(side_effect=ProcessLookupError))
        raise NoGroup("no such group")

    monkeypatch.setattr(throttle, "set_quota", set_quota)
    queue.add(Quota(process, Account(0.5, 0, 0), Place(Path("cpu"), 1)), 0)
    assert queue.run_due(0) is None
    assert list(queue.trouble.values()) == ["no such group"] * alive


def test_the_period_is_long_enough_for_the_kernels_smallest_quota() -> None:
    for share in np.geomspace(1e-3, 64, 100):
        if period(share) < 1_000_000:
            assert share * period(share) >= 1000
        assert 10_000 <= period(share) <= 1_000_000


@pytest.mark.parametrize("share", [0.0, -1.0, math.nan, math.inf])
def test_a_share_must_be_a_number_above_0(share: float) -> None:
    with pytest.raises(ValueError, match="share must be a finite number of cores above 0"):
        Account(share, 0, 0)
    assert math.isnan(Account(0.5, 10, 10).achieved().error)


class Turns:
    """A throttle with a turn every 10 ms, whose process has ended after ``most`` turns."""

    def __init__(self, most: int = 10**9) -> None:
        self.turns: list[int] = []
        self._most = most

    def turn(self, now_ns: int) -> int:
        if len(self.turns) == self._most:
            raise ProcessLookupError
        self.turns.append(now_ns)
        return now_ns + 10 * MS


def test_each_throttle_has_its_turns_when_due_until_its_process_ends() -> None:
    queue, one, other = TurnQueue(), Turns(), Turns(most=2)
    queue.add(one, 0)
    queue.add(other, 5 * MS)
    now = 0
    while now < 100 * MS:
        now = queue.run_due(now)
    assert one.turns == [i * 10 * MS for i in range(10)]
    assert other.turns == [5 * MS, 15 * MS]
    assert len(queue) == 1
    queue.drop(one)
    assert queue.run_due(now) is None


def test_a_throttle_that_is_added_again_has_one_turn_at_the_earliest_time() -> None:
    queue, one = TurnQueue(), Turns()
    for _ in range(5):
        queue.add(one, 50 * MS)
    queue.add(one, 20 * MS)
    assert queue.run_due(0) == 20 * MS
    assert queue.run_due(20 * MS) == 30 * MS
    assert one.turns == [20 * MS]


def test_a_throttle_that_is_always_due_does_not_block_the_others() -> None:
    class Greedy(Turns):
        def turn(self, now_ns: int) -> int:
            self.turns.append(now_ns)
            return now_ns

    queue, greedy = TurnQueue(), Greedy()
    queue.add(greedy, 0)
    assert queue.run_due(0) > 0
    assert greedy.turns == [0]


class World:
    """A process with simulated wall and CPU clocks, and its pipe to the governor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_ns = 10 * S
        self.cpu_ns = 5 * S
        self.ends = False
        self.reads, self.writes = os.pipe()
        monkeypatch.setattr(held, "cpu_ns", lambda pid: self.cpu_ns)
        monkeypatch.setattr(held.time, "monotonic_ns", lambda: self.wall_ns)
        self.pacer = Pacer(time_scale=2.0, wait=self.waited, clock=lambda: self.wall_ns)

    def waited(self, deadline_ns: int) -> None:
        assert self.ends, "a held phase does not wait before its end"
        self.wall_ns = deadline_ns

    def compute(self, cpu_s: float, wall_s: float) -> None:
        self.cpu_ns += int(cpu_s * S)
        self.wall_ns += int(wall_s * S)

    def requests(self) -> list[HoldRequest]:
        os.set_blocking(self.reads, False)
        try:
            return HoldRequest.decode(os.read(self.reads, 1 << 16))
        except BlockingIOError:
            return []

    def close(self) -> None:
        os.close(self.reads)
        os.close(self.writes)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> object:
    made = World(monkeypatch)
    yield made
    made.close()


def start(world: World, cost_ns: float = 1e8) -> HeldPhase:
    """Begin a phase of ten units of work in five emulated seconds, which are ten wall seconds."""
    world.pacer.begin(world.wall_ns)
    phase = world.pacer.phase(rate_per_s=2.0)
    return HeldPhase(phase, 10.0, Cost(cost_ns), world.writes, "sigstop")


def test_the_first_share_follows_from_the_known_cost_of_the_work(world: World) -> None:
    start(world)
    (request,) = world.requests()
    assert request.share == pytest.approx(0.1 / (1 - EARLY["sigstop"]))  # a second of work in not quite ten
    assert (request.pid, request.at_ns, request.used_ns, request.work_ns) == (os.getpid(), 10 * S, 5 * S, S)


def test_the_measured_cost_corrects_the_share(world: World) -> None:
    phase = start(world)
    for _ in range(5):
        world.compute(0.2, 1.0)  # twice the known cost
        phase.done(1.0)
    *_, last = world.requests()
    # Half of the work and of the time are left. The known cost 0.1 has weight 2/7, the measured 0.2 has 5/7.
    assert last.share == pytest.approx((2 * 0.1 + 5 * 0.2) / 7 * 5 / (5 - 10 * EARLY["sigstop"]))


def test_a_late_phase_gets_at_most_a_core(world: World) -> None:
    phase = start(world)
    for _ in range(2):
        world.compute(0.1, 9.5)
        phase.done(1.0)
        assert world.requests()[-1].share == MAX_SHARE


def test_small_steps_send_no_correction(world: World) -> None:
    phase = start(world)
    for _ in range(9):
        world.compute(0.0001, 0.001)
        phase.done(1.0)
    assert len(world.requests()) == 1


def test_a_phase_that_ends_early_is_released_and_waits_for_its_end(world: World) -> None:
    phase = start(world)
    world.compute(1.0, 8.0)
    phase.done(10.0)
    world.ends = True
    spent = phase.end()
    assert (spent.declared_s, spent.achieved_s, spent.lateness_s) == (5.0, 5.0, 0.0)
    last = world.requests()[-1]
    assert (last.share, last.at_ns) == (0.0, 18 * S)  # released while it waits


@pytest.mark.parametrize("kind", ["cgroup", "sigstop"])
def test_a_client_is_released_if_its_training_raises(kind: str) -> None:
    """Otherwise the transfers of its next task would be limited to the training's share."""
    reads, writes = os.pipe()
    client = ClientProcess.__new__(ClientProcess)
    client._model = lambda *_: np.zeros(2, np.float32)  # type: ignore[method-assign]
    client._transport = Mock()
    client._pacer, _ = paced()
    trip = plan(device(), network(), rng())
    answers = {"plan.return_value": trip, "share.return_value": None, "flat.whole": np.zeros(2)}
    client._workload = Mock(**answers)
    client._buffer, client._update = Mock(fetched=[0]), Mock(**{"train.side_effect": Cancelled})
    client._memory, client._governor, client._throttle, client._cost = None, writes, kind, Cost(1.0)
    task = messages.Task(client=0, task=1, trip=1, version=0, entry=0, slot=0, cut=None, condition=None)
    with pytest.raises(Cancelled):
        client._trip(task, [], 0)
    requests = HoldRequest.decode(os.read(reads, 1 << 16))
    assert [request.share > 0.0 for request in requests] == [True, False]
    os.close(reads)
    os.close(writes)


def test_a_late_end_is_reported_and_the_next_phase_starts_at_its_scheduled_time(world: World) -> None:
    phase = start(world)
    world.compute(1.0, 12.0)
    phase.done(10.0)
    spent = phase.end()
    assert (spent.achieved_s, spent.lateness_s) == (6.0, 1.0)
    after = world.pacer.phase(rate_per_s=1.0)
    assert after.due_ns(0.0) == world.wall_ns - 2 * S  # the scheduled end of the phase


class Made:
    """A throttle that only records its calls."""

    def __init__(self, request: HoldRequest, account: Account) -> None:
        self.request, self.account = request, account
        self.closed = self.renewed = 0
        self.fails: Exception | None = None

    def turn(self, now_ns: int) -> int:
        if self.fails is not None:
            raise self.fails
        return now_ns + S

    def renew(self, account: Account) -> bool:
        self.account = account
        self.renewed += 1
        return True

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def made() -> list[Made]:
    return []


@pytest.fixture
def governor(made: list[Made]) -> Governor:
    def make(request: HoldRequest, account: Account) -> Made:
        made.append(Made(request, account))
        return made[-1]

    return Governor(make)


def test_a_client_is_throttled_from_first_to_last_request(governor: Governor, made: list[Made]) -> None:
    governor.handle(HoldRequest(7, S, 0, 0.1, S))
    assert governor.run_due(S) == 2 * S
    governor.handle(HoldRequest(7, 2 * S, 0, 0.2, S))
    assert (len(made), made[0].renewed, made[0].account.share) == (1, 1, 0.2)
    governor.handle(HoldRequest(7, 3 * S, 0, 0.0, 0))
    assert made[0].closed == 1
    assert governor.run_due(4 * S) is None
    governor.handle(HoldRequest(7, 5 * S, 0, 0.0, 0))  # sent twice
    assert made[0].closed == 1


def test_a_dead_client_is_released_and_its_pid_can_be_reused(governor: Governor, made: list[Made]) -> None:
    governor.handle(HoldRequest(7, S, 0, 0.1, S))
    made[0].fails = ProcessLookupError()
    assert governor.run_due(S) is None
    assert made[0].closed == 1
    governor.handle(HoldRequest(7, 2 * S, 0, 0.3, S))
    assert (len(made), made[0].closed, made[1].account.share) == (2, 1, 0.3)


def test_a_throttle_that_fails_ends_the_run(governor: Governor, made: list[Made]) -> None:
    governor.handle(HoldRequest(7, S, 0, 0.1, S))
    made[0].fails = OSError("no such group")
    with pytest.raises(RunError, match="can no longer be limited to its CPU share: no such group"):
        governor.run_due(S)


@pytest.mark.parametrize(
    ("error", "raised"), [(ProcessLookupError, ProcessLookupError), (PermissionError, ConfigError)]
)
def test_a_process_that_cannot_be_throttled_leaves_no_descriptor(
    error: type[OSError], raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may end after its descriptor was opened."""
    monkeypatch.setattr(throttle, "signal_pidfd", Mock(side_effect=error))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(raised):
        throttle.Target(os.getpid())
    assert os.listdir("/proc/self/fd") == before


def test_a_stopped_process_that_has_become_one_of_another_user_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = throttle.Target(os.getpid())
    target.stopped = True
    monkeypatch.setattr(throttle, "signal_pidfd", Mock(side_effect=PermissionError))
    target.close()
    assert target._fd == -1


def test_a_process_cannot_stop_itself() -> None:
    code = "import os; from edgefl import host; host.open('sigstop', os.getpid(), 0.2)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        child.kill()
        assert os.WIFEXITED(status)  # it is not stopped
        assert "ConfigError: throttle 'sigstop': a process cannot stop itself" in child.stderr.read()


def test_dropping_the_last_throttle_does_not_wait_if_another_one_was_added() -> None:
    """Dropping the last throttle waits for the thread's end, unless the thread has work again."""
    throttles, first, second = ThrottleThread(), Mock(), Mock()
    throttles._thread = thread = Mock()  # it has not noticed yet that its queue is empty
    throttles.queue.add(first, 0)
    leaving = threading.Thread(target=throttles.drop, args=(first,))
    leaving.start()
    while len(throttles.queue):
        os.sched_yield()
    throttles.add(second)
    leaving.join(60.0)
    assert not leaving.is_alive()
    thread.join.assert_not_called()


def test_a_forked_process_throttles_in_a_thread_of_its_own() -> None:
    """Its parent's thread does not run in it, even if a throttle is open."""
    parents = throttle._thread
    data, _ = call_forked("edgefl-test", lambda: b"same" if throttle._thread is parents else b"another")
    assert (data, throttle._thread) == (b"another", parents)


def test_a_client_that_ended_before_its_first_request_is_ignored() -> None:
    governor = Governor(Mock(side_effect=ProcessLookupError))
    governor.handle(HoldRequest(7, S, 0, 0.1, S))
    assert governor.run_due(S) is None
