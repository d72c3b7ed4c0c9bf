"""Tests Toghani and Uribe's theorem about FedBuff, with its remarks and assumptions, for known constants.

Each bound is loose, so the verdicts depend on the exact size of the bounded quantity. This size follows from
the step sizes, the buffer, and the clients' batches, objectives and arrival rates (`edgefl.lab.quadratic`).
A problem that is not quadratic is tested in `edgefl.lab.logistic`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgefl.lab.convergence import (
    QuadraticRun,
    bounded,
    judged,
    of_bound,
    rows_of,
    seen,
    slope,
    worst,
)
from edgefl.lab.quadratic import Expected, Quadratic, Trajectory
from edgefl.lab.study import Finding
from edgefl.strategies.fedbuff import FedBuff

SOURCE = "Toghani and Uribe 2022"


class Constants(NamedTuple):
    """The constants in the bound of theorem 1 (Toghani and Uribe 2022)."""

    smoothness: float
    """The smoothness constant L."""
    variance: float
    """The variance σ²/b of a gradient on the smallest batch."""
    diversity: float
    """γ², the mean over clients of ‖∇f_i − ∇f‖², where f is the objective."""
    gap: float
    """The initial gap f(w_0) − f*."""
    clients: int


def constants(problem: Quadratic) -> Constants:
    """Return the constants of a quadratic problem, all of which are exact."""
    largest = float(problem.batch_variances.max())
    return Constants(problem.smoothness, largest, problem.diversity, problem.gap, problem.clients)


def gradient_bound(of: Constants, versions: int, staleness: int, steps: int) -> float:
    """Return the bound of theorem 1 for T versions and a largest delay of τ.

    8√L·(f(w_0) − f*)/√T + 16√L·(σ²/b + γ²)/√T + 320·L·(Q + 1)·(τ² + 1)·(σ²/b + n·γ²)/T
    """
    root = math.sqrt(of.smoothness)
    first = (8 * root * of.gap + 16 * root * (of.variance + of.diversity)) / math.sqrt(versions)
    spread = of.variance + of.clients * of.diversity
    return first + 320 * of.smoothness * (steps + 1) * (staleness**2 + 1) * spread / versions


def least_versions(smoothness: float, staleness: int, steps: int) -> int:
    """Return the smallest T for which the theorem holds, 160·L·(Q + 7)·(τ + 1)³."""
    return math.ceil(160 * smoothness * (steps + 7) * (staleness + 1) ** 3)


def _local(smoothness: float, versions: int, steps: int) -> float:
    """Return the local step size of the theorem, η = 1/(Q·√(LT))."""
    return 1.0 / (steps * math.sqrt(smoothness * versions))


def _setting(problem: Quadratic, versions: int, steps: int, size: int, gain: float = 1.0) -> QuadraticRun:
    """Return a run of FedBuff with K = ``size``, β = ``gain``/K, and the local step size of the theorem."""
    rate = _local(problem.smoothness, versions, steps)
    expected = Expected(problem, versions, rate, steps, gain, gain**2 / size)
    return QuadraticRun(expected, FedBuff(buffer_size=size, exponent=0.0, server_lr=gain), bounded)


def _stalest(runs: Sequence[Sequence[Trajectory]]) -> int:
    return max(out.staleness for row in runs for out in row)


def toghani_uribe(quick: bool = False) -> Finding:
    """Test theorem 1: run FedBuff with β = 1/K and η = 1/(Q·√(LT)).

    Trips take U(0.5, 1.5) s, which keeps τ and the smallest permitted T small.
    """
    lengths = (2_000, 5_000) if quick else (2_000, 8_000, 32_000)
    problem, steps = Quadratic(4, smoothness=0.02, distance=2.5, spread=1.0), 2
    settings = [_setting(problem, versions, steps, 4) for versions in lengths]
    runs = rows_of(settings, 1 if quick else 3)
    of = constants(problem)
    part = of_bound(runs, lambda at, out: gradient_bound(of, lengths[at], out.staleness, steps))
    largest = _stalest(runs)
    return judged(
        "mean ‖∇f‖² is the sum of descent and noise, and falls like 1/√T",
        f"{SOURCE}, theorem 1",
        "at most the bound; slope −½",
        [*seen(settings, runs), slope("T", runs, (0, -1), lengths[-1] / lengths[0])],
        f"at most {part:.2g} of the bound; T from {lengths[0]:,} to {lengths[-1]:,}, τ up to {largest}",
        part <= 1.0 and lengths[0] >= least_versions(problem.smoothness, largest, steps),
    )


def scaled_bound(of: Constants, versions: int, staleness: int, steps: int, gain: float) -> float:
    """Return the bound of inequality 36 for βK = ``gain`` and the local step size of the theorem.

    The bound is 8F/(ηβKQT) + 16ηβKQL·(σ²/b + γ²) + 8L²(1 + τ²)(1 + 4ηβKL)·φ·(σ²/b + nγ²), with
    φ = 8η²Q²(1 + 2Q)(1 + β²K²). The result is infinite unless each term of inequality 37 is at most ¼.
    """
    rate, smoothness, delay = _local(of.smoothness, versions, steps), of.smoothness, staleness
    step = rate * gain
    phi = 8 * rate**2 * steps**2 * (1 + 2 * steps) * (1 + gain**2) * (1 + 4 * step * smoothness)
    terms = 4 * step * smoothness * steps, smoothness**2 * phi * max(delay**2 + 1, delay * (delay + 1) ** 2)
    if max(terms) > 0.25:
        return math.inf
    noise = 16 * step * steps * smoothness * (of.variance + of.diversity)
    stale = 8 * smoothness**2 * (1 + delay**2) * phi * (of.variance + of.clients * of.diversity)
    return 8 * of.gap / (step * steps * versions) + noise + stale


GAINS = (0.5, 2.0)
"""Values of βK (server step size times buffer size) that test remark 1; the theorem uses 1."""


def remark_1(quick: bool = False) -> Finding:
    """Test remark 1 (the proof needs only βK = O(1)) with several values of β.

    The contribution of descent is proportional to 1/βK, and the contribution of noise to βK.
    """
    lengths = (1_000, 3_000) if quick else (2_000, 8_000)
    problem, steps = Quadratic(4, smoothness=0.02, distance=2.5, spread=1.0), 2
    cases = [(gain, versions) for gain in GAINS for versions in lengths]
    settings = [_setting(problem, versions, steps, 4, gain) for gain, versions in cases]
    runs = rows_of(settings, 1 if quick else 3)
    of = constants(problem)

    def bound(at: int, out: Trajectory) -> float:
        gain, versions = cases[at]
        return scaled_bound(of, versions, out.staleness, steps, gain)

    factor, slopes = lengths[1] / lengths[0], []
    for first in range(0, len(cases), 2):
        pair = (one.expected for one in settings[first : first + 2])
        low, high = (expected.descent() + expected.floor() for expected in pair)
        steepness = math.log(high / low) / math.log(factor)
        slopes.append(slope("T", runs, (first, first + 1), factor, steepness).ratios)
    part = of_bound(runs, bound)
    return judged(
        "the rate 1/√T holds for every β with βK = O(1)",
        f"{SOURCE}, remark 1",
        "descent like 1/βK, noise like βK",
        [*seen(settings, runs), worst("slope over T", list(zip(*slopes, strict=True)))],
        f"βK = {', '.join(f'{gain:g}' for gain in GAINS)}; at most {part:.2g} of inequality 36's bound",
        0.0 < part <= 1.0,
    )


def remark_2(quick: bool = False) -> Finding:
    """Test remark 2 with two populations of clients that have the same mean diversity γ².

    In one population, a single client causes nearly all of the diversity. C of n clients train in parallel.
    They are drawn uniformly from the clients that are not training, so each client is drawn at slightly more
    regular intervals than if all clients could be drawn. This multiplies the variance of the sampling by 1 −
    2(C − 1)/(n − 1).
    """
    clients, size, steps, smoothness, versions = 64, 4, 1, 0.18, (8_000 if quick else 20_000)
    strategy = FedBuff(buffer_size=size, exponent=0.0, concurrency=size)
    settings = []
    for skewed in (False, True):
        # Without noise and descent, only the clients' diversity moves the model.
        problem = Quadratic(clients, smoothness, variance=0.0, distance=0.0, spread=1.0, skewed=skewed)
        settings.append(_setting(problem, versions, steps, size)._replace(strategy=strategy))
    runs = rows_of(settings, 1 if quick else 8)
    regular = 1.0 - 2.0 * (size - 1) / (clients - 1)
    sampled = [
        [
            out.mean_square() / (one.expected.sampling() * regular)
            for one, out in zip(settings, row, strict=True)
        ]
        for row in runs
    ]
    largest = _stalest(runs)
    uniform = [
        constants(one.expected.problem)._replace(clients=1, diversity=one.expected.problem.largest_diversity)
        for one in settings
    ]
    part = of_bound(runs, lambda at, out: gradient_bound(uniform[at], versions, out.staleness, steps))
    return judged(
        "only the mean of the clients' diversity counts: not its largest value, and not n times the mean",
        f"{SOURCE}, remark 2",
        "with γ² the largest diversity of a client, n·γ² is γ²",
        [worst("sampling", sampled, 0.3)],
        f"all of n = {clients} clients alike, or one with {clients - 1} times the mean; at most {part:.2g} "
        f"of the bound; τ up to {largest}",
        0.0 < part <= 1.0 and versions >= least_versions(smoothness, largest, steps),
    )


def unequal_batches(quick: bool = False) -> Finding:
    """Run clients with batches of 1 example and clients with batches of 8 examples.

    The bound depends on the smallest batch, but the noise depends on the mean of σ²/|D_i|.
    """
    versions, steps, size = (4_000 if quick else 8_000), 2, 4
    problem = Quadratic(8, 0.02, distance=2.5, spread=0.5, batches=(1, 8) * 4)
    settings = [_setting(problem, versions, steps, size)]
    runs = rows_of(settings, 1 if quick else 3)
    of = constants(problem)
    part = of_bound(runs, lambda at, out: gradient_bound(of, versions, out.staleness, steps))
    alone = Expected(problem._replace(batches=()), *settings[0].expected[1:])
    return judged(
        "with batches of unequal size the noise is that of the mean of σ²/|D_i|",
        f"{SOURCE}, assumption 3 and theorem 1",
        "at most the bound with b = min |D_i|",
        seen(settings, runs),
        f"|D_i| = 1 and 8: {settings[0].expected.floor() / alone.floor():.2f} of the noise with b = 1; "
        f"at most {part:.2g} of the bound; τ up to {_stalest(runs)}",
        part <= 1.0 and versions >= least_versions(problem.smoothness, _stalest(runs), steps),
    )


SLOWER = 9.0
"""Ratio of the speed of fast clients to the speed of slow clients in `not_uniform`."""


def uneven(draws: np.random.Generator, client: int) -> float:
    """Draw the duration of a trip of ``client``; every second client is slow."""
    return bounded(draws, client) * (SLOWER if client % 2 else 1.0)


def not_uniform(quick: bool = False) -> Finding:
    """Violate assumption 1: updates arrive at unequal rates. The run starts from the optimum, without noise.

    If the share p_i of the arrivals comes from client i, the model moves to Σ p_i c_i. In a long run, the
    mean of ‖∇f‖² therefore rises to ‖∇f(Σ p_i c_i)‖², while the bound falls to 0.
    """
    clients, size, steps, smoothness, lengths = 4, 2, 1, 2e-4, (4_000, 16_000)
    problem = Quadratic(clients, smoothness, variance=0.0, distance=0.0, spread=1.0)
    rates = np.array([1.0, 1.0 / SLOWER] * (clients // 2))
    shares = clients * rates / rates.sum()
    away = float(smoothness**2 * np.sum((problem.spreads * (shares - 1.0)) ** 2))
    settings = [_setting(problem, versions, steps, size)._replace(durations=uneven) for versions in lengths]
    runs = rows_of(settings, 1 if quick else 3)
    ratios = [
        [out.mean_square() / (away * _left(one.expected)) for one, out in zip(settings, row, strict=True)]
        for row in runs
    ]
    of = constants(problem)
    parts = [
        min(row[at].mean_square() / gradient_bound(of, lengths[at], row[at].staleness, steps) for row in runs)
        for at in range(len(lengths))
    ]
    return judged(
        "if arrivals are not uniform, mean ‖∇f‖² tends to that of the arrivals' own mean, not to 0",
        f"{SOURCE}, assumption 1",
        "the bound, which falls to 0, needs uniform arrivals",
        [worst("‖∇f‖² of the arrivals' mean", ratios)],
        f"half of the clients {SLOWER:g} times slower: {parts[0]:.2g} times the bound at T = {lengths[0]:,}, "
        f"{parts[1]:.2g} at {lengths[1]:,}; τ up to {_stalest(runs)}",
        parts[1] > 1.0 and lengths[0] >= least_versions(smoothness, _stalest(runs), steps),
    )


def _left(expected: Expected) -> float:
    """Return the mean of (1 − ρ^t)² over versions t.

    ρ is the fraction of the distance to the optimum that remains after a version.
    """
    t = np.arange(expected.versions)
    return float(np.mean((1.0 - (1.0 - expected.step) ** t) ** 2))
