"""Changes of clients by themselves during a run: temperature, charge, coming and going.

`Dynamics` is shown every event and what the core answered. It knows each client's condition, the plan of its
trip, and the next instant at which it comes or goes, which both clocks ask for. A resumed run has the same
state from replaying the journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from edgefl.core.events import Action, Arrived, Event, Failed, Joined, Left, Train
from edgefl.devices.cells import FinishedTrip, SharedCells
from edgefl.devices.condition import Condition, ConditionModel
from edgefl.devices.fleet import (
    ClientInfo,
    Trips,
    cell_capacities,
    cell_limits,
    changes,
    condition_model,
    presence_of,
)
from edgefl.devices.plan import End, TripPlan
from edgefl.devices.presence import Presence
from edgefl.experiment import Experiment

MOST_TRIES = 10_000  # recoveries looked through for one after which the client is online as well as fit


class Transition(NamedTuple):
    """The next change of a client by itself, unless it is given a task or ends one before."""

    at_s: float
    """Emulated seconds since the start of the run; infinite: no change."""
    why: Literal["back", "offline", "battery", "heat", "died"]

    @property
    def comes(self) -> bool:
        return self.why == "back"


NEVER = Transition(math.inf, "back")


class _ClientState:
    """The state of one client that changes over time."""

    __slots__ = ("forced", "here", "model", "move", "not_before_s", "now", "plan", "presence")

    def __init__(self, model: ConditionModel, presence: Presence, charge: float) -> None:
        self.model, self.presence = model, presence
        self.now = model.initial(charge)  # while it is on a trip, its condition at the start of that
        self.plan: TripPlan | None = None
        self.here, self.not_before_s = False, 0.0
        self.forced = NEVER  # the change that ends its trip even where clients finish theirs first
        self.rest(0.0)

    def begin(self, at_s: float) -> Condition:
        """Begin a task's trip at that instant; returns the client's condition then."""
        self.now = self.model.after_rest(self.now, max(at_s, self.now.at_s))
        return self.now

    def travel(self, plan: TripPlan, given_s: float) -> None:
        """Set the trip that it makes, of a task that it was given at that instant."""
        self.plan, start_s = plan, self.now.at_s
        self.move, self.forced = self._goes(given_s), Transition(start_s + plan.dies_s, "died")
        if (stop := self.model.interruption(self.now, plan)) is not None:
            stops = Transition(start_s + stop[0], stop[1])
            if stops.why == "battery":
                self.move = min(self.move, stops)
            else:
                self.forced = min(self.forced, stops)
        self.move = min(self.move, self.forced)

    def end(self, at_s: float) -> None:
        """End its trip, at its end or before."""
        if self.plan is None:
            return
        why, elapsed_s = self.move.why, min(at_s, self.move.at_s) - self.now.at_s
        because = why if at_s >= self.move.at_s and (why == "battery" or why == "heat") else None
        self.now = self.model.after_trip(self.now, self.plan, max(0.0, elapsed_s), because)
        self.plan = None
        self.rest(at_s)

    def rest(self, at_s: float) -> None:
        """Set the next change of a client that is on no trip."""
        if not self.here:
            self.move = Transition(self._comes_s(max(at_s, self.not_before_s)), "back")
            return
        self.move, unfit_s = self._goes(at_s), self.model.unfit_at_s(self.now)
        if unfit_s < self.move.at_s:
            self.move = Transition(unfit_s, "heat" if self.now.off else "battery")

    def _goes(self, at_s: float) -> Transition:
        return Transition(self.presence.goes_s(at_s) if self.presence.online(at_s) else at_s, "offline")

    def _comes_s(self, at_s: float) -> float:
        """The first instant from ``at_s`` on at which it is present and fit."""
        now = self.now
        for _ in range(MOST_TRIES):
            if (at_s := self.presence.comes_s(at_s)) == math.inf:
                break
            now = self.model.after_rest(now, max(at_s, now.at_s))
            if now.fit:
                return at_s
            if (at_s := self.model.fit_at_s(now)) == math.inf:
                break
        return math.inf


class Dynamics:
    """The changing clients of one run; those on which nothing changes are not in it, and cost nothing."""

    def __init__(
        self,
        experiment: Experiment,
        clients: Sequence[ClientInfo],
        trips: Trips,
        cells: SharedCells | None = None,
    ) -> None:
        self._experiment, self._trips, self._cells = experiment, trips, cells
        self._through: dict[int, FinishedTrip] = {}
        self._in_cells: dict[int, tuple[int, TripPlan]] = {}  # client → its task and trip
        self._states: dict[int, _ClientState] = {}
        for info in filter(partial(changes, experiment), clients):
            model, presence = condition_model(experiment, info), presence_of(experiment, info)
            self._states[info.client] = _ClientState(model, presence, experiment.fleet.charge)
        self._moved = dict.fromkeys(self._states)

    def __contains__(self, client: int) -> bool:
        return client in self._states

    def condition(self, client: int) -> Condition | None:
        """The client's condition when its trip started; None for one that does not change."""
        state = self._states.get(client)
        return None if state is None else state.now

    def plan(self, client: int) -> TripPlan | None:
        """The trip that it is on; None for a client that does not change."""
        if client in self._in_cells:
            return self._in_cells[client][1]
        state = self._states.get(client)
        return None if state is None else state.plan

    def move(self, client: int) -> Transition:
        """The next change of the client by itself."""
        return self._states[client].move

    def finishes(self, client: int) -> bool:
        """Returns True for a client that finishes its task before it goes, as `move` says."""
        state = self._states[client]
        return self._experiment.fleet.on_leave == "finish" and state.move is not state.forced

    def lost_at_s(self, client: int) -> float:
        """The instant at which the client's task is lost, unless the trip is over before."""
        state = self._states.get(client)
        if state is None:
            return math.inf
        return (state.forced if self._experiment.fleet.on_leave == "finish" else state.move).at_s

    def moved(self) -> Iterable[int]:
        """Clients whose next change is another than when this was asked last."""
        moved, self._moved = self._moved, {}
        return moved

    @property
    def shares(self) -> bool:
        """True where trips' times depend on each other: then `through` says when each is over."""
        return self._cells is not None

    @property
    def next_s(self) -> float:
        """The instant of the next event in a cell; infinite if there is none."""
        return math.inf if self._cells is None else self._cells.next_s

    def advance(self, at_s: float) -> None:
        """Let everything happen in the cells until then."""
        if self._cells is not None:
            self._through.update((through.task, through) for through in self._cells.advance(at_s))

    def through(self) -> Iterable[FinishedTrip]:
        """Trips that are over since this was asked last."""
        found, self._through = self._through, {}
        return found.values()

    def observe(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        """Take in that the core, whose time is ``now_s``, answered ``event`` with ``actions``."""
        if self._cells is not None and event.at_s < math.inf:
            self.advance(event.at_s)
            if isinstance(event, Arrived | Failed) or (isinstance(event, Left) and not event.finishes):
                task, _ = self._in_cells.pop(event.client, (-1, None))
                self._cells.drop(task, event.at_s)
                self._through.pop(task, None)
        if isinstance(event, Joined | Left | Arrived | Failed) and event.client in self._states:
            self._happened(event, self._states[event.client])
            self._moved[event.client] = None
        for action in actions:
            if isinstance(action, Train) and (action.client in self._states or self._cells is not None):
                self._begin(action, self._states.get(action.client), now_s)

    def _happened(self, event: Joined | Left | Arrived | Failed, state: _ClientState) -> None:
        if isinstance(event, Joined | Left):
            state.here = isinstance(event, Joined)
        if isinstance(event, Left) and state.move.why == "died" and event.at_s >= state.move.at_s:
            fleet = self._experiment.fleet
            state.not_before_s = event.at_s + fleet.rejoin_s if fleet.on_death == "replace" else math.inf
        if isinstance(event, Joined | Left) and state.plan is None:
            state.rest(event.at_s)
        elif isinstance(event, Left) and event.finishes:
            state.move = state.forced
        elif not isinstance(event, Joined):
            state.end(event.at_s)

    def _begin(self, action: Train, state: _ClientState | None, now_s: float) -> None:
        client = action.client
        begins_s = now_s + self._trips.wait_s(client, action.task, action.trip)
        condition = None if state is None else state.begin(begins_s)
        end = None
        if (until := action.until) is not None:
            end = End(max(0.0, until.at_s - begins_s), until.steps)
        plan = self._trips.plan(client, action.trip, end, condition)
        if state is not None:
            state.travel(plan, now_s)
            self._moved[client] = None
        if self._cells is not None:
            self._in_cells[client] = action.task, plan
            self._cells.begin(action.task, client, plan, begins_s)


def dynamics_of(experiment: Experiment, clients: Sequence[ClientInfo], trips: Trips) -> Dynamics | None:
    """The dynamics of a run; None for a fleet on which nothing changes over time."""
    kinds = {(info.profile, info.network): info for info in clients}
    cells, shared = experiment.fleet.cells, None
    if cells is not None and experiment.clock.kind == "virtual":  # on the wall, clients see to it
        count = min(cells.count, len(clients))  # with more, each client is alone in its own
        shared = SharedCells(count, cell_limits(clients), cell_capacities(cells))
    if shared is None and not any(changes(experiment, info) for info in kinds.values()):
        return None
    return Dynamics(experiment, clients, trips, shared)
