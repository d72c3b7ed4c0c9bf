"""The server's gauges: the few figures that the live view and the summary take from the running server."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from edgefl import control, kernels, wire
from edgefl.aggregator import Totals
from edgefl.core import Core
from edgefl.peers import CLIENTS, Peers
from edgefl.rows import Aggregation

RECENT_TRIPS = 500


class Gauge:
    """Counts what passes by; `progress` reads it out."""

    def __init__(self, plan: control.Serve) -> None:
        self._profiles = [info.profile for info in plan.clients]
        self._trips: Counter[str] = Counter()
        self._errors: deque[float] = deque(maxlen=RECENT_TRIPS)
        self._accuracy: float | None = None
        self._loss: float | None = None
        self.strangers = 0
        """Messages of unknown senders."""
        self.incidents: Counter[str] = Counter()

    def trip(self, done: wire.Done) -> None:
        """A trip ended."""
        self._trips[self._profiles[done.client]] += 1
        if done.trip.declared_s > 0:
            self._errors.append(abs(done.trip.achieved_s / done.trip.declared_s - 1.0))

    def assessed(self, answer: wire.Assessed) -> None:
        """A version was measured."""
        total = sum(answer.total)
        self._accuracy = sum(answer.correct) / total if total else None
        self._loss = answer.loss

    def progress(self, core: Core, now_s: float, peers: Peers, started: bool) -> control.Progress:
        """The figures of this instant."""
        idle, running = set(core.idle), set(core.running)
        by_profile: dict[str, list[int]] = {}
        for client, profile in enumerate(self._profiles):
            counts = by_profile.setdefault(profile, [0, 0, 0, 0])
            counts[0 if client in idle else 1 if client in running else 2] += 1
        for profile, counts in by_profile.items():
            counts[3] = self._trips[profile]
        connected = sum(peer.ready for peer in peers.of(*CLIENTS))
        median, p95 = np.quantile(self._errors, [0.5, 0.95]) if self._errors else (None, None)
        return control.Progress(
            emulated_s=now_s,
            version=core.version,
            trips=core.trips,
            idle=len(idle),
            training=len(running),
            absent=len(self._profiles) - (len(idle) + len(running) if started else connected),
            staleness_mean=core.staleness_sum / core.applied if core.applied else 0.0,
            staleness_max=core.staleness_max,
            accuracy=self._accuracy,
            loss=self._loss,
            fidelity_median=None if median is None else float(median),
            fidelity_p95=None if p95 is None else float(p95),
            dropped=core.dropped,
            by_profile=by_profile,
            phase="running" if started else "starting",
        )

    @staticmethod
    def aggregation(totals: Totals, backend: str | None) -> Aggregation:
        """What aggregation cost, for the summary."""
        return Aggregation(
            backend=backend or kernels.backend(),
            updates=totals.updates,
            seconds=totals.seconds,
            bytes=totals.bytes,
        )
