"""FedAT: synchronous rounds within tiers of similarly fast clients; tiers run asynchronously.

Chai et al. 2021, SC, arXiv:2010.05958.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from edgefl.experiment import Count, NonNegative
from edgefl.sequences import sample
from edgefl.strategies.base import Client, LocalTerms, Step, Strategy, Update, View, check_fits, importance


@dataclass
class Tier:
    """Clients of similar latency, and the state of their current round."""

    clients: list[int]
    rounds: int = 0
    """T_m: number of rounds of this tier that the global model includes."""
    running: set[int] = field(default_factory=set)
    """Clients of the current round that have not delivered an update yet."""
    arrived: dict[int, Update] = field(default_factory=dict)
    """The updates of the current round, keyed by task."""
    models: dict[int, Update] = field(default_factory=dict)
    """The updates of the last complete round, keyed by task; their average is the tier's model."""

    @property
    def complete(self) -> bool:
        """True if updates have arrived and the current round waits for no other client."""
        return bool(self.arrived) and not self.running


@dataclass(frozen=True, kw_only=True)
class FedAT(Strategy):
    """w ← Σ_m (T_{M+1−m} / T)·w_m over M tiers, where T_m is the number of rounds that tier m has completed.

    Tier 1 consists of the clients with the shortest trips, and tier M of the clients with the longest trips.
    w_m = Σ_k (n_k/N)·y_k is the average of the models from the last round of tier m, weighted by examples,
    and T = Σ_m T_m. Slow tiers complete fewer rounds, so each slow tier is weighted by the number of rounds
    of a fast tier. Each tier starts its next round immediately, from the newest global model. A client
    minimises f_k(y) + (λ/2)·‖y − w‖².

    Differences from the paper: until a tier has completed its first round, the current global model is used
    in place of the tier's model, whereas the paper uses the initial model. Tiers do not change during a run,
    and updates are not compressed by polyline encoding.

    >>> FedAT(tiers=3).mixing([4, 2, 1])
    [0.14285714285714285, 0.2857142857142857, 0.5714285714285714]
    """

    upload: ClassVar[Literal["delta", "model"]] = "model"
    lockstep: ClassVar[bool] = True
    reuses: ClassVar[bool] = True

    tiers: Count | None = None
    """M: number of tiers, each with the same number of clients (± 1); default 5, or the number of clients
    if that is less."""
    cohort: Count = 10
    """Number of clients drawn uniformly for a round of a tier; a smaller tier trains all its clients."""
    lam: NonNegative = 0.4
    """λ: weight of the proximal term."""
    gather_s: NonNegative = 10.0
    """Maximum time, in emulated seconds, that the first rounds wait for the whole fleet to connect."""

    def size(self, clients: int) -> int:
        """Return the number of tiers for a fleet of ``clients``."""
        return self.tiers or min(5, clients)

    def check(self, clients: int) -> None:
        check_fits("tiers", self.tiers, clients)

    def local_rule(self) -> LocalTerms:
        return LocalTerms(prox_mu=self.lam)

    def max_training(self, clients: int) -> int:
        small, larger = divmod(clients, count := self.size(clients))
        return larger * min(self.cohort, small + 1) + (count - larger) * min(self.cohort, small)

    def max_held(self, clients: int) -> int:
        return 2 * self.max_training(clients)

    def slots(self, clients: int) -> int:
        """Return the number of update slots, two per client of a round.

        One is for the client's task or new model, the other for its model from the last round.
        """
        return 2 * self.max_training(clients)

    def begin(self, devices: Sequence[Client]) -> list[Tier]:
        latency_s = [device.down_s + device.compute_s + device.up_s for device in devices]
        parts = np.array_split(np.argsort(latency_s, kind="stable"), self.size(len(devices)))
        return [Tier(sorted(part.tolist())) for part in parts]

    def assign(self, state: list[Tier], view: View) -> Sequence[int]:
        connected = len(view.idle) + view.training
        if view.version == 0 and connected < len(view.devices) and view.now_s < self.gather_s:
            return ()
        start: list[int] = []
        for tier in state:
            if not tier.running and not tier.arrived:
                idle = [client for client in tier.clients if client in view.idle]
                count = min(self.cohort, view.openings - len(start), len(idle))
                members = idle if count == len(idle) else sample(idle, count, view.rng)
                tier.running.update(members)
                start += members
        return start

    def arrive(self, state: list[Tier], update: Update, view: View) -> Sequence[Update]:
        (tier,) = (tier for tier in state if update.client in tier.running)
        tier.running.remove(update.client)
        tier.arrived[update.task] = update
        return ()

    def lost(self, state: list[Tier], client: int, view: View) -> None:
        """Remove the client's task, and all models that the server has discarded as invalid."""
        held = {update.task for update in view.held}
        for tier in state:
            if client not in view.running:  # if its task still runs, an earlier update was invalid
                tier.running.discard(client)
            for models in (tier.arrived, tier.models):
                for task in models.keys() - held:
                    del models[task]

    def wake_s(self, state: list[Tier], view: View) -> float | None:
        return self.gather_s if view.version == 0 else None

    def mixing(self, rounds: Sequence[int]) -> list[float]:
        """Return the weight of each tier's model, from the numbers of rounds that the tiers have completed.

        Tiers are in order from fast to slow.
        """
        return [count / sum(rounds) for count in reversed(rounds)]

    def step(self, state: list[Tier], view: View) -> Step | None:
        due = next((tier for tier in state if tier.complete), None)
        if due is None:
            return None
        shares = self.mixing([tier.rounds + (tier is due) for tier in state])
        updates: list[Update] = []
        weights: list[float] = []
        for tier, share in zip(state, shares, strict=True):
            models = tier.arrived if tier is due else tier.models
            of_tier = sorted(models.values(), key=lambda update: update.client)
            updates += of_tier
            weights += [share * part for part in importance("examples", of_tier)]
        return Step(updates, weights, 1.0 - math.fsum(weights), keep=True, release=[*due.models.values()])

    def stepped(self, state: list[Tier], step: Step, view: View) -> None:
        used = {update.task for update in step.updates}
        for tier in state:
            if tier.arrived.keys() & used:
                tier.models, tier.arrived = tier.arrived, {}
                tier.rounds += 1
