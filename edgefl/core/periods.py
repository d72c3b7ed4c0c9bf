"""Periods between evaluations: which versions are evaluated."""

from __future__ import annotations

import math

from edgefl.experiment import Evaluation


class Periods:
    """Finds the version that ends each period of N versions, client trips or emulated seconds.

    With trips or seconds, it is the first version after the period. Runs whose versions need different
    numbers of trips can thus be evaluated equally often.

    >>> periods = Periods(Evaluation(every_trips=100))
    >>> [periods.end(version, 30 * version, 0.0) for version in range(1, 8)]
    [False, False, False, True, False, False, True]
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._given = evaluation
        self._ended = 0

    def end(self, version: int, trips: int, at_s: float) -> bool:
        """True if this version ends a period. Must be called once per version, in order."""
        given = self._given
        if given.every_trips is not None:
            ended = trips // given.every_trips
        elif given.every_s is not None:
            ended = math.floor(at_s / given.every_s + 1e-9)
        else:
            ended = version // given.every_versions
        before, self._ended = self._ended, ended
        return ended > before
