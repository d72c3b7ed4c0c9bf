"""A problem for which every quantity in a convergence theorem can be computed.

The objective of client i is f_i(w) = L/2 ‖w − c_i‖². The coordinates of w form three independent blocks, each
of which shows one effect:

- **descent**, the first term of the theorems: no noise, all c_i = 0, and a start away from the optimum;
- **noise**, the variance term of the theorems: normal noise on every gradient, and a start at the optimum;
- **shares**: one coordinate for each client, in which this client's optimum c_i is n·``spread`` and that of
  all other clients is 0. The mean of the model over time, divided by ``spread``, is therefore n times the
  client's share of the weight (Ma 2024, eq. 3: 1 is fair).

As long as step size times staleness is small, the mean of ‖∇f‖² over a run follows from the step size, the
number of versions and Σ α², which measures how concentrated the weights of a version are (`Expected`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from edgefl.core import Core
from edgefl.experiment import Stop
from edgefl.seeds import stream
from edgefl.strategies.base import Client, Strategy, TripInputs
from edgefl.testing import Durations, MemoryRun, Vector, fleet, run_in_memory

Counts: TypeAlias = npt.NDArray[np.int64]

DESCENT, NOISE = slice(0, 1), slice(1, 513)


class Quadratic(NamedTuple):
    """The constants of the problem, all of which are exact."""

    clients: int
    smoothness: float = 1.0
    """The smoothness constant L."""
    variance: float = 1.0
    """The variance σ² of a stochastic gradient, summed over all coordinates."""
    distance: float = 1.0
    """The distance ‖w_0 − w*‖ of the start from the optimum."""
    spread: float = 0.0
    """The ratio ‖c_i‖/n, where c_i is a client's optimum. If it is 0, all clients have the same objective."""
    skewed: bool = False
    """True if only client 0 has a different objective; the mean diversity γ² does not depend on this."""
    batches: tuple[int, ...] = ()
    """Number of examples in the batch of each client; if empty, each batch contains one example. The variance
    of a gradient is σ² divided by this number."""

    @property
    def spreads(self) -> Vector:
        """The ratio ‖c_i‖/n for each client i with optimum c_i, in float64."""
        if not self.skewed:
            return np.full(self.clients, self.spread)
        return np.concatenate([[self.spread * math.sqrt(self.clients)], np.zeros(self.clients - 1)])

    @property
    def batch_variances(self) -> Vector:
        """The variance σ²/|D_i| of a stochastic gradient for each client, in float64."""
        return self.variance / np.array(self.batches or [1] * self.clients, dtype=np.float64)

    @property
    def gap(self) -> float:
        """The initial gap f(w_0) − f*."""
        return 0.5 * self.smoothness * self.distance**2

    @property
    def diversity(self) -> float:
        """The diversity γ², the mean over clients of ‖∇f_i − ∇f‖²; it is (L · spread)² · n(n − 1)."""
        return (self.smoothness * self.spread) ** 2 * self.clients * (self.clients - 1)

    @property
    def largest_diversity(self) -> float:
        """The largest ‖∇f_i − ∇f‖² of any client: γ², or (n − 1)·γ² if ``skewed`` is True."""
        return self.diversity * (self.clients - 1 if self.skewed else 1)

    def centres(self) -> Vector:
        """Return the clients' optima c_i, a float64 array of shape (clients, size)."""
        rows = np.zeros((self.clients, NOISE.stop + self.clients))
        rows[:, NOISE.stop :] = self.clients * np.diag(self.spreads)
        return rows

    def start(self, shares: Sequence[float] | None = None) -> Vector:
        """Return the start w_0.

        In the block `DESCENT`, w_0 is ``distance``. In the other blocks, w_0 is the optimum for the given
        ``shares``: n times each client's share of the weight, by default 1 for every client.
        """
        fair = np.ones(self.clients) if shares is None else np.asarray(shares)
        return np.concatenate([[self.distance], np.zeros(NOISE.stop - 1), self.spreads * fair])


