"""Delays of updates in an emulated fleet: their causes, and the step sizes that the theorems allow for them.

In Wang et al. 2024 (Assumption 4), λ is the largest number of versions between the base version of an update
and the version that applies the update. The fleet is that of the paper: 100 clients with uniformly
distributed speeds, 50 steps of 17.0 MFLOP per trip, and messages of 2.2 MB at 400 Mbps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from edgefl import config
from edgefl.core.events import Arrived
from edgefl.devices.fleet import KnownClients, Trips, fleet_of
from edgefl.experiment import Stop
from edgefl.lab.convergence import Ratio, iid_bound, judged, niid_bound, worst
from edgefl.lab.quadratic import (
    DESCENT,
    NOISE,
    Quadratic,
    Trajectory,
    delays_of,
    descend,
    play,
)
from edgefl.lab.study import Finding, folder
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.strategies.base import Client, Strategy
from edgefl.strategies.defedavg_iid import DeFedAvgIID
from edgefl.strategies.defedavg_niid import DeFedAvgNIID
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import MemoryRun, Vector

SOURCE, TOGHANI_URIBE = "Wang 2024", "Toghani and Uribe 2022"
CLIENTS, PARTICIPANTS = 100, 10
FLOP_PER_EXAMPLE, MODEL_BYTES = 1.7e6, 2_200_000
"""FLOP per example (the paper states 17.0 MFLOP per batch of 10), and the size in bytes of the paper's model
for FashionMNIST."""


class Fleet(NamedTuple):
    """The paper's 100 clients, as emulated under the virtual clock."""

    devices: Sequence[Client]
    trip_s: Callable[[int], float]
    """Function that returns the duration of a client's trips, in emulated seconds, for the client's ID.

    The duration excludes transfers if the strategy schedules them.
    """


def emulated(
    strategy: Strategy, seed: int, down_bytes: int = MODEL_BYTES, up_bytes: int = MODEL_BYTES
) -> Fleet:
    """Return the fleet of ``experiments/papers/defedavg.toml`` for the given seed and message sizes."""
    experiment = config.load(folder() / "defedavg.toml", (), seed=seed)
    trips = Trips(
        experiment,
        fleet_of(experiment),
        [600] * CLIENTS,
        BatchWork(fixed=StepWork(), per_example=StepWork(matmul_flop=FLOP_PER_EXAMPLE)),
        down_bytes,
        up_bytes,
        transfers_apart=strategy.transfers_apart,
    )
    return Fleet(KnownClients(trips), lambda client: trips.plan(client, 0).total_s)


def arrivals(
    strategy: Strategy, versions: int, seed: int, fleet: Fleet | None = None
) -> tuple[MemoryRun, float]:
    """Run the fleet without training; return the run and the number of emulated seconds per version."""
    fleet = fleet or emulated(strategy, seed)
    run, ended_s = play(
        strategy,
        fleet.devices,
        Stop(versions=versions),
        lambda client, trip: fleet.trip_s(client),
        seed,
        train=lambda client, model, trip: model,
    )
    return run, ended_s / versions


SKIP = 60
"""Number of versions at the start that are excluded, because delays cannot be long yet."""


def delays_iid(quick: bool = False) -> Finding:
    """Measure the delays in Algorithm 2, with and without downloads during training.

    Each of N clients always has one update in progress, and each version uses n updates. The mean delay is
    therefore (N − 1)/n versions, regardless of the clients' speeds. If downloads overlap training, the number
    of versions made during a download is added.
    """
    versions, mean, slowest, largest = (200 if quick else 1_000), [], [], []
    for seed in range(1, 2 if quick else 4):
        for overlap in (False, True):
            strategy = DeFedAvgIID(buffer_size=PARTICIPANTS, overlap=overlap)
            run, version_s = arrivals(strategy, versions, seed)
            fleet = emulated(strategy, seed)
            more = fleet.devices[0].down_s / version_s if overlap else 0.0
            found = delays_of(run, SKIP)
            mean.append(found.mean() / ((CLIENTS - 1) / PARTICIPANTS + more))
            if not overlap:
                longest_s = max(map(fleet.trip_s, range(CLIENTS)))
                slowest.append(found.max() / (longest_s / version_s))
            largest.append(int(found.max()))
    return judged(
        "DeFedAvg-IID's mean delay is (N − 1)/n versions, and λ is the slowest client's trip in versions",
        f"{SOURCE}, Assumption 4, Algorithm 2",
        "λ depends on the system's times",
        [Ratio("mean delay", mean, 0.03), Ratio("λ", slowest, 0.15)],
        f"n = {PARTICIPANTS} of {CLIENTS}: λ = {min(largest)} to {max(largest)}, T = {versions:,}",
    )


