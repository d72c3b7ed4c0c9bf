"""Early stopping: how long a run has gone on without getting better."""

from __future__ import annotations

import math
from collections.abc import Mapping

from edgefl.experiment import Stop


class Patience:
    """Counts evaluations in a row without an improvement.

    Watched is the measure of ``stop.metric``, in its direction; without one the accuracy, and the loss where
    an evaluation has no accuracy. An evaluation without the measure (NaN) is no improvement.

    >>> patience = Patience(Stop(patience_evaluations=2, min_improvement=0.01))
    >>> [patience.ends(accuracy, {}) for accuracy in (0.5, 0.7, 0.705, 0.72, 0.72, 0.725)]
    [False, False, False, False, False, True]
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._best = -math.inf
        self._waited = 0

    def ends(self, accuracy: float, metrics: Mapping[str, float]) -> bool:
        """Take in an evaluation; returns True where it is the last that the run had patience for."""
        value = self._value(accuracy, metrics)
        self._waited += 1
        if value > self._best and value - self._best > self._stop.min_improvement:
            self._best, self._waited = value, 0
        most = self._stop.patience_evaluations
        return most is not None and self._waited >= most

    def _value(self, accuracy: float, metrics: Mapping[str, float]) -> float:
        """The measure that is watched, turned so that more is better."""
        if (goal := self._stop.metric) is not None:
            value = metrics.get(goal.name, math.nan)
            return value if goal.at_most is None else -value
        return -metrics.get("loss", math.nan) if math.isnan(accuracy) else accuracy
