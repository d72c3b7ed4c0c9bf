"""Cells: many clients behind one uplink and one downlink that their transfers share.

A cell's capacity is divided max-min fairly: no transfer exceeds its own link's rate, and the capacity it
leaves is divided among the others (progressive filling, Bertsekas and Gallager 1992, 6.5.2). Rates change
when a transfer starts or ends: `SharedCells` under the virtual clock, a `CellMeter` under the wall clock.
"""

from __future__ import annotations

import heapq
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.devices.link import LinkShare, Transfer
from edgefl.devices.plan import TripPlan

Way = Literal["down", "up"]


def fair_level(limits: Sequence[float], capacity: float) -> float:
    """Return the maximum rate of any transfer if transfers with these ``limits`` share ``capacity``.

    It is infinite if the capacity suffices for all. Each transfer gets the smaller of this and its limit.

    >>> fair_level([1.0, 4.0, 9.0], 11.0)                # 1 + 4 + 6
    6.0
    >>> fair_level([1.0, 4.0], 11.0)
    inf
    """
    left, ordered = capacity, sorted(limits)
    for at, limit in enumerate(ordered):
        level = left / (len(ordered) - at)
        if limit >= level:
            return level
        left -= limit
    return math.inf


class Cell:
    """The transfers in one direction of one cell: progress of each in emulated time, and which ends next.

    >>> cell = Cell(100.0)
    >>> cell.start(1, 0.0, nbytes=300.0, limit=math.inf); cell.start(2, 1.0, nbytes=100.0, limit=math.inf)
    >>> cell.ends                                        # 50 a second each from 1.0 on
    (3.0, 2)
    >>> cell.stop(2, 3.0); cell.ends                     # 100 a second again, for the last 100
    (4.0, 1)
    """

    def __init__(self, capacity: float) -> None:
        self._capacity, self._level, self._now_s = capacity, math.inf, 0.0
        self._limits: dict[int, float] = {}
        self._left: dict[int, float] = {}
        self.ends: tuple[float, int] | None = None  # next end: time, transfer (lowest of ties)

    def __contains__(self, transfer: int) -> bool:
        return transfer in self._left

    def start(self, transfer: int, at_s: float, nbytes: float, limit: float) -> None:
        """Start a transfer whose own link carries ``limit`` bytes per emulated second."""
        self._advance(at_s)
        self._limits[transfer], self._left[transfer] = limit, nbytes
        self._share()

    def stop(self, transfer: int, at_s: float) -> None:
        """End a transfer, complete or not."""
        self._advance(at_s)
        del self._limits[transfer], self._left[transfer]
        self._share()

    def _lasts_s(self, transfer: int, left: float) -> float:
        return left / min(self._limits[transfer], self._level) if left > 0 else 0.0

    def _share(self) -> None:
        self._level = fair_level(list(self._limits.values()), self._capacity)
        found = ((self._now_s + self._lasts_s(one, left), one) for one, left in self._left.items())
        self.ends = min(found, default=None)

    def _advance(self, at_s: float) -> None:
        lasted_s = at_s - self._now_s
        if lasted_s > 0:
            for transfer, left in self._left.items():
                # Rounding of the rate must not leave bytes of a transfer that has ended.
                over = self._now_s + self._lasts_s(transfer, left) <= at_s
                moved = min(self._limits[transfer], self._level) * lasted_s
                self._left[transfer] = 0.0 if over else max(0.0, left - moved)
            self._now_s = at_s


