"""Timeline: the source of events in emulated time. The loop processes due events; the engine adds tasks.

`wall`: clients are throttled in real time, and events happen when their messages arrive. `virtual`: events
are scheduled in an agenda and processed as soon as their results are computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from edgefl.core import Core
from edgefl.core.events import Evaluated, Event, Halted, Ticked, Train
from edgefl.devices.dynamics import Dynamics, Transition
from edgefl.devices.fleet import Trips
from edgefl.devices.plan import TripPlan
from edgefl.experiment import Experiment
from edgefl.parameters.buffer import TripPhase
from edgefl.parameters.checkpoint import SavedState
from edgefl.results.store import Store
from edgefl.run import control, messages
from edgefl.run.aggregator import Aggregator
from edgefl.run.clock import JOIN, LEAVE, TICK, Agenda, Due, WallClock
from edgefl.run.dispatch import FatalTask
from edgefl.run.evaluation import EvaluationQueue
from edgefl.run.gate import Gate, TaskReturned
from edgefl.run.peers import Peer, PeerLifecycle, Peers
from edgefl.run.slots import Lease

Answer = messages.TaskResult | messages.Gone | FatalTask
"""A worker's result for a task, or the result of a task that killed its workers."""
Order = Callable[[Train, Lease, float, float], messages.Task]
"""`Engine.order`: builds the message for a task."""


class Delivery(NamedTuple):
    """The arrival of a client's complete update at the emulated time ``at_s``."""

    client: int
    result: messages.TaskResult
    times: messages.TripTimes
    examples: int
    """Number of examples by which the update is weighted."""
    at_s: float


TimelineEvent = Event | Delivery


@dataclass(frozen=True)
class InFlightWork:
    """Unfinished work, as a checkpoint stores it."""

    answers: list[Answer] = field(default_factory=list)
    """Results from workers for tasks whose trips have not ended yet in emulated time."""
    tasks: list[int] = field(default_factory=list)
    """IDs of those tasks in ``answers`` whose updates are complete in their slots."""
    entries: dict[int, int] = field(default_factory=dict)
    """Ring entries of versions that a task or the evaluator still has to read, keyed by version."""


@dataclass(frozen=True)
class Restored:
    """State of a resumed run, except for the state in its core, its buffer and its record."""

    checkpoint: SavedState
    emulated_s: float
    """Emulated time of this state, which may be later than the time of the checkpoint."""
    tasks: dict[int, tuple[Train, float]]
    """Running tasks in the order of their numbers, each with the emulated time at which it was assigned."""
    assessing: dict[int, tuple[float, int]]
    """For each version that waits for evaluation, its publication time, and the number of client trips up to
    that time."""
    entries: dict[int, int]
    """Current ring entries of the versions that are still to be read, keyed by version."""
    answers: dict[int, Answer]
    evaluated: Evaluated | None = None
    """The last evaluation; None if no version has been evaluated."""


def planned_phase(plan: TripPlan, since_s: float) -> int:
    """Return the phase (a `TripPhase`) of a trip that began ``since_s`` emulated seconds ago."""
    past_s = since_s - plan.down_s
    if past_s < 0:
        return TripPhase.DOWN
    return TripPhase.COMPUTE if past_s < plan.compute_s else TripPhase.UP


