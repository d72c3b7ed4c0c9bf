"""Tests of the moving averages of clients' staleness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgefl.kernels import MovingAverage


@pytest.mark.parametrize(
    ("settings", "values", "means"),
    [
        ({"window": 3}, (9.0, 3.0, 6.0, 0.0, 0.0), [9.0, 6.0, 6.0, 3.0, 2.0]),
        ({"mode": "cumulative"}, (4.0, 0.0, 2.0), [4.0, 2.0, 2.0]),
        ({"mode": "exponential", "decay": 0.75}, (8.0, 4.0, 0.0), [8.0, 7.0, 5.25]),
    ],
)
def test_means_by_hand(backend: str, settings: Any, values: tuple[float, ...], means: list[float]) -> None:
    average = MovingAverage(2, **settings, backend=backend)
    assert [average.observe(1, value) for value in values] == means
    assert average.mean(0) == 0.0


def test_a_batch_is_applied_in_order(backend: str) -> None:
    average = MovingAverage(3, window=2, backend=backend)
    means = average.observe(np.array([2, 0, 2, 2]), np.array([1.0, 5.0, 3.0, 7.0]))
    assert means.dtype == np.float64
    assert means.tolist() == [1.0, 5.0, 2.0, 5.0]
    assert average.mean([0, 1, 2]).tolist() == [5.0, 0.0, 5.0]
    assert average.observe([], []).tolist() == []


@pytest.mark.parametrize(
    ("ids", "values", "error", "words"),
    [
        (3, 1.0, ValueError, "client_ids must be from 0 to 2 (got 3)"),
        (-1, 1.0, ValueError, "client_ids must be from 0 to 2 (got -1)"),
        ([0, 3], [1.0, 1.0], ValueError, "client_ids must be from 0 to 2 (got 3)"),
        (2**70, 1.0, TypeError, "client_ids must be integers (got object)"),
        (0.5, 1.0, TypeError, "client_ids must be integers (got float64)"),
        (0, float("nan"), ValueError, "values must be finite (got nan)"),
        ([0, 1], [1.0, float("inf")], ValueError, "values must be finite (got inf)"),
        ([0, 1], [1.0], ValueError, "values must have 2 entries, as many as client_ids (got shape (1,))"),
        ([0], ["x"], TypeError, "values must be numbers (got ['x'])"),
        ([[0]], [[1.0]], ValueError, "client_ids must be flat (got shape (1, 1))"),
    ],
)
def test_a_batch_with_a_wrong_value_is_refused_as_a_whole(
    backend: str, ids: Any, values: Any, error: type[Exception], words: str
) -> None:
    average = MovingAverage(3, backend=backend)
    with pytest.raises(error) as caught:
        average.observe(ids, values)
    assert str(caught.value) == words
    assert not average.mean([0, 1, 2]).any()
    assert average.observe([0, 1, 2], [4.0, 5.0, 6.0]).tolist() == [4.0, 5.0, 6.0], "a window is not empty"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "windows"}, "mode 'windows' not found; did you mean 'window'?"),
        ({"window": 0}, "window must be at least 1 (got 0)"),
        ({"decay": 1.0}, "decay must be at least 0 and under 1 (got 1.0)"),
        ({"clients": -1}, "clients must be at least 0 (got -1)"),
    ],
)
def test_wrong_settings_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        MovingAverage(**{"clients": 1} | given)
    assert str(caught.value).startswith(words)