class Trajectory(NamedTuple):
    """The result of a run on the problem `Quadratic`."""

    problem: Quadratic
    models: Vector
    """The model after each version, a float64 array of shape (versions + 1, size)."""
    staleness: int
    """Largest staleness that an applied update had when it arrived."""
    delays: Vector
    """Share of all applied weight, indexed by the delay (`delays_of`), in float64."""
    squares: Vector
    """For each client i, the largest ‖∇f_i‖² at the start of any of its trips."""

    def mean_square(self, block: slice | None = None) -> float:
        """Return the mean of ‖∇f‖² over all versions except the last, in one block or in all blocks."""
        away = self.models[:-1] - self.problem.centres().mean(axis=0)
        part = away if block is None else away[:, block]
        return float(self.problem.smoothness**2 * np.mean(np.sum(part**2, axis=1)))

    def shares(self) -> Vector:
        """Return, for each client, n times its share of the weight after the first tenth of the run."""
        late = self.models[len(self.models) // 10 :, NOISE.stop :]
        return np.asarray(late.mean(axis=0) / self.problem.spread)


def descend(
    problem: Quadratic,
    strategy: Strategy,
    versions: int,
    *,
    rate: float,
    steps: int = 1,
    durations: Callable[[np.random.Generator, int], float] = lambda draws, client: draws.exponential(),
    shares: Sequence[float] | None = None,
    seed: int = 0,
    devices: Sequence[Client] | None = None,
) -> Trajectory:
    """Run until version ``versions``; each trip consists of ``steps`` SGD steps with the step size ``rate``.

    By default, the duration of a trip is Exp(1), so that each client is equally likely to be the next whose
    update arrives, as the proofs assume. The run starts from ``problem.start(shares)``. ``devices``
    describes the clients to the strategy; by default, the strategy has no information about them.
    """
    centres, size = problem.centres(), NOISE.stop - NOISE.start
    noise, delays = (
        [stream(seed, what, client) for client in range(problem.clients)] for what in ("gradient", "delay")
    )
    squares = np.zeros(problem.clients)
    deviations = rate * np.sqrt(problem.batch_variances / size)
    step = rate * problem.smoothness

    def trip(client: int, model: Vector, number: int, given: TripInputs) -> Vector:
        y, centre = model - centres[client], centres[client]
        squares[client] = max(squares[client], problem.smoothness**2 * float(y @ y))
        if not problem.variance:
            return np.asarray((1.0 - step) ** steps * y + centre)
        for draws in noise[client].normal(scale=deviations[client], size=(steps, size)):
            y = (1.0 - step) * y
            y[NOISE] -= draws
        return np.asarray(y + centre)

    run, _ = play(
        strategy,
        devices or problem.clients,
        Stop(versions=versions),
        lambda client, number: float(durations(delays[client], client)),
        seed,
        model=problem.start(shares),
        trip=trip,
    )
    largest = max(update.staleness for _, updates in run.sums for update in updates)
    weights = np.concatenate([order.weights for order, _ in run.sums])
    old = np.bincount(delays_of(run), weights / weights.sum())
    return Trajectory(problem, np.array(run.models), largest, old, squares)


def delays_of(run: MemoryRun, skip: int = 0) -> Counts:
    """Return the delay t − τ_i(t) of each applied update, in versions.

    The delay is the number of versions from an update's base version to the version to which it is added.
    `Update.staleness` counts only the versions until the update arrives. The updates of the first ``skip``
    versions are left out.
    """
    sums = run.sums[skip:]
    return np.array([order.version - 1 - one.base_version for order, made in sums for one in made])


def play(
    strategy: Strategy,
    clients: int | Sequence[Client],
    stop: Stop,
    durations: Durations,
    seed: int = 0,
    **how: object,
) -> tuple[MemoryRun, float]:
    """Run ``strategy`` in memory without evaluations; return the run and its duration in emulated seconds."""
    devices = fleet(clients) if isinstance(clients, int) else clients
    core = Core(strategy, devices, seed, stop, evaluate_every=10**9)
    return run_in_memory(core, durations, max_events=10**9, **how), core.now_s  # type: ignore[arg-type]


class Expected(NamedTuple):
    """Prediction of the mean of ‖∇f‖² over ``versions`` versions, from the step sizes and weights.

    With r = 1 − ηL, a trip of Q steps moves the model by the fraction 1 − r^Q of the way to c_i, and adds
    noise with variance η²σ²(1 − r^{2Q})/(1 − r²). The sum of a version's weights is ``gain``, and the sum of
    their squares is ``concentration``. A version leaves the fraction ρ = 1 − gain·(1 − r^Q) of the distance
    to the optimum. Staleness changes these values by about ηLQτ, which must be small.
    """

    problem: Quadratic
    versions: int
    rate: float
    steps: int = 1
    gain: float = 1.0
    concentration: float = 1.0

    @property
    def _kept(self) -> float:
        return (1.0 - self.rate * self.problem.smoothness) ** self.steps

    @property
    def step(self) -> float:
        """The fraction 1 − ρ of the distance to the optimum that a version covers, about gain·ηLQ."""
        return self.gain * (1.0 - self._kept)

    def _after(self) -> float:
        """Return the mean of ρ^{2t} over versions t.

        ρ is the fraction of the distance to the optimum that remains after a version.
        """
        left = (1.0 - self.step) ** 2
        return (1.0 - left**self.versions) / ((1.0 - left) * self.versions)

    def descent(self) -> float:
        """Return the contribution of descent: L²‖w_0 − w*‖² times the mean of ρ^{2t}."""
        return self._after() * (self.problem.smoothness * self.problem.distance) ** 2

    def floor(self) -> float:
        """Return the contribution of noise.

        It rises with ``versions`` from 0 to a limit: the noise that one version adds, divided by 1 − ρ².
        """
        one = (1.0 - self._kept**2) / (1.0 - (1.0 - self.rate * self.problem.smoothness) ** 2)
        return self._risen(self.rate**2 * float(self.problem.batch_variances.mean()) * one)

    def sampling(self) -> float:
        """Return the contribution of client sampling, for clients drawn uniformly and independently."""
        pull = (1.0 - self._kept) ** 2 * self.problem.diversity / self.problem.smoothness**2
        return self._risen(pull)

    def _risen(self, added: float) -> float:
        rise = (1.0 - self._after()) / (1.0 - (1.0 - self.step) ** 2)
        return self.problem.smoothness**2 * self.concentration * added * rise
