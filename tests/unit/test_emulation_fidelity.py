"""What fidelity says of made-up trips: exact figures, and INVALID with its reason."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.emulation.fidelity import QUANTITIES, Fidelity, Record, assess


def trips(factors: list[float], seconds: float = 1.0, **given: Any) -> Fidelity:
    """Trips whose every part took ``factor`` times what was declared."""
    declared = {q: np.full(len(factors), seconds) for q in QUANTITIES}
    achieved = {q: seconds * np.array(factors) for q in QUANTITIES}
    return assess(["pixel-4"] * len(factors), declared, achieved, **given)


def test_exact_trips_have_no_error() -> None:
    found = trips([1.0] * 20, load=0.4, steal=0.0)
    assert (found.valid, found.median_abs_error, found.p95_abs_error, found.reasons) == (True, 0.0, 0.0, ())
    assert found.trips == 20
    assert (found.load, found.steal) == (0.4, 0.0)


def test_slow_is_positive_and_fast_is_negative() -> None:
    assert trips([1.02] * 9).by_quantity["compute"].median_error == pytest.approx(0.02)
    assert trips([0.97] * 9).by_quantity["trip"].median_error == pytest.approx(-0.03)
    assert trips([0.97] * 9).median_abs_error == pytest.approx(0.03)


def test_median_and_95th_percentile_are_of_computing_and_whole_trips() -> None:
    n = 101
    compute = 1 + np.linspace(0, 0.1, n)
    one = np.ones(n)
    declared = dict.fromkeys(QUANTITIES, one)
    achieved = {"compute": compute, "trip": compute, "down": one * 9, "up": one * 9}
    found = assess(["a"] * n, declared, achieved)
    assert found.median_abs_error == pytest.approx(0.05)
    assert found.p95_abs_error == pytest.approx(0.095)
    assert found.by_quantity["down"].median_abs_error == pytest.approx(8.0)


def test_profiles_are_reported_apart() -> None:
    declared = dict.fromkeys(QUANTITIES, np.ones(4))
    achieved = dict.fromkeys(QUANTITIES, np.array([1.0, 1.0, 1.04, 1.04]))
    found = assess(["pi-4", "pi-4", "moto-g4", "moto-g4"], declared, achieved)
    assert list(found.by_profile) == ["moto-g4", "pi-4"]
    assert found.by_profile["moto-g4"].median_error == pytest.approx(0.04)
    assert found.by_profile["pi-4"].median_error == 0.0
    assert found.by_profile["pi-4"].measured == 4


def test_what_is_too_short_for_the_clock_is_left_out() -> None:
    declared = {"compute": [1.0], "down": [0.004], "up": [0.0], "trip": [1.004]}
    achieved = {"compute": [1.0], "down": [0.4], "up": [0.1], "trip": [1.004]}
    found = assess(["a"], declared, achieved)
    assert found.valid
    assert found.by_quantity["down"].measured == found.by_quantity["up"].measured == 0
    assert found.by_quantity["down"].median_error is None
    stretched = assess(["a"], declared, achieved, time_scale=2.0)
    assert stretched.by_quantity["down"].measured == 1


def test_no_trips_is_invalid() -> None:
    found = assess([], {}, {})
    assert (found.valid, found.median_abs_error, found.trips) == (False, None, 0)
    assert found.reasons == ("no trip was measured",)


def test_only_short_trips_is_invalid() -> None:
    found = trips([1.0] * 5, seconds=0.001)
    assert not found.valid
    assert "too short to measure" in found.reasons[0]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (trips([1.06] * 9), "median error 6.0%, at most 5% is allowed"),
        (trips([1.0] * 90 + [2.0] * 10), "95th percentile of errors 100.0%, at most 20%"),
        (trips([1.0] * 9, load=0.95), "host load 95.0%, at most 90%"),
        (trips([1.0] * 9, steal=0.03), "time stolen by the hypervisor 3.0%, at most 2%"),
        (trips([1.0] * 9, load=float("nan")), "host load nan%"),
        (trips([float("inf")] + [1.0] * 9), "a compute time is not finite"),
        (trips([float("nan")] + [1.0] * 9), "a trip time is not finite"),
    ],
)
def test_invalid_says_why(found: Fidelity, reason: str) -> None:
    assert not found.valid
    assert any(reason in text for text in found.reasons), found.reasons
    assert str(found).startswith("INVALID: ")
    assert reason in str(found)


def test_all_reasons_are_given() -> None:
    assert len(trips([1.5] * 9, load=2.0, steal=0.5).reasons) == 4


def test_the_limits_themselves_are_allowed() -> None:
    assert trips([1.0] * 9, load=0.9, steal=0.02).valid


def test_a_valid_one_reads_as_a_line() -> None:
    assert str(trips([1.01] * 4)) == "median error 1.00%, 95% of errors below 1.00%, 4 trips"


def test_lateness_is_reported() -> None:
    assert trips([1.0] * 3, lateness_s=np.linspace(0, 1, 101)).p95_lateness_s == pytest.approx(0.95)
    assert trips([1.0] * 3).p95_lateness_s is None


def test_it_is_plain_data() -> None:
    found = trips([1.01] * 4, load=0.3)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Fidelity) == found


def test_columns_must_be_there_and_fit() -> None:
    one = {key: [1.0] for key in QUANTITIES}
    with pytest.raises(ValueError, match="quantity 'up' is missing"):
        assess(["a"], {q: v for q, v in one.items() if q != "up"}, one)
    with pytest.raises(ValueError, match=r"compute must have shape \(2,\)"):
        assess(["a", "b"], one, one)


def test_a_record_is_the_same_as_the_arrays() -> None:
    record = Record()
    for factor in (1.0, 1.1, 0.95):
        record.add(
            "pi-4",
            declared_s=(0.5, 2.0, 1.0),
            achieved_s=(0.5 * factor, 2.0 * factor, 1.0 * factor),
            lateness_s=factor / 100,
        )
    found = record.assess(load=0.1, steal=0.0)
    assert found.by_quantity["trip"].p95_abs_error == pytest.approx(np.percentile([0, 0.1, 0.05], 95))
    assert found.p95_lateness_s is not None
    assert found.trips == 3
    assert Record().assess().valid is False
