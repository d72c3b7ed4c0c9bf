"""Tracks how clients change during a run: how they heat up, discharge, go offline and return.

`Dynamics` observes every event and the core's actions. It tracks each client's condition (temperature and
battery charge), the plan of its trip (download, training and upload), and the time of its next change, which
the wall clock and the virtual clock query. A resumed run restores this state by replaying the journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from edgefl.core.deaths import consequence
from edgefl.core.events import Action, Arrived, Died, Event, Failed, Joined, Left, Rejoin, Train
from edgefl.devices.condition import Condition, ConditionModel
from edgefl.devices.fleet import ClientInfo, Trips, changes, condition_model, kinds_of, presence_of
from edgefl.devices.plan import End, TripPlan
from edgefl.devices.presence import Presence
from edgefl.experiment import Experiment

MAX_TRIES = 10_000  # maximum attempts to find a time at which a client is both online and able to work


class Transition(NamedTuple):
    """A client's next change, such as going offline, assuming that none of its tasks starts or ends first."""

    at_s: float
    """Time of the change in emulated seconds since the start of the run; infinite if there is no change."""
    why: Literal["back", "offline", "battery", "heat", "died"]

    @property
    def joins(self) -> bool:
        return self.why == "back"


NEVER = Transition(math.inf, "back")


class _ClientState:
    """Condition, online presence and current trip of one client."""

    __slots__ = ("forced", "here", "model", "move", "not_before_s", "now", "plan", "presence")

    def __init__(self, model: ConditionModel, presence: Presence, charge: float) -> None:
        self.model, self.presence = model, presence
        self.now = model.initial(charge)  # during a trip, this is the condition at the start of the trip
        self.plan: TripPlan | None = None
        self.here, self.not_before_s = False, 0.0
        self.forced = NEVER  # the client's next change that ends the trip even if on_leave = "finish"
        self.rest(0.0)

    def begin(self, at_s: float) -> Condition:
        """Start a task's trip at ``at_s``; return the client's condition at that time."""
        self.now = self.model.after_rest(self.now, max(at_s, self.now.at_s))
        return self.now

    def travel(self, plan: TripPlan, given_s: float) -> None:
        """Set the plan of the current trip, whose task was assigned at ``given_s``."""
        self.plan, start_s = plan, self.now.at_s
        self.move, self.forced = self._departure(given_s), Transition(start_s + plan.dies_s, "died")
        if (stop := self.model.interruption(self.now, plan)) is not None:
            stops = Transition(start_s + stop[0], stop[1])
            if stops.why == "battery":
                self.move = min(self.move, stops)
            else:
                self.forced = min(self.forced, stops)
        self.move = min(self.move, self.forced)

    def end(self, at_s: float) -> None:
        """End the current trip, whether or not it is complete."""
        if self.plan is None:
            return
        why, elapsed_s = self.move.why, min(at_s, self.move.at_s) - self.now.at_s
        because = why if at_s >= self.move.at_s and (why == "battery" or why == "heat") else None
        self.now = self.model.after_trip(self.now, self.plan, max(0.0, elapsed_s), because)
        self.plan = None
        self.rest(at_s)

    def rest(self, at_s: float) -> None:
        """Compute the next change (such as going offline) of a client that is not on a trip."""
        if not self.here:
            self.move = Transition(self._next_fit_s(max(at_s, self.not_before_s)), "back")
            return
        self.move, unfit_s = self._departure(at_s), self.model.unfit_at_s(self.now)
        if unfit_s < self.move.at_s:
            self.move = Transition(unfit_s, "heat" if self.now.off else "battery")

    def _departure(self, at_s: float) -> Transition:
        return Transition(
            self.presence.next_offline_s(at_s) if self.presence.online(at_s) else at_s, "offline"
        )

    def _next_fit_s(self, at_s: float) -> float:
        """Return the earliest time at or after ``at_s`` at which the client is online and able to work."""
        now = self.now
        for _ in range(MAX_TRIES):
            if (at_s := self.presence.next_online_s(at_s)) == math.inf:
                break
            now = self.model.after_rest(now, max(at_s, now.at_s))
            if now.fit:
                return at_s
            if (at_s := self.model.fit_at_s(now)) == math.inf:
                break
        return math.inf


