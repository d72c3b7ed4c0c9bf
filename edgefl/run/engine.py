"""Carries out what the core decides: leases slots, sums, frees, and writes the record.

The one place where core, aggregator and record meet. It knows nothing of sockets; whatever must go to a
client or wait for an instant is handed to an `Outbox`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from edgefl.core import Core
from edgefl.core.events import (
    Action,
    Arrived,
    Cancel,
    Evaluate,
    Evaluated,
    Event,
    Release,
    Stop,
    Sum,
    Summed,
    Train,
    Wake,
)
from edgefl.devices.dynamics import Dynamics
from edgefl.errors import WireError
from edgefl.results.record import EvaluationRow, TripRow, VersionRow
from edgefl.results.store import Store
from edgefl.run import messages
from edgefl.run.progress import Stopwatch
from edgefl.run.slots import Aggregator, Lease

LONG_SUM_BYTES = 2**20
"""Bytes of updates whose sum takes longer than it takes to send a task."""


class Outbox(Protocol):
    """What the executor cannot do itself."""

    def train(self, task: messages.Task) -> None: ...
    def flush(self) -> None: ...
    def cancel(self, client: int, task: int) -> None: ...
    def assess(self, version: int, entry: int) -> None: ...
    def wake(self, at_s: float) -> None: ...
    def stop(self, reason: str) -> None: ...


class _Trip(msgspec.Struct):
    """A task that was given out, until its row is on record; ``done`` once its update is in its slot."""

    order: Train
    sent_s: float
    done: messages.Done | None = None
    arrived_s: float = 0.0
    staleness: int = 0

    def row(self, size_bytes: tuple[int, int], checksum_seen: int | None = None) -> TripRow:
        """What is known of it, with the bytes of the model and of the update."""
        order, done = self.order, self.done
        if done is None:
            return TripRow(
                task=order.task,
                client=order.client,
                base_version=order.version,
                trip=order.trip,
                sent_s=self.sent_s,
            )
        down, compute, up, trip = done.down, done.compute, done.up, done.trip
        down_bytes, up_bytes = size_bytes
        return TripRow(
            task=order.task,
            client=order.client,
            base_version=order.version,
            trip=order.trip,
            sent_s=self.sent_s,
            received_s=self.sent_s + down.achieved_s,
            arrived_s=self.arrived_s,
            staleness=self.staleness,
            examples=done.examples,
            steps=done.steps,
            loss=done.loss,
            trained_version=done.trained_version,
            down_bytes=down_bytes,
            up_bytes=up_bytes,
            down_s=down.achieved_s,
            compute_s=compute.achieved_s,
            up_s=up.achieved_s,
            down_declared_s=down.declared_s,
            compute_declared_s=compute.declared_s,
            up_declared_s=up.declared_s,
            delay_declared_s=done.delay.declared_s,
            delay_s=done.delay.achieved_s,
            trip_declared_s=trip.declared_s,
            trip_achieved_s=trip.achieved_s,
            flops=done.flops,
            lateness_s=done.lateness_s,
            cpu_s=done.cpu_s,
            peak_mib=done.peak_mib,
            checksum_sent=done.checksum,
            checksum_seen=checksum_seen,
        )


@dataclass
class Executor:
    """Core in, actions out, everything on record."""

    core: Core
    aggregator: Aggregator
    store: Store
    outbox: Outbox
    now_s: Callable[[], float]
    wall_s: Callable[[], float]
    watch: Stopwatch
    dynamics: Dynamics | None = None
    """What changes over time on the phones, if anything does."""
    deferred: Sum | None = None
    """A sum that waits for a ring entry that nobody reads."""
    restored: frozenset[int] = frozenset()
    """Updates of before an interruption: their trips are on record already."""
    _open: dict[int, _Trip] = field(default_factory=dict)
    """Trips that are not on record yet, by task."""
    assessing: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Versions at the evaluator: when each was published, and the client trips until then."""

    def handle(self, event: Event) -> None:
        """Journal an event, ask the core, and do what it says."""
        self._carry_out(self._decide(event))

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Do what the core had asked for before an interruption."""
        self._carry_out(list(actions))

    def retry_sum(self) -> None:
        """Try the deferred sum again."""
        if self.deferred is not None:
            action, self.deferred = self.deferred, None
            self._carry_out([action])

    def arrived(self, done: messages.Done, lease: Lease, at_s: float) -> None:
        """A client's update is whole in its slot. `WireError` if it says so a second time."""
        trip = self._open.get(done.task)
        if trip is None or trip.done is not None:
            raise WireError(f"an update of task {done.task}, which had been done before")
        trip.done, trip.arrived_s, trip.staleness = done, at_s, self.core.version - lease.version
        self.aggregator.delivered(lease.slot)
        self.aggregator.buffer.accepted(done.client)
        self.handle(
            Arrived(done.client, done.task, lease.version, done.examples, done.steps, done.loss, at_s)
        )

    def assessed(self, answer: messages.Assessed) -> None:
        """The evaluator measured a version."""
        total = sum(answer.total)
        accuracy = sum(answer.correct) / total if total else math.nan
        now_s = self.now_s()
        published_s, trips = self.assessing.pop(answer.version, (now_s, self.core.trips))
        self.store.evaluation(
            EvaluationRow(
                version=answer.version,
                at_s=published_s,
                wall_s=self.wall_s(),
                trips=trips,
                accuracy=accuracy,
                loss=answer.loss,
                correct=tuple(answer.correct),
                total=tuple(answer.total),
            )
        )
        self.handle(Evaluated(answer.version, now_s, accuracy))

    def record_open(self, *, running: bool) -> None:
        """Put trips whose update is held on record, and at the very end those that are still ``running``."""
        for trip in self._open.values():
            if running or trip.done is not None:
                self.store.trip(trip.row(self._size_bytes))

    # ---- carrying out --------------------------------------------------------------------------

    def __post_init__(self) -> None:
        shape = self.aggregator.buffer.shape
        self._size_bytes = (4 * shape.size, shape.update_bytes)
        self._do: dict[type, Callable[..., None]] = {
            Train: self._train,
            Cancel: lambda action: self.outbox.cancel(action.client, action.task),
            Release: self._release,
            Evaluate: self._evaluate,
            Wake: lambda action: self.outbox.wake(action.at_s),
            Stop: lambda action: self.outbox.stop(action.reason),
        }

    def _decide(self, event: Event) -> list[Action]:
        before = self.watch.to("decide")
        self.store.journal(event)
        actions = self.core.handle(event)
        if self.dynamics is not None:
            self.dynamics.observe(event, actions, self.core.now_s)
        self.watch.to(before)
        return actions

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:  # a sum's own actions come behind those that are waiting
            if type(action) is Sum:
                entry = self.aggregator.free_entry()
                if entry is None:
                    self.deferred = action
                else:
                    actions.extend(self._sum(action, entry))
            else:
                self._do[type(action)](action)

    def _train(self, action: Train) -> None:
        lease = self.aggregator.lease(task=action.task, client=action.client, version=action.version)
        self.outbox.train(self.order(action, lease, self.now_s(), self.core.now_s))

    def order(self, action: Train, lease: Lease, sent_s: float, decided_s: float) -> messages.Task:
        """What the client is told of a task that is (or, before an interruption, was) given out."""
        self._open[action.task] = _Trip(action, sent_s)
        cut = condition = None
        if (until := action.until) is not None:
            cut = messages.Cut(max(0.0, until.at_s - decided_s), until.gain, until.per_step)
        if self.dynamics is not None:
            condition = self.dynamics.condition(action.client)
        return messages.Task(
            action.client,
            action.task,
            action.trip,
            action.version,
            lease.entry,
            lease.slot,
            cut,
            condition,
        )

    def _sum(self, action: Sum, entry: int) -> list[Action]:
        if len(action.tasks) * self._size_bytes[1] >= LONG_SUM_BYTES:
            self.outbox.flush()  # those who have a task need not wait for the sum
        before = self.watch.to("sum")
        result = self.aggregator.sum(action, entry)
        self.watch.to("publish")
        now_s = self.now_s()
        for task, seen in zip(action.tasks, result.checksums, strict=True):
            trip = self._open.pop(task, None)
            if trip is not None:
                self.store.trip(trip.row(self._size_bytes, seen))
            elif task in self.restored:
                self.store.checksum_seen(task, seen)
        for task in result.bad:
            kind = "checksum" if task in result.altered else "non-finite"
            self.store.incident(now_s, self.aggregator.leases[task].client, kind, f"update of task {task}")
        if not result.bad:
            self.store.applied(action.version, action.tasks, action.weights)
            self.store.version(
                VersionRow(
                    version=action.version,
                    at_s=now_s,
                    wall_s=self.wall_s(),
                    updates=len(action.tasks),
                    weight_sum=math.fsum(action.weights),
                    sum_s=result.seconds,
                )
            )
        self.watch.to(before)
        return self._decide(Summed(action.version, now_s, result.bad))

    def _release(self, action: Release) -> None:
        trip = self._open.pop(action.task, None)
        if trip is not None:
            self.store.trip(trip.row(self._size_bytes))
        self.store.released(action.task, action.fate, action.reason)
        self.aggregator.release(action.task)

    def _evaluate(self, action: Evaluate) -> None:
        self.assessing[action.version] = (self.now_s(), self.core.trips)
        self.outbox.assess(action.version, self.aggregator.buffer.latest[1])
