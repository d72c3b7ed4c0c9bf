"""A fleet whose clients take the time that a distribution says, driven through the real core: no learning.

The arrivals are those of a run of the same seed under the virtual clock on profiles with these delays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
