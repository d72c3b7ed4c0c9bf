"""The server's decisions as a pure state machine, which turns events into actions.

It uses no clock, no socket and no arithmetic on models. These are the states of a client and its update, and
the actions (Train, Sum) and events (the other names) that change them:

    Joined ─► idle ─ Train ─► running ─ Arrived ─► held ─ Sum ─► Summed ─► applied
                ▲                │ Left: lost         │ Summed(bad): dropped
                └──── Failed ────┘                    └ the strategy's choice: discarded

With differential privacy, participation must not depend on client data, whereas failures and invalid updates
may depend on them. A failed trip (a client's download, training and upload) is therefore held as an update of
zeros, and invalid updates are replaced with zeros (``Summed.zero``) instead of being dropped.

Each task ends in exactly one ``Release``, unless it is still running when the run ends. The same events
always lead to the same actions, so a run can be resumed, replayed and verified from its journal alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import msgspec

from edgefl import experiment
from edgefl.core import events
from edgefl.core import strategy_calls as calls
from edgefl.core.deaths import Deaths, consequence
from edgefl.core.evaluations import Patience, Periods, Standstill
from edgefl.core.events import (
    Action,
    Arrived,
    Cohort,
    Event,
    Failed,
    Joined,
    Left,
    Release,
    Sum,
    Summed,
    Train,
    Wake,
)
from edgefl.core.ledger import Ledger
from edgefl.core.participation import Schedule
from edgefl.errors import RunError
from edgefl.experiment import NO_PROGRESS, TOO_FEW_CLIENTS
from edgefl.seeds import stream
from edgefl.strategies.base import Client, Step, Strategy, Until, Update

OVER = "the run is over"
BAD = "not finite or altered"
MAX_IDLE_WAKES = 100_000
"""A run without ``stop.emulated_s`` ends after this number of consecutive wake-ups (at times of
`Strategy.wake_s` or `Strategy.arrivals`) in which no client trains and no version is made, unless a client
can still join. Held updates do not prevent this, because the strategy may never use them."""
MAX_UNSERVED = 100
"""A run without ``stop.emulated_s`` ends after this number of consecutive arrivals that start no training in
two cases: some clients have used up their participations (``[privacy]``) and all others are connected; or
some clients are disconnected and none of them will ever join again. A pending time of `Strategy.wake_s`
prevents this."""
AS_ZERO = "summed as zero: "
"""Prefix of ``Release.reason`` for an update that was replaced with zeros because of differential privacy."""


class Core(Ledger):
    """The state of a run. Only `handle` changes it; strategies read it through the interface `View`.

    >>> from edgefl.strategies.fedbuff import FedBuff
    >>> core = Core(FedBuff(buffer_size=1), [Client(0, "pi-4", 60)], seed=1, stop=experiment.Stop(versions=1))
    >>> core.handle(Joined(client=0, at_s=0.0))
    [Evaluate(version=0), Train(client=0, task=0, version=0, trip=0)]
    >>> core.handle(Arrived(client=0, task=0, base_version=0, examples=60, steps=5, loss=2.3, at_s=4.0))
    [Sum(version=1, tasks=(0,), weights=(1.0,), base_scale=1.0)]
    >>> for action in core.handle(Summed(version=1, at_s=4.0)): print(action)
    Release(task=0, fate='applied', reason='')
    Evaluate(version=1)
    Finish(reason='versions')
    """

    def __init__(
        self,
        strategy: Strategy,
        devices: Sequence[Client],
        seed: int,
        stop: experiment.Stop,
        evaluate_every: int | experiment.Evaluation = 10,
        privacy: experiment.Privacy | None = None,
        deaths: Deaths | None = None,
    ) -> None:
        super().__init__(devices, seed, privacy)
        self.deaths = deaths or Deaths()
        if isinstance(evaluate_every, int):
            if evaluate_every < 1:
                raise ValueError(f"evaluate_every must be at least 1, got {evaluate_every}")
            evaluate_every = experiment.Evaluation(every_versions=evaluate_every)
        self.strategy = strategy
        self.stopped: str | None = None
        """Reason why the run is over; None while the run continues."""
        self.stopped_s: float | None = None
        """Emulated time at which the run was over, in seconds; None while the run continues."""
        central = self.privacy
        self._clip_norm = None if central is None else central.clip_norm
        self._max_weight = math.inf if central is None else strategy.max_weight(len(self.devices)) or 0.0
        self._stop, self._patience, self._standstill = stop, Patience(stop), Standstill(stop)
        self._end_s = math.inf if stop.emulated_s is None else stop.emulated_s
        self._periods = Periods(evaluate_every)
        self._recent: deque[float] = deque(maxlen=stop.accuracy_over)
        self._evaluated = -1
        self._halt: str | None = None
        self._begun = False
        self._sum: tuple[Sum, Step] | None = None
        self._late: list[Update] = []  # updates that the strategy discarded while they were being summed
        self._zero: dict[int, str] = {}  # task → reason why its held update is treated as zero
        self.learned = False
        """True once a version contains a valid update of a trip that did not fail."""
        self._failed_in_a_row = 0  # failed tasks and bad updates since the last version with a valid update
        self._lost_in_a_row = 0  # lost tasks since the last arrival of an update
        self._wakes: set[float] = set()  # times of the pending ``Wake`` actions
        self._idle_wakes = 0  # due ``Wake`` actions since the last training and the last version
        self._wakes_itself = type(strategy).wake_s is not Strategy.wake_s  # if False, `wake_s` is not called
        self._cuts = type(strategy).until is not Strategy.until
        self._state = calls.call(strategy, "begin", self.devices)
        process = strategy.arrivals()
        self._schedule = None if process is None else Schedule(process, stream(seed, "arrivals"))
        self._handlers: dict[type, Callable[[Any, list[Action]], bool]] = {
            Joined: self._joined,
            Left: self._left,
            events.Died: self._died,
            Arrived: self._arrived,
            Failed: self._failed,
            Summed: self._summed,
            events.Unmasking: self._unmasking,
            events.Ticked: self._ticked,
            events.Evaluated: self._measured,
            events.Halted: self._halted,
        }

    def handle(self, event: Event) -> list[Action]:
        """Process an event and return the actions, in the order in which they must be carried out.

        An inconsistent event (an unknown client, a task that is over, a repeated arrival) changes nothing.
        After ``Finish``, the only actions are releases of tasks that were still running. Raises `RunError`
        for a ``Summed`` event if no ``Sum`` is pending, and if the strategy raises an exception or returns an
        invalid result.
        """
        actions: list[Action] = []
        if self.now_s < event.at_s < math.inf:
            self.now_s = event.at_s
        if not self._begun:
            self._begun = True
            self._evaluate(actions)
            if self._stop.emulated_s is not None:
                self._wake(self._end_s, actions)
        decided = self._handlers[type(event)](event, actions)
        if self.participation is not None:
            self.participation.record(actions)
            self.update_eligibility()
        if decided and self.stopped is None and self._sum is None:
            self._settle(actions, stepped=type(event) is Summed)
        return actions

    @property
    def unserved(self) -> bool:
        """True if no client trains, the last `MAX_UNSERVED` arrivals started no training, and nothing but
        arrivals is pending."""
        if self._idle_wakes < MAX_UNSERVED or self._schedule is None:
            return False
        return self._wakes == {self._schedule.next_s} and self._sum is None and not self.training

    @property
    def deserted(self) -> bool:
        """True if no client is connected, no update is held or being summed, and the run has no
        ``stop.emulated_s``."""
        connected = self.idle or self.ineligible or self.training
        return self._end_s == math.inf and self._sum is None and not (connected or self.held)

    @property
    def too_few(self) -> str:
        """The stop reason to use if the run ends now because too few clients are left."""
        return f"{TOO_FEW_CLIENTS}: {sum(self.present)} of {len(self.present)}"

    @property
    def awaits(self) -> bool:
        """True if a pending ``Wake`` is due before the end of the run."""
        return any(at_s < self._end_s for at_s in self._wakes)

    @property
    def arrival_version(self) -> int:
        """The version up to which the staleness of an arriving update is counted.

        It is usually the newest version. While clients exchange messages for a pending sum, or this sum waits
        for clients, it is the version that this sum will create, because that version is published before the
        update can be used.
        """
        if self._sum is None or self._sum[0].from_s is None:
            return self.version
        return self._sum[0].version

    @property
    def unmasking(self) -> bool:
        """True while clients exchange messages for the pending sum (`Unmasking`); it ends with a ``Wake``."""
        from_s = None if self._sum is None else self._sum[0].from_s
        return from_s is not None and self.now_s < min(from_s, self._end_s)

    @property
    def ends(self) -> bool:
        """True if the run must end after the pending sum, because its time is up or the run was halted."""
        return self._halt is not None or self.now_s >= self._end_s

    def is_zero(self, task: int) -> bool:
        """Return True if a held update is treated as zero: its trip failed, or the update is invalid."""
        return task in self._zero

    def pending(self) -> list[Action]:
        """Return the pending ``Sum`` and ``Wake`` actions, which a restarted server must carry out again."""
        if self.stopped is not None:
            return []
        wakes: list[Action] = [Wake(at_s) for at_s in sorted(self._wakes)]
        return wakes if self._sum is None else [*wakes, self._sum[0]]

    def _joined(self, event: Joined, actions: list[Action]) -> bool:
        if self.stopped is not None:
            return False
        if self._schedule is not None and not (self.idle or self.training):
            self._schedule.due(self.now_s)  # skip arrivals that occurred while no client was connected
        return self.connect(event.client)

    def _left(self, event: Left, actions: list[Action]) -> bool:
        client = event.client
        if not self.connected(client):
            return False
        task = self.task_of(client)
        if task is not None and event.finishes:
            self._leaving.add(client)
            return False
        if task is not None:
            self.end(task)
            self.lost += 1
            self._lost_in_a_row += 1
            actions.append(Release(task, "lost", event.reason))
        self.disconnect(client)
        if task is not None:
            self._no_update(client)
        return True

    def _died(self, event: events.Died, actions: list[Action]) -> bool:
        if not 0 <= event.client < len(self.present):
            return False
        follows = consequence(event, private=self.privacy is not None)
        if isinstance(follows, Failed):
            return self._failed(follows, actions)
        if self.stopped is None:
            actions.append(self.deaths.died(event))
        return follows is not None and self._left(follows, actions)

    def _arrived(self, event: Arrived, actions: list[Action]) -> bool:
        client, task = event.client, event.task
        if self.base_of(client, task) != event.base_version:
            return False
        self.end(task)
        self.deaths.delivered(client)
        self._deliver(event, actions, zero=event.failed if self.rules is not None else "")
        return True

    def _deliver(self, event: Arrived, actions: list[Action], zero: str = "") -> None:
        """Hold the update of a finished task, or release it.

        ``zero`` is the reason why the update is treated as zero; it is empty if the update is used unchanged.
        """
        client, task = event.client, event.task
        self.trips += 1
        self.finished[client] += 1
        self._lost_in_a_row = 0
        if self.stopped is not None or self.now_s >= self._end_s:
            self.discarded += 1
            actions.append(Release(task, "discarded", OVER))
        elif self.privacy is None and (event.examples < 0 or event.steps < 0):
            self._drop(task, client, "negative number of examples or steps", actions)
        elif self.privacy is None and event.norm is not None and not math.isfinite(event.norm):
            self._drop(task, client, BAD, actions)
        else:
            if zero:
                self._zero[task] = zero
                self._failed_in_a_row += 1
            update = self.hold(event, self.arrival_version)
            try:
                discard = calls.updates(self.strategy.arrive(self._state, update, self))
            except (Exception, SystemExit) as error:
                raise calls.raised(self.strategy, "arrive", error) from error
            if discard:
                self._discard(discard, actions)

    def _failed(self, event: Failed, actions: list[Action]) -> bool:
        client, task = event.client, event.task
        base = self.base_of(client, task)
        if base is None:
            return False
        if self.end(task):
            self.trips += 1
            self.finished[client] += 1
            self.discarded += 1
            actions.append(Release(task, "discarded", "cancelled"))
        elif self.privacy is not None:
            arrived = Arrived(client, task, base, 0, 0, math.nan, event.at_s)
            self._deliver(arrived, actions, zero=event.reason or "failed")
            return True
        else:
            self.failed += 1
            self._failed_in_a_row += 1
            actions.append(Release(task, "lost", event.reason))
        self._no_update(client)
        return True

    def _summed(self, event: Summed, actions: list[Action]) -> bool:
        if self._sum is None:
            raise RunError(f"Summed must follow a Sum, got version {event.version} without a pending Sum")
        order, step = self._sum
        bad = sorted(set(event.bad))
        if event.version != order.version or not {*bad, *event.zero} <= set(order.tasks):
            raise RunError(
                f"Summed must be for version {order.version} and name only tasks of {order.tasks}, "
                f"got version {event.version} and tasks {(*event.bad, *event.zero)}"
            )
        if event.zero if self.privacy is None else bad:
            raise RunError(
                "Summed must list invalid updates in its field 'zero' with differential privacy, and in its "
                f"field 'bad' without it (got bad={event.bad}, zero={event.zero})"
            )
        self._failed_in_a_row += sum(task not in self._zero for task in event.zero)
        self._zero.update(dict.fromkeys(event.zero, BAD))
        self._sum = None
        self._clip_norm = event.clip_norm or self._clip_norm
        if self._schedule is not None and order.from_s is not None:
            self._schedule.due(math.nextafter(self.now_s, 0.0))  # arrivals during the exchange are lost
        late, self._late = self._late, []
        if bad:
            for task in bad:
                client = self.update(task).client
                self.forget((task,))
                self._drop(task, client, BAD, actions)
        else:
            self._publish(order, step, actions)
        self._discard([update for update in late if self.holds(update)], actions)
        return True

    def _unmasking(self, event: events.Unmasking, actions: list[Action]) -> bool:
        if self._sum is None or event.version != self._sum[0].version:
            raise RunError(f"Unmasking must be for a pending Sum, got version {event.version}")
        order, step = self._sum
        self._sum = msgspec.structs.replace(order, from_s=event.until_s), step
        self._wake(event.until_s, actions)
        return False

    def _ticked(self, event: events.Ticked, actions: list[Action]) -> bool:
        ahead = {at_s for at_s in self._wakes if at_s > self.now_s}
        if ahead and len(ahead) == len(self._wakes) and self.stopped is None:  # the timer fired early
            actions.append(Wake(min(ahead)))
        elif self._sum is None:
            self._idle_wakes = 0 if self.training else self._idle_wakes + 1
        self._wakes = ahead
        if self._idle_wakes == MAX_IDLE_WAKES:
            self._idle_wakes = 0
            if self._stop.emulated_s is None and not self._awaits_clients():
                idle = f"the strategy was woken {MAX_IDLE_WAKES:,} times in a row while no client trained"
                hint = "if it waits on purpose, set stop.emulated_s"
                self._halt = self._halt or f"{NO_PROGRESS}: {idle}; {hint}"
        return True

    def _measured(self, event: events.Evaluated, actions: list[Action]) -> bool:
        stop, goal = self._stop, self._stop.metric
        impatient = self._patience.ends(event.accuracy, event.metrics)
        still = self._standstill.ends(event.accuracy, event.metrics)
        self._recent.append(event.accuracy)
        whole = len(self._recent) == stop.accuracy_over
        if stop.accuracy is not None and whole and fmean(self._recent) >= stop.accuracy:
            reason = "accuracy"
        elif goal is not None and goal.met(event.metrics.get(goal.name, math.nan)):
            reason = f"metric {goal.name}"
        elif impatient:
            reason = "patience"
        elif still:
            reason = f"{NO_PROGRESS}: {Standstill.MAX_EQUAL} evaluations in a row were equal"
        else:
            return False
        self._halt = self._halt or reason
        return True

    def _halted(self, event: events.Halted, actions: list[Action]) -> bool:
        self._halt = self._halt or event.reason
        return True

    def _settle(self, actions: list[Action], stepped: bool) -> None:
        """Request the sum for the next version if one is due; otherwise finish the run or start clients."""
        due = self._due()
        may_step = due is None or (due == "trips" and not stepped)  # the last trip may have filled a buffer
        if may_step and self._order_sum(actions):
            return
        if due is not None:
            self._finish(due, actions)
            return
        if self._schedule is not None:
            self.openings = self._schedule.due(self.now_s)
            if self.idle or self.training:  # arrivals have no effect while no client is connected
                self._wake(self._schedule.next_s, actions)
        if self.idle and self.openings:
            self._start_clients(actions)
        if self._wakes_itself:
            at_s = calls.call(self.strategy, "wake_s", self._state, self, read=calls.time_s)
            if at_s is not None:
                self._wake(at_s, actions)
        if self._halt is None and (reason := self._too_few_clients()) is not None:
            self._halt = reason
            self._settle(actions, stepped)

    def _order_sum(self, actions: list[Action]) -> bool:
        """Request the sum for the next version; return False if the strategy returns no step."""
        try:
            step = calls.step(self.strategy.step(self._state, self))
        except (Exception, SystemExit) as error:
            raise calls.raised(self.strategy, "step", error) from error
        if step is None:
            return False
        weights = calls.weights(self.strategy, step, self.holds)
        parts = calls.parts(self.strategy, step) if step.parts else {}
        tasks, numbers = tuple(weights), tuple(weights.values())
        if self.privacy is not None:
            calls.check_private(self.strategy, step, self._max_weight)
        order = Sum(self.version + 1, tasks, numbers, step.base_scale, parts, self._clip_norm)
        self._sum = (order, step)
        actions.append(order)
        return True

    def _finish(self, reason: str, actions: list[Action]) -> None:
        if self._evaluated != self.version:
            self._evaluate(actions)
        actions.extend([self._release(update.task, OVER) for update in self.held])
        self.forget(tuple(self._updates))
        self.stopped, self.stopped_s = reason, self.now_s
        actions.append(events.Finish(reason))

    def _start_clients(self, actions: list[Action]) -> None:
        """Start the clients that the strategy selects."""
        try:
            assigned = calls.clients(self.strategy.assign(self._state, self))
        except (Exception, SystemExit) as error:
            raise calls.raised(self.strategy, "assign", error) from error
        if len(assigned) > self.openings:
            allowed = f"at most {self.openings} clients now"
            raise calls.invalid(self.strategy, "assign", allowed, f"{len(assigned)}")
        if assigned:
            self._idle_wakes = 0
        cohort = Cohort(self.next_task, assigned) if assigned and self.strategy.closed else None
        for client in assigned:
            begun = self.start(client)
            if begun is None:
                allowed = "idle clients, each at most once"
                raise calls.invalid(self.strategy, "assign", allowed, f"client {client}")
            task, trip = begun
            until: Until | None = None
            if self._cuts:
                until = calls.call(self.strategy, "until", self._state, client, self, read=calls.until)
            if until is not None and not calls.possible(until, self.now_s):
                allowed = f"a time that has not passed, or 1 to {calls.MAX_STEPS:,} steps, and a finite gain"
                raise calls.invalid(self.strategy, "until", allowed, repr(until))
            actions.append(Train(client, task, self.version, trip, until, cohort))
            if self.participation is not None:
                self.participation.record(actions[-1:])

    def _publish(self, order: Sum, step: Step, actions: list[Action]) -> None:
        self.version = order.version
        self._idle_wakes = 0
        if any(task not in self._zero for task in order.tasks):
            self.learned, self._failed_in_a_row = True, 0
        self.apply(order.tasks, order.weights)
        if self.participation is not None:
            self.participation.apply(order.tasks, order.version)
        if step.keep:
            self._kept.update(order.tasks)
        else:
            self._kept.difference_update(order.tasks)
            self.forget(order.tasks)
            zero = {task: AS_ZERO + self._zero.pop(task) for task in order.tasks if task in self._zero}
            actions.extend([Release(task, "applied", zero.get(task, "")) for task in order.tasks])
        self._discard([update for update in step.release if self.holds(update)], actions)
        calls.call(self.strategy, "stepped", self._state, step, self)
        for client in calls.call(self.strategy, "cancel", self._state, self, read=calls.clients):
            task = self.task_of(client)
            if task is None:
                raise calls.invalid(self.strategy, "cancel", "clients with a task", f"client {client}")
            if task not in self.cancelled:
                self.cancelled.add(task)
                actions.append(events.Revoke(client, task))
        if self._periods.end(self.version, self.trips, self.now_s):
            self._evaluate(actions)

    def _due(self) -> str | None:
        stop = self._stop
        if self._halt is not None:
            return self._halt
        if stop.versions is not None and self.version >= stop.versions:
            return "versions"
        if self.now_s >= self._end_s:
            return "emulated_s"
        if stop.trips is not None and self.trips >= stop.trips:
            return "trips"
        limit = 100 + 10 * len(self.present)
        if self._failed_in_a_row > limit:
            return f"{NO_PROGRESS}: {self._failed_in_a_row} tasks in a row failed or gave a bad update"
        if self._lost_in_a_row > limit:
            return f"{NO_PROGRESS}: {self._lost_in_a_row} tasks in a row were lost with their clients"
        return None

    def _too_few_clients(self) -> str | None:
        """Return the stop reason if too few clients can still participate to complete another version."""
        limits, present, unserved = self.participation, self.present, self.unserved
        if self.training or (limits is None and any(present) and not unserved):
            return None
        done = [False] * len(present) if limits is None else [*map(limits.exhausted, range(len(present)))]
        few = any(done) and all(one or here for one, here in zip(done, present, strict=True))
        if few and (unserved or not self.awaits):
            return "participations"
        if not self.awaits:
            return None
        if unserved and not all(present) and not self._awaits_clients():
            return self.too_few
        if self.held:  # a held update may still be used when the ``Wake`` is due
            return None
        if all(done):
            return "participations"
        # A run with ``stop.emulated_s`` need not stop here, because it ends at that time anyway.
        if self._stop.emulated_s is None and all(map(self._never_starts, range(len(present)), done)):
            return self.too_few
        return None

    def _awaits_clients(self) -> bool:
        """Return True if a client that is not connected may still join."""
        return any(not here and self.deaths.returns_s(c) < math.inf for c, here in enumerate(self.present))

    def _never_starts(self, client: int, exhausted: bool) -> bool:
        """Return True if the client has used up its participations, or was dropped after its death."""
        return exhausted or (not self.present[client] and self.deaths.returns_s(client) == math.inf)

    def _no_update(self, client: int) -> None:
        self.forget_base(client)
        if self.stopped is None:
            calls.call(self.strategy, "lost", self._state, client, self)

    def _drop(self, task: int, client: int, why: str, actions: list[Action]) -> None:
        self.dropped += 1
        self._failed_in_a_row += 1
        actions.append(Release(task, "dropped", why))
        self._no_update(client)

    def _discard(self, updates: Sequence[Update], actions: list[Action]) -> None:
        summing = self._sum[0].tasks if self._sum is not None else ()
        gone: dict[int, None] = {}
        for update in updates:
            if not self.holds(update):
                raise calls.invalid(self.strategy, "arrive", "updates that are held", f"task {update.task}")
            if update.task in summing:
                self._late.append(update)
            elif update.task not in gone:
                gone[update.task] = None
                actions.append(self._release(update.task))
        if gone:
            self.forget(gone)

    def _release(self, task: int, why: str = "") -> Release:
        """Release a valid held update as ``applied`` if a step has used it, otherwise as ``discarded``."""
        self._zero.pop(task, None)
        if task in self._kept:
            self._kept.remove(task)
            return Release(task, "applied")
        self.discarded += 1
        return Release(task, "discarded", why)

    def _evaluate(self, actions: list[Action]) -> None:
        self._evaluated = self.version
        actions.append(events.Evaluate(self.version))

    def _wake(self, at_s: float, actions: list[Action]) -> None:
        if self.now_s < at_s < math.inf and at_s not in self._wakes:
            self._wakes.add(at_s)
            actions.append(Wake(at_s))
