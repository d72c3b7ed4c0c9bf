"""DeFedAvg-IID: delayed averaging for clients with IID data (Wang et al. 2024, arXiv:2402.11198)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from edgefl.strategies.base import Client, Step, Update, View
from edgefl.strategies.buffered import Buffered


@dataclass
class Links:
    """Transfer times of a fleet whose clients download while they train."""

    broadcast_s: float
    """Duration of a broadcast to the receive buffers of the clients, in emulated seconds."""
    free_s: dict[int, float] = field(default_factory=dict)
    """Time at which each client's last upload ends, in emulated seconds."""


@dataclass(frozen=True, kw_only=True)
class DeFedAvgIID(Buffered):
    """w ← w + (η/n) Σ_i Δ_i over the first n = ``buffer_size`` updates to finish, stale or not (Algorithm 2).

    A client restarts without delay, from the newest model. With ``overlap``, clients download into a receive
    buffer while they train (section 2.2.1): a client trains, uploads, and restarts from the newest version in
    its receive buffer. Transfer times are then constant: every upload of a client takes as long as its first
    upload, and every broadcast takes as long as the clients' first downloads on average.
    """

    overlap: bool = False
    """Whether clients download while they train, as in the paper; otherwise a trip is a download, then
    training, then an upload."""

    @property
    def transfers_apart(self) -> bool:
        return self.overlap

    def max_held(self, clients: int) -> int:
        """Return the maximum number of held updates, which is one full buffer without ``overlap``.

        With ``overlap``, the updates of versions that are being broadcast are also held.
        """
        return 3 * clients if self.overlap else super().max_held(clients)

    def begin(self, devices: Sequence[Client]) -> Links:
        return Links(fmean(device.down_s for device in devices) if self.overlap else 0.0)

    def assign(self, state: Links, view: View) -> Sequence[int]:
        if not self.overlap:
            return super().assign(state, view)
        if view.version == 0 and view.now_s < state.broadcast_s:
            return ()
        room = self.max_held(len(view.devices)) - len(view.held) - view.training
        return super().assign(state, view)[: max(0, room)]

    def waiting(self, state: Links, view: View) -> Collection[int]:
        """Return the clients that may not start yet, including those that are still uploading an update."""
        waiting = super().waiting(state, view)
        if not self.overlap:
            return waiting
        return {*waiting, *self._uploading(state, view)}

    def arrive(self, state: Links, update: Update, view: View) -> Sequence[Update]:
        state.free_s = {**self._uploading(state, view), update.client: self._received_s(update, view)}
        return super().arrive(state, update, view)

    def step(self, state: Links, view: View) -> Step | None:
        if not self.overlap:
            return super().step(state, view)
        if view.now_s < self._due_s(state, view):
            return None
        updates = self._first(view)
        return Step(updates, self.weights(state, updates, view))

    def wake_s(self, state: Links, view: View) -> float | None:
        if not self.overlap:
            return None
        begins_s = state.broadcast_s if view.version == 0 else 0.0
        waits = (begins_s, self._due_s(state, view), *self._uploading(state, view).values())
        return min((at_s for at_s in waits if view.now_s < at_s < math.inf), default=None)

    def _uploading(self, state: Links, view: View) -> dict[int, float]:
        """Return the emulated time, in seconds, at which each upload in progress ends, keyed by client."""
        return {client: free_s for client, free_s in state.free_s.items() if free_s > view.now_s}

    def _received_s(self, update: Update, view: View) -> float:
        """Return the emulated time, in seconds, at which the server has received the update."""
        return update.at_s + view.devices[update.client].up_s

    def _first(self, view: View) -> list[Update]:
        """Return the updates for the next version, which are the first n updates that the server receives."""
        order = sorted(view.held, key=lambda update: (self._received_s(update, view), update.task))
        return order[: self.size(len(view.devices))]

    def _due_s(self, state: Links, view: View) -> float:
        """Return the emulated time, in seconds, at which clients receive the next version.

        The result is infinite while updates for that version are missing.
        """
        updates = self._first(view)
        if len(updates) < self.size(len(view.devices)):
            return math.inf
        return self._received_s(updates[-1], view) + state.broadcast_s