class Dynamics:
    """The state of those clients of a run that heat up, discharge or go offline."""

    def __init__(self, experiment: Experiment, clients: Sequence[ClientInfo], trips: Trips) -> None:
        self._experiment, self._trips = experiment, trips
        self._states: dict[int, _ClientState] = {}
        for info in filter(partial(changes, experiment), clients):
            model, presence = condition_model(experiment, info), presence_of(experiment, info)
            self._states[info.client] = _ClientState(model, presence, experiment.fleet.charge)
        self._moved = dict.fromkeys(self._states)

    def __contains__(self, client: int) -> bool:
        return client in self._states

    def condition(self, client: int) -> Condition | None:
        """Return the client's condition at the start of its trip; None if its condition never changes."""
        state = self._states.get(client)
        return None if state is None else state.now

    def plan(self, client: int) -> TripPlan | None:
        """Return the plan of the client's trip; None if it has no trip or its condition never changes."""
        state = self._states.get(client)
        return None if state is None else state.plan

    def move(self, client: int) -> Transition:
        """Return the client's next change, such as going offline; see `Transition`."""
        return self._states[client].move

    def never_returns(self, client: int) -> bool:
        """Return True if the client is offline and will never be online again."""
        return client in self and self.move(client) == NEVER

    def declares_death(self, client: int, now_s: float) -> bool:
        """Return True if a simulated death (``die_per_trip``) has ended the client's trip by ``now_s``."""
        return client in self and self.move(client).why == "died" and self.move(client).at_s <= now_s

    def finishes(self, client: int) -> bool:
        """Return True if the client will still finish its current task after it goes offline (see `move`)."""
        state = self._states[client]
        return self._experiment.fleet.on_leave == "finish" and state.move is not state.forced

    def lost_at_s(self, client: int) -> float:
        """Return the time at which the client's task will be lost unless the trip ends first."""
        state = self._states.get(client)
        if state is None:
            return math.inf
        return (state.forced if self._experiment.fleet.on_leave == "finish" else state.move).at_s

    def moved(self) -> Iterable[int]:
        """Return the clients whose next change was rescheduled since the last call of this method."""
        moved, self._moved = self._moved, {}
        return moved

    def observe(self, event: Event, actions: Sequence[Action], now_s: float) -> None:
        """Update the clients' state after an event and the core's actions.

        ``now_s`` is the core's time after the event.
        """
        change = event
        if isinstance(event, Died) and (state := self._states.get(event.client)) is not None:
            if event.declared:
                back_s = (action.at_s for action in actions if isinstance(action, Rejoin))
                state.not_before_s = next(back_s, math.inf)
            rules = self._experiment.privacy
            follows = consequence(event, private=rules is not None and rules.central)
            # a client that left may still be finishing its task
            change = follows if follows is not None and (state.here or state.plan is not None) else event
        if isinstance(change, Joined | Left | Arrived | Failed) and change.client in self._states:
            self._happened(change, self._states[change.client])
            self._moved[change.client] = None
        for action in actions:
            if isinstance(action, Train) and action.client in self._states:
                self._begin(action, self._states[action.client], now_s)

    def _happened(self, event: Joined | Left | Arrived | Failed, state: _ClientState) -> None:
        if isinstance(event, Joined | Left):
            state.here = isinstance(event, Joined)
        if isinstance(event, Joined | Left) and state.plan is None:
            state.rest(event.at_s)
        elif isinstance(event, Left) and event.finishes:
            state.move = state.forced
        elif not isinstance(event, Joined):
            state.end(event.at_s)

    def _begin(self, action: Train, state: _ClientState, now_s: float) -> None:
        client = action.client
        begins_s = now_s + self._trips.wait_s(client, action.task, action.trip)
        condition, end = state.begin(begins_s), None
        if (until := action.until) is not None:
            end = End(max(0.0, until.at_s - begins_s), until.steps)
        state.travel(self._trips.plan(client, action.trip, end, condition), now_s)
        self._moved[client] = None


def dynamics_of(experiment: Experiment, clients: Sequence[ClientInfo], trips: Trips) -> Dynamics | None:
    """Create the dynamics of a run; None if nothing in the fleet changes over time."""
    if not any(changes(experiment, info) for info in kinds_of(clients).values()):
        return None
    return Dynamics(experiment, clients, trips)
