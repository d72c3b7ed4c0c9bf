"""The papers' theorems on problems whose constants can be computed.

Toghani and Uribe's bound for FedBuff (arXiv:2210.01161); FedStaleWeight's weights as its paper derives them
(Ma et al. 2024, arXiv:2406.02877); and fleets whose clients take the time that a distribution says, driven
through the real core without any learning. Their arrivals are those of a run of the same seed under the
virtual clock on profiles with these delays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Arrived
from edgefl.devices.schema import Delay
from edgefl.seeds import stream
from edgefl.strategies import Strategy
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import MemoryRun, Vector, fleet, run_in_memory

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


def gradient_bound(problem: Problem, versions: int, staleness: int) -> float:
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


def bounded_run(problem: Problem, versions: int, seed: int) -> Point:
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
    return Point(versions, staleness, float(np.mean(squares)), gradient_bound(problem, versions, staleness))


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


Doubles = npt.NDArray[np.float64]

FAST = Delay(dist="uniform", low_s=1.0, high_s=2.0)
SLOW = Delay(dist="uniform", low_s=8.0, high_s=12.0)
FEDSTALEWEIGHT = (FAST,) * 10 + (SLOW,) * 5
"""FedStaleWeight's fleet, section 6.2: ten fast clients and five slow ones."""


class Outcome(NamedTuple):
    """What came of a fleet's arrivals."""

    share: Doubles
    """Of each client: its part of all applied weight, times the number of clients. 1 is fair (eq. 3)."""
    staleness: Doubles
    """Of each client: the mean staleness of its applied updates."""
    step: float
    """Mean of the weights of one version, added up."""
    emulated_s: float
    weights: Doubles
    """Of each applied update."""
    largest_staleness: int
    """Of any of them."""


def simulate(
    strategy: Strategy,
    delays: Sequence[Delay],
    versions: int,
    seed: int = 0,
    slowed: Mapping[int, float] | None = None,
    skip: int = 0,
) -> Outcome:
    """Let clients with these ``delays`` train under ``strategy`` until there are so many versions.

    ``slowed`` multiplies the times of the clients it names; the first ``skip`` versions do not count.

    >>> fair = simulate(FedBuff(buffer_size=1), [FAST, FAST], versions=400)
    >>> bool((abs(fair.share - 1) < 0.03).all())
    True
    """
    factors = slowed or {}
    run, core = _run(strategy, delays, experiment.Stop(versions=versions), seed, factors)
    clients = len(delays)
    weight, count, staleness = np.zeros(clients), np.zeros(clients), np.zeros(clients)
    steps: list[float] = []
    weights: list[float] = []
    largest = 0
    for order, updates in run.sums[skip:]:
        weights += order.weights
        for update, one in zip(updates, order.weights, strict=True):
            weight[update.client] += one
            count[update.client] += 1
            staleness[update.client] += update.staleness
            largest = max(largest, update.staleness)
        steps.append(sum(order.weights))
    mean = np.divide(staleness, count, out=np.full(clients, np.nan), where=count > 0)
    share = weight / weight.sum() * clients
    return Outcome(share, mean, float(np.mean(steps)), core.now_s, np.array(weights), largest)


def gain_of_slowing(
    strategy: Strategy, delays: Sequence[Delay], client: int, factor: float, versions: int, seed: int = 0
) -> float:
    """What ``client`` gains by taking ``factor`` times as long: its share over the one that it has otherwise.

    Not above 1: slowing down does not pay (strategy-proofness, section 4.2.1).
    """
    honest = simulate(strategy, delays, versions, seed)
    slow = simulate(strategy, delays, versions, seed, {client: factor})
    return float(slow.share[client] / honest.share[client])


