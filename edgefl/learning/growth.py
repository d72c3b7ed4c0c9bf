"""The number of examples that a client has on each trip if its data grow during the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgefl.experiment import Growth
from edgefl.seeds import stream


class GrowingData:
    """The number of examples that each client has on each trip; ``final`` is each client's final number n_k.

    On trip t (the first trip is 0) client k has ⌈min(1, start + t·r_k)·n_k⌉ examples, but at least one. The
    rate r_k is drawn uniformly from [``least_per_trip``, ``most_per_trip``] with the experiment's seed.

    >>> grows = GrowingData([40], Growth(start=0.5, least_per_trip=0.125, most_per_trip=0.125), seed=1)
    >>> [grows.held(0, trip) for trip in range(6)]
    [20, 25, 30, 35, 40, 40]
    """

    def __init__(self, final: Sequence[int], growth: Growth | None, seed: int) -> None:
        self.final, self._growth, self._seed = final, growth, seed
        self._rates: dict[int, float] = {}

    def held(self, client: int, trip: int) -> int:
        """Return the number of examples that the client has on trip number ``trip``, counted from 0."""
        growth, final = self._growth, self.final[client]
        if growth is None:
            return final
        if (rate := self._rates.get(client)) is None:
            draw = stream(self._seed, "growth", client).uniform
            rate = self._rates[client] = float(draw(growth.least_per_trip, growth.most_per_trip))
        share = min(1.0, growth.start + trip * rate)
        return max(1, math.ceil(round(share * final, 9)))
