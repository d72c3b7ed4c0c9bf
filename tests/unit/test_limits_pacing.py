"""Tests of pacing, with a simulated clock and with the real one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.host.pacing import Pacer, Phase, set_timer_slack, wait_until

S = 1_000_000_000
BAD = (0.0, -1.0, math.nan, math.inf)


class FakeTime:
    """A monotonic clock that advances only by waiting; each wait ends ``oversleep_ns`` late."""

    def __init__(self, oversleep_ns: int = 0) -> None:
        self.now_ns = 0
        self.oversleep_ns = oversleep_ns
        self.waits: list[int] = []

    def clock(self) -> int:
        return self.now_ns

    def wait(self, deadline_ns: int) -> None:
        self.waits.append(deadline_ns)
        self.now_ns = max(self.now_ns, deadline_ns) + self.oversleep_ns

    def pacer(self, time_scale: float = 1.0) -> Pacer:
        pacer = Pacer(time_scale=time_scale, wait=self.wait, clock=self.clock)
        pacer.begin(self.now_ns)
        return pacer


def test_the_lead_is_waited_once_before_the_work() -> None:
    fake = FakeTime()
    phase = fake.pacer().phase(rate_per_s=10.0, lead_s=0.5)
    phase.done(5.0)
    assert fake.now_ns == S
    phase.done(5.0)
    assert phase.end().declared_s == 1.5
    assert fake.now_ns == 3 * S // 2


def test_the_next_phase_makes_up_for_a_late_one() -> None:
    fake = FakeTime()
    pacer = fake.pacer()
    first = pacer.phase(rate_per_s=1.0)
    fake.now_ns += 3 * S // 2
    first.done(1.0)
    late = first.end()
    assert (late.declared_s, late.achieved_s, late.lateness_s) == (1.0, 1.5, 0.5)
    second = pacer.phase(rate_per_s=1.0)
    second.done(2.0)
    caught_up = second.end()
    assert fake.now_ns == 3 * S
    assert (caught_up.declared_s, caught_up.achieved_s, caught_up.lateness_s) == (2.0, 1.5, 0.0)


def test_phases_that_are_always_too_slow_are_reported_late() -> None:
    fake = FakeTime()
    pacer = fake.pacer()
    achieved = 0.0
    for _ in range(3):
        phase = pacer.phase(rate_per_s=1.0)
        fake.now_ns += 2 * S
        phase.done(1.0)
        spent = phase.end()
        achieved += spent.achieved_s
        assert spent.achieved_s > spent.declared_s
    assert achieved == 6.0
    assert spent.lateness_s == 3.0
    assert fake.waits == []


def test_an_infinite_rate_never_waits_and_time_between_phases_counts() -> None:
    fake = FakeTime()
    pacer = fake.pacer()
    phase = pacer.phase(rate_per_s=math.inf)
    phase.done(1e18)
    assert phase.end().declared_s == 0.0
    assert fake.waits == []
    fake.now_ns += S
    assert pacer.phase(math.inf).end().achieved_s == 1.0


def test_a_trip_begins_at_the_given_time() -> None:
    fake = FakeTime()
    pacer = fake.pacer()
    fake.now_ns = 5 * S
    pacer.begin(4 * S)
    assert pacer.phase(1.0).end(2.0).achieved_s == 2.0
    assert fake.now_ns == 6 * S


@given(
    st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0, 2), st.floats(0, 100)), min_size=1, max_size=6),
    st.integers(0, 10_000_000),
    st.floats(0.01, 100),
)
def test_a_trip_takes_the_sum_of_its_phases(
    phases: list[tuple[float, float, float]], oversleep_ns: int, scale: float
) -> None:
    fake = FakeTime(oversleep_ns)
    pacer = fake.pacer(scale)
    declared = achieved = 0.0
    for rate, lead, work in phases:
        phase = pacer.phase(rate, lead)
        phase.done(work / 2)
        phase.done(work / 2)
        spent = phase.end()
        assert spent.declared_s == pytest.approx(lead + work / rate)
        assert spent.work == pytest.approx(work)
        assert 0.0 <= spent.lateness_s <= (oversleep_ns + 10) / S / scale * (1 + 1e-6)  # not cumulative
        declared += spent.declared_s
        achieved += spent.achieved_s
    due_ns = declared * scale * S
    slack_ns = oversleep_ns + 10 + due_ns * 1e-9
    assert due_ns * (1 - 1e-9) - 10 <= fake.now_ns <= due_ns + slack_ns
    assert achieved == pytest.approx(fake.now_ns / (scale * S))


def test_an_exception_of_the_wait_reaches_the_caller() -> None:
    pacer = Pacer(time_scale=1.0, wait=Mock(side_effect=InterruptedError), clock=lambda: 0)
    pacer.begin(0)
    with pytest.raises(InterruptedError):
        pacer.phase(1.0).done(1.0)


def ended(work: float = 0.0) -> Phase:
    phase = FakeTime().pacer().phase(1.0)
    phase.end(work)
    return phase


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        *((lambda scale=scale: Pacer(time_scale=scale), "time_scale must be finite") for scale in BAD),
        *((lambda rate=rate: FakeTime().pacer().phase(rate), "rate_per_s must be") for rate in BAD[:3]),
        *((lambda lead=lead: FakeTime().pacer().phase(1.0, lead), "lead_s must be") for lead in BAD[1:]),
        *((lambda work=work: ended(work), "work must be") for work in BAD[1:]),
        (lambda: Pacer(time_scale=1.0).phase(1.0), "before begin"),
        (lambda: ended().done(1.0), "has ended"),
        (lambda: ended().end(), "has ended"),
    ],
)
def test_misuse_is_refused(misuse: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        misuse()


def test_wait_until_is_never_early() -> None:
    for wait_ns in (0, 1_000, 200_000, 3_000_000):
        deadline_ns = time.monotonic_ns() + wait_ns
        wait_until(deadline_ns)
        assert time.monotonic_ns() >= deadline_ns
    wait_until(0)
    assert set_timer_slack() is sys.platform.startswith("linux")


def test_a_paced_trip_is_never_early_on_the_real_clock() -> None:
    pacer = Pacer(time_scale=0.5)
    start_ns = time.monotonic_ns()
    pacer.begin(start_ns)
    phase = pacer.phase(rate_per_s=1000.0, lead_s=0.005)
    for _ in range(5):
        phase.done(1.0)
    spent = phase.end()
    assert time.monotonic_ns() - start_ns >= 5_000_000
    assert spent.achieved_s >= spent.declared_s == pytest.approx(0.010)


@pytest.mark.skipif(sys.platform == "win32", reason="processes have no niceness")
def test_setting_a_time_slice_does_not_change_the_niceness() -> None:
    code = "import os; from edgefl.host.pacing import *; os.nice(7); set_time_slice(); print(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == min(19, os.nice(0) + 7)
