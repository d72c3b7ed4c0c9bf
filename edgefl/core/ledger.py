"""The core's books of running tasks and held updates, which strategies see as their view."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from edgefl.ascending import Ascending
from edgefl.core.events import Arrived
from edgefl.core.participation import Participation
from edgefl.experiment import Privacy
from edgefl.seeds import stream
from edgefl.strategies.base import Client, Update


class Ledger:
    """Clients, tasks, held updates and counts; its methods keep them in agreement and decide nothing.

    It is the live `edgefl.strategies.base.View`: nothing is copied to show it.

    >>> books = Ledger([Client(0, "pi-4", 60), Client(1, "pi-4", 60)], seed=1)
    >>> books.connect(1), books.connect(0), books.idle
    (True, True, [0, 1])
    >>> books.start(1), books.idle, books.training
    ((0, 0), [0], 1)
    """

    def __init__(self, devices: Sequence[Client], seed: int, privacy: Privacy | None = None) -> None:
        self.devices = devices
        self.privacy = privacy
        count = len(devices)
        self.seed = seed
        self.version = 0
        self.now_s = 0.0
        self.idle = Ascending(count)
        """Connected clients without a task that may be given one."""
        self.resting: set[int] = set()
        """Connected clients without a task that may not be given one, at this version or ever."""
        limited = privacy is not None and (privacy.max_participations or privacy.min_separation > 1)
        self.participation = Participation(privacy, count) if privacy is not None and limited else None
        self.held: list[Update] = []
        self.rng = stream(seed, "strategy")
        self.openings = count

        self.trips = 0
        """Finished client trips: updates that arrived, used or not, and tasks that were cancelled."""
        self.dropped = 0
        """Updates that were not finite or were altered."""
        self.discarded = 0
        """Valid updates that were not used, and cancelled tasks."""
        self.failed = 0
        """Tasks that a client gave back of its own accord."""
        self.lost = 0
        """Tasks whose client left."""
        self.applied = 0
        """Updates that were applied; one applied in two versions counts twice."""
        self.staleness_sum = 0
        """Sum of the staleness of applied updates; over ``applied``, their mean."""
        self.staleness_max = 0
        self.applied_weight: npt.NDArray[np.float64] = np.zeros(count)
        """Total weight with which each client's updates were applied."""

        self._next_task = 0
        self._tasks: dict[int, tuple[int, int]] = {}  # task → client, version
        self._running: dict[int, int] = {}  # client → task, in the order of starting
        self.cancelled: set[int] = set()
        self._leaving: set[int] = set()  # clients that go when they have finished their task
        self._updates: dict[int, Update] = {}  # task → held update, in arrival order
        self._trips = array("i", [0]) * count
        self._trained_from = array("i", [-1]) * count
        self._starters: tuple[int, set[int]] = (0, set())  # of a version, who trained from it last
        self.present = bytearray(count)
        """By client: 1 if it is connected, else 0."""

    @property
    def running(self) -> Collection[int]:
        """Clients with a task, in the order in which they were started."""
        return self._running.keys()

    @property
    def training(self) -> int:
        """The number of clients that have a task."""
        return len(self._running)

    def trained_from(self, client: int) -> int:
        """The version of the client's last task; −1 before its first and after one that gave no update."""
        return self._trained_from[client]

    @property
    def up_to_date(self) -> Collection[int]:
        """Clients whose last task is from the current version."""
        version, clients = self._starters
        return clients if version == self.version else ()

    def update(self, task: int) -> Update:
        """The held update of ``task``, until its ``Release`` is returned; then `KeyError`."""
        return self._updates[task]

    def connect(self, client: int) -> bool:
        """The client is there and idle; false if it is unknown or was there."""
        if not 0 <= client < len(self.present) or self.present[client]:
            return False
        self.present[client] = 1
        self._rest(client)
        return True

    def _rest(self, client: int) -> None:
        """The client has no task any more, or not yet."""
        if self.participation is None or self.participation.may_start(client, self.version):
            self.idle.add(client)
        else:
            self.resting.add(client)

    def awaken(self) -> None:
        """Have resting clients be idle that may be given a task by now."""
        if self.participation is not None and self.participation.eased:
            self.participation.eased, rested = False, sorted(self.resting)
            self.resting.clear()
            for client in rested:
                self._rest(client)

    def disconnect(self, client: int) -> None:
        """The client is gone, if it was there. A task of its own must be ended before."""
        if self.connected(client):
            self.present[client] = 0
            if client in self.resting:
                self.resting.remove(client)
            else:
                self.idle.remove(client)

    def connected(self, client: int) -> bool:
        return 0 <= client < len(self.present) and self.present[client] == 1

    def start(self, client: int) -> tuple[int, int] | None:
        """Give an idle client its next task: (task, trip); None if it is not idle."""
        if not (0 <= client < len(self.present) and self.idle.discard(client)):
            return None
        task, trip = self._next_task, self._trips[client]
        self._next_task += 1
        self._trips[client] += 1
        self._trained_from[client] = self.version
        if self._starters[0] != self.version:
            self._starters = (self.version, set())
        self._starters[1].add(client)
        self._tasks[task] = client, self.version
        self._running[client] = task
        return task, trip

    @property
    def tasks(self) -> Collection[int]:
        """Running tasks."""
        return self._tasks.keys()

    def task_of(self, client: int) -> int | None:
        """The client's running task."""
        return self._running.get(client)

    def base_of(self, client: int, task: int) -> int | None:
        """The version that the running task trains from; None if it is not this client's."""
        owner, version = self._tasks.get(task, (None, None))
        return version if owner == client else None

    def end(self, task: int) -> bool:
        """The task is over, its client idle, or gone if it waited for that; true if it was cancelled."""
        client = self._tasks.pop(task)[0]
        del self._running[client]
        self._rest(client)
        if client in self._leaving:
            self._leaving.remove(client)
            self.disconnect(client)
        cancelled = task in self.cancelled
        self.cancelled.discard(task)
        return cancelled

    def forget_base(self, client: int) -> None:
        """The client's last task gave nothing, so it may be given the same version again."""
        if client not in self._running:
            self._trained_from[client] = -1
            self._starters[1].discard(client)

    def hold(self, event: Arrived) -> Update:
        """Hold an arrived update, its staleness measured now.

        In a private run the strategy gets the device's declared examples and steps, and NaN as the loss.
        """
        base, staleness = event.base_version, self.version - event.base_version
        known = (event.examples, event.steps, event.loss)
        if self.privacy is not None:
            device = self.devices[event.client]
            known = (device.examples, device.steps, math.nan)
        update = self._updates[event.task] = Update(
            event.task,
            event.client,
            base,
            staleness,
            *known,
            event.at_s,
            event.norm or 0.0,
            event.distance,
        )
        self.held.append(update)
        return update

    def holds(self, update: Update) -> bool:
        return self._updates.get(update.task) is update

    def forget(self, tasks: Iterable[int]) -> None:
        """Hold these no more."""
        for task in tasks:
            del self._updates[task]
        self.held = list(self._updates.values())

    def apply(self, tasks: Sequence[int], weights: Sequence[float]) -> None:
        """Count these held updates as applied with these weights."""
        self.applied += len(tasks)
        for task, weight in zip(tasks, weights, strict=True):
            update = self._updates[task]
            self.applied_weight[update.client] += weight
            self.staleness_sum += update.staleness
            if update.staleness > self.staleness_max:
                self.staleness_max = update.staleness