@dataclass(eq=False)
class Timeline(ABC):
    """Base class of the timelines. Callers must handle an event before they request the next one."""

    experiment: Experiment
    clock: WallClock
    """Clock of emulated time."""
    core: Core
    dynamics: Dynamics | None
    aggregator: Aggregator
    evaluation: EvaluationQueue
    peers: Peers
    lifecycle: PeerLifecycle
    gate: Gate
    store: Store
    trips: Trips
    agenda: Agenda = field(init=False, default_factory=Agenda)

    @abstractmethod
    def expect(self) -> None:
        """Register the clients or workers, which perform the tasks, as expected peers."""

    @abstractmethod
    def start(self) -> None:
        """Start emulated time, and schedule the joins of the clients."""

    @abstractmethod
    def assign(self, task: messages.Task) -> None:
        """Assign a task to a client or, under the virtual clock, to any worker."""

    @abstractmethod
    def cancel(self, client: int, task: int) -> None:
        """Cancel a running task."""

    def plan(self, task: messages.Task) -> TripPlan:
        """Return the plan of a running task's trip."""
        plan = None if self.dynamics is None else self.dynamics.plan(task.client)
        if plan is None:
            plan = self.trips.plan(task.client, task.trip, None if task.cut is None else task.cut.end)
        return plan

    def _next_change(self, client: int) -> Due | None:
        """Return the next join or leave of a client; None if `dynamics` does not track the client."""
        if self.dynamics is None or client not in self.dynamics:
            return None
        move = self.dynamics.move(client)
        return Due(self._change_s(client, move), JOIN if move.joins else LEAVE, client)

    @abstractmethod
    def _change_s(self, client: int, move: Transition) -> float:
        """Return the emulated time at which to schedule a client's join or leave; ∞ stands for never."""

    def _schedule_changes(self) -> None:
        """Schedule the next join or leave of each client whose dynamics have changed."""
        for client in () if self.dynamics is None else self.dynamics.moved():
            if (change := self._next_change(client)) is not None:
                self._schedule(change)

    def _schedule(self, change: Due) -> None:
        if change.at_s < math.inf:
            self.agenda.add(change)

    def wake(self, at_s: float) -> None:
        """Schedule a `Ticked` event."""
        self.agenda.add(Due(at_s, TICK))

    @property
    def any_gone(self) -> bool:
        """True if a client was dropped after its death, or is offline and will never be online again."""
        core, dynamics = self.core, self.dynamics
        absent = (client for client, here in enumerate(core.present) if not here)
        return core.deaths.any_dropped or (dynamics is not None and any(map(dynamics.never_returns, absent)))

    def _tick(self, at_s: float) -> Ticked | Halted:
        """Return the event of a timer or, if the remaining clients cannot continue the run, the run's end.

        The run ends if clients are absent, none of them will ever join again, and the core is `deserted` (no
        client is connected) or `unserved` (many arrivals in a row have started no training).
        """
        core, dynamics = self.core, self.dynamics
        waits = core.awaits and (core.unserved or core.deserted)
        if waits and dynamics is not None and self.aggregator.waiting is None:
            absent = (client for client, here in enumerate(core.present) if not here)
            gone = (
                core.deaths.returns_s(client) == math.inf or dynamics.never_returns(client)
                for client in absent
            )
            if not all(core.present) and all(gone):
                return Halted(at_s, core.too_few)
        return Ticked(at_s)

    @abstractmethod
    def flush(self) -> None:
        """Send the queued messages."""

    @abstractmethod
    def phase(self, task: int) -> int:
        """Return the current phase (a `TripPhase`) of the trip of a running task."""

    def states(self) -> bytes:
        """Return the state of each client, one byte per client, as in `control.Progress`."""
        states = bytearray(self.core.present)  # 1 (= IDLE) for present clients
        for client in self.core.running:
            task = self.core.task_of(client)
            assert task is not None
            states[client] = control.IDLE + self.phase(task)
        return bytes(states)

    def ready(self, peer: Peer) -> Iterator[TimelineEvent]:
        """Handle the first message of a process that replaces a dead one. A worker gets tasks at the next
        `flush`."""
        return iter(())

    @abstractmethod
    def resend(self, peer: Peer) -> Iterator[TimelineEvent]:
        """Send an idle peer its unanswered tasks again."""

    def delivery(
        self, client: int, result: messages.TaskResult, times: messages.TripTimes, at_s: float
    ) -> Delivery:
        """Return the arrival of a client's update after a trip with these times."""
        examples = self.trips.data.final[client] if result.counted is None else result.counted
        return Delivery(client, result, times, examples, at_s)

    @abstractmethod
    def task_ended(self, result: messages.TaskResult | TaskReturned) -> Iterator[TimelineEvent]:
        """Handle a peer's report that a task has ended."""

    @abstractmethod
    def departed(self, peer: Peer, end: control.Departed) -> Iterator[TimelineEvent]:
        """Handle the end of a client's or worker's process."""

    @abstractmethod
    def rejoin(self, client: int, at_s: float) -> None:
        """Let a dead client join again, at ``at_s`` or later."""

    @abstractmethod
    def due(self) -> Iterator[TimelineEvent]:
        """Yield the events that are due now."""

    @abstractmethod
    def wait_ms(self) -> int:
        """Return the milliseconds until the next event that can become due without a message."""

    @property
    @abstractmethod
    def expected(self) -> int:
        """Positive if scheduled events are still to come although no client trains; otherwise 0."""

    def save(self) -> InFlightWork:
        """Return the unfinished work that a checkpoint must hold: in this base class, only the versions that
        wait for evaluation."""
        return InFlightWork(entries=self.evaluation.entries)

    @abstractmethod
    def restore(self, restored: Restored, order: Order) -> Iterator[TimelineEvent]:
        """Continue from a checkpoint."""
