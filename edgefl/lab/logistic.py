"""Tests a convergence theorem on a problem that is not quadratic: a logistic regression with known constants.

For client i, f_i(w) is the mean of log(1 + exp(−y·xᵀw)) over the client's examples (x, y). The
smoothness constant L follows from the largest eigenvalue of the second moments of a client's examples. The
variance σ² and the diversity γ² of the gradients are at most the largest mean of ‖x‖² of any client. Newton's
method computes the minimum f*. Two computations without clients predict the mean of ‖∇f‖² over a run:
gradient descent on all examples, and the covariance of a linear recursion at the optimum.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from edgefl.experiment import Stop
from edgefl.lab.convergence import Ratio, judged
from edgefl.lab.quadratic import play
from edgefl.lab.study import Finding
from edgefl.lab.unbounded import SOURCE, Constants, gradient_bound, least_versions
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy, TripInputs
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import Vector


class Logistic:
    """A logistic regression on the examples of ``clients`` clients.

    The features are Gaussian, and their mean differs from client to client.
    """

    def __init__(self, clients: int, examples: int, features: int, scale: float) -> None:
        draws = stream(0, "logistic")
        true = draws.normal(size=features) / scale
        centres = 0.3 * draws.normal(size=(clients, 1, features))
        self.x = scale * (centres + draws.normal(size=(clients, examples, features)))
        """The features, a float64 array of shape (clients, examples, features)."""
        self.y = np.where(draws.random((clients, examples)) < _sigmoid(0.5 * self.x @ true), 1.0, -1.0)
        """The labels 1 and −1, a float64 array of shape (clients, examples)."""

    def losses(self, w: Vector) -> Vector:
        """Return f_i(w) for each client i."""
        return np.asarray(np.logaddexp(0.0, -self.y * (self.x @ w)).mean(axis=1))

    def each(self, w: Vector) -> Vector:
        """Return the gradient of each example's loss, an array of shape (clients, examples, features)."""
        return np.asarray((-self.y * _sigmoid(-self.y * (self.x @ w)))[..., None] * self.x)

    def gradient(self, w: Vector) -> Vector:
        return np.asarray(self.each(w).mean(axis=(0, 1)))

    def hessian(self, w: Vector) -> Vector:
        p = _sigmoid(self.x @ w)
        return np.asarray(np.einsum("ij,ijk,ijl->kl", p * (1.0 - p), self.x, self.x) / self.y.size)

    @cached_property
    def optimum(self) -> Vector:
        """The minimiser of f, computed with Newton's method."""
        w = np.zeros(self.x.shape[-1])
        for _ in range(50):
            w = w - np.linalg.solve(self.hessian(w), self.gradient(w))
        return w

    def constants(self) -> Constants:
        """Return the exact L, bounds on σ² and γ² that hold for every w, and the initial gap f(0) − f*."""
        moments = np.einsum("ijk,ijl->ikl", self.x, self.x) / self.x.shape[1]
        squares = float(np.sum(self.x**2, axis=2).mean(axis=1).max())
        gap = float(np.mean(self.losses(np.zeros(self.x.shape[-1])) - self.losses(self.optimum)))
        largest = float(np.linalg.eigvalsh(moments).max()) / 4.0
        return Constants(largest, squares, squares, gap, len(self.x))

    def covariance(self) -> Vector:
        """Return the covariance of the examples' gradients at the optimum, averaged over clients."""
        each = self.each(self.optimum)
        apart = each - each.mean(axis=1, keepdims=True)
        return np.asarray(np.einsum("ijk,ijl->kl", apart, apart) / self.y.size)


def _sigmoid(z: Vector) -> Vector:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * z)))


def run(
    problem: Logistic, strategy: Strategy, versions: int, rate: float, steps: int, start: Vector, seed: int
) -> tuple[float, int]:
    """Train on one example per step; return the mean of ‖∇f‖² over the versions and the largest staleness."""
    clients, examples, _ = problem.x.shape
    picks, delays = ([stream(seed, what, one) for one in range(clients)] for what in ("gradient", "delay"))

    def trip(client: int, model: Vector, number: int, given: TripInputs) -> Vector:
        y = model
        for at in picks[client].integers(examples, size=steps).tolist():
            x, label = problem.x[client, at], problem.y[client, at]
            y = y + rate * label / (1.0 + math.exp(label * float(x @ y))) * x
        return np.asarray(y)

    done, _ = play(
        strategy,
        clients,
        Stop(versions=versions),
        lambda client, number: float(delays[client].uniform(0.75, 1.25)),  # a staleness of at most 2
        seed,
        model=start,
        trip=trip,
    )
    mean = float(np.mean([np.sum(problem.gradient(w) ** 2) for w in done.models[:-1]]))
    return mean, max(update.staleness for _, updates in done.sums for update in updates)


def descent(problem: Logistic, versions: int, step: float) -> float:
    """Return the mean of ‖∇f‖² over a gradient descent from w = 0 that uses all examples in each step."""
    w, squares = np.zeros(problem.x.shape[-1]), []
    for _ in range(versions):
        gradient = problem.gradient(w)
        squares.append(float(gradient @ gradient))
        w = w - step * gradient
    return float(np.mean(squares))


def noise(problem: Logistic, versions: int, step: float, updates: int) -> float:
    """Return the mean of ‖∇f‖² over a run that starts from the optimum.

    Each step averages ``updates`` gradients. The covariance C of w follows
    C ← (I − step·H) C (I − step·H) + step²·S/updates, where H is the Hessian and S is the covariance of the
    examples' gradients, both at the optimum.
    """
    values, vectors = np.linalg.eigh(problem.hessian(problem.optimum))
    added = step**2 / updates * np.diag(vectors.T @ problem.covariance() @ vectors)
    kept = (1.0 - step * values) ** 2
    rise = (1.0 - (1.0 - kept**versions) / ((1.0 - kept) * versions)) / (1.0 - kept)
    return float(np.sum(values**2 * added * rise))


def logistic(quick: bool = False) -> Finding:
    """Run FedBuff with the step sizes of the theorem, once from w = 0 and once from the optimum."""
    versions, scale = (4_000, 0.35) if quick else (8_000, 0.5)
    steps, size, problem = 2, 8, Logistic(8, 40, 16, scale)
    of = problem.constants()
    rate = 1.0 / (steps * math.sqrt(of.smoothness * versions))
    strategy = FedBuff(buffer_size=size, exponent=0.0)
    floor = noise(problem, versions, rate * steps, size * steps)
    falling = descent(problem, versions, rate * steps)
    whole, still, parts, largest = [], [], [], 0
    for seed in range(1, 2 if quick else 21):
        found, staleness = run(problem, strategy, versions, rate, steps, np.zeros(16), seed)
        whole.append(found / (falling + floor))
        still.append(run(problem, strategy, versions, rate, steps, problem.optimum, seed)[0] / floor)
        parts.append(found / gradient_bound(of, versions, staleness, steps))
        largest = max(largest, staleness)
    return judged(
        "on a logistic regression mean ‖∇f‖² is the sum of descent and noise",
        f"{SOURCE}, theorem 1",
        "at most the bound",
        [Ratio("descent and noise", whole, 0.1), Ratio("noise", still, 0.15)],
        f"L = {of.smoothness:.3g}, σ², γ² ≤ {of.variance:.3g}; at most {max(parts):.2g} of the bound; "
        f"T = {versions:,}, τ up to {largest}",
        max(parts) <= 1.0 and versions >= least_versions(of.smoothness, largest, steps),
    )
