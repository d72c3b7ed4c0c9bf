"""Decides what happens after a client's death."""

from __future__ import annotations

import math
from typing import Final, Literal

from edgefl.core.events import Died, Drop, Failed, Left, Rejoin


def consequence(event: Died, *, private: bool) -> Left | Failed | None:
    """Return the event that a client's death causes: either the client leaves, or only its task fails.

    With differential privacy (``private``), participation must not depend on client data, so a client leaves
    only if the experiment declared its death. Return None if the client stays and the event has no task: a
    separate `Failed` event then ends the client's task when its update would have arrived.

    >>> consequence(Died(client=0, at_s=4.0, reason="signal 9", task=7), private=True)
    Failed(client=0, task=7, at_s=4.0, reason='signal 9')
    """
    if event.declared or not private:
        return Left(event.client, event.at_s, event.reason)
    return None if event.task is None else Failed(event.client, event.task, event.at_s, event.reason)


class Deaths:
    """Counts each client's deaths since its last update, and decides whether the client joins again.

    Deaths that the experiment declares (``churn.die_per_trip``) are not counted. With ``on_death="drop"``, no
    client that dies joins again; otherwise it may join again ``rejoin_s`` emulated seconds after its death.

    >>> deaths = Deaths(rejoin_s=30.0)
    >>> [deaths.died(Died(client=0, at_s=at_s, reason="signal 9")) for at_s in (0.0, 40.0, 80.0, 120.0)][-1]
    Rejoin(client=0, at_s=150.0)
    >>> deaths.died(Died(client=0, at_s=160.0, reason="signal 9"))
    Drop(client=0, reason='died 5 times in a row')
    """

    MAX_IN_A_ROW: Final = 5

    def __init__(self, on_death: Literal["replace", "drop"] = "replace", rejoin_s: float = 0.0) -> None:
        self._replaces, self._rejoin_s = on_death == "replace", rejoin_s
        self._in_a_row: dict[int, int] = {}
        self._returns_s: dict[int, float] = {}

    def died(self, event: Died) -> Rejoin | Drop:
        """Count a death; return the action that lets the client join again or drops it permanently."""
        client = event.client
        deaths = self._in_a_row[client] = self._in_a_row.get(client, 0) + (not event.declared)
        if self._replaces and deaths < self.MAX_IN_A_ROW:
            self._returns_s[client] = event.at_s + self._rejoin_s
            return Rejoin(client, self._returns_s[client])
        self._returns_s[client] = math.inf
        return Drop(client, f"died {deaths} times in a row" if self._replaces else "")

    def delivered(self, client: int) -> None:
        """Reset the client's count of deaths, because the client has delivered an update."""
        self._in_a_row.pop(client, None)

    @property
    def any_dropped(self) -> bool:
        """True if a client was dropped."""
        return math.inf in self._returns_s.values()

    def returns_s(self, client: int) -> float:
        """Return the earliest emulated time at which the client may join, in seconds.

        Returns −∞ if the client never died, and ∞ if the client was dropped.
        """
        return self._returns_s.get(client, -math.inf)
