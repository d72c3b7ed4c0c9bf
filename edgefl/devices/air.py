"""The cells of a fleet under the virtual clock: transfers share, so each trip's times depend on the others'.

A pure book: it is told when a trip begins and when it is given up, and says when the next one is through. A
trip's bytes flow after each message's own delay; its training takes what its plan says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from edgefl.devices.cell import Cell, Way
from edgefl.devices.link import Transfer
from edgefl.devices.plan import TripPlan

SEND, SENT = 0, 1


class Through(NamedTuple):
    """A trip that is over, at its end or where its link was lost, and what its transfers took."""

    at_s: float
    task: int
    client: int
    down_s: float
    up_s: float


class _Trip:
    """A trip on its way through a cell."""

    __slots__ = ("begun_s", "client", "down_s", "plan", "way")

    def __init__(self, client: int, plan: TripPlan, begun_s: float) -> None:
        self.client, self.plan, self.begun_s = client, plan, begun_s
        self.way: Way = "down"
        self.down_s = 0.0

    @property
    def message(self) -> Transfer:
        return self.plan.down if self.way == "down" else self.plan.up


class Air:
    """Client c is in cell c mod ``cells``; a cell's ways carry ``capacities`` bytes per emulated second.

    ``limits`` are what each client's own link carries.
    """

    def __init__(
        self, cells: int, capacities: dict[Way, float | None], limits: dict[Way, Sequence[float]]
    ) -> None:
        self._limits = limits
        self._cells: dict[Way, list[Cell]] = {
            way: [Cell(math.inf if capacity is None else capacity) for _ in range(cells)]
            for way, capacity in capacities.items()
        }
        self._trips: dict[int, _Trip] = {}
        self._queue: list[tuple[float, int, int]] = []

    def begin(self, task: int, client: int, plan: TripPlan, at_s: float) -> None:
        """A trip begins: its download is sent."""
        self._trips[task] = _Trip(client, plan, at_s)
        heapq.heappush(self._queue, (at_s + plan.down.lead_s, SEND, task))

    def drop(self, task: int, at_s: float) -> None:
        """A trip is given up, if it is not through."""
        trip = self._trips.pop(task, None)
        if trip is not None and task in (cell := self._cell(trip)):
            cell.stop(task, at_s)
            self._await(cell)

    @property
    def next_s(self) -> float:
        """When something happens next; infinite if nothing does."""
        while self._queue and not self._counts(*self._queue[0]):
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else math.inf

    def advance(self, at_s: float) -> list[Through]:
        """Let everything happen until then; returns the trips that are through, in order."""
        found: list[Through] = []
        while self.next_s <= at_s:
            due_s, kind, task = heapq.heappop(self._queue)
            trip = self._trips[task]
            cell = self._cell(trip)
            if kind == SEND:
                message = trip.message
                share = 1.0 if message.breaks_after is None else message.breaks_after / message.nbytes
                limit = self._limits[trip.way][trip.client]
                cell.start(task, due_s, message.wire_bytes * share, limit)
            else:
                cell.stop(task, due_s)
                self._await(cell)
                if (through := self._sent(task, trip, due_s)) is not None:
                    found.append(through)
                    continue
                cell = self._cell(trip)
            self._await(cell)
        return found

    def _sent(self, task: int, trip: _Trip, at_s: float) -> Through | None:
        """A message is through, and perhaps the trip."""
        broken = trip.message.breaks_after is not None
        if trip.way == "down":
            trip.down_s = at_s - trip.begun_s
            if not broken:
                trip.way = "up"
                sent_s = at_s + trip.plan.compute_s + trip.plan.up.lead_s
                heapq.heappush(self._queue, (sent_s, SEND, task))
                return None
        del self._trips[task]
        trained_s = trip.begun_s + trip.down_s + trip.plan.compute_s
        return Through(at_s, task, trip.client, trip.down_s, max(0.0, at_s - trained_s))

    def _cell(self, trip: _Trip) -> Cell:
        cells = self._cells[trip.way]
        return cells[trip.client % len(cells)]

    def _await(self, cell: Cell) -> None:
        """Whatever ends next in this cell has an entry in the queue."""
        if (ends := cell.ends) is not None:
            heapq.heappush(self._queue, (ends[0], SENT, ends[1]))

    def _counts(self, at_s: float, kind: int, task: int) -> bool:
        """Whether an entry of the queue still holds."""
        trip = self._trips.get(task)
        if trip is None:
            return False
        cell = self._cell(trip)
        return task not in cell if kind == SEND else cell.ends == (at_s, task)
