"""Tests theorems of the papers by measurements on edgefl's core, with tiny models and without data.

This module measures staleness, fairness and strategy-proofness in fleets in which the distribution of trip
durations is known. Updates arrive as in a run with the same seed under the virtual clock. Other modules of
`edgefl.lab` contain the other tests: `incentive` tests equations 9 and 1 of FedStaleWeight, `stragglers` the
durations of rounds and of FedBuff's updates, `short_batches` FedBuff's learning-rate normalisation,
`convergence` the convergence theorems, `unbounded` and `logistic` the theorem of Toghani and Uribe, and
`delays` the delays in DeFedAvg's fleet. Each verdict depends on values that the theory determines, so that a
wrong implementation fails. The test suite tries several wrong implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from edgefl.core.events import Event, Joined, Left
from edgefl.devices.schema import Delay
from edgefl.experiment import Stop
from edgefl.lab import convergence, delays, incentive, short_batches, stragglers, unbounded
from edgefl.lab.convergence import RATES, Ratio, composition, fair_weights, judged, worst
from edgefl.lab.influence import (
    FAST_ONES,
    FEDSTALEWEIGHT,
    Outcome,
    Shares,
    gains_of_slowing,
    simulate,
    staleness_by_buffer,
)
from edgefl.lab.logistic import logistic
from edgefl.lab.quadratic import play
from edgefl.lab.study import Finding
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight

TITLE = "What the papers prove, measured"
CITATION = "Nguyen 2022 (app. A); Toghani and Uribe 2022 (theorem 1); Ma 2024 (theorem 1, §4.2.1); Wang 2024"

PAPERS_B: dict[str, Any] = {"buffer_size": 5, "restart": "immediate"}
"""Settings of FedStaleWeight with the buffer size b of the paper. Clients restart immediately, as the
derivation in the paper assumes."""
UNCAPPED: dict[str, Any] = {**PAPERS_B, "normalize": "running", "max_step": 1e9}
WAITING: dict[str, Any] = {**UNCAPPED, "restart": "after-step"}
"""The settings `UNCAPPED`, but with the restart rule of appendix A and of the experiments in the paper."""
SLOWED = (1.5, 2.0, 4.0)
LARGER = (2, 4, 8)
SKIP = 200
"""Number of versions at the start that are ignored, because slow clients have not yet sent an update."""


def findings(*, quick: bool, say: Callable[[str], None]) -> list[Finding]:
    found = []
    for judge in FINDINGS:
        found.append(judge(quick))
        say(f"{found[-1].source}: {found[-1].claim}")
    return found


# ---- findings ----------------------------------------------------------------------------------


def staleness_over_k(quick: bool = False) -> Finding:
    """Test FedBuff, appendix A: compare the staleness of each update with a separate count.

    The count is the number of versions between the start of the trip and the arrival of its update.
    """
    delays = [Delay(dist="uniform", low_s=low_s, high_s=1.2 * low_s) for low_s in np.linspace(1.0, 10.0, 20)]
    seen = staleness_by_buffer(delays, (1, *LARGER), (50 if quick else 1_000) * len(delays))
    one = seen[1].staleness
    numbers = np.arange(len(one))
    exact = all(
        bool((stale == numbers // size - started // size).all()) for size, (stale, started) in seen.items()
    )
    shrinks = all(bool((seen[size].staleness <= -(-one // size)).all()) for size in LARGER)
    means = [seen[size].staleness.mean() * size / one.mean() for size in LARGER]
    return judged(
        "staleness shrinks by K: τ_K ≤ ⌈τ_1/K⌉ for every trip",
        "Nguyen 2022, appendix A",
        "every trip",
        [worst("mean · K divided by the mean for K = 1", [means], 0.05)],
        f"{'every' if exact and shrinks else 'not every'} one of {len(one):,} trips is within the bound and "
        f"agrees with a separate count; K = {', '.join(map(str, LARGER))}",
        exact and shrinks,
    )


def fixed_delay(quick: bool = False) -> Finding:
    """Simulate n equal clients that never wait, with K = 1, so that every update is n − 1 versions stale.

    The error follows e_{t+1} = e_t − s(τ)·η·e_{t−τ}, so it falls by a factor z per version, where
    z^{τ+1} = z^τ − s(τ)·η.
    """
    rate, versions, delays = 0.05, 600, (0, 1, 3, 8)
    found = []
    for delay in delays:
        run, _ = play(
            FedBuff(buffer_size=1),
            delay + 1,
            Stop(versions=versions),
            [1.0] * (delay + 1),
            model=np.ones(1),
            train=lambda client, model, trip: model - rate * model,
        )
        half = versions // 2
        measured = math.log(abs(run.models[half][0] / run.models[versions][0])) / (versions - half)
        found.append(measured / -math.log(_root(delay, rate * (1.0 + delay) ** -0.5)))
    return judged(
        "the model's path under a fixed delay, s(τ) = (1 + τ)^−½",
        "Nguyen 2022, algorithm 1 and section 5",
        "falls by z, z^{τ+1} = z^τ − s(τ)·η",
        [worst("rate", [found], 1e-3)],
        f"τ = {', '.join(map(str, delays))}",
    )


def _root(delay: int, step: float) -> float:
    """Return the error's factor per version: the largest |z| with z^{τ+1} − z^τ + a = 0 for a = ``step``."""
    roots = np.roots([1.0, -1.0, *[0.0] * (delay - 1), step] if delay else [1.0, step - 1.0])
    return float(np.abs(roots).max())


