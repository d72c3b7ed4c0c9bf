"""CA2FL: buffered aggregation calibrated by cached updates (Wang et al. 2024, ICLR).

"Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update Calibration".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from edgefl.strategies.base import Client, Step, Update, View
from edgefl.strategies.buffered import Buffered


@dataclass(frozen=True, kw_only=True)
class CA2FL(Buffered):
    """w ← w + η_g·v, v = h + (1/M) Σ_{i∈S} (Δ_i − h_i), h = (1/n) Σ_i h_i over all n clients.

    S is the set of the M = ``buffer_size`` updates in a full buffer. h_i is the last update of client i that
    an earlier step used, initially 0. After the step, h_i ← Δ_i for i ∈ S. The server stores n updates.
    """

    reuses: ClassVar[bool] = True

    restart: Literal["immediate", "new-version", "after-step"] = "new-version"

    def contributors(self, state: dict[int, Update], view: View) -> Collection[int]:
        cached = {update.task for update in state.values()}
        return {update.client for update in view.held if update.task not in cached}

    def max_held(self, clients: int) -> int:
        return clients + self.size(clients)

    def begin(self, devices: Sequence[Client]) -> dict[int, Update]:
        """Return an empty cache of the updates h_i, keyed by client."""
        return {}

    def lost(self, state: dict[int, Update], client: int, view: View) -> None:
        """Remove the client's update from the cache if it proved to be invalid when it was summed."""
        if client in state and state[client].task not in {update.task for update in view.held}:
            del state[client]

    def step(self, state: dict[int, Update], view: View) -> Step | None:
        cached = {update.task for update in state.values()}
        fresh = [update for update in view.held if update.task not in cached]
        size, clients = self.size(len(view.devices)), len(view.devices)
        if len(fresh) < size:
            return None
        updates, weights = fresh[:size], [1.0 / size] * size
        newest, times = {update.client: update for update in updates}, Counter(one.client for one in updates)
        release = [update for update in updates if newest[update.client] is not update]
        for client, update in sorted(state.items()):
            updates.append(update)
            weights.append(1.0 / clients - times[client] / size)
            if client in newest:
                release.append(update)
        return Step(updates, weights, keep=True, release=release)

    def stepped(self, state: dict[int, Update], step: Step, view: View) -> None:
        used = {update.task for update in step.updates}
        state.update({update.client: update for update in view.held if update.task in used})