def bound_of_delays(versions: int, error: float) -> float:
    """Return the paper's bound on λ for T versions and δ = ``error``, which is (1 + log(NT/δ))/p.

    The constant that the paper leaves open is set to 1.
    """
    return (1.0 + math.log(CLIENTS * versions / error)) / chance()


def chance() -> float:
    """Return p, the probability that a given client is in the sample for a version."""
    return 1.0 - (1.0 - 1.0 / CLIENTS) ** PARTICIPANTS


STARTS_PER_S = 80.0


def transfers(quick: bool = False) -> Finding:
    """Measure staleness with large downloads, with large uploads, with both, and with neither.

    Clients start at random times. The base version of an update is the newest version when the download
    begins. If r updates arrive per second and each version uses K of them, the staleness of an update is r/K
    times the duration of its whole trip. Waiting before the download does not increase staleness.
    """
    versions, size = (300 if quick else 1_000), 10
    strategy = FedBuff(
        buffer_size=size, exponent=0.0, arrival_process="poisson", arrival_rate_per_s=STARTS_PER_S
    )
    rows, stale = [], []
    for seed in range(1, 2 if quick else 4):
        row, means = [], []
        for down, up in ((0, 0), (4, 0), (0, 4), (2, 2)):
            fleet = emulated(strategy, seed, down * MODEL_BYTES, up * MODEL_BYTES)
            run, version_s = arrivals(strategy, versions, seed, fleet)
            per_s = sum(isinstance(event, Arrived) for event in run.events) / (version_s * versions)
            updates = [one for _, made in run.sums[SKIP:] for one in made]
            means.append(fmean(one.staleness for one in updates))
            row.append(means[-1] / (per_s / size * fmean(fleet.trip_s(one.client) for one in updates)))
        rows.append(row)
        stale.append(means)
    alone, down_s, up_s, both_s = np.mean(stale, axis=0)
    return judged(
        "a second of download makes an update as stale as one of upload; a wait before it does not",
        f"{TOGHANI_URIBE}, assumption 1",
        "delay between the download and the upload step",
        [worst("staleness · K divided by rate · trip", rows, 0.03)],
        f"mean staleness {alone:.2f}; with 176 ms more of download {down_s:.2f}, of upload {up_s:.2f}, "
        f"half of each {both_s:.2f}; clients wait {CLIENTS / STARTS_PER_S:.2g} s from start to start",
    )


LONG = 20
"""Number of versions after which a paused client is sure to have trained; then it only waits to be drawn."""


