"""Tasks that wait, tasks in the hands of workers, and what came back. Pure: it knows no socket."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice

import msgspec

from edgefl.run import messages

AHEAD_S = 0.004
"""Seconds of work in a worker's hand, by the cost of tasks so far, so that it need not wait for more."""
FEWEST, MOST = 2, 64
"""Tasks in a worker's hand: one that it computes and one more, at most so many as fit a message."""
MOST_LOSSES = 3
"""A task that so many workers were computing when they died is what they die of."""

Send = Callable[[int, Sequence[messages.Task]], bool]
"""Gives tasks to a worker; False if it is gone."""


class Died(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """An answer for workers that died of a task, and how the last of them ended."""

    client: int
    task: int
    reason: str


_Entry = tuple[float, int, int, messages.Task]
"""Time at which a task is due, client, task number, task."""


class Dispatch:
    """Gives the task that is due first to the worker with the least in hand.

    So workers starve least, and what waits at the end of a run is never computed. While a sum waits for room
    in the ring, tasks of the oldest versions come first (``oldest_first``): they are what keeps it full.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.oldest_first = False
        self.results: dict[int, messages.TaskResult | messages.Gone | Died] = {}
        """Results whose arrival is not due yet, by task."""
        self._waiting: dict[int, _Entry] = {}
        """By task; those given out first come first."""
        self._by_due: list[_Entry] = []
        """A heap; entries of tasks that wait no more are passed over."""
        self._at_work: dict[int, tuple[int, _Entry]] = {}
        self._losses: dict[int, int] = {}
        self._task_s = AHEAD_S / FEWEST

    def add(self, task: messages.Task, due_s: float) -> None:
        """A task waits for a worker."""
        entry = self._waiting[task.task] = (due_s, task.client, task.task, task)
        heapq.heappush(self._by_due, entry)

    def _wait_again(self, entries: Sequence[_Entry]) -> None:
        self._waiting = dict(sorted([*self._waiting.items(), *((entry[2], entry) for entry in entries)]))
        self._by_due = sorted(self._waiting.values())

    def take_back(self, task: int) -> bool:
        """Nobody shall begin this task any more; False if a worker has it, or has done it."""
        self._losses.pop(task, None)
        return self._waiting.pop(task, None) is not None

    @property
    def unfinished(self) -> Iterator[messages.Task]:
        """Tasks that wait or are being computed."""
        for entry in (*self._waiting.values(), *(entry for _, entry in self._at_work.values())):
            yield entry[3]

    def held_by(self, task: int) -> int | None:
        """The worker that has this task in hand."""
        found = self._at_work.get(task)
        return None if found is None else found[0]

    def finished(self, result: messages.TaskResult | messages.Gone) -> messages.Task:
        """A worker is done with a task; returns what it was told."""
        _, entry = self._at_work.pop(result.task)
        self._losses.pop(result.task, None)
        self.results[result.task] = result
        if isinstance(result, messages.TaskResult):
            self._task_s += 0.1 * (result.cpu_s - self._task_s)
        return entry[3]

    def in_hand(self, worker: int) -> list[messages.Task]:
        """The tasks that this worker has and has not answered."""
        return [entry[3] for holder, entry in self._at_work.values() if holder == worker]

    def worker_gone(self, worker: int, computing: int | None, reason: str) -> None:
        """Makes the tasks in a dead worker's hand wait again, but for the one that too many have died of.

        ``computing`` is the task that it had begun last, if any. All that is left of one that workers die of
        is an answer in `results`.
        """
        orphans = [entry for holder, entry in self._at_work.values() if holder == worker]
        for entry in orphans:
            del self._at_work[entry[2]]
        if computing is not None:
            losses = self._losses[computing] = self._losses.get(computing, 0) + 1
            if losses >= MOST_LOSSES:
                (guilty,) = (entry for entry in orphans if entry[2] == computing)
                orphans.remove(guilty)
                del self._losses[computing]
                self.results[computing] = Died(guilty[1], computing, reason)
        self._wait_again(orphans)

    def fill(self, workers: Collection[int]) -> None:
        """Give waiting tasks to those of ``workers`` whose hands are at most half full."""
        if not self._waiting or not workers:
            return
        hands = dict.fromkeys(workers, 0)
        for worker, _ in self._at_work.values():
            if worker in hands:
                hands[worker] += 1
        most = max(FEWEST, min(MOST, int(AHEAD_S / max(self._task_s, 1e-9))))
        for worker, held in sorted(hands.items(), key=lambda item: (item[1], item[0])):
            if not self._waiting or held > most // 2:
                return
            share = -(-(len(self._waiting) + len(self._at_work)) // len(hands))
            entries = self._next(min(max(1, min(most, share) - held), len(self._waiting)))
            if self._send(worker, [entry[3] for entry in entries]):
                self._at_work.update({entry[2]: (worker, entry) for entry in entries})
            else:
                self._wait_again(entries)

    def _next(self, count: int) -> list[_Entry]:
        waiting = self._waiting
        if self.oldest_first:
            found = list(islice(waiting.values(), count))
            for entry in found:
                del waiting[entry[2]]
        else:
            found = []
            while len(found) < count:
                entry = heapq.heappop(self._by_due)
                if waiting.pop(entry[2], None) is not None:
                    found.append(entry)
        if len(self._by_due) > 2 * len(waiting) + 1000:
            self._by_due = sorted(waiting.values())
        return found
