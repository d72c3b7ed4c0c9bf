"""Assigns tasks to workers, and tracks waiting tasks, running tasks and results. Does no I/O."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice

import msgspec

from edgefl.run import messages

PREFETCH_S = 0.004
"""Amount of work, in seconds, that is sent to a worker in advance so that it never idles. The duration of a
task is estimated from earlier tasks."""
MIN_TASKS, MAX_TASKS = 2, 64
"""Minimum and maximum number of tasks that a worker may hold. The minimum is one task to compute and one that
waits; the maximum is the number of tasks that fit in a message."""
MAX_DEATHS = 3
"""A task is given up when this many workers have died while they computed it. These deaths are not stored in
the journal, because they depend on the processes of this machine, whereas a run's results must be the same on
every machine."""

Send = Callable[[int, Sequence[messages.Task]], bool]
"""Sends tasks to a worker; returns False if the worker is gone."""


class FatalTask(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """Result of a task that killed its workers; ``reason`` describes the last worker's death."""

    client: int
    task: int
    reason: str


_Entry = tuple[float, int, int, messages.Task]
"""A queued task: its due time, its client, its number and its message."""


class Dispatch:
    """Assigns the task that is due first to the worker with the fewest tasks.

    Workers therefore rarely idle, and tasks that are still waiting when the run ends are never computed.
    ``oldest_first`` is True while a sum waits for a free ring entry: tasks of the oldest model versions are
    then assigned first, because they keep ring entries in use.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.oldest_first = False
        self.results: dict[int, messages.TaskResult | messages.Gone | FatalTask] = {}
        """Results of tasks whose trips have not ended yet in emulated time, keyed by task."""
        self._waiting: dict[int, _Entry] = {}
        """Waiting tasks, keyed by task number, in the order in which they were added."""
        self._by_due: list[_Entry] = []
        """Heap of entries, ordered by due time; entries of tasks that are no longer waiting are skipped."""
        self._at_work: dict[int, tuple[int, _Entry]] = {}
        self._deaths: Counter[int] = Counter()
        """Number of workers that have died while they computed a task, keyed by task."""
        self._task_s = PREFETCH_S / MIN_TASKS

    def add(self, task: messages.Task, due_s: float) -> None:
        """Queue a task for a worker."""
        entry = self._waiting[task.task] = (due_s, task.client, task.task, task)
        heapq.heappush(self._by_due, entry)

    def _requeue(self, entries: Sequence[_Entry]) -> None:
        self._waiting = dict(sorted([*self._waiting.items(), *((entry[2], entry) for entry in entries)]))
        self._by_due = sorted(self._waiting.values())

    def withdraw(self, task: int) -> bool:
        """Remove a waiting task; return False if a worker holds the task or has finished it."""
        self._deaths.pop(task, None)
        return self._waiting.pop(task, None) is not None

    @property
    def unfinished(self) -> Iterator[messages.Task]:
        """Tasks that wait for a worker, and tasks that workers have received but not finished."""
        for entry in (*self._waiting.values(), *(entry for _, entry in self._at_work.values())):
            yield entry[3]

    def worker_of(self, task: int) -> int | None:
        """Return the worker that is performing this task; None if the task is waiting or finished."""
        found = self._at_work.get(task)
        return None if found is None else found[0]

    def finished(self, result: messages.TaskResult | messages.Gone) -> messages.Task:
        """Store the result of a task that a worker has finished; return the task."""
        _, entry = self._at_work.pop(result.task)
        self._deaths.pop(result.task, None)
        self.results[result.task] = result
        if isinstance(result, messages.TaskResult):
            self._task_s += 0.1 * (result.cpu_s - self._task_s)
        return entry[3]

    def tasks_of(self, worker: int) -> list[messages.Task]:
        """Return the tasks that this worker has received but not finished."""
        return [entry[3] for holder, entry in self._at_work.values() if holder == worker]

    def worker_died(self, worker: int, computing: int | None, reason: str) -> None:
        """Requeue the tasks of a dead worker, except a task that is blamed for the deaths of workers.

        ``computing`` is the task that the worker had begun last, if any. The task is blamed if `MAX_DEATHS`
        workers have died while they computed it; it then gets a `FatalTask` result in `results`.
        """
        orphans = [entry for holder, entry in self._at_work.values() if holder == worker]
        for entry in orphans:
            del self._at_work[entry[2]]
        if computing is not None:
            self._deaths[computing] += 1
            if self._deaths[computing] >= MAX_DEATHS:
                (guilty,) = (entry for entry in orphans if entry[2] == computing)
                orphans.remove(guilty)
                del self._deaths[computing]
                self.results[computing] = FatalTask(guilty[1], computing, reason)
        self._requeue(orphans)

    def fill(self, workers: Collection[int]) -> None:
        """Send waiting tasks to ``workers``, except to those that hold more than half of their maximum."""
        if not self._waiting or not workers:
            return
        counts = dict.fromkeys(workers, 0)
        for worker, _ in self._at_work.values():
            if worker in counts:
                counts[worker] += 1
        most = max(MIN_TASKS, min(MAX_TASKS, int(PREFETCH_S / max(self._task_s, 1e-9))))
        for worker, held in sorted(counts.items(), key=lambda item: (item[1], item[0])):
            if not self._waiting or held > most // 2:
                return
            share = -(-(len(self._waiting) + len(self._at_work)) // len(counts))
            entries = self._next(min(max(1, min(most, share) - held), len(self._waiting)))
            if self._send(worker, [entry[3] for entry in entries]):
                self._at_work.update({entry[2]: (worker, entry) for entry in entries})
            else:
                self._requeue(entries)

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
