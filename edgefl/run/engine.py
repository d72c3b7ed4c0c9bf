"""The engine: passes events to the core and carries out the core's actions.

It leases slots, sums updates, frees slots and writes the record; no other module connects core, aggregator
and record. It uses no socket: it passes tasks, cancellations and wake-ups to a `Timeline`, and versions to be
evaluated to an `EvaluationQueue`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from edgefl import failpoints
from edgefl.core import Core, events
from edgefl.core.events import Action, Arrived, Evaluate, Event, Release, Revoke, Sum, Summed, Train, Wake
from edgefl.devices.dynamics import Dynamics
from edgefl.devices.plan import End
from edgefl.results.rows import EvaluationRow, TripRow, VersionRow
from edgefl.results.store import Store
from edgefl.run import messages
from edgefl.run.aggregator import Aggregator
from edgefl.run.evaluation import EvaluationQueue
from edgefl.run.hidden import HiddenSums
from edgefl.run.progress import Stopwatch
from edgefl.run.slots import Lease
from edgefl.run.timeline import Delivery, Timeline, TimelineEvent

LONG_SUM_BYTES = 2**20
"""If the updates of a sum have at least this many bytes in total, queued tasks are sent before the sum
is computed, so that clients need not wait for it."""


class _OpenTrip(msgspec.Struct):
    """A trip that has no row in the record yet; ``arrival`` is set when its update is complete."""

    order: Train
    sent_s: float
    arrival: Delivery | None = None
    staleness: int = 0
    zero: bool = False
    """True if the trip failed in a run with differential privacy; its slot then holds an all-zero update."""

    def row(self, size_bytes: tuple[int, int], checksum_seen: int | None = None) -> TripRow:
        """Return the trip's row for the record, with the fields that are known so far.

        ``size_bytes`` holds the sizes of the model and of the update.
        """
        order, arrival = self.order, self.arrival
        if arrival is None:
            return TripRow(
                task=order.task,
                client=order.client,
                base_version=order.version,
                trip=order.trip,
                sent_s=self.sent_s,
            )
        result, times = arrival.result, arrival.times
        down, compute, up, trip = times.down, times.compute, times.up, times.trip
        return TripRow(
            task=order.task,
            client=order.client,
            base_version=order.version,
            trip=order.trip,
            sent_s=self.sent_s,
            received_s=self.sent_s + down.achieved_s,
            arrived_s=arrival.at_s,
            staleness=self.staleness,
            examples=arrival.examples,
            steps=result.steps,
            loss=result.loss,
            trained_version=result.trained_version,
            down_bytes=size_bytes[0],
            up_bytes=size_bytes[1],
            down_s=down.achieved_s,
            compute_s=compute.achieved_s,
            up_s=up.achieved_s,
            down_declared_s=down.declared_s,
            compute_declared_s=compute.declared_s,
            up_declared_s=up.declared_s,
            delay_declared_s=times.delay.declared_s,
            delay_s=times.delay.achieved_s,
            trip_declared_s=trip.declared_s,
            trip_achieved_s=trip.achieved_s,
            work_s=times.work_s,
            busy_s=times.busy_s,
            lateness_s=None if times.own_pace else times.lateness_s,
            cpu_s=result.cpu_s,
            peak_mib=result.peak_mib,
            process_grew_mib=times.process_grew_mib,
            checksum_sent=result.checksum,
            checksum_seen=checksum_seen,
            metrics=result.metrics,
        )


def is_kept(task: int, actions: Iterable[Action]) -> bool:
    """Return True if the server keeps a new update, which means that no action releases its task.

    The client's own vectors from this trip then replace its earlier ones; see `ParameterBuffer.accepted`.
    """
    return not any(type(action) is Release and action.task == task for action in actions)


@dataclass(eq=False)
class Engine:
    """Handles events of the timeline: writes them to the journal, passes them to the core, and carries out
    the core's actions."""

    core: Core
    aggregator: Aggregator
    store: Store
    timeline: Timeline
    _evaluation: EvaluationQueue
    _watch: Stopwatch
    _dynamics: Dynamics | None = None
    restored: Iterable[int] = ()
    """Tasks whose updates arrived before an interruption, and whose trips are already in the record."""
    running: Mapping[int, tuple[Train, float]] = field(default_factory=dict)
    """Tasks that were running when the run was interrupted, with the times at which they were assigned."""
    write_ahead: WriteAhead | None = None
    """Commits events before messages are sent to clients, so that the events survive a kill of this process;
    None under the virtual clock."""
    exchange_bytes: int = 0
    """Number of bytes that secure aggregation adds to a client's download."""
    wait_s: Callable[[int, int, int], float] = lambda client, task, trip: 0.0
    """Returns the time in emulated seconds from a task's message to the trip's start; see `Trips.wait_s`."""

    def __post_init__(self) -> None:
        timeline, self._clock, self._on_record = self.timeline, self.timeline.clock, set(self.restored)
        # Trips without a row in the record, keyed by task.
        self._open = {
            task: _OpenTrip(order, at_s + self.wait_s(order.client, task, order.trip))
            for task, (order, at_s) in self.running.items()
        }
        self._assessing: dict[int, tuple[float, int]] = {}
        """For each version at the evaluator, its publication time, and the number of client trips up to
        that time."""
        shape = self.aggregator.buffer.shape
        self._size_bytes = (4 * shape.size + self.exchange_bytes, shape.update_bytes)
        self._keeps, self._measures = shape.clients > 0, self.core.strategy.measures
        self._handlers: dict[type, Callable[[Any], None]] = {
            Train: self._train,
            Revoke: lambda action: timeline.cancel(action.client, action.task),
            events.Rejoin: lambda action: timeline.rejoin(action.client, action.at_s),
            events.Drop: self._drop,
            Release: self._release,
            Evaluate: self._evaluate,
            Wake: lambda action: timeline.wake(action.at_s),
            events.Finish: lambda action: None,  # the loop checks `Core.stopped`
        }

    def handle(self, timeline_event: TimelineEvent) -> None:
        """Write an event to the journal, pass it to the core, and carry out the core's actions.

        A sum that waits for clients is retried after each event, because a client may have joined, or the
        exchange that unmasks the sum may have ended.
        """
        self._handle(timeline_event)
        if (action := self.aggregator.waiting) is not None:
            self.aggregator.waiting = None
            self.carry_out([action])

    def _handle(self, timeline_event: TimelineEvent) -> None:
        if type(timeline_event) is not Delivery:
            actions = self._decide(timeline_event)  # type: ignore[arg-type]
            if isinstance(timeline_event, (events.Failed, events.Died)) and timeline_event.task is not None:
                self._zero(timeline_event.task)
            self.carry_out(actions)
            return
        event = self._arrived(timeline_event)
        actions = self._decide(event)
        if self._keeps and is_kept(event.task, actions):
            self.aggregator.buffer.accepted(event.client, event.task)
        if self.write_ahead is not None:
            self._record_trip(event.task)
        self.carry_out(actions)

    def secure(self) -> None:
        """Write all events so far to the record, so that they survive the death of this process."""
        if self.write_ahead is not None:
            self.write_ahead.secure()
        else:
            self.store.commit()

    def carry_out(self, actions: list[Action]) -> None:
        """Carry out actions of the core, including actions that were pending before an interruption."""
        for action in actions:  # a `Sum` appends its follow-up actions to this list
            if type(action) is Sum:
                if (hidden := self.aggregator.hidden) is not None:
                    if self._waits(action, hidden):
                        continue
                    if self.write_ahead is not None:
                        self.write_ahead.secure()  # a restarted server must repeat the same sum
                entry = self.aggregator.free_entry()
                if entry is None and self.write_ahead is not None:
                    self.write_ahead.secure()
                    entry = self.aggregator.free_entry()
                if entry is None:
                    self.aggregator.deferred = action
                else:
                    actions.extend(self._sum(action, entry))
            else:
                self._handlers[type(action)](action)

    def _waits(self, action: Sum, hidden: HiddenSums) -> bool:
        """Return True if a hidden sum must wait for clients that can unmask it, or for the end of their
        exchange of shares.

        At the end of the run, no sum waits: a sum whose exchange has not ended is refused.
        """
        aggregator, now_s, from_s = self.aggregator, self.core.now_s, action.from_s
        exchanging = from_s is not None and now_s < from_s
        members = () if exchanging else aggregator.members(action, zero=True)
        lacks = not exchanging and hidden.lacks_helpers(aggregator.buffer, members)
        until_s = now_s
        if from_s is None and not lacks:
            until_s += hidden.exchange_s(aggregator.buffer, members, action.version, now_s)
        if self.core.ends:
            hidden.cut_short = exchanging or until_s > now_s
            return False
        if lacks:
            if self.core.arrival_version < action.version:  # from now on, the core acts as during an exchange
                self.carry_out(self._decide(events.Unmasking(action.version, now_s, now_s)))
            action = msgspec.structs.replace(action, from_s=None)  # clients that return begin a new exchange
        elif until_s > now_s:
            action = msgspec.structs.replace(action, from_s=until_s)
            self.carry_out(self._decide(events.Unmasking(action.version, now_s, until_s)))
        elif not exchanging:
            return False
        aggregator.waiting = action
        return True

    def retry_sum(self) -> None:
        """Retry the sum that was deferred because no ring entry was free."""
        action, self.aggregator.deferred = self.aggregator.deferred, None
        if action is not None:
            self.carry_out([action])

    def assessed(self, answer: messages.Assessed) -> None:
        """Handle the results of the evaluation of a version."""
        now_s = self._clock.now_s()
        published_s, trips = self._assessing.pop(answer.version, (now_s, self.core.trips))
        scores = answer.clients
        self.store.evaluation(
            EvaluationRow(
                version=answer.version,
                at_s=published_s,
                wall_s=self._clock.wall_s(),
                trips=trips,
                accuracy=answer.accuracy,
                loss=answer.loss,
                correct=tuple(answer.correct),
                total=tuple(answer.total),
                metrics=answer.metrics,
                clients=tuple(scores.clients),
                client_loss=tuple(scores.loss),
                client_accuracy=tuple(scores.accuracy),
                personal_loss=tuple(scores.personal_loss),
                personal_accuracy=tuple(scores.personal_accuracy),
            )
        )
        if answer.problem:
            self.store.incident(now_s, None, "evaluation", f"version {answer.version}: {answer.problem}")
        metrics = {"loss": answer.loss, **answer.metrics}
        self.handle(events.Evaluated(answer.version, now_s, answer.accuracy, metrics))

    def assess_again(self, assessing: dict[int, tuple[float, int]], entries: dict[int, int]) -> None:
        """Repeat the requests for evaluations that were pending before an interruption."""
        for version, requested in sorted(assessing.items()):
            self._request_evaluation(version, requested, entries[version])

    def record_open(self, *, running: bool) -> None:
        """Record the trips whose updates are held and, if ``running``, the trips that are still running,
        which are recorded only at the end of the run."""
        for trip in self._open.values():
            if running or trip.zero or trip.arrival is not None:
                self.store.trip(trip.row(self._size_bytes))

    def _arrived(self, arrival: Delivery) -> Arrived:
        result = arrival.result
        trip, lease = self._open[result.task], self.aggregator.leases[result.task]
        trip.arrival, trip.staleness = arrival, self.core.arrival_version - lease.version
        norm, distance = self.aggregator.measure(lease) if self._measures else (None, 0.0)
        self.aggregator.delivered(lease.slot)
        if result.clipped:
            detail = f"update of task {result.task}: {result.clipped} elements beyond server.secure.clip"
            self.store.incident(arrival.at_s, arrival.client, "clipped", detail)
        return Arrived(
            arrival.client,
            result.task,
            lease.version,
            arrival.examples,
            result.steps,
            result.loss,
            arrival.at_s,
            norm,
            distance,
            result.failed,
            result.allowed,
        )

    def _decide(self, event: Event) -> list[Action]:
        before = self._watch.to("decide")
        self.store.journal(event)
        actions = self.core.handle(event)
        if self._dynamics is not None:
            self._dynamics.observe(event, actions, self.core.now_s)
        self._watch.to(before)
        return actions

    def _zero(self, task: int) -> None:
        """Write an all-zero update for this task if its trip failed and the core counts it as a zero update.

        The core does so only with differential privacy.
        """
        trip = self._open.get(task)
        if not self.core.is_zero(task) or trip is None or trip.zero:
            return
        trip.zero = True
        self.aggregator.write_zero(task)
        if self.write_ahead is not None:
            self._record_trip(task)

    def _record_trip(self, task: int) -> None:
        """Record the trip of an update that has arrived."""
        self.store.trip(self._open.pop(task).row(self._size_bytes))
        self._on_record.add(task)

    def _train(self, action: Train) -> None:
        if self.write_ahead is not None and self.aggregator.full:
            self.write_ahead.secure()
        lease = self.aggregator.lease(task=action.task, client=action.client, version=action.version)
        self.timeline.assign(self.order(action, lease, self._clock.now_s(), self.core.now_s))

    def order(self, action: Train, lease: Lease, sent_s: float, decided_s: float) -> messages.Task:
        """Build the message for a task that is assigned now, or was assigned before an interruption."""
        wait_s = self.wait_s(action.client, action.task, action.trip)
        self._open[action.task] = _OpenTrip(action, sent_s + wait_s)
        cut = condition = None
        if (until := action.until) is not None:
            end = End(max(0.0, until.at_s - decided_s - wait_s), until.steps)
            cut = messages.Cut(end, until.gain, until.per_step)
        if self._dynamics is not None:
            condition = self._dynamics.condition(action.client)
        entry, slot = lease.entry, lease.slot
        place = (action.client, action.task, action.trip, action.version, entry, slot)
        # Only pairwise masks need the list of the round's clients. Such a round is small; a list of thousands
        # of clients would not fit in a message.
        hidden = self.aggregator.hidden
        cohort = action.cohort if hidden is not None and hidden.by_round else None
        return messages.Task(*place, cut, condition, wait_s, cohort, order=action.task)

    def _sum(self, action: Sum, entry: int) -> list[Action]:
        if len(action.tasks) * self._size_bytes[1] >= LONG_SUM_BYTES:
            self.timeline.flush()
        before = self._watch.to("sum")
        result = self.aggregator.sum(action, entry)
        self._watch.to("publish")
        now_s = self._clock.now_s()
        for task, seen in zip(action.tasks, result.checksums, strict=True):
            trip = self._open.pop(task, None)
            if trip is not None:
                self.store.trip(trip.row(self._size_bytes, seen))
            elif task in self._on_record:
                self._on_record.remove(task)
                self.store.checksum_seen(task, seen)
        for task in (*result.bad, *result.zero):
            kind = "checksum" if task in result.altered else "non-finite"
            client = self.aggregator.leases[task].client
            detail = ", summed as zero" if task in result.zero else ""
            if result.refused:
                kind, detail = "refused", f": {result.refused}"
            self.store.incident(now_s, client, kind, f"update of task {task}{detail}")
        if result.rounded:
            self.store.incident(now_s, None, "rounded", f"version {action.version}: {result.rounded}")
        if not result.bad:
            weights = result.weights or action.weights
            self.store.applied(action.version, action.tasks, weights)
            self.store.version(
                VersionRow(
                    version=action.version,
                    at_s=now_s,
                    wall_s=self._clock.wall_s(),
                    updates=len(action.tasks),
                    weight_sum=math.fsum(weights),
                    sum_s=result.seconds,
                )
            )
        self._watch.to(before)
        norm, salt = result.clip_norm, result.salt
        return self._decide(Summed(action.version, now_s, result.bad, norm, salt, result.zero))

    def _drop(self, action: events.Drop) -> None:
        if action.reason:
            self.store.incident(self._clock.now_s(), action.client, "gave-up", action.reason)

    def _release(self, action: Release) -> None:
        trip = self._open.pop(action.task, None)
        if trip is not None:
            self.store.trip(trip.row(self._size_bytes))
        self._on_record.discard(action.task)
        self.store.released(action.task, action.fate, action.reason)
        self.aggregator.release(action.task)

    def _evaluate(self, action: Evaluate) -> None:
        requested = (self._clock.now_s(), self.core.trips)
        self._request_evaluation(action.version, requested, self.aggregator.buffer.latest[1])

    def _request_evaluation(self, version: int, requested: tuple[float, int], entry: int) -> None:
        self._assessing[version] = requested
        for dropped in self._evaluation.request(version, entry):
            self._assessing.pop(dropped, None)


@dataclass(eq=False)
class WriteAhead:
    """Commits events to the record in batches, so that they survive a kill of this process.

    Each call of `secure` commits all events since the previous call.
    """

    store: Store
    aggregator: Aggregator
    watch: Stopwatch

    def __post_init__(self) -> None:
        self.aggregator.recoverable = True
        self.aggregator.settle()

    def secure(self) -> None:
        """Commit all events so far; call this before sending messages that depend on them to clients."""
        before = self.watch.to("record")
        failpoints.pass_by("commit")
        self.store.secure()
        failpoints.pass_by("committed")
        self.aggregator.settle()
        self.watch.to(before)