def staleness_by_buffer(
    delays: Sequence[Delay], sizes: Sequence[int], trips: int, seed: int = 0
) -> dict[int, npt.NDArray[np.int64]]:
    """The staleness of each of the first ``trips`` arrivals, for each buffer size: FedBuff's appendix A.

    The same trips arrive in the same order whatever the buffer, so τ_K ≤ ⌈τ_1/K⌉ can be held against each.

    >>> found = staleness_by_buffer([FAST] * 4, [1, 2], trips=200)
    >>> bool((found[2] <= -(-found[1] // 2)).all())
    True
    """
    full = min(trips // size * size for size in sizes)  # so many are in a full buffer, whatever its size
    found = {}
    for size in sizes:
        run, _ = _run(FedBuff(buffer_size=size), delays, experiment.Stop(trips=trips), seed, {})
        applied = {update.task: update.staleness for _, updates in run.sums for update in updates}
        order = [event.task for event in run.events if isinstance(event, Arrived)][:full]
        found[size] = np.array([applied[task] for task in order], np.int64)
    return found


def _run(
    strategy: Strategy,
    delays: Sequence[Delay],
    stop: experiment.Stop,
    seed: int,
    factors: Mapping[int, float],
) -> tuple[MemoryRun, Core]:
    def duration(client: int, trip: int) -> float:
        drawn = delays[client].draw(stream(seed, "trip", client, trip))
        return drawn * factors.get(client, 1.0)

    def same(client: int, model: Vector, trip: int) -> Vector:
        return model

    core = Core(strategy, fleet(len(delays)), seed, stop, evaluate_every=10**9)
    return run_in_memory(core, duration, train=same, max_events=10**9), core


class WeightBounds(NamedTuple):
    """Between which the normalised weight of an update must lie."""

    low: float
    high: float


def weight_bounds(buffer_size: int, largest_staleness: float) -> WeightBounds:
    """1/((b − 1)(b·τ_max + 1) + 1) ≤ α ≤ (b·τ_max + 1)/(b(τ_max + 1)), of theorem 1.

    The lower is reached by one fresh update among the stalest, the upper by the stalest among fresh ones.

    >>> weight_bounds(5, 0.0)
    WeightBounds(low=0.2, high=0.2)
    >>> weight_bounds(5, 4.0).high
    0.84
    """
    most = buffer_size * largest_staleness + 1.0
    return WeightBounds(
        1.0 / ((buffer_size - 1) * most + 1.0), most / (buffer_size * (largest_staleness + 1.0))
    )


def largest_deviation(buffer_size: int, largest_staleness: float) -> float:
    """U(τ_max) of theorem 1: the largest squared deviation of a normalised weight from 1/b.

    >>> largest_deviation(5, 0.0)
    0.0
    """
    low, high = weight_bounds(buffer_size, largest_staleness)
    return max((1.0 / buffer_size - low) ** 2, (high - 1.0 / buffer_size) ** 2)


def expected_staleness(rates: Sequence[float], buffer_size: int) -> Doubles:
    """E[τ_i] = (Σ_j r_j/r_i − 1)/b of each client, j over all of them, itself included (eq. 6).

    >>> expected_staleness([1.0, 1.0, 2.0], 1).tolist()
    [3.0, 3.0, 1.0]
    """
    rate = np.asarray(rates, np.float64)
    return np.asarray((rate.sum() / rate - 1.0) / buffer_size)


def influence(staleness: Sequence[float] | Doubles, buffer_size: int) -> Doubles:
    """p_i = 1/(b·E[τ_i] + 1): the share of all updates that client i's are (eq. 7).

    >>> influence(expected_staleness([1.0, 1.0, 2.0], 5), 5).tolist()
    [0.25, 0.25, 0.5]
    """
    return np.asarray(1.0 / (buffer_size * np.asarray(staleness, np.float64) + 1.0))


def fair_weight(staleness: Sequence[float] | Doubles, buffer_size: int) -> Doubles:
    """α_i = (b·E[τ_i] + 1)/n, which makes every client's influence 1/n (eq. 8).

    >>> fair_weight(expected_staleness([1.0, 1.0, 2.0, 4.0], 5), 5).tolist()
    [2.0, 2.0, 1.0, 0.5]
    """
    return np.asarray(1.0 / (influence(staleness, buffer_size) * len(staleness)))
