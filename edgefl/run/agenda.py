"""What is to happen by itself, in the order of emulated time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

TICK, JOIN, ARRIVAL, LEAVE, CELL = 0, 1, 2, 3, 4
"""Kinds of entries: at one instant they come in this order. Arrivals and cells are the virtual clock's."""


class Due(NamedTuple):
    """An entry of the agenda; those of one instant come in the order of these fields."""

    at_s: float
    kind: int
    client: int = -1
    task: int = -1


class Agenda:
    """Entries by time. A task's arrival may be brought forward: it has one entry that counts.

    >>> agenda = Agenda([Due(2.0, TICK)])
    >>> agenda.enter(Due(5.0, ARRIVAL, client=1, task=7)); agenda.enter(Due(1.0, ARRIVAL, client=1, task=7))
    >>> [agenda.take().at_s, agenda.take().at_s, agenda.head]
    [1.0, 2.0, None]
    """

    def __init__(self, entries: Iterable[Due] = ()) -> None:
        self._heap: list[Due] = []
        self._due_s: dict[int, float] = {}
        for entry in entries:
            self.enter(entry)

    def enter(self, due: Due) -> None:
        """Put an entry in its place; a task's arrival takes the place of the one it had."""
        if due.kind == ARRIVAL:
            self._due_s[due.task] = due.at_s
        heapq.heappush(self._heap, due)

    @property
    def head(self) -> Due | None:
        """What comes next; None if there is nothing."""
        heap = self._heap
        while heap:
            due = heap[0]
            if due.kind != ARRIVAL or self._due_s.get(due.task) == due.at_s:
                return due
            heapq.heappop(heap)
        return None

    def take(self) -> Due:
        """Remove and return the head; IndexError if there is none."""
        if self.head is None:
            raise IndexError("the agenda is empty")
        due = heapq.heappop(self._heap)
        if due.kind == ARRIVAL:
            del self._due_s[due.task]
        return due
