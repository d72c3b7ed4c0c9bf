"""Time scale, stolen time and calibration: the arithmetic, and when they refuse."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import ConfigError
from edgefl.limits import capacity
from edgefl.limits.capacity import (
    CLIENT_SHARE,
    TARGET_LOAD,
    Burst,
    Demand,
    StealMeter,
    choose_time_scale,
    host,
    usable_cores,
)


def test_auto_never_squeezes_time() -> None:
    chosen = choose_time_scale([Demand(0.01, 10.0)] * 3, cores=2)
    assert chosen.value == 1.0
    assert chosen.verdict == "fits"
    assert chosen.load == pytest.approx(0.0015)
    assert choose_time_scale([], cores=1).value == 1.0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 100)), max_size=50),
    st.integers(1, 64),
)
def test_auto_always_fits(demands: list[tuple[float, float]], cores: int) -> None:
    chosen = choose_time_scale([Demand(*d) for d in demands], cores=cores)
    assert chosen.value >= 1
    assert chosen.load <= TARGET_LOAD * (1 + 1e-9)
    assert chosen.client_share <= CLIENT_SHARE * (1 + 1e-9)
    assert chosen.verdict == "fits"
    if chosen.value > 1.2:
        tighter = choose_time_scale([Demand(*d) for d in demands], cores=cores, scale=chosen.value / 1.2)
        assert tighter.verdict != "fits"


def test_one_client_cannot_use_two_cores() -> None:
    chosen = choose_time_scale([Demand(1.4, 1.0)], cores=64)
    assert chosen.value == 2.0
    assert chosen.load < 0.02


def test_an_explicit_scale_is_judged_and_kept() -> None:
    fleet = [Demand(0.1, 1.0)] * 12
    assert choose_time_scale(fleet, cores=2, scale=2).verdict == "fits"
    assert choose_time_scale(fleet, cores=2, scale=1).verdict == "tight"
    overloaded = choose_time_scale(fleet, cores=2, scale=0.5)
    assert (overloaded.value, overloaded.verdict) == (0.5, "overloaded")
    assert overloaded.load == pytest.approx(1.2)
    assert "INVALID" in overloaded.why


def test_only_active_clients_count() -> None:
    fleet = [Demand(0.5, 1.0)] * 4 + [Demand(0.1, 1.0)] * 100
    assert choose_time_scale(fleet, cores=2, active=4).load == pytest.approx(0.5)


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf])
def test_a_scale_must_be_a_number_above_0(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"clock\.time_scale: got"):
        choose_time_scale([], cores=1, scale=scale)


def test_a_trip_that_takes_no_time_cannot_be_paced() -> None:
    with pytest.raises(ConfigError, match="virtual"):
        choose_time_scale([Demand(0.1, 0.0)], cores=1)
    for cores in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="cores must be a finite number above 0"):
            choose_time_scale([], cores=cores)


def test_half_a_core_carries_half_as_much() -> None:
    fleet = [Demand(0.1, 1.0)] * 12
    assert choose_time_scale(fleet, cores=0.5).value == 2 * choose_time_scale(fleet, cores=1).value
    alone = [Demand(0.35, 1.0, Burst(0.3, 0.0, 1.0))]
    assert choose_time_scale(alone, cores=0.5).value == 2 * choose_time_scale(alone, cores=1).value


def test_a_quota_around_the_process_is_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "cpu_quota", lambda: 0.25)
    assert capacity.capacity_cores() == 0.25
    monkeypatch.setattr(capacity, "cpu_quota", lambda: 1000.0)
    assert capacity.capacity_cores() == usable_cores()
    monkeypatch.setattr(capacity, "cpu_quota", lambda: None)
    assert capacity.capacity_cores() == usable_cores()


def test_the_host_has_a_name_and_cores() -> None:
    assert host().cpu
    assert host().cores == usable_cores() >= 1


def stat(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_stolen_share_is_of_all_time_since_the_start(tmp_path: Path) -> None:
    path = stat(tmp_path / "stat", "cpu  100 0 0 800 0 0 0 100 50 0\ncpu0 1 2 3\n")
    meter = StealMeter(path)
    assert meter.share() == 0.0
    stat(path, "cpu  150 0 0 830 0 0 0 120 90 0\n")
    assert meter.share() == pytest.approx(0.2)


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "intr 1 2 3 4 5 6 7 8\n", "cpu a b c d e f g h\n"])
def test_a_system_that_does_not_tell_gives_none(tmp_path: Path, text: str) -> None:
    assert StealMeter(stat(tmp_path / "stat", text)).share() is None
    assert StealMeter(tmp_path / "absent").share() is None
