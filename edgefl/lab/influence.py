"""Fleets of fast and slow clients that learn nothing: their staleness and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from edgefl.core.events import Arrived, Event
from edgefl.devices.schema import Delay
from edgefl.experiment import Stop
from edgefl.lab.quadratic import play
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy
from edgefl.strategies.fedbuff import FedBuff
from edgefl.testing import MemoryRun

FAST = Delay(dist="uniform", low_s=1.0, high_s=2.0)
SLOW = Delay(dist="uniform", low_s=8.0, high_s=12.0)
FAST_ONES = range(10)
FEDSTALEWEIGHT = (FAST,) * 10 + (SLOW,) * 5
"""FedStaleWeight's fleet, section 6.2: ten fast clients and five slow ones."""


Shares: TypeAlias = npt.NDArray[np.float64]


class Outcome(NamedTuple):
    """The applied updates of `FEDSTALEWEIGHT`'s fleet, column by column."""

    client: npt.NDArray[np.int64]
    staleness: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float64]
    versions: int
    emulated_s: float

    @property
    def versions_with_slow(self) -> float:
        """The part of all versions whose buffer holds an update of a slow client: φ."""
        return float((self.client.reshape(self.versions, -1) >= len(FAST_ONES)).any(axis=1).mean())

    def applied(self) -> Shares:
        """By client: the weight that it had a version, times the number of clients."""
        clients = len(FEDSTALEWEIGHT)
        return np.asarray(np.bincount(self.client, self.weight, clients) * clients / self.versions)

    @property
    def share(self) -> npt.NDArray[np.float64]:
        """By client: its part of all applied weight, times the number of clients. 1 is fair (eq. 3)."""
        clients = len(FEDSTALEWEIGHT)
        return np.asarray(np.bincount(self.client, self.weight, clients) / self.weight.sum() * clients)


def simulate(
    strategy: Strategy,
    versions: int,
    seed: int = 0,
    *,
    slowed: float = 1.0,
    slow_by: float = 1.0,
    skip: int = 0,
    events: Sequence[Event] = (),
) -> Outcome:
    """Let `FEDSTALEWEIGHT`'s fleet train under ``strategy`` until there are so many versions.

    Client 0 takes ``slowed`` times as long as it would, each slow client ``slow_by`` times; the first
    ``skip`` versions do not count. ``events``, such as `Left`, come at their own times.
    """
    factors = [slowed, *[1.0] * (len(FAST_ONES) - 1), *[slow_by] * (len(FEDSTALEWEIGHT) - len(FAST_ONES))]
    run, now_s = arrivals(strategy, FEDSTALEWEIGHT, Stop(versions=versions), seed, factors, events=events)
    sums = run.sums[skip:]
    updates = [update for _, summed in sums for update in summed]
    return Outcome(
        np.array([update.client for update in updates]),
        np.array([update.staleness for update in updates]),
        np.concatenate([order.weights for order, _ in sums]),
        len(sums),
        now_s,
    )


def arrivals(
    strategy: Strategy,
    delays: Sequence[Delay],
    stop: Stop,
    seed: int,
    factors: Sequence[float] | None = None,
    **how: object,
) -> tuple[MemoryRun, float]:
    """A run whose clients learn nothing and take ``factors`` times what ``delays`` say, and its end, s."""

    def duration(client: int, trip: int) -> float:
        drawn = delays[client].draw(stream(seed, "trip", client, trip))
        return drawn if factors is None else drawn * factors[client]

    return play(strategy, len(delays), stop, duration, seed, train=lambda client, model, trip: model, **how)


def gains_of_slowing(
    strategy: Strategy, slowed: Sequence[float], versions: int, seed: int = 0
) -> list[float]:
    """The share of a fast client that takes so many times as long, over the one that it has otherwise.

    Not above 1: slowing down does not pay (strategy-proofness, section 4.2.1).
    """
    factors = (1.0, *slowed)
    honest, *slow = (simulate(strategy, versions, seed, slowed=factor).share[0] for factor in factors)
    return [float(share / honest) for share in slow]


class Stale(NamedTuple):
    """The first arrivals of a run, in order."""

    staleness: npt.NDArray[np.int64]
    """−1 for one that was not applied."""
    started: npt.NDArray[np.int64]
    """The number of updates that had arrived when its trip began."""


def staleness_by_buffer(delays: Sequence[Delay], sizes: Sequence[int], trips: int) -> dict[int, Stale]:
    """The staleness of each of the first ``trips`` arrivals, for each buffer size: FedBuff's appendix A.

    The same trips arrive in the same order whatever the buffer, so τ_K ≤ ⌈τ_1/K⌉ can be held against each.
    """
    full = min(trips // size * size for size in sizes)  # so many are in a full buffer, whatever its size
    found = {}
    for size in sizes:
        run, _ = arrivals(FedBuff(buffer_size=size), delays, Stop(trips=trips), seed=0)
        applied = {update.task: update.staleness for _, updates in run.sums for update in updates}
        order = [event for event in run.events if isinstance(event, Arrived)][:full]
        stale = [applied.get(event.task, -1) for event in order]
        last, started = dict.fromkeys(range(len(delays)), 0), []
        for number, event in enumerate(order, 1):
            started.append(last[event.client])
            last[event.client] = number
        found[size] = Stale(np.array(stale, np.int64), np.array(started, np.int64))
    return found
