"""QuAFL: polled clients and the server average their models (Zakerinia et al. 2024, arXiv:2206.10032)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgefl.experiment import Count
from edgefl.strategies.base import Given, Step, Vector, View
from edgefl.strategies.polled import Polled, Polls


@dataclass(frozen=True, kw_only=True)
class QuAFL(Polled):
    """X ← (X + Σ_{i∈S} Y_i)/(s + 1) and X_i ← (X + s·Y_i)/(s + 1), S a sample of s clients.

    At k·``interval_s`` each polled client sends its model Y_i as it is after the local steps since it was
    last polled, at most the K of ``training``, gets the server's model X of before this average, and goes on
    from the average X_i of the two. So clients keep models of their own. They send them in
    ``server.update_format``: the paper's lattice quantiser is not here, and downloads are not rounded. Nor is
    the variant that weighs clients by their speed.
    """

    client_vectors: ClassVar[tuple[str, ...]] = ("own",)

    participants: Count = 1
    """s."""

    def slots(self, clients: int) -> int:
        """Polled clients train on while their models wait for the sum."""
        return clients + self.size(clients)

    def begin_trip(self, model: Vector, given: Given) -> None:
        if given.kept["own"].any():  # else it is its first
            model += self.participants / (self.participants + 1) * (given.kept["own"] - model)

    def end_trip(self, model: Vector, given: Given) -> None:
        given.kept["own"][:] = model

    def assign(self, state: Polls, view: View) -> Sequence[int]:
        taken = {update.client for update in state.taken}
        return sorted({*super().assign(state, view), *(client for client in view.idle if client in taken)})

    def step(self, state: Polls, view: View) -> Step | None:
        if not state.taken:
            if (step := super().step(state, view)) is not None:
                state.taken = list(step.updates)  # first they are given the model as it is, by `assign`
            return None
        if held := [update for update in state.taken if update in view.held]:
            return self.average(held)
        self.close(state)
        return None

    def wake_s(self, state: Polls, view: View) -> float | None:
        return math.nextafter(view.now_s, math.inf) if state.taken else super().wake_s(state, view)
