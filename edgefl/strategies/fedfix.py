"""FedFix: aggregation at fixed intervals (Fraboni et al. 2023, JMLR 24(110), arXiv:2206.10189)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgefl.experiment import Positive
from edgefl.strategies.base import Client, Step, Strategy, View, importance


@dataclass
class Intervals:
    """Indices of the current interval, and of the interval in which each client's last task started."""

    running: int = 0
    """Index of the current interval; interval k lasts from k·``interval_s`` to (k + 1)·``interval_s``."""
    begun: dict[int, int] = field(default_factory=dict)
    """Index of the interval in which each client's last task started."""
    importance: list[float] = field(default_factory=list)
    """p_i: the weight of each client in the federated objective."""


@dataclass(frozen=True, kw_only=True)
class FedFix(Strategy):
    """w ← w + η_g Σ_i d_i·Δ_i at the times k·``interval_s``, over all updates since the last step.

    d_i = ⌈T_i/Δt⌉·p_i, where T_i is the duration of the client's trip and p_i is the client's importance. A
    client that is in every m-th step thus has the weight m·p_i in such a step and p_i per step on average, as
    the optimum of the federated objective requires. ⌈T_i/Δt⌉ is the number of intervals that the trip spans,
    counted for each trip because durations vary. A client restarts from the version that contains its update.

    >>> FedFix(importance_by="uniform").begin([Client(0, "pi-4", 30), Client(1, "pi-4", 90)]).importance
    [0.5, 0.5]
    """

    lockstep: ClassVar[bool] = True

    interval_s: Positive = 10.0
    """Δt: time between two steps, in emulated seconds."""
    importance_by: Literal["examples", "uniform"] = "examples"
    """Whether p_i is the client's share of the fleet's examples (``examples``) or 1/n (``uniform``)."""

    def slots(self, clients: int) -> int:
        """Return the number of update slots, one per client: no client trains while its update is held."""
        return clients

    def begin(self, devices: Sequence[Client]) -> Intervals:
        return Intervals(importance=importance(self.importance_by, devices))

    def assign(self, state: Intervals, view: View) -> Sequence[int]:
        waiting = {update.client for update in view.held}
        start = [client for client in view.idle if client not in waiting]
        state.begun.update(dict.fromkeys(start, state.running))
        return start

    def step(self, state: Intervals, view: View) -> Step | None:
        while (end_s := (state.running + 1) * self.interval_s) <= view.now_s:
            arrived = [update for update in view.held if update.at_s <= end_s]
            if updates := sorted(arrived, key=lambda update: update.client):
                return Step(updates, [self.weight(state, update.client) for update in updates])
            state.running += 1
        return None

    def weight(self, state: Intervals, client: int) -> float:
        """Return the weight d_i of a client's update that is summed at the end of the current interval."""
        return (state.running + 1 - state.begun[client]) * state.importance[client]

    def stepped(self, state: Intervals, step: Step, view: View) -> None:
        state.running += 1

    def wake_s(self, state: Intervals, view: View) -> float:
        return (state.running + 1) * self.interval_s
