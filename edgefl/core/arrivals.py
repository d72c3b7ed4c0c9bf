"""Arrival times of clients, for strategies with an arrival process."""

from __future__ import annotations

import numpy as np

from edgefl.strategies.base import Arrivals


class Schedule:
    """Arrival times of an arrival process, in order, from a random stream.

    ``constant``: k/rate for k = 1, 2, … ``poisson``: exponential gaps of mean 1/rate.

    >>> schedule = Schedule(Arrivals("constant", 2.0), np.random.default_rng(0))
    >>> schedule.next_s, schedule.due(1.2), schedule.next_s
    (0.5, 2, 1.5)
    """

    def __init__(self, process: Arrivals, rng: np.random.Generator) -> None:
        self._process, self._rng = process, rng
        self._count = 0
        self.next_s = self._after(0.0)
        """Emulated time of the next arrival."""

    def due(self, now_s: float) -> int:
        """Returns the number of arrivals after the last call and up to ``now_s``."""
        before = self._count
        while self.next_s <= now_s:
            self._count += 1
            self.next_s = self._after(self.next_s)
        return self._count - before

    def _after(self, at_s: float) -> float:
        if self._process.kind == "constant":
            return (self._count + 1) / self._process.rate_per_s
        return at_s + float(self._rng.exponential(1.0 / self._process.rate_per_s))
