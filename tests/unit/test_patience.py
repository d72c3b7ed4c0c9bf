"""A time limit of tests counts what the machine gave, and no more."""

from __future__ import annotations

import itertools

import pytest

from tests import patience


@pytest.mark.parametrize(
    ("passed_s", "ran_s", "waited_s", "looks"),
    [
        pytest.param(1.0, 0.0, 0.0, 30, id="it hangs"),
        pytest.param(1.0, 0.001, 0.0, 30, id="it hangs, and its processes beat"),
        pytest.param(1.0, 2.0, 6.0, 30, id="it never ends, on both cores"),
        pytest.param(1.0, 0.0625, 0.9375, 480, id="others have fifteen sixteenths"),
        pytest.param(1.0, 0.25, 0.5, 60, id="it waits for a core half of the time"),
        pytest.param(60.0, 0.0, 0.0, 15, id="everything stands still"),
    ],
)
def test_what_counts(
    passed_s: float, ran_s: float, waited_s: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, used = itertools.count(), itertools.count()
    monkeypatch.setattr(patience.time, "monotonic", lambda: passed_s * next(clock))
    said = ({1: (ran_s * k, waited_s * k), k + 2: (0.0, 0.0)} for k in used)
    monkeypatch.setattr(patience, "_ran_and_waited", lambda: next(said))
    limit = patience.Patience(30.0)
    assert next(look for look in itertools.count(1) if limit.over()) == looks


def test_it_reads_what_the_kernel_says() -> None:
    ran_s, waited_s = next(iter(patience._ran_and_waited().values()))
    assert ran_s > 0
    assert waited_s >= 0