class CellMeter:
    """Shared memory in which client processes mark that they transfer: one byte per client and direction.

    Create it before forking the clients. Client c is in cell c mod ``cells``; it counts the active clients of
    its cell to compute its rate.
    """

    def __init__(
        self, cells: int, limits: dict[Way, Sequence[float]], capacities: dict[Way, float | None]
    ) -> None:
        self._cells, self._capacities = cells, capacities
        self._limits = {way: np.asarray(of, dtype=np.float64) for way, of in limits.items()}
        clients = len(limits["down"])
        shared = np.frombuffer(mmap.mmap(-1, max(1, 2 * clients)), dtype=np.uint8)
        self._busy: dict[Way, npt.NDArray[np.uint8]] = {
            "down": shared[:clients], "up": shared[clients : 2 * clients]
        }  # fmt: skip

    def transfers(self, client: int, way: Way, busy: bool) -> None:
        """Record that a transfer of this client starts or ends."""
        self._busy[way][client] = busy

    def gone(self, client: int) -> None:
        """Record that the client's process has ended."""
        for busy in self._busy.values():
            busy[client] = False

    def rate(self, client: int, way: Way) -> float:
        """Return the present rate of this client's transfer, bytes per emulated second."""
        limit, capacity = float(self._limits[way][client]), self._capacities[way]
        if capacity is None:
            return limit
        mine = slice(client % self._cells, None, self._cells)
        sharing = self._limits[way][mine][self._busy[way][mine] != 0]
        return min(limit, fair_level(sharing.tolist() or [limit], capacity))

    def share(self, client: int, way: Way) -> LinkShare:
        """Return one client's share of one direction of its cell."""
        return LinkShare(partial(self.transfers, client, way), partial(self.rate, client, way))


SEND, SENT = 0, 1


class FinishedTrip(NamedTuple):
    """A trip that has ended, complete or by loss of its link, and the duration of its transfers."""

    at_s: float
    task: int
    client: int
    down_s: float
    up_s: float


@dataclass(slots=True)
class _CellTrip:
    client: int
    plan: TripPlan
    begun_s: float
    way: Way = "down"
    down_s: float = 0.0

    @property
    def message(self) -> Transfer:
        return self.plan.down if self.way == "down" else self.plan.up


class SharedCells:
    """Cells under the virtual clock; ``limits`` of clients' links and ``capacities`` of cells in bytes/s."""

    def __init__(
        self, cells: int, limits: dict[Way, Sequence[float]], capacities: dict[Way, float | None]
    ) -> None:
        self._limits = limits
        self._cells: dict[Way, list[Cell]] = {
            way: [Cell(math.inf if capacity is None else capacity) for _ in range(cells)]
            for way, capacity in capacities.items()
        }
        self._trips: dict[int, _CellTrip] = {}
        self._queue: list[tuple[float, int, int]] = []

    def begin(self, task: int, client: int, plan: TripPlan, at_s: float) -> None:
        """Start the download of a trip."""
        self._trips[task] = _CellTrip(client, plan, at_s)
        heapq.heappush(self._queue, (at_s + plan.down.lead_s, SEND, task))

    def drop(self, task: int, at_s: float) -> None:
        """Abort a trip that has not ended."""
        trip = self._trips.pop(task, None)
        if trip is not None and task in (cell := self._cell(trip)):
            cell.stop(task, at_s)
            self._await(cell)

    @property
    def next_s(self) -> float:
        """Time of the next event; infinite if there is none."""
        while self._queue and not self._counts(*self._queue[0]):
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else math.inf

    def advance(self, at_s: float) -> list[FinishedTrip]:
        """Process all events until ``at_s``; return the trips that ended, in order."""
        found: list[FinishedTrip] = []
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
                if (through := self._sent(task, trip, due_s)) is not None:
                    found.append(through)
            self._await(cell)
        return found

    def _sent(self, task: int, trip: _CellTrip, at_s: float) -> FinishedTrip | None:
        """End a message; return the trip if this ends it."""
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
        return FinishedTrip(at_s, task, trip.client, trip.down_s, max(0.0, at_s - trained_s))

    def _cell(self, trip: _CellTrip) -> Cell:
        cells = self._cells[trip.way]
        return cells[trip.client % len(cells)]

    def _await(self, cell: Cell) -> None:
        """Queue the next end of a transfer in this cell."""
        if (ends := cell.ends) is not None:
            heapq.heappush(self._queue, (ends[0], SENT, ends[1]))

    def _counts(self, at_s: float, kind: int, task: int) -> bool:
        """Return True if a queue entry is still valid."""
        trip = self._trips.get(task)
        if trip is None:
            return False
        cell = self._cell(trip)
        return task not in cell if kind == SEND else cell.ends == (at_s, task)
