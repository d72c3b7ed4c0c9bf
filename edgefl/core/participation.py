"""Rules on when a client may start a task: limits for differential privacy, and arrival processes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edgefl.core.events import Action, Release, Train
from edgefl.experiment import Privacy
from edgefl.strategies.base import Arrivals


class Participation:
    """Counts each client's participations, and checks them against the limits for differential privacy.

    A participation is an applied update; running tasks and held updates are counted as if applied. With
    local noise, every task that a client starts is a participation, even if its update is not used, because
    the server may have seen the update.

    >>> part = Participation(Privacy(clip_norm=1.0, max_participations=2, min_separation=3), clients=1)
    >>> part.record([Train(client=0, task=7, version=0, trip=0)])
    >>> part.may_start(0, version=0)  # the version that will contain the update in flight is not known yet
    False
    >>> part.apply([7], version=1)
    >>> [part.may_start(0, version) for version in (1, 2, 3)]  # for versions 2, 3 and 4
    [False, False, True]
    """

    def __init__(self, rules: Privacy, clients: int) -> None:
        self._most, self._apart = rules.max_participations, rules.min_separation
        self.applied = [0] * clients
        """Number of each client's applied updates or, with local noise, of its started tasks."""
        self._counts_tasks = rules.local_noise_multiplier > 0
        self._in_flight = [0] * clients
        self._last = [-self._apart] * clients
        self._owners: dict[int, int] = {}  # task in flight → client
        self.changed = False
        """True if a client that was not allowed to start a task may be allowed to start one now."""

    def may_start(self, client: int, version: int) -> bool:
        """Return True if the limits allow this client to start a task from ``version``."""
        pending = 0 if self._counts_tasks else self._in_flight[client]
        if self._most is not None and self.applied[client] + pending >= self._most:
            return False
        near = self._last[client] + self._apart > version + 1
        return not near and (self._apart == 1 or not self._in_flight[client])

    def exhausted(self, client: int) -> bool:
        """Return True if the client has used up its maximum number of participations."""
        return self._most is not None and self.applied[client] >= self._most

    def record(self, actions: Iterable[Action]) -> None:
        """Record the tasks that these actions start or release. Applied tasks are recorded by `apply`."""
        for action in actions:
            if type(action) is Train:
                self._owners[action.task] = action.client
                self._in_flight[action.client] += 1
                self.applied[action.client] += self._counts_tasks
            elif type(action) is Release and (client := self._owners.pop(action.task, None)) is not None:
                self._in_flight[client] -= 1
                self.changed = True

    def apply(self, tasks: Iterable[int], version: int) -> None:
        """Record that these tasks' updates were applied in ``version``. An update that a strategy keeps and
        applies again is counted once."""
        for task in tasks:
            client = self._owners.pop(task, None)
            if client is None:
                continue
            self.applied[client] += not self._counts_tasks
            self._in_flight[client] -= 1
            self._last[client] = version
        self.changed = True


class Schedule:
    """Generates the times of an arrival process, in ascending order.

    ``constant`` arrivals occur at the times k/rate for k = 1, 2, …; the gaps between ``poisson`` arrivals
    are exponentially distributed with mean 1/rate.

    >>> schedule = Schedule(Arrivals("constant", 2.0), np.random.default_rng(0))
    >>> schedule.next_s, schedule.due(1.2), schedule.next_s
    (0.5, 2, 1.5)
    """

    def __init__(self, process: Arrivals, rng: np.random.Generator) -> None:
        self._process, self._rng = process, rng
        self._count = 0
        self.next_s = self._after(0.0)
        """Emulated time of the next arrival, in seconds."""

    def due(self, now_s: float) -> int:
        """Return the number of arrivals since the last call, up to and including the time ``now_s``."""
        before = self._count
        while self.next_s <= now_s:
            self._count += 1
            self.next_s = self._after(self.next_s)
        return self._count - before

    def _after(self, at_s: float) -> float:
        if self._process.kind == "constant":
            return (self._count + 1) / self._process.rate_per_s
        return at_s + float(self._rng.exponential(1.0 / self._process.rate_per_s))
