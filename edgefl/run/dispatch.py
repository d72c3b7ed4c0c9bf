"""Tasks that wait, tasks in the hands of workers, and what came back. Pure: it knows no socket."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence

from edgefl.errors import RunError
from edgefl.run import messages

AHEAD_S = 0.004
"""Seconds of work in a worker's hand, by the cost of tasks so far, so that it need not wait for more."""
FEWEST, MOST = 2, 64
"""Tasks in a worker's hand: one that it computes and one more, at most so many as fit a message."""
MOST_LOSSES = 8
"""A task that was in the hands of so many workers when they died is what they die of."""

Send = Callable[[int, Sequence[messages.Task]], bool]
"""Gives tasks to a worker; False if it is gone."""


class Dispatch:
    """Gives the task that is due first to the worker with the least in hand.

    That order lets the agenda go on after every result, so workers starve least, and what is still waiting
    at the end of a run is never computed. While a sum waits for room in the ring, tasks of the oldest
    versions come first instead (``oldest_first``): they are what keeps it full.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.oldest_first = False
        self.results: dict[int, messages.TaskResult | messages.Gone] = {}
        """What was computed, until its arrival is due, by task."""
        self._waiting: dict[int, messages.Task] = {}
        self._due_s: dict[int, float] = {}
        self._by_due: list[tuple[float, int, int]] = []
        self._by_age: list[int] = []
        self._at_work: dict[int, tuple[int, messages.Task]] = {}
        self._losses: dict[int, int] = {}
        self._task_s = AHEAD_S / FEWEST

    # ---- tasks ---------------------------------------------------------------------------------

    def add(self, task: messages.Task, due_s: float) -> None:
        """A task waits for a worker."""
        self._due_s[task.task] = due_s
        self._wait(task)

    def _wait(self, task: messages.Task) -> None:
        self._waiting[task.task] = task
        heapq.heappush(self._by_due, (self._due_s[task.task], task.client, task.task))
        heapq.heappush(self._by_age, task.task)

    def take_back(self, task: int) -> bool:
        """Nobody shall begin this task any more; False if a worker has it, or has done it."""
        if self._waiting.pop(task, None) is None:
            return False
        self._forget(task)
        return True

    @property
    def unfinished(self) -> Iterator[messages.Task]:
        """Tasks that wait or are being computed."""
        yield from self._waiting.values()
        for _, task in self._at_work.values():
            yield task

    def waits(self, task: int) -> bool:
        """Returns True if no worker has it yet."""
        return task in self._waiting

    def held_by(self, task: int) -> int | None:
        """The worker that has this task in hand."""
        found = self._at_work.get(task)
        return None if found is None else found[0]

    def order(self, task: int) -> messages.Task:
        """The task that a worker has in hand, as it was told."""
        return self._at_work[task][1]

    def finished(self, result: messages.TaskResult | messages.Gone) -> messages.Task:
        """A worker is done with a task; returns what it was told."""
        _, task = self._at_work.pop(result.task)
        self._forget(result.task)
        self.results[result.task] = result
        if isinstance(result, messages.TaskResult):
            self._task_s += 0.1 * (result.cpu_s - self._task_s)
        return task

    def worker_gone(self, worker: int) -> list[messages.Task]:
        """Makes the tasks in a dead worker's hand wait again, and returns them.

        Raises `RunError` if one of them has been in the hands of too many dead workers.
        """
        orphans = [task for holder, task in self._at_work.values() if holder == worker]
        for task in orphans:
            del self._at_work[task.task]
            losses = self._losses[task.task] = self._losses.get(task.task, 0) + 1
            if losses >= MOST_LOSSES:
                raise RunError(
                    f"{losses} workers died with client {task.client}'s trip {task.trip} in hand; "
                    "see the incidents on record"
                )
            self._wait(task)
        return orphans

    def _forget(self, task: int) -> None:
        del self._due_s[task]
        self._losses.pop(task, None)

    # ---- workers -------------------------------------------------------------------------------

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
            tasks = [self._next() for _ in range(min(max(1, min(most, share) - held), len(self._waiting)))]
            if not self._send(worker, tasks):
                for task in tasks:
                    self._wait(task)
            else:
                self._at_work.update({task.task: (worker, task) for task in tasks})

    def _next(self) -> messages.Task:
        """The waiting task that is to be computed first."""
        while True:
            number = heapq.heappop(self._by_age) if self.oldest_first else heapq.heappop(self._by_due)[2]
            if (task := self._waiting.pop(number, None)) is not None:
                self._tidy()
                return task

    def _tidy(self) -> None:
        """Each task is in both queues and leaves by one: the other must not grow for ever."""
        room = 2 * len(self._waiting) + 1000
        if len(self._by_age) > room:
            self._by_age = sorted(self._waiting)
        if len(self._by_due) > room:
            self._by_due = sorted((self._due_s[n], t.client, n) for n, t in self._waiting.items())
