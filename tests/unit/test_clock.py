"""Emulated time under the wall clock, and alarms. The test sets the monotonic clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_parts import Hand

from edgefl.run.clock import TICK, Agenda, Alarms, Due, WallClock


def test_a_clock_stands_still_until_it_is_started() -> None:
    hand = Hand()
    clock = WallClock(2.0, emulated_s=7.0, wall_s=3.0, monotonic=hand)
    hand.at += 100
    assert (clock.now_s(), clock.wall_s()) == (7.0, 3.0)
    clock.start()
    hand.at += 4
    assert (clock.now_s(), clock.wall_s()) == (9.0, 7.0)


@given(scale=st.floats(1e-3, 1e3), before=st.floats(0, 1e6), steps=st.lists(st.floats(0, 1e4), max_size=20))
def test_emulated_time_is_wall_time_divided_by_scale(scale: float, before: float, steps: list[float]) -> None:
    hand = Hand()
    clock = WallClock(scale, emulated_s=before, wall_s=before * scale, monotonic=hand)
    clock.start()
    last = clock.now_s()
    for step in steps:
        hand.at += step
        assert clock.now_s() >= last
        last = clock.now_s()
    elapsed = hand.at - 100.0
    assert clock.now_s() == pytest.approx(before + elapsed / scale)
    assert clock.wall_s() == pytest.approx(before * scale + elapsed)


class Bell:
    """Alarms on a clock that the test sets, with a list of those that rang."""

    def __init__(self) -> None:
        self.hand = Hand(0.0)
        self.alarms = Alarms(self.hand)
        self.rang: list[str] = []

    def after(self, seconds: float, name: str) -> None:
        self.alarms.after(seconds, lambda: self.rang.append(name))

    def at(self, instant: float) -> list[str]:
        """Set the clock to ``instant`` and run the due alarms; return the names of those that rang."""
        self.hand.at = instant
        self.rang.clear()
        self.alarms.run_due()
        return self.rang


def test_alarms_ring_once_in_the_order_of_time_and_of_creation() -> None:
    bell = Bell()
    names = [f"alarm {number}" for number in range(50)]
    for seconds, name in ((3.0, "c"), (1.0, "a"), (2.0, "b"), (9.0, "d"), *((3.0, name) for name in names)):
        bell.after(seconds, name)
    assert bell.at(0.999) == []
    assert bell.at(3.0) == ["a", "b", "c", *names]
    assert bell.at(3.0) == []
    assert bell.at(100.0) == ["d"]


def test_a_callback_may_set_alarms() -> None:
    bell = Bell()

    def first() -> None:
        bell.rang.append("first")
        bell.after(0.0, "at once")
        bell.after(1.0, "later")

    bell.alarms.after(1.0, first)
    assert bell.at(1.0) == ["first", "at once"]
    assert bell.at(2.0) == ["later"]


def test_a_periodic_alarm_does_not_make_up_for_missed_periods() -> None:
    bell = Bell()
    bell.alarms.every(2.0, lambda: bell.rang.append("tick"))
    instants = (1.9, 2.0, 3.9, 100.0, 101.9, 102.0)  # busy until 100: one tick, not 48
    assert [len(bell.at(instant)) for instant in instants] == [0, 1, 0, 1, 0, 1]


def test_an_alarm_that_raises_rings_once_and_does_not_stop_others() -> None:
    bell = Bell()
    bell.alarms.after(1.0, lambda: bell.rang.append(str(1 // 0)))
    bell.after(1.0, "other")
    bell.hand.at = 1.0
    with pytest.raises(ZeroDivisionError):
        bell.alarms.run_due()
    assert bell.at(1.0) == ["other"]


@given(st.floats(0, 10))
def test_a_wait_ends_at_most_a_millisecond_after_the_alarm(seconds: float) -> None:
    bell = Bell()
    bell.after(seconds, "it")
    wait_s = bell.alarms.wait_ms(most=60_000) / 1000
    assert seconds <= wait_s <= seconds + 0.001 + 1e-9
    assert bell.at(wait_s) == ["it"]


def test_a_wait_is_between_zero_and_the_callers_limit() -> None:
    bell = Bell()
    assert bell.alarms.wait_ms(500) == 500
    bell.after(0.2, "it")
    assert bell.alarms.wait_ms(500) == 201
    assert bell.alarms.wait_ms(1) == 1
    bell.hand.at = 50.0
    assert bell.alarms.wait_ms(500) == 0
    bell.at(50.0)
    assert bell.alarms.wait_ms(500) == 500
    bell.after(math.inf, "never")
    assert bell.alarms.wait_ms(500) == 500


def test_a_tick_is_due_once() -> None:
    """Regression: if a tick was set twice, as after a resume, all later ticks also came twice."""
    agenda = Agenda()
    for at_s in (2.0, 3.0, 2.0, 2.0):
        agenda.add(Due(at_s, TICK))
    assert [agenda.pop().at_s, agenda.pop().at_s, agenda.head] == [2.0, 3.0, None]
    agenda.add(Due(2.0, TICK))
    assert agenda.pop() == Due(2.0, TICK)
