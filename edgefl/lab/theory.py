"""The papers' theorems, measured on the real core, with vectors of a few numbers and no data.

Toghani and Uribe's bound for FedBuff (arXiv:2210.01161) is held against problems whose constants can be
computed. Fairness, strategy-proofness and staleness are read off fleets whose clients take the time that a
distribution says: their arrivals are those of a run of the same seed under the virtual clock on profiles with
these delays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Arrived
from edgefl.devices.schema import Delay
from edgefl.lab.study import Finding, verdict
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy
from edgefl.strategies.defedavg_iid import DeFedAvgIID
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import MemoryRun, Vector, fleet, run_in_memory

Doubles = npt.NDArray[np.float64]

TITLE = "What the papers prove, measured"
CITATION = "Nguyen 2022 (app. A); Toghani and Uribe 2022 (theorem 1); Ma 2024 (theorem 1, §4.2.1); Wang 2024"

FAST_CLIENTS = 10
"""The first clients of FedStaleWeight's fleet."""
BOTH: dict[str, Any] = {"buffer_size": 5, "restart": "new-version"}
FAIR = 0.05
SLOWED = (1.5, 2.0, 4.0)
NO_GAIN = 0.03
"""The gain that may be chance over these versions."""
LARGER = (2, 4, 8)
SKIP = 200
"""Versions until the slow agents have been heard: fairness is of the long run."""


def findings(*, quick: bool, say: Callable[[str], None]) -> list[Finding]:
    """Every claim with its verdict."""
    lengths = (8_000, 32_000) if quick else (8_000, 32_000, 128_000)
    found = []
    for make in (quadratic, logistic):
        problem = make(seed=1)
        found.append(_bound(problem, [bounded_run(problem, versions, seed=2) for versions in lengths]))
        say(f"bound, {problem.name}: {len(lengths)} runs")
    found.append(_staleness(100 if quick else 1_000))
    say("staleness over K")
    found += _fairness(1_500 if quick else 6_000)
    say("weights and fairness of FedStaleWeight")
    found.append(_speedup(400 if quick else 2_000))
    say("linear speedup of DeFedAvg")
    return found


def _bound(problem: Problem, points: list[Point]) -> Finding:
    least = max(least_versions(problem, point.staleness) for point in points)
    first, last = points[0], points[-1]
    slope = math.log(last.measured / first.measured) / math.log(last.versions / first.versions)
    holds = all(point.measured <= point.bound for point in points)
    reach = points[0].versions >= least
    return Finding(
        f"mean ‖∇f‖² stays under the bound and falls like 1/√T, {problem.name}",
        "Toghani and Uribe, theorem 1",
        f"T ≥ {least:,}; slope −½",
        f"at most {max(p.measured / p.bound for p in points):.2g} of it; slope {slope:.2f}",
        verdict(holds and slope <= -0.4) if reach else "out of reach",
        f"T from {first.versions:,} to {last.versions:,}, τ up to {max(p.staleness for p in points)}",
    )


