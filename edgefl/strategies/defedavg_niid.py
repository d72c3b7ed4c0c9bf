"""DeFedAvg-nIID: delayed averaging of uniformly sampled clients (Wang et al. 2024, arXiv:2402.11198)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgefl.experiment import Count
from edgefl.strategies.base import Client, Step, Strategy, Update, View


@dataclass
class SendBuffers:
    """Each client's latest finished update, and this round's sample."""

    latest: dict[int, Update] = field(default_factory=dict)
    sampled: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class DeFedAvgNIID(Strategy):
    """w ← w + (η/n) Σ_{i∈I} Δ_i, I a uniform sample of n clients with replacement (Algorithm 1, eqs. 6, 7).

    Clients train without pause, each from the newest model; a finished update overwrites the client's send
    buffer, and a step is made when each sampled client's send buffer holds one, which empties it (lines 11
    to 13). A client drawn twice counts twice. For one that is gone with nothing in its send buffer another
    is drawn. What a step takes is each one's newest update then, also of a client that had one when it was
    sampled.
    """

    participants: Count | None = None
    """n; by default 10, or the whole fleet if that is smaller. It may exceed the fleet."""
    pause: bool = False
    """A client trains again only once its send buffer was taken (section 2.3: saves energy)."""

    def begin(self, devices: Sequence[Client]) -> SendBuffers:
        return SendBuffers()

    def assign(self, state: SendBuffers, view: View) -> Sequence[int]:
        if self.pause:
            return [client for client in view.idle if client not in state.latest]
        return view.idle

    def arrive(self, state: SendBuffers, update: Update, view: View) -> Sequence[Update]:
        before = state.latest.get(update.client)
        state.latest[update.client] = update
        return () if before is None else (before,)

    def lost(self, state: SendBuffers, client: int, view: View) -> None:
        state.latest = {update.client: update for update in view.held}

    def step(self, state: SendBuffers, view: View) -> Step | None:
        if not view.held:
            return None
        waiting = [client for client in state.sampled if client not in state.latest]
        if not state.sampled or waiting:
            idle = set(view.idle)
            gone = [client for client in waiting if client not in view.running and client not in idle]
            if gone or not state.sampled:
                # A new round is drawn, or only the members that are gone, from all that can have an update.
                present = sorted(idle | set(view.running) | set(state.latest))
                stay = [client for client in state.sampled if client not in gone]
                count = self.participants or min(10, len(view.devices))
                drawn = view.rng.integers(len(present), size=count - len(stay))
                state.sampled = stay + [present[int(index)] for index in drawn]
            if not state.latest.keys() >= set(state.sampled):
                return None
        updates = [state.latest[client] for client in state.sampled]
        return Step(updates, [1.0 / len(updates)] * len(updates))

    def stepped(self, state: SendBuffers, step: Step, view: View) -> None:
        state.sampled = []
        for update in step.updates:
            if state.latest.get(update.client) is update:
                del state.latest[update.client]
