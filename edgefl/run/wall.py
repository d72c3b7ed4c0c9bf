"""Timeline for the wall clock: clients are throttled in real time; an event occurs when its message arrives.

A client that goes offline before its task has ended leaves only when its process confirms the cancellation:
until then the process may still write into its slot.

With differential privacy, participation must not depend on client data, but a failure of training may. A
failed trip therefore ends only when its update would have arrived. If a client's process dies and the
experiment did not declare this death (``churn.die_per_trip``), the client stays in the fleet, and its trips
fail until it has a new process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from edgefl.core.deaths import consequence
from edgefl.core.events import Died, Failed, Joined, Left
from edgefl.devices.dynamics import Transition
from edgefl.devices.fleet import joins_at_s
from edgefl.devices.plan import TripPlan
from edgefl.parameters.buffer import TripPhase
from edgefl.run import control, messages
from edgefl.run.clock import ARRIVAL, JOIN, TICK, Due
from edgefl.run.engine import WriteAhead
from edgefl.run.gate import TaskReturned
from edgefl.run.peers import Peer
from edgefl.run.timeline import Order, Restored, Timeline, TimelineEvent, planned_phase

AT_ONCE = 16
"""Maximum number of tasks that are sent together; it is small so that the client of the first task does not
wait long."""


@dataclass(eq=False)
class WallTimeline(Timeline):
    """Sends tasks to the clients' processes in small batches, and schedules joins and leaves.

    A batch is committed to the record before it is sent, because sending a task also acknowledges the
    client's last update.
    """

    write_ahead: WriteAhead

    def __post_init__(self) -> None:
        self._private = self.core.privacy is not None
        self._assigned: dict[int, tuple[messages.Task, float]] = {}
        """The last task of each client, and the emulated time in seconds at which it was assigned."""
        self._failed: dict[int, tuple[int, str]] = {}
        """With differential privacy, each client's failed task and the reason. The entry is removed at the
        time at which the update would have arrived."""
        self._shown: dict[int, tuple[int, TripPlan]] = {}
        """For each client, the task for which `phase` last computed a plan, and the plan."""
        self._tasks: list[messages.Task] = []
        self._next_join_s: dict[int, float] = {}
        """For each client, the emulated time in seconds of its next scheduled join."""
        self._dead: dict[int, Peer] = {}
        """Peers of clients whose process has died and may be replaced if the core lets the client rejoin."""
        self._leaving: dict[int, str] = {}
        """Clients whose task was cancelled because they are leaving, mapped to the reason."""
        self._returns_s: dict[int, float] = {}
        """In a resumed run, the earliest emulated time in seconds at which each client may join again."""
        self._started = False

    def expect(self) -> None:
        for client in range(len(self.core.devices)):
            self.peers.expect(control.CLIENT, client)

    def start(self) -> None:
        self._started = True
        for peer in self.peers.of(control.CLIENT):
            if self._next_change(peer.number) is None:
                self._schedule_join(peer.number, joins_at_s(self.experiment, peer.number))

    def assign(self, task: messages.Task) -> None:
        self.aggregator.assign(task.task, task.client)
        self._assigned[task.client] = task, self.clock.now_s()
        self._tasks.append(task)
        if len(self._tasks) == AT_ONCE:
            self.flush()

    def flush(self) -> None:
        tasks, self._tasks = self._tasks, []
        if tasks:
            self.write_ahead.secure()
        for task in tasks:
            peer = self.peers.get(control.CLIENT, task.client)
            if task.task not in self.aggregator.leases:
                continue
            if self._private and (peer is None or not peer.ready):
                self._schedule_failure(task.client, task.task, "its process has died")
            elif peer is not None:
                self._send(peer, task)

    def _send(self, peer: Peer, task: messages.Task) -> None:
        frames = self.gate.transport.model_frames(task.entry)
        if self.gate.send(peer, messages.Tasks([task]), frames) and frames:
            self.aggregator.fetched(task.slot)

    def resend(self, peer: Peer) -> Iterator[TimelineEvent]:
        """Send a client its task again, with the same number.

        If the buffer no longer holds the version of the model from which the task starts, the task fails.
        With shared memory nothing happens in this case, because the client has already fetched the model.
        """
        self.flush()  # the record is written before any task is sent
        client, transport = peer.number, self.gate.transport
        task = self._assigned[client][0] if client in self._assigned else None
        if task is None or self.gate.lease_of(peer, task.task) is None:
            return
        if self.aggregator.buffer.entry_version[task.entry] == task.version:
            self._send(peer, task)
        elif transport.carries_updates:  # with shm, a fetched model proves that the task arrived
            self.gate.end_task(peer, task.task)
            reason = "its client did not receive it"
            yield from self.task_ended(TaskReturned(client, task.task, "failed", reason))

    def phase(self, task: int) -> int:
        lease = self.aggregator.leases[task]
        if not self.peers.by_door:
            return self.aggregator.buffer.fetched[lease.slot] or TripPhase.DOWN
        # Processes on other hosts do not share the buffer, so return the phase that the plan predicts.
        order, assigned_s = self._assigned[lease.client]
        shown = self._shown.get(lease.client)
        if shown is None or shown[0] != task:
            shown = self._shown[lease.client] = task, self.plan(order)
        return planned_phase(shown[1], self.clock.now_s() - assigned_s - order.wait_s)

    def cancel(self, client: int, task: int) -> None:
        self.flush()
        if client in self._failed:
            self.agenda.add(Due(self.clock.now_s(), ARRIVAL, client, task))
            return
        peer = self.peers.get(control.CLIENT, client)
        if peer is not None:
            self.gate.send(peer, messages.Withdraw([task]))

    def _schedule_failure(self, client: int, task: int, reason: str) -> None:
        """Make a trip fail at the time at which it would have ended (only with differential privacy)."""
        lease, (order, assigned_s) = self.aggregator.leases[task], self._assigned[client]
        ends_s = assigned_s + order.wait_s + self.plan(order).over_s(private=True)
        self.aggregator.unassign(task)
        self.aggregator.fetched(lease.slot)
        self.aggregator.delivered(lease.slot)
        self._failed[client] = task, reason
        if self.dynamics is not None and client in self.dynamics:
            move = self.dynamics.move(client)
            # A death that the experiment declares takes effect even if the process has already ended.
            if move.why == "died" and move.at_s < ends_s:
                self._leaving[client], ends_s = move.why, move.at_s
        self.agenda.add(Due(max(self.clock.now_s(), ends_s), ARRIVAL, client, task))

    def task_ended(self, result: messages.TaskResult | TaskReturned) -> Iterator[TimelineEvent]:
        """Handle the end of a task. If the task was cancelled because its client is leaving, the client
        leaves first."""
        now_s = self.clock.now_s()
        if isinstance(result, messages.TaskResult):
            client = self.aggregator.leases[result.task].client
            if (why := self._leaving.pop(client, None)) is not None:
                yield Left(client, now_s, why, finishes=True)
            yield self.delivery(client, result, result.measured(), now_s)
            return
        client = result.client
        if result.kind:
            self.store.incident(now_s, client, result.kind, result.reason)
        if (why := self._leaving.pop(client, None)) is not None:
            yield Left(client, now_s, why)
        elif self._private and result.task not in self.core.cancelled:
            self._schedule_failure(client, result.task, result.reason)
        else:
            yield Failed(client, result.task, now_s, result.reason)

    @property
    def expected(self) -> int:
        return len(self._next_join_s)

    def ready(self, peer: Peer) -> Iterator[TimelineEvent]:
        client = peer.number
        if peer.role != control.CLIENT:
            return
        if (change := self._next_change(client)) is not None:
            if change.kind == JOIN:
                self._schedule(change)
        elif client in self._next_join_s:
            return  # the client joins at that time
        elif self._not_before(client, now_s := self.clock.now_s()) > now_s:
            self._schedule_join(client, now_s)
        else:
            yield from self._join(client, 0.0)

    def departed(self, peer: Peer, end: control.Departed) -> Iterator[TimelineEvent]:
        client, now_s = peer.number, self.clock.now_s()
        died = Died(client, now_s, end.reason, self._declares_death(client))
        why = self._leaving.pop(client, None)
        self._dead[client] = peer
        yield died
        if consequence(died, private=self._private) is not None:
            self._failed.pop(client, None)
        elif why is not None:
            yield Left(client, now_s, why)
        elif (task := self.core.task_of(client)) in self.core.cancelled:
            assert task is not None
            yield Failed(client, task, now_s, "cancelled")
        elif task is not None and client not in self._failed:
            self._schedule_failure(client, task, end.reason)

    def _declares_death(self, client: int) -> bool:
        return self.dynamics is not None and self.dynamics.declares_death(client, self.clock.now_s())

    def _left(self, client: int, why: str) -> Died | Left:
        """Return the event of a leaving client: `Died` if the experiment declares its death, else `Left`."""
        if self._declares_death(client):
            return Died(client, self.clock.now_s(), why, declared=True)
        return Left(client, self.clock.now_s(), why)

    def rejoin(self, client: int, at_s: float) -> None:
        """Start another process for the client, if its last one has ended.

        The process is started at once if emulated time has not begun, because the run waits for it.
        """
        if (peer := self._dead.pop(client, None)) is not None:
            after_s = max(0.0, at_s - self.clock.now_s()) * self.clock.time_scale
            self.lifecycle.replace(peer, after_s if self._started else 0.0)

    def wait_ms(self) -> int:
        if self.aggregator.deferred is not None:
            return 1  # poll: a client that fetches its model frees a ring entry without sending a message
        head = self.agenda.head
        if head is None:
            return 1000
        left_ms = (head.at_s - self.clock.now_s()) * self.clock.time_scale * 1000
        return 1000 if left_ms >= 1000 else max(0, int(left_ms) + 1)

    def due(self) -> Iterator[TimelineEvent]:
        """Yield the events that are due at the time of this call.

        Ticks (timed calls of the core) may become due faster than they are handled. Events that become due
        during this call wait for the next call, so that the main loop also reads messages.
        """
        self._schedule_changes()
        until_s = self.clock.now_s()
        while (due := self.agenda.head) is not None and due.at_s <= until_s:
            self.agenda.pop()
            if due.kind == TICK:
                yield self._tick(self.clock.now_s())
            elif due.kind == JOIN:
                if self._next_join_s.get(due.client) == due.at_s:
                    del self._next_join_s[due.client]
                if self._next_change(due.client) in (None, due):
                    yield from self._join(due.client, due.at_s)
            elif due.kind == ARRIVAL:
                if due.client in self._failed and self._failed[due.client][0] == due.task:
                    _, reason = self._failed.pop(due.client)
                    if (why := self._leaving.pop(due.client, None)) is not None:
                        yield self._left(due.client, why)
                    else:
                        yield Failed(due.client, due.task, self.clock.now_s(), reason)
            elif due == self._next_change(due.client):
                yield from self._leave(due.client)
            self._schedule_changes()

    def _change_s(self, client: int, move: Transition) -> float:
        if move.joins:
            return self._not_before(client, move.at_s)
        return math.inf if move.why == "died" else move.at_s  # a client that must die kills its own process

    def _schedule_join(self, client: int, at_s: float) -> None:
        self._schedule(Due(self._not_before(client, at_s), JOIN, client))

    def _schedule(self, change: Due) -> None:
        if change.kind == JOIN and change.at_s < math.inf:
            if self._next_join_s.get(change.client) == change.at_s:
                return
            self._next_join_s[change.client] = change.at_s
        super()._schedule(change)

    def _not_before(self, client: int, at_s: float) -> float:
        """Return the earliest time, from ``at_s`` on, at which the client may join.

        A client that was dropped after a death never joins again, although a resumed run starts a new process
        for it. With differential privacy no client is dropped, because its death may depend on its data.
        """
        if not self._private and self.core.deaths.returns_s(client) == math.inf:
            return math.inf
        return max(at_s, self._returns_s.get(client, at_s))

    def _join(self, client: int, at_s: float) -> Iterator[TimelineEvent]:
        peer = self.peers.get(control.CLIENT, client)
        here = self._private and self.core.connected(client)
        if peer is not None and peer.ready and self.core.stopped is None and not here:
            yield Joined(client, max(at_s, self.clock.now_s()))

    def _leave(self, client: int) -> Iterator[TimelineEvent]:
        assert self.dynamics is not None
        core, move = self.core, self.dynamics.move(client)
        if core.stopped is not None or client in self._leaving:
            return
        if move.why != "offline":
            self.store.incident(self.clock.now_s(), client, move.why, "as declared")
        task = core.task_of(client)
        if task is None or self.dynamics.finishes(client):
            yield Left(client, self.clock.now_s(), move.why, finishes=task is not None)
        else:
            self._leaving[client] = move.why
            self.cancel(client, task)

    def restore(self, restored: Restored, order: Order) -> Iterator[TimelineEvent]:
        """Let all clients leave, because their processes have ended; they return at random times.

        Clients without a task leave first. Otherwise the core could start new tasks on them when the clients
        with tasks leave.
        """
        core, now_s, resumption = self.core, self.clock.now_s(), self.store.seq
        for client in range(len(core.devices)):
            back_s = now_s + self.trips.returns_after_s(client, resumption)
            # With differential privacy, a client returns even if it died, because its death may depend on
            # its data.
            rejoins_s = back_s if self._private else core.deaths.returns_s(client)
            self._returns_s[client] = max(back_s, rejoins_s)
        for client in (*sorted(core.idle), *sorted(core.ineligible), *sorted(core.running)):
            yield self._left(client, "interrupted")
