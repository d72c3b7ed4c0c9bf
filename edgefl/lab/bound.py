"""Toghani and Uribe's bound for FedBuff, on problems whose constants can be computed (arXiv:2210.01161)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgefl import experiment
from edgefl.core import Core
from edgefl.seeds import stream
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import fleet, run_in_memory

Vector = NDArray[Any]

LOCAL_STEPS = 2
BUFFER = 4


@dataclass(frozen=True)
class Problem:
    """n functions, their stochastic gradients, and the constants of the theorem's assumptions."""

    name: str
    clients: int
    smoothness: float
    """L of every f_i."""
    variance: float
    """σ²/b: the largest variance of a stochastic gradient."""
    diversity: float
    """γ²: the largest mean over clients of ‖∇f_i − ∇f‖²."""
    gap: float
    """f(w_0) − f*."""
    start: Vector
    gradient: Callable[[Vector], Vector]
    """∇f."""
    sample: Callable[[int, Vector, np.random.Generator], Vector]
    """A stochastic gradient of f_i."""


class Point(NamedTuple):
    """A run of T versions: both sides of the inequality."""

    versions: int
    staleness: int
    measured: float
    bound: float


def bound(problem: Problem, versions: int, staleness: int) -> float:
    """The right side of Theorem 1 for T versions and a largest delay τ.

    8√L·(f(w_0) − f*)/√T + 16√L·(σ²/b + γ²)/√T + 320·L·(Q + 1)·(τ² + 1)·(σ²/b + n·γ²)/T
    """
    root, total = math.sqrt(problem.smoothness), problem.variance + problem.diversity
    first = (8 * root * problem.gap + 16 * root * total) / math.sqrt(versions)
    spread = problem.variance + problem.clients * problem.diversity
    return first + 320 * problem.smoothness * (LOCAL_STEPS + 1) * (staleness**2 + 1) * spread / versions


def least_versions(problem: Problem, staleness: int) -> int:
    """The T from which on the theorem holds: 160·L·(Q + 7)·(τ + 1)³."""
    return math.ceil(160 * problem.smoothness * (LOCAL_STEPS + 7) * (staleness + 1) ** 3)


def run(problem: Problem, versions: int, seed: int) -> Point:
    """FedBuff with β = 1/K and η = 1/(Q·√(L·T)) for T versions: the mean of ‖∇f‖² beside the bound.

    All clients train at once and take times of one distribution, so that over the run the one that arrives
    is uniform over them, as the proof assumes; the times are bounded, U(0.5, 1.5), and with them τ.
    """
    rate = 1.0 / (LOCAL_STEPS * math.sqrt(problem.smoothness * versions))
    noise = [stream(seed, "gradient", client) for client in range(problem.clients)]
    delays = [stream(seed, "delay", client) for client in range(problem.clients)]
    strategy = FedBuff(buffer_size=BUFFER, exponent=0.0)
    core = Core(strategy, fleet(problem.clients), seed, experiment.Stop(versions=versions), 10**9)

    def step(client: int, model: Vector, trip: int) -> Vector:
        return np.asarray(model - rate * problem.sample(client, model, noise[client]))

    done = run_in_memory(
        core,
        lambda client, trip: float(delays[client].uniform(0.5, 1.5)),
        model=problem.start.copy(),
        train=step,
        steps=LOCAL_STEPS,
        max_events=10 * BUFFER * versions,
    )
    squares = [float(gradient @ gradient) for gradient in map(problem.gradient, done.models[:-1])]
    staleness = max(update.staleness for _, updates in done.sums for update in updates)
    return Point(versions, staleness, float(np.mean(squares)), bound(problem, versions, staleness))


def quadratic(seed: int, clients: int = 4, size: int = 6, smoothness: float = 0.02) -> Problem:
    """f_i(w) = ½(w − c_i)ᵀA(w − c_i) with normal gradient noise: every constant is exact."""
    rng = stream(seed, "quadratic")
    scales = np.linspace(0.2, 1.0, size) * smoothness
    centres = rng.normal(size=(clients, size))
    middle = centres.mean(axis=0)
    start = middle + 5.0 * rng.normal(size=size)
    noise = 0.05
    return Problem(
        "quadratic",
        clients,
        smoothness,
        size * noise**2,
        float(np.mean(np.sum((scales * (centres - middle)) ** 2, axis=1))),
        float(0.5 * np.sum(scales * (start - middle) ** 2)),
        start,
        lambda w: np.asarray(scales * (w - middle)),
        lambda client, w, draws: np.asarray(scales * (w - centres[client]) + noise * draws.normal(size=size)),
    )


def logistic(seed: int, clients: int = 4, size: int = 5, examples: int = 40) -> Problem:
    """Regularised logistic regression on batches of one, its constants from ‖∇ℓ‖ ≤ ‖x‖.

    L is ¼·λ_max of a client's mean xxᵀ plus the regularisation, σ² ≤ max_i mean ‖x‖². The regularisation is
    the same for all, so γ² ≤ mean_i (m_i + m)² with m_i the client's mean ‖x‖, and m the mean of those.
    """
    rng = stream(seed, "logistic")
    ridge = 0.001
    x = 0.3 * rng.normal(size=(clients, examples, size))
    y = np.sign(x @ rng.normal(size=size) + 0.1 * rng.normal(size=(clients, examples)))
    x[:, :, 0] += 0.1 * np.arange(clients)[:, None]
    norms = np.linalg.norm(x, axis=2)
    means = norms.mean(axis=1)

    def loss(w: Vector) -> float:
        return float(np.logaddexp(0.0, -y * (x @ w)).mean() + 0.5 * ridge * w @ w)

    def gradient(w: Vector) -> Vector:
        slope = -y / (1.0 + np.exp(y * (x @ w)))
        return np.asarray(np.einsum("ce,ces->s", slope, x) / (clients * examples) + ridge * w)

    def sample(client: int, w: Vector, draws: np.random.Generator) -> Vector:
        row = int(draws.integers(examples))
        point, label = x[client, row], y[client, row]
        return np.asarray(-label / (1.0 + math.exp(label * float(point @ w))) * point + ridge * w)

    smoothness = ridge + 0.25 * max(float(np.linalg.eigvalsh(part.T @ part / examples)[-1]) for part in x)
    start = 3.0 * rng.normal(size=size)
    least = start.copy()
    for _ in range(20_000):  # gradient descent at 1/L: strongly convex, so this is the minimum to rounding
        least -= gradient(least) / smoothness
    return Problem(
        "logistic",
        clients,
        smoothness,
        float((norms**2).mean(axis=1).max()),
        float(np.mean((means + means.mean()) ** 2)),
        loss(start) - loss(least),
        start,
        gradient,
        sample,
    )
