"""What the papers prove, measured: on the real core, with vectors of a few numbers and no data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl import experiment
from edgefl.core import Core
from edgefl.devices.schema import Delay
from edgefl.lab import theorems
from edgefl.lab.study import Finding, verdict
from edgefl.lab.theorems import (
    FEDSTALEWEIGHT,
    Outcome,
    gain_of_slowing,
    simulate,
    staleness_by_buffer,
    weight_bounds,
)
from edgefl.results.page import Canvas, Key, Picture, colour, house_style, series
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy
from edgefl.strategies.defedavg_iid import DeFedAvgIID
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import fleet, run_in_memory

TITLE = "What the papers prove, measured"
CITATION = "Nguyen 2022 (app. A); Toghani and Uribe 2022 (theorem 1); Ma 2024 (theorem 1, §4.2.1); Wang 2024"

FAST, SLOW = slice(0, 10), slice(10, 15)
BOTH: dict[str, Any] = {"buffer_size": 5, "restart": "new-version"}
FAIR = 0.05
SLOWED = (1.5, 2.0, 4.0)
NO_GAIN = 0.03
"""So much is chance over these versions."""
LARGER = (2, 4, 8)
SKIP = 200
"""Versions until the slow agents have been heard: fairness is of the long run."""


def findings(
    *, quick: bool, say: Callable[[str], None]
) -> tuple[list[Finding], list[tuple[str, str, Picture]]]:
    """Every claim with its verdict, and the pictures of those that have a curve."""
    lengths = (8_000, 32_000) if quick else (8_000, 32_000, 128_000)
    curves = []
    for make in (theorems.quadratic, theorems.logistic):
        problem = make(seed=1)
        curves.append((problem, [theorems.bounded_run(problem, versions, seed=2) for versions in lengths]))
        say(f"bound, {problem.name}: {len(lengths)} runs")
    found = [_bound(problem, points) for problem, points in curves]
    found.append(_staleness(100 if quick else 1_000))
    say("staleness over K")
    found += _fairness(1_500 if quick else 6_000)
    say("weights and fairness of FedStaleWeight")
    speedup, errors = _speedup(400 if quick else 2_000)
    say("linear speedup of DeFedAvg")
    pictures = [
        ("Both sides of the bound", "Dots: mean ‖∇f‖² of a run of T versions; lines: the bound.",
         _bound_picture(curves)),
        ("Error over participants", "Dots: DeFedAvg-IID after the same rounds; line: 1/√n.",
         _speedup_picture(errors)),
    ]  # fmt: skip
    return [*found, speedup], pictures


def _bound(problem: theorems.Problem, points: list[theorems.Point]) -> Finding:
    least = max(theorems.least_versions(problem, point.staleness) for point in points)
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
    def share_of(strategy: Strategy) -> Outcome:
        return simulate(strategy, FEDSTALEWEIGHT, versions, skip=SKIP)

    buff, plain = share_of(FedBuff(**BOTH)).share, share_of(FedBuff(exponent=0.0, **BOTH)).share
    paper = share_of(FedStaleWeight(**BOTH))
    fair = FedStaleWeight(normalize="running", **BOTH)
    running = share_of(fair).share
    groups = {
        name: f"fast {share[FAST].mean():.2f}, slow {share[SLOW].mean():.2f}"
        for name, share in (
            ("FedBuff", buff),
            ("averaging", plain),
            ("paper", paper.share),
            ("running", running),
        )
    }
    low, high = weight_bounds(BOTH["buffer_size"], paper.largest_staleness)
    inside = bool((paper.weights >= low).all() and (paper.weights <= high).all())
    gains = {
        name: [gain_of_slowing(each, FEDSTALEWEIGHT, 0, slowed, versions) for slowed in SLOWED]
        for name, each in (("paper's form", FedStaleWeight(**BOTH)), ("running form", fair))
    }
    return [
        Finding(
            "fairer than FedBuff and averaging on the same arrivals, applied weight · n",
            "Ma 2024, eq. 3",
            "1 for every client",
            f"{groups['paper']}; FedBuff: {groups['FedBuff']}; averaging: {groups['averaging']}",
            verdict(_unfair(paper.share) < min(_unfair(buff), _unfair(plain))),
        ),
        Finding(
            "the running form is fair to 5%",
            "ours, beyond the paper",
            "1 for every client",
            f"{groups['running']}; worst client {np.abs(running - 1).max():.1%} off",
            verdict(bool(abs(running[FAST].mean() - 1) <= FAIR and abs(running[SLOW].mean() - 1) <= FAIR)),
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


def _unfair(share: NDArray[np.float64]) -> float:
    return float(np.abs(share - 1).mean())


def _speedup(rounds: int) -> tuple[Finding, dict[int, float]]:
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
    return (
        Finding(
            "error falls like 1/√(nT): twice the participants, half the rounds",
            "Wang 2024, linear speedup",
            "slope −½ over n",
            f"slope {slope:.2f} from n = {min(errors)} to {max(errors)}",
            verdict(-0.65 <= slope <= -0.35),
            f"T = {rounds:,} rounds, step ∝ √(n/T)",
        ),
        errors,
    )


@house_style
def _bound_picture(curves: list[tuple[theorems.Problem, list[theorems.Point]]]) -> Picture:
    canvas = Canvas()
    axes, keys = canvas.axes, []
    for k, (problem, points) in enumerate(curves):
        x = [point.versions for point in points]
        axes.loglog(x, [point.bound for point in points], color=colour(series(k)), linewidth=1.4)
        (dots,) = axes.loglog(x, [point.measured for point in points], "o", color=colour(series(k)))
        canvas.tip(dots, f"{problem.name}: measured")
        keys.append(Key(series(k), problem.name))
    axes.set_xlabel("versions T")
    return Picture(canvas.svg("Measured gradient norms under the bound"), tuple(keys))


@house_style
def _speedup_picture(errors: dict[int, float]) -> Picture:
    canvas = Canvas()
    x, y = list(errors), list(errors.values())
    canvas.axes.loglog(x, y, "o", color=colour("c1"))
    canvas.axes.loglog(x, [y[0] * math.sqrt(x[0] / n) for n in x], color=colour("c2"), linewidth=1.4)
    canvas.axes.set_xlabel("participants n")
    keys = (Key("c1", "measured"), Key("c2", "1/√n from the first"))
    return Picture(canvas.svg("Error over participants"), keys)
