"""Phases that wait at their end only and the governor that holds them: what they say to each other."""

from __future__ import annotations

import os
from unittest.mock import Mock

import pytest

from edgefl.errors import RunError
from edgefl.limits import held
from edgefl.limits.held import EARLY, MESSAGE_BYTES, MOST_SHARE, Cost, Governor, HeldPhase, HoldRequest
from edgefl.limits.pacing import Pacer
from edgefl.limits.throttle import Account

S = 1_000_000_000


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


def test_a_late_end_is_reported_late_and_shortens_what_comes_next(world: World) -> None:
    phase = start(world)
    world.compute(1.0, 12.0)
    phase.done(10.0)
    spent = phase.end()
    assert (spent.achieved_s, spent.lateness_s) == (6.0, 1.0)
    after = world.pacer.phase(rate_per_s=1.0)
    assert after.due_ns(0.0) == world.wall_ns - 2 * S  # when it was scheduled


def test_a_request_survives_the_pipe() -> None:
    requests = [HoldRequest(1, 2, 3, 0.25, 4), HoldRequest(2**31, 2**62, 0, held.LEAST_SHARE, 0)]
    data = b"".join(request.encode() for request in requests)
    assert len(data) == 2 * MESSAGE_BYTES
    assert HoldRequest.decode(data) == requests


# ---- the governor --------------------------------------------------------------------------------


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
    governor.hear(HoldRequest(7, S, 0, 0.1, S))
    assert governor.look(S) == 2 * S
    governor.hear(HoldRequest(7, 2 * S, 0, 0.2, S))
    assert (len(made), made[0].renewed, made[0].account.share) == (1, 1, 0.2)
    governor.hear(HoldRequest(7, 3 * S, 0, 0.0, 0))
    assert made[0].closed == 1
    assert governor.look(4 * S) is None
    governor.hear(HoldRequest(7, 5 * S, 0, 0.0, 0))  # said twice
    assert made[0].closed == 1


def test_one_that_died_is_let_go_and_its_number_can_be_anothers(governor: Governor, made: list[Made]) -> None:
    governor.hear(HoldRequest(7, S, 0, 0.1, S))
    made[0].fails = ProcessLookupError()
    assert governor.look(S) is None
    governor.hear(HoldRequest(7, 2 * S, 0, 0.3, S))
    assert (len(made), made[0].closed, made[1].account.share) == (2, 1, 0.3)


def test_one_that_cannot_be_held_any_more_ends_the_run(governor: Governor, made: list[Made]) -> None:
    governor.hear(HoldRequest(7, S, 0, 0.1, S))
    made[0].fails = OSError("no such group")
    with pytest.raises(RunError, match="cannot be held to its share any more: no such group"):
        governor.look(S)


def test_one_that_was_gone_before_it_was_held_is_no_trouble() -> None:
    governor = Governor(Mock(side_effect=ProcessLookupError))
    governor.hear(HoldRequest(7, S, 0, 0.1, S))
    assert governor.look(S) is None
