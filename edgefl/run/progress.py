"""Metrics of the running server for the live view and the summary, and the time that the server spends in
each stage of its work."""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable
from itertools import accumulate

import numpy as np

from edgefl.core import Core
from edgefl.core.events import Evaluated
from edgefl.devices.fleet import fleet_of
from edgefl.host import verdict
from edgefl.host.capacity import StealMeter, ThrottleMeter
from edgefl.host.fidelity import MINOR_PART, RESOLUTION_WALL_S
from edgefl.host.verdict import Conditions
from edgefl.run import control, messages
from edgefl.run.clock import WallClock

RECENT_TRIPS = 500
MAX_COSTS = 1_000_000


class Gauge:
    """Measures how far trips' times are from the planned times, and how much time the server spends per trip.

    `progress` returns all metrics.
    """

    def __init__(self, plan: control.Serve) -> None:
        kinds = fleet_of(plan.experiment).kinds
        self._names = [profile for profile, *_ in kinds]
        self._ends = list(accumulate(count for *_, count in kinds))
        self._errors: deque[float] = deque(maxlen=2 * RECENT_TRIPS)
        self._costs_ns = array("q")
        self._resolution_s = RESOLUTION_WALL_S / plan.time_scale
        self._wall = plan.experiment.clock.kind == "wall"
        self._load = plan.load
        self._steal, self._throttle = StealMeter(), ThrottleMeter()
        self._declared_s = self._achieved_s = 0.0
        """Sums of the planned and the measured times, in emulated seconds, of trips long enough to judge."""
        self.accuracy: float | None = None
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}

    def trip(self, times: messages.TripTimes) -> None:
        """Add the planned and the measured times of a trip whose update has arrived.

        The trips of a real device are left out, as in the summary.
        """
        if not self._wall or times.own_pace:  # the virtual clock computes times, so there is no error
            return
        trip = times.trip
        if trip.declared_s >= self._resolution_s:
            self._declared_s += trip.declared_s
            self._achieved_s += trip.achieved_s
        least_s = max(self._resolution_s, MINOR_PART * trip.declared_s)
        for spent in (times.compute, trip):  # the two errors in the summary's headline
            if spent.declared_s >= least_s:
                self._errors.append(abs(spent.achieved_s / spent.declared_s - 1.0))

    def assessed(self, answer: messages.Assessed) -> None:
        """Store the results of an evaluation."""
        self.accuracy = None if math.isnan(answer.accuracy) else answer.accuracy
        self.loss, self.metrics = answer.loss, answer.metrics

    def remember(self, last: Evaluated) -> None:
        """Store the results of the last evaluation that an earlier part of this run made."""
        self.accuracy = None if math.isnan(last.accuracy) else last.accuracy
        self.loss = last.metrics.get("loss")
        self.metrics = {name: value for name, value in last.metrics.items() if name != "loss"}

    def cost(self, ns: int) -> None:
        """Store the time in nanoseconds that the server spent on one update, from the receipt of the update
        to the next task, excluding sums."""
        if self._wall and len(self._costs_ns) < MAX_COSTS:  # workers report in batches: no cost per update
            self._costs_ns.append(ns)

    def trip_us(self, together_s: float, trips: int) -> float | None:
        """Return the median time that the server spends on a trip, in microseconds.

        The time includes an equal share of the work that the server does for many trips together, which took
        ``together_s`` seconds.
        """
        if not self._costs_ns or not trips:
            return None
        return float(np.median(self._costs_ns)) / 1e3 + together_s / trips * 1e6

    def progress(
        self, core: Core, clock: WallClock, connected: int | None, incidents: int
    ) -> control.Progress:
        """Return the current metrics.

        ``connected`` is the number of connected clients, or None after all clients have connected.
        """
        running = np.fromiter(core.running, np.intp, core.training)
        starts = [0, *self._ends[:-1]]
        here = np.add.reduceat(np.frombuffer(core.present, np.uint8), starts, dtype=np.int64)
        trips = np.add.reduceat(np.frombuffer(core.finished, np.intc), starts, dtype=np.int64)
        training = np.bincount(np.searchsorted(self._ends, running, "right"), minlength=len(starts))
        absent = np.diff(self._ends, prepend=0) - here
        rows = np.stack([here - training, training, absent, trips], axis=1)
        error = self._achieved_s / self._declared_s - 1.0 if self._declared_s > 0 else None
        shares = {"steal": self._steal.share(), "throttled": self._throttle.share()}
        held = verdict.judge([self._errors], {"trips": error}, Conditions(load=self._load, **shares))
        return control.Progress(
            emulated_s=clock.now_s() if core.stopped_s is None else core.stopped_s,
            wall_s=clock.wall_s(),
            version=core.version,
            trips=core.trips,
            connected=connected,
            staleness_mean=core.staleness_sum / core.used if core.used else 0.0,
            staleness_max=core.staleness_max,
            accuracy=self.accuracy,
            loss=self.loss,
            metrics=self.metrics,
            fidelity_median=held.median_abs_error,
            fidelity_p95=held.p95_abs_error,
            invalid=next(iter(held.reasons), "") if self._wall else "",
            dropped=core.dropped,
            incidents=incidents,
            by_profile=dict(zip(self._names, rows.tolist(), strict=True)),
        )


class Stopwatch:
    """Measures the time spent in each stage; exactly one stage is current at any time.

    >>> now = iter([0, 5, 7, 10]).__next__
    >>> watch = Stopwatch("wait", now)
    >>> before = watch.to("sum"); _ = watch.to(before); _ = watch.to("sum")
    >>> watch.ns
    {'wait': 8, 'sum': 2}
    """

    def __init__(self, stage: str, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.ns: dict[str, int] = {stage: 0}
        self.calls: dict[str, int] = {stage: 1}
        self._clock_ns = clock_ns
        self._stage = stage
        self.since_ns = clock_ns()
        """Start of the current stage, in nanoseconds."""

    def to(self, stage: str) -> str:
        """Switch to ``stage``; return the previous stage."""
        now_ns, before, ns = self._clock_ns(), self._stage, self.ns
        ns[before] += now_ns - self.since_ns
        self.since_ns, self._stage = now_ns, stage
        if stage not in ns:
            ns[stage] = self.calls[stage] = 0
        self.calls[stage] += 1
        return before