def _staleness(trips_each: int) -> Finding:
    """τ_K ≤ ⌈τ_1/K⌉ trip by trip on the same arrivals, and the means' ratio."""
    clients = 20
    delays = [Delay(dist="uniform", low_s=one, high_s=1.2 * one) for one in np.linspace(1.0, 10.0, clients)]
    seen = staleness_by_buffer(delays, (1, *LARGER), trips_each * clients)
    one = seen[1]
    exact = all(bool((seen[size] <= -(-one // size)).all()) for size in LARGER)
    ratios = [float(seen[size].mean() * size / one.mean()) for size in LARGER]
    return Finding(
        "staleness shrinks by K: τ_K ≤ ⌈τ_1/K⌉ for every trip",
        "Nguyen 2022, appendix A",
        "every trip",
        f"{'every' if exact else 'not every'} one of {len(one):,} trips; mean · K over that of K = 1: "
        + ", ".join(f"{ratio:.2f}" for ratio in ratios),
        verdict(exact),
        f"K = {', '.join(map(str, LARGER))}",
    )


def _fairness(versions: int) -> list[Finding]:
    def share_of(strategy: Strategy) -> Doubles:
        return simulate(strategy, versions, skip=SKIP).share

    def groups(share: Doubles) -> str:
        return f"fast {share[:FAST_CLIENTS].mean():.2f}, slow {share[FAST_CLIENTS:].mean():.2f}"

    buff, plain = share_of(FedBuff(**BOTH)), share_of(FedBuff(exponent=0.0, **BOTH))
    paper = simulate(FedStaleWeight(**BOTH), versions, skip=SKIP)
    fair = FedStaleWeight(normalize="running", **BOTH)
    running = share_of(fair)
    off = [abs(part.mean() - 1) for part in (running[:FAST_CLIENTS], running[FAST_CLIENTS:])]
    low, high = weight_bounds(BOTH["buffer_size"], paper.largest_staleness)
    inside = bool((paper.weights >= low).all() and (paper.weights <= high).all())
    gains = {
        name: [gain_of_slowing(each, slowed, versions) for slowed in SLOWED]
        for name, each in (("paper's form", FedStaleWeight(**BOTH)), ("running form", fair))
    }
    return [
        Finding(
            "fairer than FedBuff and averaging on the same arrivals, applied weight · n",
            "Ma 2024, eq. 3",
            "1 for every client",
            f"{groups(paper.share)}; FedBuff: {groups(buff)}; averaging: {groups(plain)}",
            verdict(_unfair(paper.share) < min(_unfair(buff), _unfair(plain))),
        ),
        Finding(
            "the running form is fair to 5%",
            "ours, beyond the paper",
            "1 for every client",
            f"{groups(running)}; worst client {np.abs(running - 1).max():.1%} off",
            verdict(bool(max(off) <= FAIR)),
        ),
        Finding(
            "every normalised weight lies within the bounds",
            "Ma 2024, theorem 1",
            f"{low:.4f} to {high:.4f} at τ_max = {paper.largest_staleness}",
            f"{paper.weights.min():.4f} to {paper.weights.max():.4f}, {paper.weights.size:,} weights",
            verdict(inside),
        ),
        Finding(
            "a fast client that slows itself down gains no weight",
            "Ma 2024, section 4.2.1",
            "at most 1× as n grows",
            "; ".join(f"{name} {', '.join(f'{gain:.2f}×' for gain in row)}" for name, row in gains.items()),
            verdict(all(gain <= 1 + NO_GAIN for row in gains.values() for gain in row)),
            f"at {', '.join(f'{slowed:g}×' for slowed in SLOWED)} slower, to {NO_GAIN:.0%}; "
            f"n = {len(FEDSTALEWEIGHT)}",
        ),
    ]


def _unfair(share: Doubles) -> float:
    return float(np.abs(share - 1).mean())


def _speedup(rounds: int) -> Finding:
    """Mean ‖∇f‖² of DeFedAvg-IID after the same rounds, for n, 2n, 4n, 8n participants at the tuned step."""
    size, noise, clients = 8, 1.0, 64
    errors: dict[int, float] = {}
    for participants in (4, 8, 16, 32):
        rate = 0.5 * math.sqrt(participants / rounds)
        rngs = [stream(5, "noise", client, participants) for client in range(clients)]
        delays = [stream(5, "delay", client) for client in range(clients)]

        def step(client: int, w: Any, trip: int, rate: float = rate, rngs: Any = rngs) -> Any:
            return w - rate * (w + noise * rngs[client].normal(size=size))

        core = Core(
            DeFedAvgIID(buffer_size=participants),
            fleet(clients),
            0,
            experiment.Stop(versions=rounds),
            10**9,
        )
        done = run_in_memory(
            core,
            lambda client, trip, delays=delays: float(delays[client].exponential()),  # type: ignore[misc]
            model=np.full(size, 1.0),
            train=step,
            max_events=10 * participants * rounds + 10_000,
        )
        errors[participants] = float(np.mean([w @ w for w in done.models]))
    n = np.log(list(errors))
    slope = float(np.polyfit(n, np.log(list(errors.values())), 1)[0])
    return Finding(
        "error falls like 1/√(nT): twice the participants, half the rounds",
        "Wang 2024, linear speedup",
        "slope −½ over n",
        f"slope {slope:.2f} from n = {min(errors)} to {max(errors)}",
        verdict(-0.65 <= slope <= -0.35),
        f"T = {rounds:,} rounds, step ∝ √(n/T)",
    )


# ---- Toghani and Uribe's bound -----------------------------------------------------------------

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


# ---- arrivals ----------------------------------------------------------------------------------

FAST = Delay(dist="uniform", low_s=1.0, high_s=2.0)
SLOW = Delay(dist="uniform", low_s=8.0, high_s=12.0)
FEDSTALEWEIGHT = (FAST,) * 10 + (SLOW,) * 5
"""FedStaleWeight's fleet, section 6.2: ten fast clients and five slow ones."""


class Outcome(NamedTuple):
    """The updates that a fleet's arrivals led to."""

    share: Doubles
    """By client: its part of all applied weight, times the number of clients. 1 is fair (eq. 3)."""
    staleness: Doubles
    """By client: the mean staleness of its applied updates."""
    step: float
    """Mean sum of the weights of a version."""
    emulated_s: float
    weights: Doubles
    """By applied update."""
    largest_staleness: int


def simulate(
    strategy: Strategy, versions: int, seed: int = 0, *, slowed: float = 1.0, skip: int = 0
) -> Outcome:
    """Let `FEDSTALEWEIGHT`'s fleet train under ``strategy`` until there are so many versions.

    Client 0 takes ``slowed`` times as long as it would; the first ``skip`` versions do not count.

    >>> slow = simulate(FedBuff(exponent=0.0), versions=400).share[10:]
    >>> bool((slow < 0.3).all())
    True
    """
    run, core = _run(strategy, FEDSTALEWEIGHT, experiment.Stop(versions=versions), seed, slowed)
    sums, clients = run.sums[skip:], len(FEDSTALEWEIGHT)
    updates = [update for _, summed in sums for update in summed]
    client = np.array([update.client for update in updates])
    staleness = np.array([update.staleness for update in updates])
    weight = np.concatenate([order.weights for order, _ in sums])
    with np.errstate(invalid="ignore"):  # a client without an update has no staleness: NaN
        mean = np.bincount(client, staleness, clients) / np.bincount(client, minlength=clients)
    return Outcome(
        share=np.bincount(client, weight, clients) / weight.sum() * clients,
        staleness=mean,
        step=float(weight.sum() / len(sums)),
        emulated_s=core.now_s,
        weights=weight,
        largest_staleness=int(staleness.max()),
    )


def gain_of_slowing(strategy: Strategy, slowed: float, versions: int, seed: int = 0) -> float:
    """The share of a fast client that takes ``slowed`` times as long, over the one that it has otherwise.

    Not above 1: slowing down does not pay (strategy-proofness, section 4.2.1).
    """
    honest, slow = (simulate(strategy, versions, seed, slowed=factor) for factor in (1.0, slowed))
    return float(slow.share[0] / honest.share[0])


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
        run, _ = _run(FedBuff(buffer_size=size), delays, experiment.Stop(trips=trips), seed)
        applied = {update.task: update.staleness for _, updates in run.sums for update in updates}
        order = [event.task for event in run.events if isinstance(event, Arrived)][:full]
        found[size] = np.array([applied[task] for task in order], np.int64)
    return found


def _run(
    strategy: Strategy, delays: Sequence[Delay], stop: experiment.Stop, seed: int, slowed: float = 1.0
) -> tuple[MemoryRun, Core]:
    def duration(client: int, trip: int) -> float:
        drawn = delays[client].draw(stream(seed, "trip", client, trip))
        return drawn * slowed if client == 0 else drawn

    def same(client: int, model: Vector, trip: int) -> Vector:
        return model

    core = Core(strategy, fleet(len(delays)), seed, stop, evaluate_every=10**9)
    return run_in_memory(core, duration, train=same, max_events=10**9), core


def weight_bounds(buffer_size: int, largest_staleness: float) -> tuple[float, float]:
    """Theorem 1's bounds of a weight: 1/((b − 1)(b·τ_max + 1) + 1) and (b·τ_max + 1)/(b(τ_max + 1)).

    The lower is reached by one fresh update among the stalest, the upper by the stalest among fresh ones.

    >>> weight_bounds(5, 0.0), weight_bounds(5, 4.0)[1]
    ((0.2, 0.2), 0.84)
    """
    most = buffer_size * largest_staleness + 1.0
    return 1.0 / ((buffer_size - 1) * most + 1.0), most / (buffer_size * (largest_staleness + 1.0))
