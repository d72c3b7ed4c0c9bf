"""The limits on a client's part in a private run: how many of its updates are applied, and how far apart."""

from __future__ import annotations

from collections.abc import Iterable

from edgefl.core.events import Action, Release, Train
from edgefl.experiment import Privacy


class Participation:
    """Counts each client's updates, those under way as if they were applied.

    >>> part = Participation(Privacy(clip_norm=1.0, max_participations=2, min_separation=3), clients=1)
    >>> part.follow([Train(client=0, task=7, version=0, trip=0)])
    >>> part.may_start(0, version=0)  # one of both is under way
    False
    >>> part.apply([7], version=1)
    >>> [part.may_start(0, version) for version in (1, 2, 3)]  # for versions 2, 3 and 4
    [False, False, True]
    """

    def __init__(self, rules: Privacy, clients: int) -> None:
        self._most, self._apart = rules.max_participations, rules.min_separation
        self.applied = [0] * clients
        """By client: its updates that were applied."""
        self._under_way = [0] * clients
        self._last = [-self._apart] * clients
        self._owners: dict[int, int] = {}  # task under way → client
        self.eased = False
        """A client that might not start may be able to by now."""

    def may_start(self, client: int, version: int) -> bool:
        """Tells whether an update that is begun from ``version`` may be applied, whenever it comes."""
        if self._most is not None and self.applied[client] + self._under_way[client] >= self._most:
            return False
        near = self._last[client] + self._apart > version + 1
        return not near and (self._apart == 1 or not self._under_way[client])

    def spent(self, client: int) -> bool:
        """Tells whether the client may never take part again."""
        return self._most is not None and self.applied[client] >= self._most

    def follow(self, actions: Iterable[Action]) -> None:
        """Take in the tasks that were given, and those that ended without being applied."""
        for action in actions:
            if type(action) is Train:
                self._owners[action.task] = action.client
                self._under_way[action.client] += 1
            elif type(action) is Release and (client := self._owners.pop(action.task, None)) is not None:
                self._under_way[client] -= 1
                self.eased = True

    def apply(self, tasks: Iterable[int], version: int) -> None:
        """These tasks' updates were applied in ``version``."""
        for task in tasks:
            client = self._owners.pop(task)
            self.applied[client] += 1
            self._under_way[client] -= 1
            self._last[client] = version
        self.eased = True
