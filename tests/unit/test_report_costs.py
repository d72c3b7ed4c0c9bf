"""What the server's stages say of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from edgefl.results.record import Aggregation, CostRow, Meta, Record
from edgefl.results.summary import breakdown


def record(clock: str, **seconds: float) -> Record:
    """As much of a record as the breakdown reads: four trips, of which three ended."""
    meta = Meta(clock=clock, aggregation=Aggregation(seconds=2.0, bytes=30 * 10**9))
    found: Any = SimpleNamespace(
        meta=meta,
        costs=[CostRow(stage=stage, seconds=spent, calls=1) for stage, spent in seconds.items()],
        trips={"arrived_s": np.array([1.0, 2.0, np.nan, 3.0])},
    )
    return cast(Record, found)


def test_waiting_is_the_phones_under_the_wall_clock_and_training_under_the_virtual_one() -> None:
    wall = breakdown(record("wall", start=50.0, wait=9.0, sum=0.6, decide=0.4))
    assert wall["limited_by"] == "phones"
    assert wall["busy"] == pytest.approx(0.1)
    assert wall["says"] == (
        "The phones set the pace: the server waits 90% of the time; summing updates takes 60% of its work, "
        "at 15.0 GB/s."
    )
    assert list(wall["stages"]) == ["wait", "sum", "decide"]
    assert wall["stages"]["decide"] == {"share": 0.04, "us_a_trip": pytest.approx(0.4e6 / 3, rel=1e-5)}
    assert breakdown(record("virtual", wait=9.0, sum=0.6))["limited_by"] == "training"


def test_a_server_that_hardly_waits_is_the_limit() -> None:
    found = breakdown(record("virtual", wait=0.5, receive=9.0, unheard_of=0.5))
    assert found["limited_by"] == "server"
    assert "busy 95% of the time, and taking in messages takes 95% of its work" in found["says"]
    assert found["stages"]["unheard_of"]["share"] == pytest.approx(0.05)


@pytest.mark.parametrize("seconds", [{}, {"start": 3.0}, {"wait": 0.0}])
def test_nothing_recorded_says_nothing(seconds: dict[str, float]) -> None:
    assert breakdown(record("wall", **seconds))["limited_by"] is None


def test_a_run_that_never_worked_divides_by_nothing() -> None:
    found = breakdown(record("wall", wait=3.0, sum=0.0))
    assert found["busy"] == 0.0
    assert found["limited_by"] == "phones"
