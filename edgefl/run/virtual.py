"""Timeline of the virtual clock: events are scheduled in an agenda, and any worker may perform a task.

A few processes train ahead of emulated time; the server waits for an update only when its arrival is due. The
results therefore depend only on the seed, and not on the number, the speed or the deaths of the workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np

from edgefl import failpoints
from edgefl.core.events import Died, Failed, Halted, Joined, Left
from edgefl.devices.dynamics import Transition
from edgefl.devices.fleet import joins_at_s
from edgefl.devices.plan import TripPlan
from edgefl.errors import ConfigError, RunError
from edgefl.run import control, messages
from edgefl.run.clock import ARRIVAL, JOIN, LEAVE, TICK, Due, VirtualClock
from edgefl.run.dispatch import Dispatch, FatalTask
from edgefl.run.gate import TaskReturned
from edgefl.run.peers import Peer
from edgefl.run.timeline import (
    InFlightWork,
    Order,
    Restored,
    Timeline,
    TimelineEvent,
    planned_phase,
)

TRAINING_DEATH = "its training ended its process"
"""Prefix of the reason for a client's death if its training killed the workers that computed it."""
EVENTS_AT_ONCE = 128
"""Maximum number of events that are processed before the socket is polled again."""
STALL_LIMIT = 1000
"""A run is stopped after this many events per client without progress: joins and leaves in a row with no task
assigned in between or, if only emulated time or an evaluation can end the run, trips that all end at the same
emulated time."""


class Trip(msgspec.Struct):
    """A running trip and its complete plan, which is drawn at random when the trip starts."""

    task: messages.Task
    plan: TripPlan
    sent_s: float
    cancelled: bool = False
    left: Left | Died | None = None
    """The event that cancelled the trip, if the client left or died as the experiment declares; else None."""
    doomed: bool = False
    """True if the client will leave before the trip ends, so that the task is not computed."""
    broken: str = ""
    """Description of how the link was lost during the trip, or "" if it was not lost. The task of a trip with
    a lost link is not computed."""

    def times(self) -> messages.TripTimes:
        """Return the times of the trip, which are exactly the planned ones."""
        plan = self.plan
        down, compute, up, delay = (
            messages.Spent(time_s, time_s)
            for time_s in (plan.down_s, plan.compute_s, plan.up_s, plan.down.lead_s + plan.up.lead_s)
        )
        return messages.TripTimes(plan.work_s, down, compute, up, delay, busy_s=plan.busy_s)