def expected_staleness(quick: bool = False) -> Finding:
    """Compare the measured staleness with the value of equation 6 for the clients' mean update rates."""
    rates, size = np.array(RATES), PAPERS_B["buffer_size"]

    def ratio(seen: Outcome) -> Shares:
        mean = np.bincount(seen.client, seen.staleness) / np.bincount(seen.client)
        return np.asarray(mean / ((rates.sum() / rates - 1.0) / size))

    return judged(
        "expected staleness is (Σ r_j/r_i − 1)/b",
        "Ma 2024, equation 6",
        "fast 1.95, slow 14.13",
        [_groups("staleness", FedStaleWeight(**PAPERS_B), ratio, 0.01, quick)],
    )


def waiting_staleness(quick: bool = False) -> Finding:
    """Test equation 6 of FedStaleWeight for clients that wait for the next version before they restart.

    Client i then contributes an update to one in E[τ_i] + 1 versions.
    """

    def ratio(seen: Outcome) -> Shares:
        number = np.bincount(seen.client)
        return np.asarray(number / seen.versions * (np.bincount(seen.client, seen.staleness) / number + 1.0))

    strategy = FedStaleWeight(**WAITING)
    return judged(
        "a client that waits for the step is in 1 of E[τ_i] + 1 versions; the weight E[τ_i] + 1 gives it 1/n",
        "Ma 2024, appendix A and algorithm 1",
        "1 of E[τ_i] + 1 versions; 1/n of the weight",
        [
            _groups("updates per version · (E[τ] + 1)", strategy, ratio, 0.01, quick),
            _groups("weight · n", strategy, Outcome.applied, 0.02, quick),
        ],
        "not normalised inside a buffer",
    )


def fair_influence(quick: bool = False) -> Finding:
    """Test equations 7 and 8 without normalisation in each buffer.

    FedStaleWeight runs with ``normalize="running"`` and unbounded steps.
    """
    return judged(
        "b·E[τ_i] + 1 gives each client 1/n of the weight",
        "Ma 2024, equations 3, 7 and 8",
        "1/n of the weight, which is 1 per version",
        [_groups("weight · n", FedStaleWeight(**UNCAPPED), Outcome.applied, 0.03, quick)],
        "not normalised inside a buffer",
    )


