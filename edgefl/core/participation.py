"""Limits on a client's participation in a private run: number of applied updates, and their separation."""

from __future__ import annotations

from collections.abc import Iterable

from edgefl.core.events import Action, Release, Train
from edgefl.experiment import Privacy


class Participation:
    """Counts each client's updates; running tasks and held updates count as applied.

    >>> part = Participation(Privacy(clip_norm=1.0, max_participations=2, min_separation=3), clients=1)
    >>> part.record([Train(client=0, task=7, version=0, trip=0)])
    >>> part.may_start(0, version=0)  # one of two participations is in flight
    False
    >>> part.apply([7], version=1)
    >>> [part.may_start(0, version) for version in (1, 2, 3)]  # for versions 2, 3 and 4
    [False, False, True]
    """

    def __init__(self, rules: Privacy, clients: int) -> None:
        self._most, self._apart = rules.max_participations, rules.min_separation
        self.applied = [0] * clients
        """Number of applied updates of each client."""
        self._in_flight = [0] * clients
        self._last = [-self._apart] * clients
        self._owners: dict[int, int] = {}  # task in flight → client
        self.changed = False
        """Set when an ineligible client may have become eligible."""

    def may_start(self, client: int, version: int) -> bool:
        """True if the limits allow an update of this client that starts from ``version``."""
        if self._most is not None and self.applied[client] + self._in_flight[client] >= self._most:
            return False
        near = self._last[client] + self._apart > version + 1
        return not near and (self._apart == 1 or not self._in_flight[client])

    def exhausted(self, client: int) -> bool:
        """True if the client has no participation left."""
        return self._most is not None and self.applied[client] >= self._most

    def record(self, actions: Iterable[Action]) -> None:
        """Count the tasks that these actions start, and those that they release without applying."""
        for action in actions:
            if type(action) is Train:
                self._owners[action.task] = action.client
                self._in_flight[action.client] += 1
            elif type(action) is Release and (client := self._owners.pop(action.task, None)) is not None:
                self._in_flight[client] -= 1
                self.changed = True

    def apply(self, tasks: Iterable[int], version: int) -> None:
        """Record that these tasks' updates were applied in ``version``."""
        for task in tasks:
            client = self._owners.pop(task)
            self.applied[client] += 1
            self._in_flight[client] -= 1
            self._last[client] = version
        self.changed = True