@dataclass(eq=False)
class VirtualTimeline(Timeline):
    """Processes events in the order of emulated time, as soon as their results are computed."""

    clock: VirtualClock
    workers: int

    def __post_init__(self) -> None:
        self._dispatch = Dispatch(self._send_tasks)
        self._running_trips: dict[int, Trip] = {}
        self._idle_changes = 0
        """Number of joins and leaves since a task was last assigned."""
        self._instant: tuple[float, int] = (-math.inf, 0)
        """Emulated time of the last arrival, and the number of arrivals at that time."""
        self._withdrawn: dict[int, list[int]] = {}  # worker → cancelled tasks that it still holds
        self._orders = 0
        """Number of orders sent to workers so far."""
        self._started = False
        self._has_more = False
        """True if the last call of `due` ended because it had yielded the maximum number of events."""

    def expect(self) -> None:
        for worker in range(self.workers):
            self.peers.expect(control.WORKER, worker)

    def start(self) -> None:
        self._started = True
        self.agenda.follow(self._first_joins())
        self._schedule_changes()

    def _first_joins(self) -> Iterator[Due]:
        """Yield the first joins of the absent clients in chronological order.

        Clients whose availability `dynamics` tracks are excluded.
        """
        absent = np.flatnonzero(np.frombuffer(self.core.present, np.uint8) == 0)
        if self.dynamics is not None:
            absent = np.array([client for client in absent.tolist() if client not in self.dynamics], np.int64)
        firsts = (joins_at_s(self.experiment, client) for client in absent.tolist())
        instants = np.fromiter(map(self._not_before, absent.tolist(), firsts), np.float64, len(absent))
        order = np.lexsort((absent, instants))
        order = order[instants[order] < math.inf]
        columns = zip(instants[order].data, absent[order].data, strict=True)
        return (Due(at_s, JOIN, client) for at_s, client in columns)

    @property
    def expected(self) -> int:
        return int(self.agenda.head is not None)

    def departed(self, peer: Peer, end: control.Departed) -> Iterator[TimelineEvent]:
        """Requeue the tasks of a dead worker. This causes no event, because no client depends on a worker.

        If a task has killed too many workers, its client dies when the update would have arrived. A death in
        the middle of a task is blamed on the task; any other death is blamed on the worker.
        """
        computing = self._computing(end)
        if not self.lifecycle.retry(peer, blamed=computing is None):
            raise RunError(f"worker {peer.number} died too often; the record of the run lists its deaths")
        self._withdrawn.pop(peer.number, None)
        dispatch = self._dispatch
        orphans = dispatch.tasks_of(peer.number)
        dispatch.worker_died(peer.number, computing, end.reason)
        for task in orphans:
            self.aggregator.reclaim(task.task)
            if task.task in dispatch.results:
                self.aggregator.fetched(task.slot)
            elif self._running_trips[task.task].cancelled:
                self._withdraw(task.task)
        return iter(())

    def _computing(self, end: control.Departed) -> int | None:
        """Return the task that the dead worker began last, or None if it had finished this task."""
        task = end.task
        return task if task is not None and self._dispatch.worker_of(task) == end.peer else None

    def assign(self, task: messages.Task, sent_s: float | None = None) -> None:
        """Begin a trip, now or at ``sent_s``.

        The plan equals the plan that the client's own process would compute under the wall clock.
        """
        self._idle_changes = 0
        client, dynamics = task.client, self.dynamics
        sent_s = (self.clock.now_s() if sent_s is None else sent_s) + task.wait_s
        plan = self.plan(task)
        trip = self._running_trips[task.task] = Trip(task, plan, sent_s)
        due_s = sent_s + plan.over_s(private=self.core.privacy is not None)
        if dynamics is not None and dynamics.lost_at_s(client) < due_s:
            trip.doomed = True
            self.aggregator.fetched(task.slot)
            return
        self.agenda.add(Due(due_s, ARRIVAL, client, task.task))
        if plan.breaks_s < math.inf:
            trip.broken = plan.broken
            self.aggregator.fetched(task.slot)
        else:
            self._dispatch.add(task, due_s)

    def cancel(self, client: int, task: int) -> None:
        """End the trip now. If no worker has begun its task, the task is never computed."""
        trip = self._running_trips[task]
        trip.cancelled, trip.doomed = True, False
        self.agenda.add(Due(self.clock.now_s(), ARRIVAL, client, task))
        self._withdraw(task)

    def phase(self, task: int) -> int:
        trip = self._running_trips[task]
        return planned_phase(trip.plan, self.clock.now_s() - trip.sent_s)

    def _withdraw(self, task: int) -> None:
        if (worker := self._dispatch.worker_of(task)) is not None:
            self._withdrawn.setdefault(worker, []).append(task)
        elif self._dispatch.withdraw(task):
            self.aggregator.fetched(self._running_trips[task].task.slot)

    def task_ended(self, result: messages.TaskResult | TaskReturned) -> Iterator[TimelineEvent]:
        """Store a worker's result until the trip ends in emulated time."""
        if isinstance(result, TaskReturned):
            task = self._dispatch.finished(messages.Gone(result.client, result.task, result.reason))
        else:
            task = self._dispatch.finished(result)
        self.aggregator.fetched(task.slot)
        return iter(())

    def flush(self) -> None:
        """Send the workers their next tasks, and the cancellations of tasks that they hold."""
        if not self._started or self.core.stopped is not None:
            return
        for worker, tasks in self._withdrawn.items():
            if (peer := self.peers.get(control.WORKER, worker)) is not None:
                self.gate.send(peer, messages.Withdraw(tasks))
        self._withdrawn.clear()
        self._dispatch.oldest_first = self.aggregator.deferred is not None
        workers = self.peers.of(control.WORKER)
        self._dispatch.fill([peer.number for peer in workers if peer.ready and not peer.expelled])

    def _send_tasks(self, worker: int, tasks: Sequence[messages.Task]) -> bool:
        peer, transport = self.peers.get(control.WORKER, worker), self.gate.transport
        if peer is None:
            return False
        taken = True
        by_entry = groupby(tasks, key=lambda task: task.entry if transport.carries_updates else 0)
        for _, same in by_entry:
            self._orders += 1
            batch = [msgspec.structs.replace(task, order=self._orders) for task in same]
            frames = transport.model_frames(batch[0].entry)
            taken = taken and self.gate.send(peer, messages.Tasks(batch), frames)
            for task in batch:
                self.aggregator.renumber(task.task, task.order)
        if taken:
            for task in tasks:
                self.aggregator.assign(task.task, worker)
        return taken

    def resend(self, peer: Peer) -> Iterator[TimelineEvent]:
        if self.core.stopped is None and (tasks := self._dispatch.tasks_of(peer.number)):
            self._send_tasks(peer.number, tasks)
        return iter(())

    def wait_ms(self) -> int:
        return 0 if self._has_more else 1000

    def due(self) -> Iterator[TimelineEvent]:
        """Yield the next events that can be processed now, at most `EVENTS_AT_ONCE`."""
        agenda, dispatch, self._has_more = self.agenda, self._dispatch, False
        for _ in range(EVENTS_AT_ONCE):
            if self.core.stopped is not None or self.aggregator.deferred is not None:
                return
            if self.experiment.stop.measured and self.evaluation.waiting:
                return  # the result of the evaluation may end the run before this event
            due = agenda.head
            if due is None:
                return
            at_s, kind, client, task = due
            if kind == ARRIVAL:
                trip = self._running_trips[task]
                computed = task in dispatch.results or trip.broken != ""
                if not (dispatch.worker_of(task) is None if trip.cancelled else computed):
                    return  # not computed yet, or cancelled while a worker may still write into its slot
            agenda.pop()
            if kind in (JOIN, LEAVE) and (change := self._next_change(client)) is not None:
                if due != change:
                    continue
                if (end := self._count_change()) is not None:
                    yield end
                    return
            self.clock.advance(at_s)
            if kind == ARRIVAL:
                yield self._ended(due)
            elif kind == JOIN:
                yield Joined(client, at_s)
            elif kind == LEAVE:
                yield from self._leave(due)
            elif kind == TICK:
                yield self._tick(at_s)
            self._schedule_changes()
            failpoints.pass_by("event")
        self._has_more = True

    def _ended(self, due: Due) -> TimelineEvent:
        """Remove a trip that ends now; return the event for its end."""
        at_s, _, client, task = due
        self._require_time(at_s)
        trip, result = self._running_trips.pop(task), self._dispatch.results.pop(task, None)
        if trip.cancelled:
            return trip.left or Failed(client, task, at_s, "cancelled")
        if trip.broken:
            self.store.incident(self.clock.now_s(), client, "failed", trip.broken)
            return Failed(client, task, at_s, trip.broken)
        if isinstance(result, messages.TaskResult):
            return self.delivery(client, result, trip.times(), at_s)
        assert result is not None
        if isinstance(result, FatalTask):
            self.store.incident(at_s, client, "death", result.reason)
            return Died(client, at_s, f"{TRAINING_DEATH}: {result.reason}", task=task)
        self.store.incident(at_s, client, "failed", result.reason)
        return Failed(client, task, at_s, result.reason)

    def rejoin(self, client: int, at_s: float) -> None:
        if self._next_change(client) is None:
            self._schedule(Due(self._not_before(client, at_s), JOIN, client))

    def _change_s(self, client: int, move: Transition) -> float:
        return self._not_before(client, move.at_s) if move.joins else max(move.at_s, self.clock.now_s())

    def _not_before(self, client: int, at_s: float) -> float:
        return max(at_s, self.clock.now_s(), self.core.deaths.returns_s(client))

    def _require_time(self, at_s: float) -> None:
        """Raise RunError if trips take no time and only emulated time or an evaluation can end the run."""
        last_s, count = self._instant
        count = count + 1 if at_s == last_s else 1
        self._instant = (at_s, count)
        stop = self.experiment.stop
        ends = (stop.trips, stop.versions, stop.wall_s)
        if count > STALL_LIMIT * len(self.trips.data.final) and ends == (None, None, None):
            raise RunError(
                f"emulated time stands still at {at_s:g} s: {count} trips took no time; set stop.trips or "
                "stop.versions, or a fleet whose trips take time"
            )

    def save(self) -> InFlightWork:
        """Return the results of trips that have not ended yet, and the versions from which unfinished tasks
        start."""
        trips, results = self._running_trips, self._dispatch.results.values()
        answers = [answer for answer in results if not trips[answer.task].cancelled]
        # The task of a client that is leaving is not computed. Its departure is saved, so that the client
        # also leaves after a resume.
        left = [(task, trip.left) for task, trip in trips.items() if trip.left is not None]
        gone = [messages.Gone(event.client, task, event.reason) for task, event in left]
        starting = self._dispatch.unfinished
        if self.core.strategy.measures:
            starting = (trip.task for trip in trips.values())
        return InFlightWork(
            answers=[*answers, *gone],
            tasks=[answer.task for answer in answers if isinstance(answer, messages.TaskResult)],
            entries={task.version: task.entry for task in starting} | self.evaluation.entries,
        )

    def restore(self, restored: Restored, order: Order) -> Iterator[TimelineEvent]:
        """Continue all trips that were running, as if there had been no interruption."""
        for number, (train, sent_s) in restored.tasks.items():
            client, version, answer = train.client, train.version, restored.answers.get(number)
            entry = restored.entries.get(version, -1)
            if isinstance(answer, messages.TaskResult):  # the update was computed before its arrival was due
                last = restored.checkpoint
                lease = self.aggregator.restore(
                    task=number,
                    client=client,
                    version=version,
                    update=last.held[number],
                    statistics=last.statistics.get(number),
                    entry=entry,
                )
            else:
                lease = self.aggregator.resume(task=number, client=client, version=version, entry=entry)
            self.assign(order(train, lease, sent_s, sent_s), sent_s)
            if number in self.core.cancelled:
                self.cancel(client, number)
            elif answer is not None:
                self._dispatch.withdraw(number)
                self._dispatch.results[number] = answer
                self.aggregator.fetched(lease.slot)
            elif lease.entry < 0 and self._dispatch.withdraw(number):
                raise ConfigError(f"the checkpoint lacks version {version} for task {number}")
        return iter(())

    def _count_change(self) -> Halted | None:
        """Count a declared join or leave; stop the run after too many of them with no task in between.

        In that case, return the end of the run if a client was dropped or will never return, and otherwise
        raise RunError. The limit is `STALL_LIMIT` per client; it applies only while no client is training.
        """
        self._idle_changes += 1
        core = self.core
        if self._idle_changes <= STALL_LIMIT * len(self.trips.data.final) or core.training:
            return None
        if self.any_gone:
            return Halted(self.clock.now_s(), core.too_few)
        raise RunError(
            f"no client is training and none will start: phones joined or left {self._idle_changes} "
            f"times since the last new task, {len(core.held)} updates wait in the buffer"
        )

    def _leave(self, due: Due) -> Iterator[TimelineEvent]:
        assert self.dynamics is not None
        client, why = due.client, self.dynamics.move(due.client).why
        if why != "offline":
            self.store.incident(self.clock.now_s(), client, "death" if why == "died" else why, "as declared")
        task = self.core.task_of(client)
        finishes = task is not None and self.dynamics.finishes(client)
        left: Left | Died = Left(client, due.at_s, why, finishes=finishes)
        if why == "died":
            left = Died(client, due.at_s, why, declared=True)
        if task is not None and not finishes:
            trip = self._running_trips[task]
            if not trip.doomed:
                trip.left = left
                self.cancel(client, task)
                return
            del self._running_trips[task]
        yield left
