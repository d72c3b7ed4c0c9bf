"""Emulated time: what happens when. The loop takes what is due, the engine gives tasks.

`wall`: clients are throttled for real, and what they say happens when they say it. `virtual`: what happens is
entered in an agenda, and taken as soon as what it needs has been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from edgefl.core import Core
from edgefl.core.events import Event, Train
from edgefl.devices.dynamics import Dynamics
from edgefl.devices.fleet import Trips
from edgefl.devices.plan import TripPlan
from edgefl.experiment import Experiment
from edgefl.parameters.checkpoint import SavedState
from edgefl.results.store import Store
from edgefl.run import control, messages
from edgefl.run.clock import TICK, Agenda, Due, WallClock
from edgefl.run.dispatch import Died
from edgefl.run.evaluation import EvaluationQueue
from edgefl.run.gate import Gate, GivenBack
from edgefl.run.peers import Peer, Peers
from edgefl.run.slots import Aggregator, Lease

Answer = messages.TaskResult | messages.Gone | Died
"""A worker's answer to a task, or the finding that the task kills workers."""
OF_TRAINING = "its training ended its process"
"""The beginning of a `Left`'s reason, where no process was the client's own (virtual clock)."""
Order = Callable[[Train, Lease, float, float], messages.Task]
"""`Engine.order`: what a client is told of a task."""


class Delivery(NamedTuple):
    """A client's update is whole in its slot, and it is time for it to arrive."""

    done: messages.Done
    at_s: float


Happening = Event | Delivery


@dataclass(frozen=True)
class Ahead:
    """Work in flight at one instant."""

    answers: list[Answer] = field(default_factory=list)
    """Workers' answers to tasks whose arrival is not due yet."""
    tasks: list[int] = field(default_factory=list)
    """Those of the answered tasks whose update is in its slot."""
    entries: dict[int, int] = field(default_factory=dict)
    """Versions that are still to be read, by a task or the evaluator, and their ring entries."""


@dataclass(frozen=True)
class Restored:
    """The state that a resumed run goes on from, besides its core, its buffer and its record."""

    checkpoint: SavedState
    emulated_s: float
    """The instant of this state, which may be later than the checkpoint's."""
    tasks: dict[int, tuple[Train, float]]
    """Tasks that were running, and when they were given out, emulated s; in order."""
    assessing: dict[int, tuple[float, int]]
    """Versions that were to be measured: when each was published, and the client trips until then."""
    entries: dict[int, int]
    """Versions that were to be read, and the ring entries that hold them now."""
    answers: dict[int, Answer]
    deaths: dict[int, list[float]]
    """By client, when it died of its training since its last update, emulated s."""


@dataclass(eq=False)
class Timeline:
    """One run's time. What an iterator yields is dealt with before the next is asked for."""

    experiment: Experiment
    clock: WallClock
    """The emulated time."""
    core: Core
    dynamics: Dynamics | None
    aggregator: Aggregator
    evaluation: EvaluationQueue
    peers: Peers
    gate: Gate
    store: Store
    trips: Trips
    agenda: Agenda = field(init=False, default_factory=Agenda)

    def expect(self) -> None:
        """Enter the processes that compute into the table of peers."""

    def start(self) -> None:
        """Emulated time runs from now on: each client comes when it is due."""

    def give(self, task: messages.Task) -> None:
        """A task begins."""

    def cancel(self, client: int, task: int) -> None:
        """A task is not wanted any more."""

    def plan(self, task: messages.Task) -> TripPlan:
        """The trip of a task that its client has been given and that is not over."""
        plan = None if self.dynamics is None else self.dynamics.plan(task.client)
        if plan is None:
            plan = self.trips.plan(task.client, task.trip, None if task.cut is None else task.cut.end)
        return plan

    def wake(self, at_s: float) -> None:
        """Let a `Ticked` happen at that instant."""
        self.agenda.enter(Due(at_s, TICK))

    def flush(self) -> None:
        """Send what waits to be sent."""

    def phase(self, task: int) -> int:
        """Returns the part of its trip that a running task is in now, one of `TripPhase`."""
        raise NotImplementedError

    def states(self) -> bytes:
        """Returns each client's state, a byte a client, as `control.Progress` tells it."""
        states = bytearray(self.core.present)  # IDLE where it is there
        for client in self.core.running:
            task = self.core.task_of(client)
            assert task is not None
            states[client] = control.IDLE + self.phase(task)
        return bytes(states)

    def ready(self, peer: Peer) -> Iterator[Happening]:
        """A process that takes another's place is there: a worker waits for the next `flush`."""
        return iter(())

    def unheard(self, peer: Peer) -> None:
        """A worker with nothing to do: what it has in hand by our account is told it again."""

    def heard(self, said: messages.Done | messages.TaskResult | GivenBack) -> Iterator[Happening]:
        """A peer's task has ended."""
        raise NotImplementedError

    def departed(self, peer: Peer, end: control.Departed, *, given_up: bool) -> Iterator[Happening]:
        """A process that computes is gone, for good if ``given_up``."""
        raise NotImplementedError

    def declares_death(self, end: control.Departed) -> bool:
        """Returns True if this process died of the experiment: its peer is not given up for that."""
        return False

    def due(self) -> Iterator[Happening]:
        """Yields everything that happens now."""
        raise NotImplementedError

    def wait_ms(self) -> int:
        """Milliseconds in which nothing will be due, unless a message comes."""
        raise NotImplementedError

    @property
    def expected(self) -> int:
        """The number of things that will happen by themselves although no client trains."""
        raise NotImplementedError

    def save(self) -> Ahead:
        """The work in flight that a checkpoint has to hold: here, only versions that are to be measured."""
        return Ahead(entries=self.evaluation.entries)

    def restore(self, restored: Restored, order: Order) -> Iterator[Happening]:
        """Go on from a checkpoint."""
        raise NotImplementedError
