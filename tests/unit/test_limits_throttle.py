"""What throttles steer by, and what held phases and their governor say to each other: no real clock."""

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
from edgefl.host.groups import Place
from edgefl.host.held import EARLY, MOST_SHARE, Cost, Governor, HeldPhase, HoldRequest
from edgefl.host.pacing import Pacer
from edgefl.host.throttle import SLICE_NS, Account, DutyCycle, Quota, ThrottleThread, TurnQueue, period
from edgefl.run import messages
from edgefl.run.client import ClientProcess
from edgefl.run.connection import Cancelled

MS = 1_000_000
S = 1_000_000_000
TICK_NS = 4 * MS


class Simulated:
    """A process on a core of its own: it runs unless it is stopped, sleeps, or has used up its quota.

    Its clock is as Linux keeps it: brought up to date at ticks, and when it leaves its core.
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
    """Look after a simulated process for so long, each time a little late."""
    due_ns = process.now_ns
    while due_ns < seconds * S:
        process.pass_time(due_ns + int(late_ns()))
        due_ns = throttled.turn(process.now_ns)
        assert due_ns > process.now_ns


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("late_ms", [0.0, 0.1, 5.0])
def test_a_duty_cycle_is_off_by_a_slice_and_what_the_governor_was_late(share: float, late_ms: float) -> None:
    rng = np.random.default_rng(0)
    process = Simulated()
    duty = DutyCycle(process, Account(share, 0, 0))
    steered(duty, process, 20.0, lambda: rng.uniform(0, late_ms * MS))
    achieved = duty.account.achieved()
    assert abs(process.used_ns - share * process.now_ns) <= SLICE_NS + late_ms * MS
    assert achieved.declared_cpu_s == pytest.approx(share * achieved.wall_s)


def test_a_whole_core_or_more_is_hardly_stopped() -> None:
    process = Simulated()
    steered(DutyCycle(process, Account(1.5, 0, 0, most_saved_ns=SLICE_NS)), process, 1.0)
    assert process.used_ns > 0.98 * process.now_ns


def test_a_share_can_change_while_it_is_held_and_a_released_process_runs() -> None:
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
"""Phases of one emulated second: threads that can run, and what a device of these cores grants them."""


def test_each_thread_that_can_run_gets_the_fastest_core_that_is_left() -> None:
    process = Simulated()
    process.share_allowed = math.inf
    duty = DutyCycle(process, Account(CORES, 0, 0, most_saved_ns=SLICE_NS))
    for second, (process.threads, share) in enumerate(THREADS):
        before_ns = process.used_ns
        steered(duty, process, second + 1.0)
        assert process.used_ns - before_ns == pytest.approx(share * S, abs=5 * SLICE_NS)
    assert duty.account.achieved().error == pytest.approx(0.0, abs=0.01)


def test_a_quota_follows_the_threads_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_threads_that_can_run_are_counted_by_process() -> None:
    """Of three threads two sleep; an ended process has none."""
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


def test_time_until_a_change_counts_by_the_share_before_it() -> None:
    account = Account(0.1, 0, 0)
    assert account.ahead_ns(S, 0) == -0.1 * S
    account.change(0.5, 9 * S)  # nobody has looked for eight seconds
    account.change(0.2, 10 * S)
    assert account.ahead_ns(11 * S, 0) == pytest.approx(-(0.9 + 0.5 + 0.2) * S)
    assert account.achieved().declared_cpu_s == pytest.approx(1.6)
    with pytest.raises(ValueError, match="share must be"):
        account.change(0.0, 12 * S)


def test_a_process_that_slept_does_not_run_at_full_speed_after_it() -> None:
    process = Simulated()
    duty = DutyCycle(process, Account(0.25, 0, 0, most_saved_ns=SLICE_NS))
    process.asleep = True
    steered(duty, process, 10.0)
    assert process.stops <= 2  # what sleeps is not disturbed
    process.asleep = False
    steered(duty, process, 11.0)
    assert process.used_ns == pytest.approx(0.25 * S, abs=3 * SLICE_NS)


@pytest.mark.parametrize("given", [0.75, 0.86, 1.0, 1.2])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.8])
def test_a_quota_is_corrected(given: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that loses a quarter of every quota, or gives a fifth too much."""
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


