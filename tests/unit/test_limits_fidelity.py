"""Tests of the assessment of fidelity with made-up trips: errors, reasons for INVALID, and warnings."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.host.fidelity import QUANTITIES, Fidelity, assess
from edgefl.host.verdict import Conditions


def trips(factors: list[float], seconds: float = 1.0, **given: Any) -> Fidelity:
    """Assess one trip per factor; each part took that factor times ``seconds``, its declared time."""
    declared = {q: np.full(len(factors), seconds) for q in QUANTITIES}
    achieved = {q: seconds * np.array(factors) for q in QUANTITIES}
    return assess(["pixel-4"] * len(factors), declared, achieved, **given)


def judged(achieved: dict[str, Any], declared: dict[str, Any] | None = None, **given: Any) -> Fidelity:
    """Assess trips whose parts have a declared and achieved time of 1 s unless other times are given."""
    size = len(next(iter(achieved.values())))
    usual = dict.fromkeys(QUANTITIES, np.ones(size)) | (declared or {})
    return assess(given.pop("names", ["a"] * size), usual, usual | achieved, **given)


def under(**conditions: float) -> Fidelity:
    """Assess trips without timing errors under these conditions of the host."""
    return trips([1.0] * 9, conditions=Conditions(**conditions))


def test_exact_trips_have_no_error() -> None:
    found = trips([1.0] * 20, conditions=Conditions(load=0.4, steal=0.0))
    assert (found.valid, found.median_abs_error, found.p95_abs_error, found.reasons) == (True, 0.0, 0.0, ())
    assert found.trips == 20
    assert (found.conditions.load, found.conditions.steal) == (0.4, 0.0)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Fidelity) == found


@pytest.mark.parametrize("error", [0.02, -0.03])
def test_errors_of_slow_trips_are_positive_and_of_fast_ones_negative(error: float) -> None:
    found = trips([1 + error] * 9)
    assert found.by_quantity["compute"].median_error == pytest.approx(error)
    assert found.by_quantity["trip"].median_error == pytest.approx(error)
    assert found.median_abs_error == pytest.approx(abs(error))


def test_median_and_95th_percentile_include_computing_and_trips_but_no_transfers() -> None:
    slower, one = 1 + np.linspace(0, 0.1, 101), np.ones(101)
    found = judged({"compute": slower, "trip": slower, "down": one * 9, "up": one * 9})
    assert found.median_abs_error == pytest.approx(0.05)
    assert found.p95_abs_error == pytest.approx(0.095)
    assert found.by_quantity["down"].median_abs_error == pytest.approx(8.0)


def test_each_quantity_is_reported_per_device() -> None:
    achieved = dict.fromkeys(QUANTITIES, np.array([1.0, 1.0, 1.02, 1.02]))
    found = judged(achieved, names=["pi-4", "pi-4", "moto-g4", "moto-g4"])
    assert list(found.by_device) == ["moto-g4", "pi-4"]
    assert set(found.by_device["pi-4"]) == set(QUANTITIES)
    assert found.by_device["moto-g4"]["compute"].median_error == pytest.approx(0.02)
    assert found.by_device["moto-g4"]["trip"].mean_error == pytest.approx(0.02)
    assert found.by_device["pi-4"]["trip"].mean_error == 0.0
    assert found.by_device["pi-4"]["up"].measured == 2
    assert found.valid


def test_quantities_without_values_are_not_measured_and_do_not_invalidate() -> None:
    none = np.full(3, np.nan)
    found = judged({"delay": np.ones(3), "round": none}, {"delay": none})
    assert found.valid
    assert found.by_quantity["delay"].measured == found.by_quantity["round"].measured == 0
    assert found.by_quantity["delay"].mean_error is None


def test_sums_omit_trips_too_short_to_measure() -> None:
    found = judged({"trip": np.array([1.1, 3.0, 5.0])}, {"trip": np.array([1.0, 3.0, 0.001])})
    trip = found.by_quantity["trip"]
    assert (trip.measured, trip.declared_s, trip.achieved_s) == (2, 4.0, pytest.approx(4.1))
    assert trip.mean_error == pytest.approx(0.025)


def test_one_device_with_an_error_is_named_although_the_fleet_is_exact() -> None:
    names = ["pi-4"] * 100 + ["moto-g4"] * 2 + ["pixel-4"] * 2
    factors = np.array([1.0] * 100 + [1.2] * 2 + [0.94] * 2)
    assert judged(dict.fromkeys(QUANTITIES, factors), names=names).reasons == (
        "trips of moto-g4 took 20.0% longer than declared, at most 3% is allowed (and 1 more devices)",
    )


def test_late_training_is_the_only_reason_if_the_trips_are_on_time() -> None:
    found = judged({"compute": np.array([1.0] * 18 + [1.5] * 2)})
    assert found.reasons == ("training took 5.0% longer than declared, at most 3% is allowed",)


def slow_training(declared_s: float, factor: float, trips: int = 20) -> Fidelity:
    """Assess trips of two devices that ended on time, although the training of one device took ``factor``
    times the declared time."""
    part = np.where(np.arange(2 * trips) < trips, declared_s, 0.5)
    took = np.where(part == declared_s, factor * part, part)
    return judged({"compute": took}, {"compute": part}, names=["fast"] * trips + ["slow"] * trips)


def test_the_worst_phase_and_device_are_named_although_trips_are_on_time() -> None:
    found = slow_training(0.02, 1.57)
    assert found.valid
    assert found.p95_abs_error == 0.0
    assert (found.worst.device, found.worst.phase) == ("fast", "compute")
    assert found.worst.median_error == found.worst.p95_abs_error == pytest.approx(0.57)
    assert found.warnings == ("training of fast: median +57.0%, p95 57.0%, beyond 5% or 20%",)


@pytest.mark.parametrize(
    ("declared_s", "factor", "warns"),
    [(0.02, 1.04, False), (0.02, 0.8, True), (0.006, 1.3, False), (0.006, 1.4, True)],
    ids=["within bounds", "too fast", "within a timer's lateness", "beyond it"],
)
def test_a_phase_warns_if_no_timer_explains_its_error(declared_s: float, factor: float, warns: bool) -> None:
    assert bool(slow_training(declared_s, factor).warnings) == warns


def test_large_errors_of_a_few_trips_are_a_warning() -> None:
    factors = np.array([1.0] * 18 + [3.5] * 2)
    found = judged({"up": 0.03 * factors}, {"up": 0.03 * np.ones(20)})
    assert [line.split(":")[0] for line in found.warnings] == ["upload of a"]


@pytest.mark.parametrize(("part", "valid"), [(0.04, True), (0.06, False)])
def test_training_that_is_a_small_part_of_its_trip_is_judged_by_the_trip(part: float, valid: bool) -> None:
    one = np.ones(20)
    declared, achieved = {"compute": part * one}, {"compute": 2 * part * one}
    found = judged(achieved, declared)
    assert found.valid == valid
    assert found.by_quantity["compute"].mean_error == pytest.approx(1.0)
    late = judged(achieved | {"trip": 1.06 * one}, declared)
    assert "trips took 6.0% longer than declared, at most 3% is allowed" in late.reasons


def test_other_processes_are_named_only_in_an_invalid_run() -> None:
    busy = Conditions(others=0.6)
    assert trips([1.0] * 9, conditions=busy).valid
    assert trips([1.5] * 9, conditions=busy).reasons[1] == "other processes used 60% of the host"


def test_times_too_short_for_the_clock_are_not_measured() -> None:
    declared = {key: [1.004] for key in QUANTITIES} | {"down": [0.004], "up": [0.0], "delay": [0.0]}
    achieved = declared | {"down": [0.4], "up": [0.1], "delay": [0.3]}
    found = assess(["a"], declared, achieved)
    assert found.valid
    assert found.by_quantity["down"].measured == found.by_quantity["up"].measured == 0
    assert found.by_quantity["down"].median_error is None
    stretched = assess(["a"], declared, achieved, time_scale=2.0)
    assert stretched.by_quantity["down"].measured == 1


def test_a_run_without_measured_trips_is_invalid() -> None:
    found = assess([], {}, {})
    assert (found.valid, found.median_abs_error, found.trips) == (False, None, 0)
    assert found.reasons == ("no trip was measured",)
    short = trips([1.0] * 5, seconds=0.001)
    assert not short.valid
    assert "too short to measure" in short.reasons[0]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (trips([1.06] * 9), "median error 6.0%, at most 5% is allowed"),
        (trips([1.0] * 90 + [2.0] * 10), "95th percentile of errors 100.0%, at most 20%"),
        (under(load=0.95), "host load 95.0%, at most 90%"),
        (under(steal=0.03), "time stolen by the hypervisor 3.0%, at most 2%"),
        (under(throttled=0.05), "time throttled by a CPU quota around the run 5.0%, at most 2%"),
        (under(step_cost=2.6), "calibration is stale: training took 2.6 times the CPU time"),
        (under(step_cost=0.3), "calibration is stale: training took 0.3 times the CPU time"),
        (under(load=float("nan")), "host load nan%"),
        (trips([0.96] * 9), "trips took 4.0% less than declared"),
        # median and 95th percentile of errors are 0
        (trips([1.0] * 96 + [2.0] * 4), "trips took 4.0% longer than declared, at most 3% is allowed"),
        (judged({"round": np.full(9, 1.05)}), "trips as the server saw them took 5.0% longer than declared"),
        (trips([float("inf")] + [1.0] * 9), "a compute time is not finite"),
        (trips([float("nan")] + [1.0] * 9), "a trip time is not finite"),
    ],
)
def test_an_invalid_run_has_its_reason(found: Fidelity, reason: str) -> None:
    assert not found.valid
    assert any(reason in text for text in found.reasons), found.reasons


def test_the_limits_are_inclusive_and_all_reasons_are_given() -> None:
    assert len(trips([1.5] * 9, conditions=Conditions(load=2.0, steal=0.5, throttled=0.5)).reasons) == 9
    assert under(load=0.9, steal=0.02, throttled=0.02, step_cost=2.0).valid
    assert trips([1.0299] * 9).valid


def test_lateness_is_reported() -> None:
    late = trips([1.0] * 3, lateness_s=np.linspace(0, 1, 101))
    assert (late.p95_lateness_s, late.max_lateness_s) == (pytest.approx(0.95), 1.0)
    assert trips([1.0] * 3).p95_lateness_s is None


def test_missing_or_short_columns_are_refused() -> None:
    one = {key: [1.0] for key in QUANTITIES}
    with pytest.raises(ValueError, match="quantity 'up' is missing"):
        assess(["a"], {q: v for q, v in one.items() if q != "up"}, one)
    with pytest.raises(ValueError, match=r"compute must have shape \(2,\)"):
        assess(["a", "b"], one, one)
