"""Moving averages: the window drops the oldest entry, order counts, nothing is taken in half."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgefl.kernels import MovingAverage, backends

BACKENDS = [name for name, status in backends().items() if status == "ok"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_window_drops_the_oldest(backend: str) -> None:
    average = MovingAverage(2, window=3, backend=backend)
    assert [average.observe(1, x) for x in (9.0, 3.0, 6.0, 0.0, 0.0)] == [9.0, 6.0, 6.0, 3.0, 2.0]
    assert average.mean(0) == 0.0


def test_cumulative(backend: str) -> None:
    average = MovingAverage(1, mode="cumulative", backend=backend)
    assert [average.observe(0, x) for x in (4.0, 0.0, 2.0)] == [4.0, 2.0, 2.0]


def test_exponential(backend: str) -> None:
    average = MovingAverage(1, mode="exponential", decay=0.75, backend=backend)
    assert [average.observe(0, x) for x in (8.0, 4.0, 0.0)] == [8.0, 7.0, 5.25]


def test_a_batch_is_applied_in_order(backend: str) -> None:
    average = MovingAverage(3, window=2, backend=backend)
    means = average.observe(np.array([2, 0, 2, 2]), np.array([1.0, 5.0, 3.0, 7.0]))
    assert means.dtype == np.float64
    assert means.tolist() == [1.0, 5.0, 2.0, 5.0]
    assert average.mean([0, 1, 2]).tolist() == [5.0, 0.0, 5.0]
    assert average.count([0, 1, 2]).tolist() == [1, 0, 3]
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
        ([0, 1], [1.0], ValueError, "values must have 2 entries like client_ids (got shape (1,))"),
        ([0], ["x"], TypeError, "values must be numbers (got ['x'])"),
        ([[0]], [[1.0]], ValueError, "client_ids must be flat (got shape (1, 1))"),
    ],
)
def test_refused_and_nothing_taken_in(
    backend: str, ids: Any, values: Any, error: type[Exception], words: str
) -> None:
    average = MovingAverage(3, backend=backend)
    with pytest.raises(error) as caught:
        average.observe(ids, values)
    assert str(caught.value) == words
    assert not average.count([0, 1, 2]).any()


@pytest.mark.parametrize("mode", ["window", "cumulative", "exponential"])
def test_a_snapshot_goes_on_where_it_was(backend: str, mode: Any) -> None:
    rng = np.random.default_rng(0)
    first = MovingAverage(4, mode, window=3, decay=0.3, backend=backend)
    first.observe(rng.integers(0, 3, 20), rng.random(20))
    again = MovingAverage.from_arrays(first.arrays(), mode, window=3, decay=0.3)
    ids, values = rng.integers(0, 4, 20), rng.random(20)
    assert first.observe(ids, values).tolist() == again.observe(ids, values).tolist()
    snapshot = first.arrays()
    first.observe(0, 5.0)
    assert snapshot["count"].tolist() != first.arrays()["count"].tolist()


def test_wrong_snapshots() -> None:
    arrays = MovingAverage(4, window=3).arrays()
    with pytest.raises(
        ValueError, match=r"^state must be float64 of shape \(4, 5\) \(got float64, shape \(4, 3\)\)$"
    ):
        MovingAverage.from_arrays(arrays)
    with pytest.raises(ValueError, match=r"^arrays must hold count and state \(got \['count'\]\)$"):
        MovingAverage.from_arrays({"count": arrays["count"]})
    with pytest.raises(ValueError, match=r"^count must be a flat int64 array from 0"):
        MovingAverage.from_arrays(arrays | {"count": np.full(4, -1)}, window=3)
    with pytest.raises(ValueError, match=r"^state must be finite$"):
        MovingAverage.from_arrays(arrays | {"state": np.full((4, 3), np.nan)}, window=3)


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match=r"^mode 'windows' not found; did you mean 'window'\?"):
        MovingAverage(1, mode="windows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^window must be at least 1 \(got 0\)$"):
        MovingAverage(1, window=0)
    with pytest.raises(ValueError, match=r"^decay must be at least 0 and under 1 \(got 1.0\)$"):
        MovingAverage(1, decay=1.0)
    with pytest.raises(ValueError, match=r"^clients must be at least 0 \(got -1\)$"):
        MovingAverage(-1)
