"""DeFedAvg-nIID: delayed averaging of uniformly sampled clients (Wang et al. 2024, arXiv:2402.11198)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from edgefl.experiment import Count
from edgefl.strategies.base import Client, Step, Strategy, Update, View


@dataclass
class Buffers:
    """The clients' send buffers, the uploads of the current round, and the version that is being broadcast.

    Times are in emulated seconds.
    """

    broadcast_s: float = 0.0
    """Duration of a broadcast to the receive buffers of the clients."""
    latest: dict[int, Update] = field(default_factory=dict)
    """The update in each client's send buffer."""
    sampled: list[int] = field(default_factory=list)
    """Clients that were drawn for the current round."""
    uploads: dict[int, tuple[Update, float]] = field(default_factory=dict)
    """The upload of each sampled client: its update, and the time at which the upload ends."""
    sending: list[Update] = field(default_factory=list)
    """Updates of the version that is being broadcast."""
    arrives_s: float = math.inf
    """Time at which the broadcast ends."""

    def upload(self, update: Update, takes_s: float, now_s: float) -> None:
        """Start the upload of a sampled client's update."""
        self.uploads[update.client] = (update, now_s + takes_s)

    @property
    def collected_s(self) -> float:
        """Time at which the last upload of the round ends; infinite if an upload has not started."""
        if not self.sampled or len(self.uploads) < len(set(self.sampled)):
            return math.inf
        return max(through_s for _, through_s in self.uploads.values())


@dataclass(frozen=True, kw_only=True)
class DeFedAvgNIID(Strategy):
    """w ← w + (η/n) Σ_{i∈I} Δ_i, I a uniform sample of n clients with replacement (Algorithm 1, eqs. 6, 7).

    Clients train without pause, each from the newest model in its receive buffer; a finished update
    overwrites the client's send buffer. With ``takes = "when-selected"`` a sampled client uploads and empties
    its send buffer, or uploads its next finished update if the buffer is empty (lines 10 to 14). After the
    last upload the model is updated, the next sample is drawn and the new version is broadcast. Clients
    continue to train meanwhile; a client that finishes before the broadcast ends restarts from the previous
    version. Every upload of a client takes as long as its first upload, and every broadcast takes as long as
    the clients' first downloads on average. A client that is drawn twice counts twice. A sampled client that
    disconnects with an empty send buffer is replaced by another draw, and a client that is offline is not
    drawn.
    """

    participants: Count | None = None
    """n: number of clients drawn per step; default 10, or the size of the fleet if it is smaller. n may
    exceed the size of the fleet, because clients are drawn with replacement."""
    takes: Literal["when-selected", "newest"] = "when-selected"
    """Which update of a sampled client is used: with ``when-selected``, the update in its send buffer when
    the client is selected (Algorithm 1); with ``newest``, its newest update at the time when every sampled
    client has sent one. With ``newest`` a trip is a download, then training, then an upload, and steps and
    broadcasts take no time."""
    pause: bool = False
    """Whether a client waits until its send buffer is empty before it trains again, to save energy (section
    2.3)."""

    @property
    def literal(self) -> bool:
        """True if the send and receive buffers work as in Algorithm 1."""
        return self.takes == "when-selected"

    @property
    def transfers_apart(self) -> bool:
        return self.literal

    @property
    def uploads_on_demand(self) -> bool:
        return self.literal

    def size(self, clients: int) -> int:
        """Return n, the number of clients drawn per step, for a fleet of ``clients``."""
        return self.participants or min(10, clients)

    def max_held(self, clients: int) -> int:
        """Return the maximum number of held updates.

        There is one update per client, in its send buffer; if buffers work as in Algorithm 1, there are also
        the uploads of this round and of the previous round.
        """
        return clients + (2 * min(self.size(clients), clients) if self.literal else 0)

    def begin(self, devices: Sequence[Client]) -> Buffers:
        return Buffers(fmean(device.down_s for device in devices) if self.literal else 0.0)

    def assign(self, state: Buffers, view: View) -> Sequence[int]:
        if view.version == 0 and view.now_s < state.broadcast_s:
            return ()
        if self.pause:
            return [client for client in view.idle if client not in state.latest]
        return view.idle

    def arrive(self, state: Buffers, update: Update, view: View) -> Sequence[Update]:
        client = update.client
        if self.literal and client in state.sampled and client not in state.uploads:
            state.upload(update, view.devices[client].up_s, view.now_s)
            return ()
        before = state.latest.get(client)
        state.latest[client] = update
        return () if before is None else (before,)

    def lost(self, state: Buffers, client: int, view: View) -> None:
        held = {update.task for update in view.held}
        state.latest = {i: update for i, update in state.latest.items() if update.task in held}
        state.uploads = {i: upload for i, upload in state.uploads.items() if upload[0].task in held}
        state.sending = [update for update in state.sending if update.task in held]

    def step(self, state: Buffers, view: View) -> Step | None:
        if not self.literal:
            self._sample(state, view)
            ready = state.sampled and state.latest.keys() >= set(state.sampled)
            return self._average([state.latest[client] for client in state.sampled]) if ready else None
        self._sample(state, view)
        if not state.sending and state.collected_s <= view.now_s:
            state.sending = [state.uploads[client][0] for client in state.sampled]
            state.arrives_s = view.now_s + state.broadcast_s
            state.sampled, state.uploads = [], {}
            self._sample(state, view)
        return self._average(state.sending) if state.sending and state.arrives_s <= view.now_s else None

    def stepped(self, state: Buffers, step: Step, view: View) -> None:
        if self.literal:
            state.sending = []
            return
        state.sampled = []
        for update in step.updates:
            if state.latest.get(update.client) is update:
                del state.latest[update.client]

    def wake_s(self, state: Buffers, view: View) -> float | None:
        begins_s = state.broadcast_s if view.version == 0 else 0.0
        waits = (begins_s, state.arrives_s if state.sending else state.collected_s)
        return min((at_s for at_s in waits if view.now_s < at_s < math.inf), default=None)

    def _average(self, updates: Sequence[Update]) -> Step:
        return Step(updates, [1.0 / len(updates)] * len(updates))

    def draw(self, state: Buffers, view: View, present: Sequence[int], count: int) -> list[int]:
        """Draw ``count`` clients from ``present``, uniformly and with replacement."""
        return [present[index] for index in view.rng.integers(len(present), size=count).tolist()]

    def _sample(self, state: Buffers, view: View) -> None:
        """Draw the clients of a round, or replacements for clients that can no longer deliver an update."""
        if not state.sampled and not view.held:
            return
        have = state.uploads if self.literal else state.latest
        away = [i for i in state.sampled if i not in have and i not in view.running]
        if state.sampled and not away:
            return
        idle = set(view.idle)
        gone = [client for client in away if client not in idle]
        if state.sampled and not gone:
            return
        # With `takes = "newest"`, the server has the updates. Otherwise they are in the send buffers of the
        # clients, which may be offline.
        delivered = () if self.literal else state.latest
        present = sorted(idle.union(view.running, delivered))
        if not present:
            return
        stay = [client for client in state.sampled if client not in gone]
        members = self.draw(state, view, present, self.size(len(view.devices)) - len(stay))
        state.sampled = stay + members
        if self.literal:
            for client in dict.fromkeys(members):
                if client not in state.uploads and client in state.latest:
                    state.upload(state.latest.pop(client), view.devices[client].up_s, view.now_s)
