"""The theory's findings, and the bound's pieces against hand-computed ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgefl.lab import theorems, theory
from edgefl.lab.study import verdict


@pytest.mark.parametrize("make", [theorems.quadratic, theorems.logistic])
def test_the_constants_are_upper_bounds_of_what_is_seen(make: object) -> None:
    problem = make(seed=1)  # type: ignore[operator]
    rng = np.random.default_rng(0)
    for _ in range(20):
        w = problem.start + rng.normal(size=problem.start.size)
        v = w + 0.1 * rng.normal(size=w.size)
        samples = np.array([[problem.sample(i, w, rng) for _ in range(400)] for i in range(problem.clients)])
        local = samples.mean(axis=1)
        assert np.linalg.norm(problem.gradient(w) - problem.gradient(v)) <= (
            problem.smoothness * np.linalg.norm(w - v) * (1 + 1e-9)
        )
        assert samples.var(axis=1).sum(axis=1).max() <= problem.variance * 1.3
        spread = ((local - local.mean(axis=0)) ** 2).sum(axis=1).mean()
        assert spread <= problem.diversity * 1.3 + problem.variance / 100
        np.testing.assert_allclose(
            local.mean(axis=0), problem.gradient(w), atol=5 * math.sqrt(problem.variance / 1600)
        )


def test_the_gradient_is_that_of_the_gap() -> None:
    """f(w_0) − f* of the quadratic by integrating its gradient along the way."""
    problem = theorems.quadratic(seed=3)
    steps = np.linspace(0.0, 1.0, 2001)
    least = problem.start - np.linalg.solve(
        np.diag(np.linspace(0.2, 1.0, 6) * problem.smoothness), problem.gradient(problem.start)
    )
    values = [problem.gradient(least + t * (problem.start - least)) @ (problem.start - least) for t in steps]
    assert np.trapezoid(values, steps) == pytest.approx(problem.gap, rel=1e-6)


def test_the_right_side_is_the_theorem_s() -> None:
    problem = theorems.quadratic(seed=1)
    L, s, g, n = problem.smoothness, problem.variance, problem.diversity, problem.clients
    T, tau, Q = 10_000, 3, theorems.LOCAL_STEPS
    by_hand = (
        8 * math.sqrt(L) * problem.gap / math.sqrt(T)
        + 16 * math.sqrt(L) * (s + g) / math.sqrt(T)
        + 320 * L * (Q + 1) * (tau**2 + 1) * (s + n * g) / T
    )
    assert theorems.gradient_bound(problem, T, tau) == pytest.approx(by_hand, rel=1e-12)
    assert theorems.least_versions(problem, tau) == math.ceil(160 * L * (Q + 7) * (tau + 1) ** 3)


def test_every_claim_is_judged_and_stands() -> None:
    said: list[str] = []
    found, pictures = theory.findings(quick=True, say=said.append)
    assert len(found) == 8
    assert [one.claim for one in found if one.verdict != "reproduced"] == []
    assert len(pictures) == 2
    assert said


def test_the_same_findings_every_time() -> None:
    assert theorems.bounded_run(theorems.quadratic(seed=1), 300, seed=2) == theorems.bounded_run(
        theorems.quadratic(seed=1), 300, seed=2
    )
    assert verdict(False) == "not reproduced"