def delays_niid(quick: bool = False) -> Finding:
    """Measure the delays in Algorithm 1 if clients wait until their update is used, and if they do not.

    The sample for a version contains N·p different clients on average. Each version uses a waiting update
    with probability p. Therefore, however long an update has waited, its remaining delay has a geometric
    distribution with mean 1/p.
    """
    versions, error = (400 if quick else 2_000), 0.01
    members, waits, paused, busy = [], [], [], []
    for seed in range(1, 2 if quick else 4):
        run, _ = arrivals(DeFedAvgNIID(participants=PARTICIPANTS, pause=True), versions, seed)
        drawn = fmean(len(made) for _, made in run.sums)  # clients drawn twice are listed once
        members.append(drawn / (CLIENTS * chance()))
        found = delays_of(run, SKIP)
        paused.append(int(delays_of(run).max()))
        late = found[found > LONG] - LONG
        waits.append(float(late.sum()) / max(1, len(late)) * chance())
        still, _ = arrivals(DeFedAvgNIID(participants=PARTICIPANTS), versions // 4, seed)
        busy.append(int(delays_of(still).max()))
    limit = bound_of_delays(versions, error)
    return judged(
        "the delay of clients that wait to be drawn is geometric, and λ grows with log T",
        f"{SOURCE}, Assumption 4, Algorithm 1",
        "λ = O((1 + log(NT/δ))/p)",
        [Ratio("clients per version", members, 0.02), Ratio("delay beyond 20", waits, 0.15)],
        f"λ = {min(paused)} to {max(paused)} of at most {limit:.0f} (δ = {error}) at T = {versions:,}; "
        f"if clients do not wait, λ = {min(busy)} to {max(busy)} at T = {versions // 4:,}",
        max(paused) <= limit,
    )


class Response(NamedTuple):
    """Model of a run with delays on the quadratic problem: e_{t+1} = e_t − a·Σ_k q_k·e_{t−k}.

    The distance from the optimum is e_t, and q_k is the share of the applied weight that has delay k.
    """

    shares: Vector
    """The shares q_k, indexed by the delay k, in float64."""
    step: float
    """The step size a."""

    def path(self, versions: int, before: float) -> Vector:
        """Return e_0 = 1, …, e_{T−1} in float64; ``before`` is the value of e_t for t < 0.

        ``before`` is 1 for a run whose clients start from w_0, and 0 for the response to an impulse.
        """
        lag = len(self.shares)
        e = np.concatenate([np.full(lag, before), np.zeros(versions)])
        e[lag] = 1.0
        for t in range(lag, lag + versions - 1):
            e[t + 1] = e[t] - self.step * float(self.shares @ e[t - lag + 1 : t + 1][::-1])
        return e[lag:]

    def descent(self, problem: Quadratic, versions: int) -> float:
        """Return the contribution of descent to the mean of ‖∇F‖²."""
        path = self.path(versions, 1.0)
        return float((problem.smoothness * problem.distance) ** 2 * np.mean(path**2))

    def risen(self, problem: Quadratic, versions: int, added: float) -> float:
        """Return the contribution of noise to the mean of ‖∇F‖²; each version adds the variance ``added``."""
        squares = self.path(versions, 0.0)[:-1] ** 2
        return float(problem.smoothness**2 * added * np.cumsum(squares).sum() / versions)

    def largest_step(self) -> float:
        """Return the largest stable step size a: above it, the distance e_t does not tend to 0."""
        low, high = 0.0, 2.0
        for _ in range(40):
            middle = (low + high) / 2.0
            low, high = (low, middle) if _radius(self.shares, middle) >= 1.0 else (middle, high)
        return low


def _radius(shares: Vector, step: float) -> float:
    """Return the error's factor per version: the largest |z| with z^{λ+1} = z^λ − a·Σ_k q_k·z^{λ−k}."""
    polynomial = np.concatenate([[1.0, -1.0], np.zeros(len(shares) - 1)])
    polynomial[1:] += step * shares
    return float(np.abs(np.roots(polynomial)).max())


class Edge(NamedTuple):
    """Step sizes from a theorem, and a problem for which they make the theorem's condition an equality."""

    problem: Quadratic
    versions: int
    local: float
    """The local step size η̄."""
    server: float
    """The server step size η."""

    def run(self, strategy: Strategy, seed: int) -> Trajectory:
        """Run the strategy on the problem in the emulated fleet, with one local step per trip."""
        fleet = emulated(strategy, seed)
        return descend(
            self.problem,
            strategy,
            self.versions,
            rate=self.local,
            durations=lambda draws, client: fleet.trip_s(client),
            seed=seed,
            devices=fleet.devices,
        )

    def ratios(self, out: Trajectory, same: float) -> tuple[float, float, Response]:
        """Return the ratios of measured to predicted descent and noise, and the model that predicts them.

        ``same`` is the mean number of times that a drawn update occurs in a version. It is 1 if clients are
        drawn without replacement.
        """
        problem, step = self.problem, self.server * self.local * self.problem.smoothness
        response = Response(out.delays, step)
        noise = (self.server * self.local) ** 2 * problem.variance * same / PARTICIPANTS
        return (
            out.mean_square(DESCENT) / response.descent(problem, self.versions),
            out.mean_square(NOISE) / response.risen(problem, self.versions, noise),
            response,
        )


def parts_of(found: Sequence[tuple[float, float, Response]]) -> list[Ratio]:
    """Return one `Ratio` for descent and one for noise, from the results of `Edge.ratios` for all seeds."""
    return [
        Ratio("descent", [descent for descent, *_ in found], 0.05),
        Ratio("noise", [noise for _, noise, _ in found], 0.12),
    ]


def largest_delay(strategy: Strategy, versions: int, seeds: Sequence[int]) -> int:
    """Return λ, the largest delay over runs of the emulated fleet with these seeds."""
    return max(int(delays_of(arrivals(strategy, versions, seed)[0]).max()) for seed in seeds)


def beyond(edge: Edge, strategy: Callable[[float], Strategy], largest: float, seed: int) -> bool:
    """Return True if the step size ``largest`` separates runs that converge from runs that diverge.

    Without noise, a run with 0.8 times this step size must end nearer to the optimum than it started, and a
    run with 1.25 times this step size must end farther away. ``strategy`` returns the strategy for a given η.
    """
    problem = edge.problem._replace(variance=0.0, spread=0.0)
    ends = []
    for part in (0.8, 1.25):
        server = part * largest / (edge.local * problem.smoothness)
        models = edge._replace(problem=problem, server=server).run(strategy(server), seed).models
        ends.append(float(np.abs(models[-100:, 0]).max()) / problem.distance)
    return ends[0] < 1.0 < ends[1]


def condition_13(quick: bool = False) -> Finding:
    """Run DeFedAvg-IID with step sizes of theorem 2 for which (13) is an equality at the measured λ."""
    versions, seeds = (300 if quick else 600), range(1, 2 if quick else 6)

    def strategy(server: float) -> Strategy:
        return DeFedAvgIID(buffer_size=PARTICIPANTS, server_lr=server, overlap=True)

    delay = largest_delay(strategy(1.0), versions, seeds)
    # With L = K = σ² = 1, choose F so that η·η̄ = √(nF/2)/√T is 1/(4λ).
    gap = versions / (8.0 * PARTICIPANTS * delay**2)
    problem = Quadratic(CLIENTS, distance=math.sqrt(2.0 * gap))
    edge = Edge(problem, versions, 1.0 / math.sqrt(versions), math.sqrt(PARTICIPANTS * gap / 2.0))
    runs = [edge.run(strategy(edge.server), seed) for seed in seeds]
    found = [edge.ratios(out, 1.0) for out in runs]
    parts = [out.mean_square() / iid_bound(out, versions, PARTICIPANTS, 1, units=True) for out in runs]
    largest = min(response.largest_step() for *_, response in found)
    return judged(
        "at (13)'s largest step size, with the measured λ, mean ‖∇F‖² is as the measured delays predict",
        f"{SOURCE}, condition (13), theorem 2",
        "at most the bound (14) if η·η̄ ≤ 1/(4LKλ)",
        parts_of(found),
        f"λ = {delay}; at most {max(parts):.2g} of the bound with F times L·σ²; the run diverges above "
        f"{largest / (edge.server * edge.local):.1f} times this step size",
        max(parts) <= 1.0
        and max(len(out.delays) - 1 for out in runs) == delay
        and edge.local <= 1.0 / (4.0 * math.sqrt(3.0))
        and beyond(edge, strategy, largest, 1),
    )


def step_limit(delay: int, variance: float, largest: float) -> float:
    """Return the upper limit that condition (11) sets for η·η̄ if L = K = 1 and G² = ``largest``."""
    return min(
        1.0 / (4.0 * delay),
        (2.0 * variance + largest) / (8.0 * variance * delay + 4.0 * largest * delay**2),
    )


def condition_11(quick: bool = False) -> Finding:
    """Run DeFedAvg-nIID with step sizes of theorem 1 for which (11) is an equality at the measured λ."""
    versions, seeds, largest = (150 if quick else 300), range(1, 2 if quick else 7), 1.0

    def strategy(server: float) -> Strategy:
        return DeFedAvgNIID(participants=PARTICIPANTS, server_lr=server)

    delay = largest_delay(strategy(1.0), versions, seeds)
    waits = largest_delay(DeFedAvgNIID(participants=PARTICIPANTS, pause=True), versions, seeds)
    # With L = K = σ² = 1, the step sizes are η̄ = 1/√((4 + 2G²)T) and η = √(4nF).
    local = 1.0 / math.sqrt((4.0 + 2.0 * largest) * versions)
    gap = (step_limit(delay, 1.0, largest) / local) ** 2 / (4.0 * PARTICIPANTS)
    problem = Quadratic(CLIENTS, distance=math.sqrt(2.0 * gap), spread=0.008)
    edge = Edge(problem, versions, local, math.sqrt(4.0 * PARTICIPANTS * gap))
    runs = [edge.run(strategy(edge.server), seed) for seed in seeds]
    found = [edge.ratios(out, 1.0 + (PARTICIPANTS - 1) / CLIENTS) for out in runs]
    added = (edge.server * local) ** 2 * problem.diversity / PARTICIPANTS
    shares = slice(NOISE.stop, None)
    sampled = [
        out.mean_square(shares) / response.risen(problem, versions, added)
        for out, (*_, response) in zip(runs, found, strict=True)
    ]
    parts = [out.mean_square() / niid_bound(out, versions, PARTICIPANTS, 1, largest) for out in runs]
    most = min(response.largest_step() for *_, response in found)
    fewer = (step_limit(delay, 1.0, largest) / step_limit(waits, 1.0, largest)) ** 2
    return judged(
        "at (11)'s largest step size, with the measured λ, mean ‖∇F‖² is as the measured delays predict",
        f"{SOURCE}, condition (11), theorem 1",
        "at most the bound (12) if η·η̄ is small for λ; T = Ω(nKλ⁴)",
        [*parts_of(found), Ratio("sampling", sampled, 0.3)],
        f"λ = {delay}; at most {max(parts):.2g} of the bound; the run diverges above "
        f"{most / (edge.server * local):.0f} times this step size; clients that wait have λ = {waits}, "
        f"for which (11) requires {fewer:,.0f} times as many versions",
        max(parts) <= 1.0
        and max(len(out.delays) - 1 for out in runs) == delay
        and max(out.squares.max() for out in runs) <= largest
        and local <= 0.125
        and beyond(edge, strategy, most, 1),
    )
