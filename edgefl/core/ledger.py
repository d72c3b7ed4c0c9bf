"""The core's record of running tasks and held updates, which strategies read through the View."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from edgefl.core.events import Arrived
from edgefl.core.participation import Participation
from edgefl.experiment import Privacy
from edgefl.seeds import stream
from edgefl.sequences import Ascending
from edgefl.strategies.base import Client, Update


class Ledger:
    """A run's clients, tasks, held updates and counters, which its methods keep consistent.

    The subclass `Core` makes the decisions. A held update has arrived and still occupies memory. The class
    implements `edgefl.strategies.base.View` without copying.

    >>> ledger = Ledger([Client(0, "pi-4", 60), Client(1, "pi-4", 60)], seed=1)
    >>> ledger.connect(1), ledger.connect(0), ledger.idle
    (True, True, [0, 1])
    >>> ledger.start(1), ledger.idle, ledger.training
    ((0, 0), [0], 1)
    """

    def __init__(self, devices: Sequence[Client], seed: int, privacy: Privacy | None = None) -> None:
        self.devices = devices
        self.privacy = privacy if privacy is not None and privacy.central else None
        """Privacy rules if the server itself clips updates or adds noise; None otherwise."""
        self.rules = privacy
        count = len(devices)
        self.seed = seed
        self.version = 0
        self.now_s = 0.0
        self.idle = Ascending(count)
        """Connected clients that have no task and may start one."""
        self.ineligible: set[int] = set()
        """Connected clients that have no task and, because of privacy limits, may not start one now or ever
        again."""
        limited = privacy is not None and (privacy.max_participations or privacy.min_separation > 1)
        self.participation = Participation(privacy, count) if privacy is not None and limited else None
        self.held: list[Update] = []
        self.rng = stream(seed, "strategy")
        self.openings = count

        self.trips = 0
        """Number of finished client trips: all updates that arrived, even if unused, and cancelled tasks."""
        self.dropped = 0
        """Number of updates dropped as invalid: not finite, altered on the way, or with negative counts."""
        self.discarded = 0
        """Number of valid updates that were not used, plus the number of cancelled tasks."""
        self.failed = 0
        """Number of tasks that failed on the client."""
        self.lost = 0
        """Number of tasks lost because their client disconnected."""
        self.applied = 0
        """Number of applied updates; an update that was applied in two versions counts twice."""
        self.used = 0
        """Number of applied updates; an update that was applied in two versions counts once."""
        self.staleness_sum = 0
        """Sum of the staleness of all ``used`` updates; divided by their number, it is the mean staleness."""
        self.staleness_max = 0
        self.applied_weight: npt.NDArray[np.float64] = np.zeros(count)
        """Total weight of each client's applied updates."""

        self.next_task = 0
        """ID of the next task to be started."""
        self._tasks: dict[int, tuple[int, int]] = {}  # task → (client, base version)
        self._running: dict[int, int] = {}  # client → task, in the order in which the tasks started
        self.cancelled: set[int] = set()
        self._leaving: set[int] = set()  # clients that disconnect when their task ends
        self._updates: dict[int, Update] = {}  # task → held update, in order of arrival
        self._kept: set[int] = set()  # tasks whose updates were used at least once and are still held
        self._trips = array("i", [0]) * count
        self.finished = array("i", [0]) * count
        """Number of each client's finished trips, counted as in `trips`."""
        self._trained_from = array("i", [-1]) * count
        self._starters: tuple[int, set[int]] = (0, set())  # version; clients whose last task started from it
        self.present = bytearray(count)
        """One byte for each client: 1 if the client is connected, 0 otherwise."""

    @property
    def running(self) -> Collection[int]:
        """Clients with a task, in the order in which their tasks started."""
        return self._running.keys()

    @property
    def training(self) -> int:
        """Number of clients with a task."""
        return len(self._running)

    def trained_from(self, client: int) -> int:
        """Return the base version of the client's last task.

        Returns −1 before the client's first task, and after a task that ended without an update.
        """
        return self._trained_from[client]

    @property
    def up_to_date(self) -> Collection[int]:
        """Clients whose last task started from the current version."""
        version, clients = self._starters
        return clients if version == self.version else ()

    def update(self, task: int) -> Update:
        """Return the held update of a task. Raises `KeyError` once the update has been released."""
        return self._updates[task]

    def connect(self, client: int) -> bool:
        """Mark a client as connected and without a task.

        Returns False if the client is unknown or already connected.
        """
        if not 0 <= client < len(self.present) or self.present[client]:
            return False
        self.present[client] = 1
        self._set_without_task(client)
        return True

    def _set_without_task(self, client: int) -> None:
        """Add the client to ``idle`` if it may start a task, otherwise to ``ineligible``."""
        if self.participation is None or self.participation.may_start(client, self.version):
            self.idle.add(client)
        else:
            self.ineligible.add(client)

    def update_eligibility(self) -> None:
        """Move clients from ``ineligible`` to ``idle`` if they may now start a task."""
        if self.participation is not None and self.participation.changed:
            self.participation.changed, clients = False, sorted(self.ineligible)
            self.ineligible.clear()
            for client in clients:
                self._set_without_task(client)

    def disconnect(self, client: int) -> None:
        """Mark the client as disconnected, if it is connected. Its task must have ended before this call."""
        if self.connected(client):
            self.present[client] = 0
            if client in self.ineligible:
                self.ineligible.remove(client)
            else:
                self.idle.remove(client)

    def connected(self, client: int) -> bool:
        return 0 <= client < len(self.present) and self.present[client] == 1

    def start(self, client: int) -> tuple[int, int] | None:
        """Start the next task of an idle client; return the pair (task, trip), or None if it is not idle."""
        if not (0 <= client < len(self.present) and self.idle.discard(client)):
            return None
        task, trip = self.next_task, self._trips[client]
        self.next_task += 1
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
        """IDs of the running tasks."""
        return self._tasks.keys()

    def task_of(self, client: int) -> int | None:
        """Return the client's running task, or None if it has none."""
        return self._running.get(client)

    def base_of(self, client: int, task: int) -> int | None:
        """Return the base version of a client's running task.

        Returns None if the task is not running, or is not this client's task.
        """
        owner, version = self._tasks.get(task, (None, None))
        return version if owner == client else None

    def end(self, task: int) -> bool:
        """End a task and disconnect its client if it is leaving. Returns True if the task was cancelled."""
        client = self._tasks.pop(task)[0]
        del self._running[client]
        self._set_without_task(client)
        if client in self._leaving:
            self._leaving.remove(client)
            self.disconnect(client)
        cancelled = task in self.cancelled
        self.cancelled.discard(task)
        return cancelled

    def forget_base(self, client: int) -> None:
        """Record that the client's last task ended without an update.

        The client may then train from the same version again.
        """
        if client not in self._running:
            self._trained_from[client] = -1
            self._starters[1].discard(client)

    def hold(self, event: Arrived, version: int) -> Update:
        """Hold an update that arrived; its staleness is the number of versions from its base to ``version``.

        With differential privacy, even if only clients add noise, the update gets the numbers of examples and
        steps that were declared for the client before the run, and its loss is NaN.
        """
        base, staleness = event.base_version, version - event.base_version
        known = (event.examples, event.steps, event.loss)
        if self.rules is not None:
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
        """Remove the updates of these tasks from ``held``."""
        for task in tasks:
            del self._updates[task]
        self.held = list(self._updates.values())

    def apply(self, tasks: Sequence[int], weights: Sequence[float]) -> None:
        """Record that the held updates of these tasks were applied with these weights."""
        self.applied += len(tasks)
        for task, weight in zip(tasks, weights, strict=True):
            update = self._updates[task]
            self.applied_weight[update.client] += weight
            if task in self._kept:  # it was counted at its first use
                continue
            self.used += 1
            self.staleness_sum += update.staleness
            if update.staleness > self.staleness_max:
                self.staleness_max = update.staleness
