"""Selects the versions to evaluate, and ends a run whose evaluations no longer improve or change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from edgefl.experiment import Evaluation, Stop


class Patience:
    """Counts consecutive evaluations without an improvement.

    The monitored value is the metric named in ``stop.metric``. If none is named, it is the accuracy, or the
    loss if the evaluation has no accuracy. NaN is not an improvement.

    >>> patience = Patience(Stop(patience_evaluations=2, min_improvement=0.01))
    >>> [patience.ends(accuracy, {}) for accuracy in (0.5, 0.7, 0.705, 0.72, 0.72, 0.725)]
    [False, False, False, False, False, True]
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._best = -math.inf
        self._waited = 0

    def ends(self, accuracy: float, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation; return True after ``patience_evaluations`` in a row without improvement."""
        value = self._value(accuracy, metrics)
        self._waited += 1
        if value > self._best and value - self._best > self._stop.min_improvement:
            self._best, self._waited = value, 0
        most = self._stop.patience_evaluations
        return most is not None and self._waited >= most

    def _value(self, accuracy: float, metrics: Mapping[str, float]) -> float:
        """Return the monitored value, with its sign changed if lower values are better."""
        if (goal := self._stop.metric) is not None:
            value = metrics.get(goal.name, math.nan)
            return value if goal.at_most is None else -value
        return -metrics.get("loss", math.nan) if math.isnan(accuracy) else accuracy


class Standstill:
    """Counts consecutive equal evaluations, in a run whose ``[stop]`` sets no limit and no patience.

    Such a run would never end if its model stopped changing. While a model still learns, its loss changes
    from one evaluation to the next.

    >>> standstill = Standstill(Stop(accuracy=0.9))
    >>> [standstill.ends(0.1, {"loss": 2.3}) for _ in range(Standstill.MAX_EQUAL)][-2:]
    [False, True]
    """

    MAX_EQUAL: Final = 20

    def __init__(self, stop: Stop) -> None:
        ends = (stop.versions, stop.trips, stop.emulated_s, stop.wall_s, stop.patience_evaluations)
        self._counts = all(end is None for end in ends)
        self._last = ""
        self._equal = 0

    def ends(self, accuracy: float, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation; return True once `MAX_EQUAL` in a row are equal."""
        result = repr((accuracy, sorted(metrics.items())))  # a string, because NaN != NaN
        self._equal = self._equal + 1 if result == self._last else 1
        self._last = result
        return self._counts and self._equal >= self.MAX_EQUAL


class Periods:
    """Selects one version to evaluate in each period of N versions, client trips or emulated seconds.

    If periods are counted in trips or seconds, the first version after the end of a period is selected. In
    this way, runs that need different numbers of trips per version are evaluated equally often.

    >>> periods = Periods(Evaluation(every_trips=100))
    >>> [periods.end(version, 30 * version, 0.0) for version in range(1, 8)]
    [False, False, False, True, False, False, True]
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._given = evaluation
        self._ended = 0

    def end(self, version: int, trips: int, at_s: float) -> bool:
        """Return True if this version ends a period. Must be called once per version, in ascending order."""
        given = self._given
        if given.every_trips is not None:
            ended = trips // given.every_trips
        elif given.every_s is not None:
            ended = math.floor(at_s / given.every_s + 1e-9)
        else:
            ended = version // given.every_versions
        before, self._ended = self._ended, ended
        return ended > before
