"""Measures staleness and weights in fleets of fast and slow clients that train nothing."""

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
"""FedStaleWeight's fleet, section 6.2: ten fast and five slow clients."""


Shares: TypeAlias = npt.NDArray[np.float64]


class Outcome(NamedTuple):
    """Columns of the applied updates of `FEDSTALEWEIGHT`'s fleet."""

    client: npt.NDArray[np.int64]
    staleness: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float64]
    versions: int
    emulated_s: float

    @property
    def versions_with_slow(self) -> float:
        """φ: share of versions whose buffer has an update of a slow client."""
        return float((self.client.reshape(self.versions, -1) >= len(FAST_ONES)).any(axis=1).mean())

    def applied(self) -> Shares:
        """Return each client's weight per version, times the number of clients."""
        clients = len(FEDSTALEWEIGHT)
        return np.asarray(np.bincount(self.client, self.weight, clients) * clients / self.versions)

    @property
    def share(self) -> npt.NDArray[np.float64]:
        """Share of all applied weight, times the number of clients, by client; 1 is fair (eq. 3)."""
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
    """Run `FEDSTALEWEIGHT`'s fleet under ``strategy`` for ``versions`` versions.

    Client 0 is slower by the factor ``slowed``, and each slow client by the factor ``slow_by``. The first
    ``skip`` versions are ignored. ``events``, such as `Left`, occur at the times in them.
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
    """Run clients that train nothing; return the run and its end, emulated s.

    A trip takes a random duration from its client's delay, times the client's factor.
    """

    def duration(client: int, trip: int) -> float:
        drawn = delays[client].draw(stream(seed, "trip", client, trip))
        return drawn if factors is None else drawn * factors[client]

    return play(strategy, len(delays), stop, duration, seed, train=lambda client, model, trip: model, **how)


def gains_of_slowing(
    strategy: Strategy, slowed: Sequence[float], versions: int, seed: int = 0
) -> list[float]:
    """Return, for each factor, client 0's share of the weight when slowed by this factor ÷ at full speed.

    A value of at most 1 means that slowing down does not pay (strategy-proofness, section 4.2.1).
    """
    factors = (1.0, *slowed)
    honest, *slow = (simulate(strategy, versions, seed, slowed=factor).share[0] for factor in factors)
    return [float(share / honest) for share in slow]


class Stale(NamedTuple):
    """The first arrivals of a run, in order."""

    staleness: npt.NDArray[np.int64]
    """Staleness of each update; −1 if it was not applied."""
    started: npt.NDArray[np.int64]
    """Number of arrivals before the start of each update's trip."""


def staleness_by_buffer(delays: Sequence[Delay], sizes: Sequence[int], trips: int) -> dict[int, Stale]:
    """Return the staleness of the first ``trips`` arrivals for each buffer size (FedBuff, appendix A).

    Arrivals have the same order for every buffer size, so that τ_K ≤ ⌈τ_1/K⌉ can be checked for each update.
    """
    full = min(trips // size * size for size in sizes)  # number of updates in full buffers, for all sizes
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
