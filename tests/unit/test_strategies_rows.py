"""Tests of median, trimmed mean, Krum and RFA, which read single updates, against other implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from edgefl.core.strategy_calls import combined
from edgefl.errors import ConfigError, RunError
from edgefl.strategies import Buffered, Rows, resolve


def normal(count: int, size: int = 400, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)


def rows_of(values: np.ndarray) -> Rows:
    return Rows(list(values), clients=range(len(values)))


def equal(count: int) -> list[float]:
    return [1.0 / count] * count


def krum_of(values: np.ndarray, attackers: int, selected: int) -> set[int]:
    """Return Krum's selection, computed pair by pair as in section 4 of the paper."""
    exact = values.astype(np.float64)
    scores = []
    for i in range(len(exact)):
        others = sorted(float(((exact[i] - exact[j]) ** 2).sum()) for j in range(len(exact)) if j != i)
        scores.append((sum(others[: len(exact) - attackers - 2]), i))
    return {i for _, i in sorted(scores)[:selected]}


def geometric_median(values: np.ndarray, alphas: np.ndarray, steps: int, smoothing: float) -> np.ndarray:
    exact, at = values.astype(np.float64), alphas @ values.astype(np.float64)
    for _ in range(steps):
        betas = alphas / np.maximum(smoothing, np.linalg.norm(exact - at, axis=1))
        at = betas @ exact / betas.sum()
    return np.asarray(at)


def test_median_and_trimmed_mean_equal_numpys() -> None:
    for count in (3, 8, 10):
        values = normal(count)
        found = combined(resolve({"name": "median"}), rows_of(values), equal(count))
        np.testing.assert_allclose(found, np.median(values.astype(np.float64), axis=0), rtol=1e-7)
    ranked = np.sort(normal(10).astype(np.float64), axis=0)
    for beta, left_out in ((0.0, 0), (0.1, 1), (0.3, 3), (0.39, 3)):
        strategy = resolve({"name": "trimmed-mean", "beta": beta})
        found = combined(strategy, rows_of(normal(10)), equal(10))
        np.testing.assert_allclose(found, ranked[left_out : 10 - left_out].mean(axis=0), rtol=1e-6, atol=1e-8)
    for count in (1, 2, 6):  # β just below ½ keeps the middle despite rounding
        strategy = resolve({"name": "trimmed-mean", "beta": 0.4999999999, "buffer_size": count})
        median = combined(resolve({"name": "median"}), rows_of(normal(count)), equal(count))
        np.testing.assert_array_equal(combined(strategy, rows_of(normal(count)), equal(count)), median)


@pytest.mark.parametrize(("attackers", "selected"), [(0, 1), (2, 1), (3, 4), (None, 10)])
def test_krum_selects_the_updates_of_the_paper(attackers: int | None, selected: int) -> None:
    strategy = resolve({"name": "krum", "buffer_size": 10, "attackers": attackers, "selected": selected})
    for seed in range(5):
        values = normal(10, seed=seed)
        weights = combined(strategy, rows_of(values), equal(10))
        chosen = krum_of(values, 3 if attackers is None else attackers, selected)
        assert [i for i, weight in enumerate(weights) if weight] == sorted(chosen)
        assert set(weights) <= {0.0, 1.0 / selected}


def test_rfa_is_the_smoothed_weiszfeld_algorithm() -> None:
    values, alphas = normal(7), np.arange(1, 8) / 28
    for steps in (1, 3, 50):
        weights = combined(resolve({"name": "rfa", "iterations": steps}), rows_of(values), alphas.tolist())
        expected = geometric_median(values, alphas, steps, 1e-6)
        np.testing.assert_allclose(
            np.asarray(weights) @ values.astype(np.float64), expected, rtol=1e-12, atol=1e-12
        )


def test_rfa_weighs_equal_updates_equally() -> None:
    weights = combined(resolve({"name": "rfa"}), rows_of(np.ones((4, 9), np.float32)), equal(4))
    np.testing.assert_allclose(weights, equal(4))


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "rfa"])
def test_one_huge_update_does_not_move_the_result(name: str) -> None:
    """It would move an average, which these rules replace, by a tenth of its size. RFA iterates 3 times."""
    values = normal(10)
    values[4] = 1e6
    found = np.asarray(combined(resolve({"name": name}), rows_of(values), equal(10)))
    step = found if found.size == values.shape[1] else found @ values.astype(np.float64)
    assert np.abs(step).max() < 1000 < np.abs(values.mean(axis=0)).max()


def test_rows_have_clients_norms_distances_and_cosines() -> None:
    values = normal(5)
    rows, exact = rows_of(values), values.astype(np.float64)
    assert rows.clients == (0, 1, 2, 3, 4)
    np.testing.assert_array_equal(rows[3], values[3])
    np.testing.assert_allclose(rows.norms, np.linalg.norm(exact, axis=1), rtol=1e-12)
    apart = ((exact[:, None] - exact) ** 2).sum(axis=2)
    np.testing.assert_allclose(rows.sq_distances, apart, rtol=1e-12, atol=1e-9)
    lengths = np.linalg.norm(exact, axis=1)
    np.testing.assert_allclose(rows.cosines, exact @ exact.T / np.outer(lengths, lengths), rtol=1e-12)
    assert rows_of(np.zeros((2, 3), np.float32)).cosines.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("krum", {"buffer_size": 6, "attackers": 2}, r"at least 2 × strategy.attackers \+ 3 = 7 .* got 6"),
        ("krum", {"buffer_size": 2, "attackers": 0}, r"at least 2 × strategy.attackers \+ 3 = 3 .* got 2"),
        ("krum", {"buffer_size": 5, "selected": 6}, "selected must be at most the buffer's 5 updates, got 6"),
        ("trimmed-mean", {"beta": 0.5}, "strategy.beta"),
    ],
)
def test_impossible_fields_are_refused(name: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve({"name": name, **fields}).check(20)


@dataclass(frozen=True, kw_only=True)
class Mine(Buffered):
    reads: ClassVar[Any] = "updates"
    wrong: Any

    def combine(self, rows: Rows, weights: Any) -> Any:
        return self.wrong


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        ([0.5], "got 1 numbers"),
        (np.zeros(3), "got 3 numbers of float64"),
        ("abc", "got str"),
        (7, "got int"),
        ([float("nan")] * 5, "got .nan"),
        (np.full(400, np.nan, np.float32), "got a vector with NaN or infinity"),
        (np.array([*[0.0] * 399, np.inf], np.float32), "got a vector with NaN or infinity"),
    ],
)
def test_a_wrong_result_of_combine_is_an_error_in_one_line(wrong: Any, got: str) -> None:
    why = rf"Mine.combine must return 5 finite weights or a float32 vector.*{got}"
    with pytest.raises(RunError, match=why) as caught:
        combined(Mine(wrong=wrong), rows_of(normal(5)), equal(5))
    assert "\n" not in str(caught.value)
