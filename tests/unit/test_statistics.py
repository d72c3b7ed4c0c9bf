"""Tests of statistics over seeds: estimates, bands, areas, and the time at which a curve passes a target."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgefl.results.statistics import area, estimate, passage, summary_curve
from tests.reports import noisy_curve


def test_an_estimate_has_students_interval() -> None:
    mean, half = estimate([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert half == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, rel=1e-6)
    assert estimate([1.0]) == (1.0, None)
    assert math.isnan(estimate([1.0, math.nan]).mean)
    assert estimate([0.0, 1.0] * 50).half == pytest.approx(1.984217 * math.sqrt(25 / 99) / 10, rel=1e-6)


def test_the_band_is_students_interval_of_the_mean() -> None:
    seeds = [np.array([[0.0, 1.0], [value, value]]) for value in (1.0, 2.0, 3.0)]
    x, mean, low, high = summary_curve(seeds)
    assert (x.tolist(), mean.tolist()) == ([0.0, 1.0], [2.0, 2.0])
    np.testing.assert_allclose(high - mean, 4.302652729 / math.sqrt(3), rtol=1e-8)  # t(0.975, 2) · s / √n
    np.testing.assert_allclose(mean - low, high - mean)


def test_the_smoothed_passage_is_less_biased_than_the_first_touch() -> None:
    """Without noise, the curve passes 0.7 at time 451. With noise, the first touch is earlier than that,
    and varies more than the smoothed passage."""
    true = 300 * math.log(0.9 / 0.2)
    found = [noisy_curve(1.0, seed) for seed in range(40)]
    touched = [next(c for c, a in zip(*curve, strict=True) if a >= 0.7) for curve in found]
    smooth = [passage(*curve, 0.7) for curve in found]
    assert np.mean(touched) < true - 15
    assert abs(np.mean(smooth) - true) < 0.6 * abs(np.mean(touched) - true)
    assert np.std(smooth) < np.std(touched)


def test_the_passage_does_not_depend_on_the_frequency_of_evaluations() -> None:
    passages = {
        period: np.mean([passage(*noisy_curve(1.0, seed, 0.0, period), 0.7) for seed in range(3)])
        for period in (10.0, 40.0)
    }
    assert passages[10.0] == pytest.approx(passages[40.0], rel=0.02)


def test_an_area_is_the_mean_over_the_whole_budget() -> None:
    assert area([0, 50, 100, 300], [0.0, 0.5, 0.5, 0.9], budget=100) == pytest.approx(0.375)
    assert area([0, 50], [0.0, 0.5], budget=100) == pytest.approx(0.375)
    assert area([0, 50, 150], [0.0, 0.5, 0.9], budget=100) == pytest.approx(0.425)
