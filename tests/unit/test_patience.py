"""Tests that the time limit of tests does not count the time for which processes wait for a core."""

from __future__ import annotations

import itertools

import pytest

from tests import patience


@pytest.mark.parametrize(
    ("passed_s", "ran_s", "waited_s", "looks"),
    [
        pytest.param(1.0, 0.0, 0.0, 30, id="hangs"),
        pytest.param(1.0, 0.001, 0.0, 30, id="hangs, with processes that wake now and then"),
        pytest.param(1.0, 2.0, 6.0, 30, id="computes for ever on both cores"),
        pytest.param(1.0, 0.0625, 0.9375, 480, id="has a sixteenth of a core"),
        pytest.param(1.0, 0.25, 0.5, 60, id="waits for a core half of the time"),
        pytest.param(60.0, 0.0, 0.0, 15, id="the machine stands still"),
    ],
)
def test_a_limit_counts_time_without_that_of_waiting_for_a_core(
    passed_s: float, ran_s: float, waited_s: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, used = itertools.count(), itertools.count()
    monkeypatch.setattr(patience.time, "monotonic", lambda: passed_s * next(clock))
    reported = ({1: (ran_s * k, waited_s * k), k + 2: (0.0, 0.0)} for k in used)
    monkeypatch.setattr(patience, "_ran_and_waited", lambda: next(reported))
    limit = patience.Patience(30.0)
    assert next(look for look in itertools.count(1) if limit.over()) == looks


def test_the_kernel_reports_how_long_a_process_ran_and_waited() -> None:
    ran_s, waited_s = next(iter(patience._ran_and_waited().values()))
    assert ran_s > 0
    assert waited_s >= 0