def normalized_influence(quick: bool = False) -> Finding:
    """Compare the clients' shares of the weight with predictions from the composition of the buffers.

    Weights are normalised in each buffer, as in section 4.2.1.
    """
    size = PAPERS_B["buffer_size"]
    made, plain = (composition(RATES, size, raw).shares for raw in (fair_weights(RATES), [1.0] * len(RATES)))

    def ratio(seen: Outcome) -> Shares:
        return np.asarray(seen.applied() / np.array(made))

    return judged(
        "normalising inside each buffer distorts fairness as much as the buffers' composition predicts",
        "Ma 2024, equation 3 and section 4.2.1",
        f"fast {made[0]:.2f}/n, slow {made[-1]:.2f}/n",
        [_groups("weight · n", FedStaleWeight(**PAPERS_B), ratio, 0.05, quick)],
        f"fairer than averaging: {plain[0]:.2f}/n, {plain[-1]:.2f}/n",
    )


def _groups(
    name: str, strategy: Strategy, ratio: Callable[[Outcome], Shares], within: float, quick: bool
) -> Ratio:
    """Return the mean ratio of the fast clients or of the slow clients, whichever is farther from 1."""
    rows = []
    for seed in range(1, 3 if quick else 6):
        found = ratio(simulate(strategy, 2_000 if quick else 10_000, seed, skip=SKIP))
        rows.append([float(found[:10].mean()), float(found[10:].mean())])
    return worst(f"{name}, fast or slow", rows, within)


def slowing_down(quick: bool = False) -> Finding:
    """Measure how much weight a client loses by slowing down, and compare the loss with the theory.

    The theory predicts no loss for raw weights, and a known loss for normalised weights.
    """
    size = PAPERS_B["buffer_size"]
    versions, seeds = (2_000, [1]) if quick else (10_000, [1, 2, 3, 4, 5, 6])
    rates = [(RATES[0] / factor, *RATES[1:]) for factor in (1.0, *SLOWED)]
    shares = [composition(each, size, fair_weights(each)).shares[0] for each in rates]
    paper = [gains_of_slowing(FedStaleWeight(**PAPERS_B), SLOWED, versions, seed) for seed in seeds]
    fair = [gains_of_slowing(FedStaleWeight(**UNCAPPED), SLOWED, versions, seed) for seed in seeds]
    ratios = [
        [gain / (share / shares[0]) for gain, share in zip(row, shares[1:], strict=True)] for row in paper
    ]
    means = ", ".join(f"{gain:.2f}×" for gain in np.mean(paper, axis=0))
    return judged(
        "a fast client that slows itself down gains no weight",
        "Ma 2024, sections 4.1 and 4.2.1",
        "1× before normalisation, less after it",
        [worst("gain before", fair, 0.05), worst("gain after", ratios, 0.05)],
        f"gain after normalisation, {'×, '.join(f'{by:g}' for by in SLOWED)}× slower: {means}; n = 15",
    )


# ---- fairest weights under a bounded step, for the tables in docs/findings.md (`benchmarks.frontier`) ----
#
# The weights of a version add up to at most c. If a group of clients has updates in a share φ of all
# versions, no strategy can therefore give the group more than the weight c·φ per version. If c·φ is less than
# the group's share of all clients, no weights are fair.


class Short(NamedTuple):
    """Weight of slow clients with a cap on the sum of weights, divided by their weight without a cap.

    Each list contains one value per seed.
    """

    most: list[float]
    """Upper bound on the slow clients' ratio, derived from the weight c·φ per version and capped at 1."""
    running: list[float]
    credit: list[float]
    owed: list[float]
    """Largest final credit of a client, in units of the fair weight of one of its updates.

    Credit is weight that the cap withheld from the client.
    """


