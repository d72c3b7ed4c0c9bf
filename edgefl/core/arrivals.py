"""The instants at which clients come and ask for work, where a strategy says that they do."""

from __future__ import annotations

import numpy as np

from edgefl.strategies.base import Arrivals


class Schedule:
    """The instants of an arrival process, one after the other, from a stream of their own.

    ``constant``: k/rate for k = 1, 2, … ``poisson``: gaps from Exp(rate).

    >>> schedule = Schedule(Arrivals("constant", 2.0), np.random.default_rng(0))
    >>> schedule.next_s, schedule.due(1.2), schedule.next_s
    (0.5, 2, 1.5)
    """

    def __init__(self, process: Arrivals, rng: np.random.Generator) -> None:
        self._process, self._rng = process, rng
        self._count = 0
        self.next_s = self._after(0.0)
        """The next arrival."""

    def due(self, now_s: float) -> int:
        """Returns the number of arrivals since the last call."""
        before = self._count
        while self.next_s <= now_s:
            self._count += 1
            self.next_s = self._after(self.next_s)
        return self._count - before

    def _after(self, at_s: float) -> float:
        if self._process.kind == "constant":
            return (self._count + 1) / self._process.rate_per_s
        return at_s + float(self._rng.exponential(1.0 / self._process.rate_per_s))