def test_a_period_allows_for_the_kernels_least_quota() -> None:
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
    """Wants to be looked after every 10 ms, so many times."""

    def __init__(self, most: int = 10**9) -> None:
        self.turns: list[int] = []
        self._most = most

    def turn(self, now_ns: int) -> int:
        if len(self.turns) == self._most:
            raise ProcessLookupError
        self.turns.append(now_ns)
        return now_ns + 10 * MS


def test_each_is_looked_after_when_it_is_due_and_forgotten_when_it_is_gone() -> None:
    queue, one, other = TurnQueue(), Turns(), Turns(most=2)
    queue.add(one, 0)
    queue.add(other, 5 * MS)
    now = 0
    while now < 100 * MS:
        due = queue.run_due(now)
        assert due is not None
        now = due
    assert one.turns == [i * 10 * MS for i in range(10)]
    assert other.turns == [5 * MS, 15 * MS]
    assert len(queue) == 1
    queue.drop(one)
    assert queue.run_due(now) is None


def test_looked_after_again_earlier_is_not_looked_after_twice() -> None:
    queue, one = TurnQueue(), Turns()
    for _ in range(5):
        queue.add(one, 50 * MS)
    queue.add(one, 20 * MS)
    assert queue.run_due(0) == 20 * MS
    assert queue.run_due(20 * MS) == 30 * MS
    assert one.turns == [20 * MS]


def test_one_that_is_always_due_does_not_keep_the_queue_from_the_others() -> None:
    class Greedy(Turns):
        def turn(self, now_ns: int) -> int:
            self.turns.append(now_ns)
            return now_ns

    queue, greedy = TurnQueue(), Greedy()
    queue.add(greedy, 0)
    due = queue.run_due(0)
    assert greedy.turns == [0]
    assert due is not None
    assert due > 0


class World:
    """A process whose wall and CPU clocks are moved by hand, and the pipe that it writes to."""

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
    """Ten pieces of work in five emulated seconds, ten on the wall."""
    world.pacer.begin(world.wall_ns)
    phase = world.pacer.phase(rate_per_s=2.0)
    return HeldPhase(phase, 10.0, Cost(cost_ns), world.writes, "sigstop")


def test_the_first_share_is_what_the_work_is_known_to_cost(world: World) -> None:
    start(world)
    (request,) = world.requests()
    assert request.share == pytest.approx(0.1 / (1 - EARLY["sigstop"]))  # a second of work in not quite ten
    assert (request.pid, request.at_ns, request.used_ns, request.work_ns) == (os.getpid(), 10 * S, 5 * S, S)


def test_what_it_really_costs_corrects_the_share(world: World) -> None:
    phase = start(world)
    for _ in range(5):
        world.compute(0.2, 1.0)  # twice what was known
        phase.done(1.0)
    *_, last = world.requests()
    # Half of the work and of the time are left; 2 of 7 parts say 0.1 a piece, as was known, and 5 say 0.2.
    assert last.share == pytest.approx((2 * 0.1 + 5 * 0.2) / 7 * 5 / (5 - 10 * EARLY["sigstop"]))


def test_a_phase_that_is_behind_gets_more_and_never_more_than_a_core(world: World) -> None:
    phase = start(world)
    for _ in range(2):
        world.compute(0.1, 9.5)
        phase.done(1.0)
        assert world.requests()[-1].share == MOST_SHARE


def test_corrections_are_not_sent_for_each_small_step(world: World) -> None:
    phase = start(world)
    for _ in range(9):
        world.compute(0.0001, 0.001)
        phase.done(1.0)
    assert len(world.requests()) == 1


def test_the_end_is_told_and_what_is_left_is_waited_out(world: World) -> None:
    phase = start(world)
    world.compute(1.0, 8.0)
    phase.done(10.0)
    world.ends = True
    spent = phase.end()
    assert (spent.declared_s, spent.achieved_s, spent.lateness_s) == (5.0, 5.0, 0.0)
    last = world.requests()[-1]
    assert (last.share, last.at_ns) == (0.0, 18 * S)  # it is held no more while it waits