def measure(cap: float, slow_by: float, versions: int, seeds: Sequence[int], churn: bool = False) -> Short:
    """Run FedStaleWeight with ``normalize`` "running" and "credit" on the fleet of its paper.

    Each slow client is slowed down by the factor ``slow_by``, and ``cap`` limits the sum of a version's
    weights. Clients restart immediately, as in equation 6, so that without a cap each client gets 1/n of the
    weight.
    """
    seen = Short([], [], [], [])
    slow = slice(len(FAST_ONES), None)
    capped = {**PAPERS_B, "max_step": cap}
    forms = ({**capped, "normalize": "running"}, {**capped, "normalize": "credit"}, UNCAPPED)
    strategies = [FedStaleWeight(**form) for form in forms]
    for seed in seeds:
        events = comings_and_goings(versions, seed) if churn else ()
        run = [simulate(one, versions, seed, slow_by=slow_by, events=events) for one in strategies]
        running, credit, fair = (each.applied() for each in run)
        room = cap * run[1].versions_with_slow * len(FEDSTALEWEIGHT)
        seen.most.append(min(1.0, room / float(fair[slow].sum())))
        seen.running.append(float(running[slow].sum() / fair[slow].sum()))
        seen.credit.append(float(credit[slow].sum() / fair[slow].sum()))
        updates = np.bincount(run[1].client, minlength=len(fair))
        seen.owed.append(float(((fair - credit) / fair * updates).max()))
    return seen


def comings_and_goings(versions: int, seed: int) -> list[Event]:
    """Return events that take each client offline for Exp(10) s at a time.

    On average, each client is offline for a fifth of the time.
    """
    events: list[Event] = []
    for client in range(len(FEDSTALEWEIGHT)):
        draws, now_s = stream(seed, "churn", client), 0.0
        while now_s < versions:
            gone_s = now_s + float(draws.exponential(40.0))
            now_s = gone_s + float(draws.exponential(10.0))
            events += [Left(client, gone_s, "churn"), Joined(client, now_s)]
    return events


def credit_reaches_it(quick: bool = False) -> Finding:
    """Compare two forms of FedStaleWeight whose weights may add up to at most c = 2 per version.

    With ``normalize`` "running", the weight above the limit is lost; with "credit", it is added to later
    versions. Some of the fleets allow fair weights under this limit, and some do not.
    """
    versions, seeds = (2_000, (1,)) if quick else (8_000, (1, 2, 3))
    rows = [measure(2.0, slow_by, versions, seeds) for slow_by in (1.0, 1.5, 4.0)]
    ratios = [[one.credit[at] / one.most[at] for one in rows] for at in range(len(seeds))]
    plain, paid = (
        ", ".join(f"{1.0 - sum(values) / len(values):.0%}" for values in each)
        for each in ([one.running for one in rows], [one.credit for one in rows])
    )
    return judged(
        "with credit, slow clients get 1/n each, or the most that any weights can give under max_step = 2",
        "ours, beyond the paper",
        "at most c·φ per version, where φ is the share of versions with their updates",
        [worst("weight of slow clients", ratios, 0.04)],
        f"slow clients 1, 1.5, 4 times slower: {paid} short of 1/n; running form {plain}",
        max(map(max, ratios)) <= 1.0 + 1e-9,
    )


FINDINGS: tuple[Callable[[bool], Finding], ...] = (
    staleness_over_k,
    fixed_delay,
    convergence.fedbuff,
    convergence.fedbuff_as_printed,
    short_batches.lr_normalization,
    stragglers.times,
    unbounded.toghani_uribe,
    unbounded.remark_1,
    unbounded.remark_2,
    unbounded.unequal_batches,
    unbounded.not_uniform,
    delays.transfers,
    logistic,
    expected_staleness,
    waiting_staleness,
    fair_influence,
    normalized_influence,
    slowing_down,
    incentive.throttling,
    incentive.any_target,
    credit_reaches_it,
    convergence.fedstaleweight,
    convergence.fedstaleweight_as_printed,
    convergence.defedavg_iid,
    convergence.defedavg_iid_as_printed,
    convergence.defedavg_niid,
    delays.delays_iid,
    delays.delays_niid,
    delays.condition_13,
    delays.condition_11,
)
