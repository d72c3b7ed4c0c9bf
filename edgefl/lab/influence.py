"""Measures staleness and weights in fleets of fast and slow clients, without real training."""

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
"""The fleet in section 6.2 of the paper on FedStaleWeight: ten fast and five slow clients."""


Shares: TypeAlias = npt.NDArray[np.float64]


class Outcome(NamedTuple):
    """The client, staleness and weight of each applied update in a run of the fleet `FEDSTALEWEIGHT`."""

    client: npt.NDArray[np.int64]
    staleness: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float64]
    versions: int
    emulated_s: float

    @property
    def versions_with_slow(self) -> float:
        """The share φ of versions whose buffer contains an update from a slow client."""
        return float((self.client.reshape(self.versions, -1) >= len(FAST_ONES)).any(axis=1).mean())

    def applied(self) -> Shares:
        """Return the weight of each client per version, multiplied by the number of clients."""
        clients = len(FEDSTALEWEIGHT)
        return np.asarray(np.bincount(self.client, self.weight, clients) * clients / self.versions)

    @property
    def share(self) -> npt.NDArray[np.float64]:
        """Each client's share of the total weight, multiplied by the number of clients; 1 is fair (eq. 3)."""
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
    """Run the fleet `FEDSTALEWEIGHT` with ``strategy`` for ``versions`` versions.

    Client 0 is slowed down by the factor ``slowed``, and each slow client by the factor ``slow_by``. The
    first ``skip`` versions are ignored. ``events``, such as `Left`, occur at the times that they contain.
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
    """Run clients without real training; return the run and its duration in emulated seconds.

    The duration of a trip is drawn from its client's delay and multiplied by the client's factor.
    """

    def duration(client: int, trip: int) -> float:
        drawn = delays[client].draw(stream(seed, "trip", client, trip))
        return drawn if factors is None else drawn * factors[client]

    return play(strategy, len(delays), stop, duration, seed, train=lambda client, model, trip: model, **how)


def gains_of_slowing(
    strategy: Strategy, slowed: Sequence[float], versions: int, seed: int = 0
) -> list[float]:
    """Return client 0's gain from slowing itself down by each factor in ``slowed``.

    The gain is its share of the weight when slowed down, divided by its share at full speed. A gain of at
    most 1 means that slowing down does not pay (strategy-proofness, section 4.2.1).
    """
    factors = (1.0, *slowed)
    honest, *slow = (simulate(strategy, versions, seed, slowed=factor).share[0] for factor in factors)
    return [float(share / honest) for share in slow]


class Stale(NamedTuple):
    """Staleness of the first updates of a run, and when their trips started; in the order of arrival."""

    staleness: npt.NDArray[np.int64]
    """Staleness of each update, or −1 if the update was not applied."""
    started: npt.NDArray[np.int64]
    """For each update, the number of arrivals before its trip started."""


def staleness_by_buffer(delays: Sequence[Delay], sizes: Sequence[int], trips: int) -> dict[int, Stale]:
    """Return the staleness of the first ``trips`` arrivals for each buffer size (FedBuff, appendix A).

    Updates arrive in the same order for every buffer size, so τ_K ≤ ⌈τ_1/K⌉ can be checked for each update.
    """
    # Ignore later updates: for at least one size, they are in a buffer that is never filled.
    full = min(trips // size * size for size in sizes)
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
