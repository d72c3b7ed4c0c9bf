"""Decides what happens after a client's death: it joins again later, or it is dropped."""

from __future__ import annotations

import math
from typing import Final, Literal

from edgefl.core.events import Died, Drop, Rejoin


class Deaths:
    """Counts each client's deaths without an update in between, and decides whether it returns.

    Deaths that the experiment declares (``churn.die_per_trip``) do not count. Of the fleet's fields,
    ``on_death="drop"`` drops every client that dies, and ``rejoin_s`` is the time until the others return.

    >>> deaths = Deaths(rejoin_s=30.0)
    >>> [deaths.died(Died(client=0, at_s=at_s, reason="signal 9")) for at_s in (0.0, 40.0, 80.0, 120.0)][-1]
    Rejoin(client=0, at_s=150.0)
    >>> deaths.died(Died(client=0, at_s=160.0, reason="signal 9"))
    Drop(client=0, reason='died 5 times in a row')
    """

    MOST_IN_A_ROW: Final = 5

    def __init__(self, on_death: Literal["replace", "drop"] = "replace", rejoin_s: float = 0.0) -> None:
        self._replaces, self._rejoin_s = on_death == "replace", rejoin_s
        self._in_a_row: dict[int, int] = {}
        self._returns_s: dict[int, float] = {}

    def died(self, event: Died) -> Rejoin | Drop:
        """Count a death; return what follows."""
        client = event.client
        deaths = self._in_a_row[client] = self._in_a_row.get(client, 0) + (not event.declared)
        if self._replaces and deaths < self.MOST_IN_A_ROW:
            self._returns_s[client] = event.at_s + self._rejoin_s
            return Rejoin(client, self._returns_s[client])
        self._returns_s[client] = math.inf
        return Drop(client, f"died {deaths} times in a row" if self._replaces else "")

    def delivered(self, client: int) -> None:
        """Start counting again, because the client has delivered an update."""
        self._in_a_row.pop(client, None)

    def returns_s(self, client: int) -> float:
        """Return the earliest time at which the client may join: −∞ if it never died, ∞ if it was dropped."""
        return self._returns_s.get(client, -math.inf)
