"""The statistics of device tests: coverage, error rates and power, counted on drawn samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.regression import measurement, verdict

RUNS = 400


def draws(purpose: int, count: int = 15, spread: float = 0.05) -> list[float]:
    return [float(x) for x in np.random.default_rng((7, purpose)).lognormal(0.0, spread, count)]


def test_the_90_percent_interval_holds_the_true_median_about_so_often() -> None:
    held = 0
    for run in range(RUNS):
        interval = measurement.median_interval(draws(run))
        held += interval.low <= 1.0 <= interval.high
    assert 0.85 * RUNS <= held <= 0.96 * RUNS


def test_the_upper_bound_is_above_the_true_median_at_least_about_so_often() -> None:
    above = sum(measurement.upper_bound(draws(run)) >= 1.0 for run in range(RUNS))
    assert above >= 0.92 * RUNS


def test_equivalence_is_found_inside_the_margin_and_seldom_at_it() -> None:
    assert all(measurement.equivalent(draws(run, spread=0.01), 0.03) for run in range(50))
    wrong = sum(
        measurement.equivalent([1.03 * x for x in draws(run, spread=0.02)], 0.03) for run in range(RUNS)
    )
    assert wrong <= 0.08 * RUNS


def test_noise_alone_is_not_equivalence() -> None:
    assert not measurement.equivalent(draws(1, spread=0.3), 0.03)


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.045])
def test_the_rule_finds_a_tenth_more_and_leaves_what_did_not_change(spread: float) -> None:
    found = alarms = 0
    for run in range(RUNS):
        before = draws(2 * run, spread=spread)
        now = draws(2 * run + 1, spread=spread)
        for factor in (1.0, 1.1):
            one = verdict.change(before, [factor * x for x in now])
            grew = one.shift > 0.05 and verdict.holm([one.p], tests=3)[0] <= verdict.ALPHA
            found += grew and factor > 1
            alarms += grew and factor == 1
    assert found >= 0.95 * RUNS
    assert alarms <= 0.01 * RUNS


def test_a_change_is_told_by_its_medians_and_its_p_value() -> None:
    one = verdict.change([1.0] * 9, [1.2] * 9)
    assert one.shift == pytest.approx(0.2)
    assert one.p < 0.001
    assert verdict.change([3.0] * 9, [3.0] * 9) == verdict.Change(3.0, 3.0, 1.0)
    assert verdict.change([0.0] * 9, [1.0] * 9).shift == math.inf
    assert verdict.change([0.0] * 9, [0.0] * 9).shift == 0.0


def test_too_few_repetitions_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="before must hold at least 9 repetitions \\(got 8\\)"):
        verdict.change([1.0] * 8, [1.0] * 9)
    with pytest.raises(ValueError, match="now must hold at least 9 repetitions \\(got 2\\)"):
        verdict.change([1.0] * 9, [1.0] * 2)


@pytest.mark.parametrize("wrong", [[], [1.0, math.nan], [math.inf], [[1.0], [2.0]]])
def test_samples_that_are_no_row_of_numbers_are_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="samples must be a row of finite numbers"):
        measurement.median_interval(wrong)


def test_the_same_samples_give_the_same_bounds() -> None:
    assert measurement.median_interval(draws(3)) == measurement.median_interval(draws(3))


def test_a_width_without_a_median_is_infinite() -> None:
    assert measurement.Interval(0.0, 0.0, 1.0).half_width == math.inf
    assert measurement.Interval(0.0, 0.0, 0.0).half_width == 0.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 10))
def test_holm_adjusts_upwards_and_rejects_something_whenever_bonferroni_does(
    p_values: list[float], more: int
) -> None:
    tests = len(p_values) + more
    adjusted = verdict.holm(p_values, tests)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    assert min(adjusted) == min(1.0, tests * min(p_values))
    assert sorted(range(len(p_values)), key=lambda i: (p_values[i], i)) == sorted(
        range(len(p_values)), key=lambda i: (adjusted[i], p_values[i], i)
    )


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_what_holm_rejects_with_some_unknown_it_rejects_with_all_known(p_values: list[float]) -> None:
    early = verdict.holm(p_values[:-1], len(p_values))
    late = verdict.holm(p_values)
    assert all(b <= a for a, b in zip(early, late, strict=False))