@pytest.mark.parametrize("kind", ["cgroup", "sigstop"])
def test_a_client_whose_training_raises_is_held_no_more(kind: str) -> None:
    """Else the downloads and uploads of its next task would have what was left of the training's share."""
    reads, writes = os.pipe()
    client = ClientProcess.__new__(ClientProcess)
    client._model = client._room = lambda *_: np.zeros(2, np.float32)  # type: ignore[method-assign, assignment]
    client._pacer, _ = paced()
    trip = plan(device(), network(), rng())
    client._workload = Mock(
        **{"plan.return_value": trip, "share.return_value": None, "flat.whole": np.zeros(2)}
    )
    client._buffer, client._update = Mock(fetched=[0]), Mock(**{"train.side_effect": Cancelled})
    client._memory, client._governor, client._throttle, client._cost = None, writes, kind, Cost(1.0)
    task = messages.Task(client=0, task=1, trip=1, version=0, entry=0, slot=0, cut=None, condition=None)
    with pytest.raises(Cancelled):
        client._trip(task, [], 0)
    requests = HoldRequest.decode(os.read(reads, 1 << 16))
    assert [request.share > 0.0 for request in requests] == [True, False]
    os.close(reads)
    os.close(writes)


def test_a_late_end_is_reported_late_and_shortens_what_comes_next(world: World) -> None:
    phase = start(world)
    world.compute(1.0, 12.0)
    phase.done(10.0)
    spent = phase.end()
    assert (spent.achieved_s, spent.lateness_s) == (6.0, 1.0)
    after = world.pacer.phase(rate_per_s=1.0)
    assert after.due_ns(0.0) == world.wall_ns - 2 * S  # when it was scheduled


class Made:
    """A throttle that does nothing but note what it is told."""

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


def test_a_client_is_held_from_its_first_request_to_its_last(governor: Governor, made: list[Made]) -> None:
    governor.handle(HoldRequest(7, S, 0, 0.1, S))
    assert governor.run_due(S) == 2 * S
    governor.handle(HoldRequest(7, 2 * S, 0, 0.2, S))
    assert (len(made), made[0].renewed, made[0].account.share) == (1, 1, 0.2)
    governor.handle(HoldRequest(7, 3 * S, 0, 0.0, 0))
    assert made[0].closed == 1
    assert governor.run_due(4 * S) is None
    governor.handle(HoldRequest(7, 5 * S, 0, 0.0, 0))  # said twice
    assert made[0].closed == 1


def test_one_that_died_is_let_go_and_its_number_can_be_anothers(governor: Governor, made: list[Made]) -> None:
    governor.handle(HoldRequest(7, S, 0, 0.1, S))
    made[0].fails = ProcessLookupError()
    assert governor.run_due(S) is None
    governor.handle(HoldRequest(7, 2 * S, 0, 0.3, S))
    assert (len(made), made[0].closed, made[1].account.share) == (2, 1, 0.3)


def test_one_that_cannot_be_held_any_more_ends_the_run(governor: Governor, made: list[Made]) -> None:
    governor.handle(HoldRequest(7, S, 0, 0.1, S))
    made[0].fails = OSError("no such group")
    with pytest.raises(RunError, match="can no longer be limited to its CPU share: no such group"):
        governor.run_due(S)


@pytest.mark.parametrize(
    ("error", "raised"), [(ProcessLookupError, ProcessLookupError), (PermissionError, ConfigError)]
)
def test_a_process_that_cannot_be_held_leaves_no_descriptor(
    error: type[OSError], raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may end between the two calls."""
    monkeypatch.setattr(throttle.signal, "pidfd_send_signal", Mock(side_effect=error))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(raised):
        throttle.Target(os.getpid())
    assert os.listdir("/proc/self/fd") == before


def test_a_process_cannot_stop_itself() -> None:
    code = "import os; from edgefl import host; host.open('sigstop', os.getpid(), 0.2)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        child.kill()
        assert os.WIFEXITED(status)  # and does not stand still
        assert child.stderr is not None
        assert "ConfigError: throttle 'sigstop': a process cannot stop itself" in child.stderr.read()


def test_one_that_leaves_does_not_wait_for_one_that_comes_meanwhile() -> None:
    """The last one waits for the thread's end, unless the thread has somebody to look after again."""
    looking, first, second = ThrottleThread(), Mock(), Mock()
    looking._thread = thread = Mock()  # one that has not noticed yet that nobody is left
    looking.queue.add(first, 0)
    leaving = threading.Thread(target=looking.drop, args=(first,))
    leaving.start()
    while len(looking.queue):
        os.sched_yield()
    looking.add(second)
    leaving.join(60.0)
    assert not leaving.is_alive()
    thread.join.assert_not_called()


def test_one_that_was_gone_before_it_was_held_is_no_trouble() -> None:
    governor = Governor(Mock(side_effect=ProcessLookupError))
    governor.handle(HoldRequest(7, S, 0, 0.1, S))
    assert governor.run_due(S) is None
