"""QuAFL: polled clients and the server average their models (Zakerinia et al. 2024, arXiv:2206.10032)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgefl.experiment import Count
from edgefl.strategies.base import Step, TripInputs, Vector, View
from edgefl.strategies.polled import Polled, Polls


@dataclass(frozen=True, kw_only=True)
class QuAFL(Polled):
    """X ← (X + Σ_{i∈S} Y_i)/(s + 1) and X_i ← (X + s·Y_i)/(s + 1), with a sample S of s clients.

    At the times k·``interval_s`` each polled client sends its model Y_i, which includes the local steps since
    its last poll (at most the K steps of ``[training]``). The client receives the model X that the server had
    before this average, and continues from X_i, the weighted average of X and Y_i. Each client thus keeps its
    own model. Uploads are encoded in the format that ``server.update_format`` sets. Differences from the
    paper: there is no lattice quantiser, downloads are not rounded, and the variant that weights clients by
    speed is not implemented.
    """

    client_vectors: ClassVar[tuple[str, ...]] = ("own",)

    participants: Count = 1
    """s: number of clients per poll."""

    def slots(self, clients: int) -> int:
        """Return the number of update slots: one per client, and one more per polled client.

        A polled client already trains again while its last update waits to be summed.
        """
        return clients + self.size(clients)

    def begin_trip(self, model: Vector, given: TripInputs) -> None:
        if given.kept["own"].any():  # before the first trip, the vector contains zeros
            model += self.participants / (self.participants + 1) * (given.kept["own"] - model)

    def end_trip(self, model: Vector, given: TripInputs) -> None:
        given.kept["own"][:] = model

    def assign(self, state: Polls, view: View) -> Sequence[int]:
        taken = {update.client for update in state.taken}
        return sorted({*super().assign(state, view), *(client for client in view.idle if client in taken)})

    def step(self, state: Polls, view: View) -> Step | None:
        if not state.taken:
            if (step := super().step(state, view)) is not None:
                state.taken = list(step.updates)  # they are summed after `assign` has restarted the clients
            return None
        if held := [update for update in state.taken if update in view.held]:
            return self.average(held)
        self.close(state)
        return None

    def wake_s(self, state: Polls, view: View) -> float | None:
        return math.nextafter(view.now_s, math.inf) if state.taken else super().wake_s(state, view)
