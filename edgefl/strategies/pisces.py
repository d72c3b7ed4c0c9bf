"""Pisces: asynchronous training of clients chosen by utility (Jiang et al. 2022, SoCC, arXiv:2206.09264)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from edgefl.experiment import Count, NonNegative, Positive, Share
from edgefl.kernels import MovingAverage
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import Client, Step, Update, View, importance


@dataclass
class TripStatistics:
    """Measurements of each client's trips, and the time of the last step."""

    staleness: MovingAverage
    latency_s: list[float]
    """Duration of each client's last trip, in emulated seconds. Before the client's first trip, it is the
    duration that the device and network profiles predict."""
    utility: dict[int, float] = field(default_factory=dict)
    """Utility of each client that has delivered an update."""
    begun_s: dict[int, float] = field(default_factory=dict)
    """Time at which each client's last trip started, in emulated seconds."""
    stepped_s: float = 0.0
    """Time of the last step, in emulated seconds."""
    exploration: float = 1.0
    """Probability that a client without a utility is selected for a new trip."""
    losses: dict[int, dict[int, float]] = field(default_factory=dict)
    """For each base version, the last loss of each client that trained from it; used to detect outliers."""
    outlying: dict[int, int] = field(default_factory=dict)
    """Number of times that the loss of each client was an outlier."""


@dataclass(frozen=True, kw_only=True)
class Pisces(Asynchronous):
    """w ← w + η_g Σ_i p_i·(E[τ_i] + 1)^−γ·Δ_i over all held updates, at intervals of I = L_max/(b + 1).

    L_max is the duration of the last trip of the slowest running client, so the model is updated about b
    times during this client's current trip. This bounds the staleness of its update; the bound is b + 1 if
    trip durations are constant and a step coincides with an arrival. Whenever fewer than ``concurrency``
    clients train, the clients with the largest utility U_i = |B_i|·L_i/(E[τ_i] + 1)^β start, where B_i are
    the client's examples, L_i is the loss on them and E[τ_i] is the mean staleness of the client's last
    updates. With probability ``exploration``, which decays, a random client without a utility starts instead.
    A client whose update is held waits for the step, so ``restart`` has no effect.

    The discount (E[τ_i] + 1)^−γ and the exploration follow the authors' published code in the framework
    Plato; ``staleness_discount = 0``, and ``exploration = 1`` with ``exploration_decay = 1``, disable them.

    If ``credits`` is set, clients with outlying losses are excluded (section 5.2). Each arrival creates a
    pool of losses: the newest loss of each client that trained from one of the last ``outlier_window`` base
    versions up to the base version of the arriving update. If the pool contains at least ``concurrency``
    losses, the losses that DBSCAN classifies as noise are outliers. A client whose loss was an outlier
    ``credits`` times does not start again.

    Differences from the paper: L_i is the mean loss over the steps of a trip, whereas in the paper it is the
    root mean square over the examples. The authors' code pools utilities instead of losses.

    >>> Pisces().utility(examples=100, loss=2.0, staleness=3.0)
    100.0
    """

    lockstep: ClassVar[bool] = True

    staleness_bound: Count = 5
    """b: the server takes about b steps while the slowest of the training clients makes one trip. This bounds
    the staleness of that client's update."""
    staleness_penalty: NonNegative = 0.5
    """β: exponent with which staleness reduces a client's utility."""
    staleness_discount: NonNegative = 0.5
    """γ: exponent with which staleness reduces the weight of an update; with 0, there is no discount."""
    exploration: Share = 0.3
    """Initial probability that a client without a utility is selected for a new trip."""
    exploration_decay: Share = 0.99
    """Factor by which the probability ``exploration`` is multiplied after each use."""
    min_exploration: Share = 0.1
    """Lower bound at which the probability stops decaying; a smaller ``exploration`` does not decay."""
    window: Count = 5
    """Number of a client's latest updates over which its mean staleness E[τ_i] is computed."""
    weighting: Literal["examples", "uniform"] = "examples"
    """Whether p_i is proportional to the number of examples, or 1/n for a step of n updates; the p_i add up
    to 1."""

    credits: Count | None = None
    """Number of times that the loss of a client must be an outlier before the client is excluded (5 in the
    authors' code). With None, no client is excluded."""
    outlier_window: Count = 5
    """Number of consecutive base versions whose losses are pooled to detect outliers."""
    outlier_distance: Positive = 0.5
    """ε of DBSCAN: the distance within which two losses are neighbours. A loss that has at least
    ``concurrency`` / 2 neighbours, including itself, is in a cluster, and so are its neighbours; all other
    losses are outliers."""

    def slots(self, clients: int) -> int:
        """Return the number of update slots, one per client: no client trains while its update is held."""
        return clients

    def begin(self, devices: Sequence[Client]) -> TripStatistics:
        average = MovingAverage(len(devices), window=self.window)
        latency_s = [device.down_s + device.compute_s + device.up_s for device in devices]
        return TripStatistics(average, latency_s, exploration=self.exploration)

    @property
    def needs_losses(self) -> str:
        return "" if self.credits is None else "credits"

    def utility(self, examples: int, loss: float, staleness: float) -> float:
        """Return U_i, the utility of a client with this mean loss and mean staleness."""
        return examples * loss * math.pow(staleness + 1.0, -self.staleness_penalty)

    def assign(self, state: TripStatistics, view: View) -> Sequence[int]:
        waiting = {update.client for update in view.held}
        ready = [client for client in view.idle if client not in waiting and not self.excludes(state, client)]
        room = min(view.openings, (self.concurrency or len(view.devices)) - view.training)
        room = min(max(0, room), len(ready))
        new = [client for client in ready if client not in state.utility]
        known = [client for client in ready if client in state.utility]
        known.sort(key=lambda client: (-state.utility[client], client))
        explored = room
        if room and new and known:
            explored = int(view.rng.binomial(room, state.exploration))
            least = min(self.min_exploration, self.exploration)
            state.exploration = max(least, state.exploration * self.exploration_decay)
        explored = min(len(new), max(explored, room - len(known)))
        if 0 < explored < len(new):
            new = [new[int(index)] for index in view.rng.permutation(len(new))]
        start = new[:explored] + known[: room - explored]
        state.begun_s.update(dict.fromkeys(start, view.now_s))
        return start

    def arrive(self, state: TripStatistics, update: Update, view: View) -> Sequence[Update]:
        client = update.client
        state.latency_s[client] = update.at_s - state.begun_s[client]
        staleness = state.staleness.observe(client, float(update.staleness))
        utility = self.utility(update.examples, update.loss, staleness)
        if not math.isnan(utility):  # if the trip reports no loss, the previous utility remains
            state.utility[client] = utility
            if self.credits is not None:
                self._count_outliers(state, update, view)
        return super().arrive(state, update, view)

    def excludes(self, state: TripStatistics, client: int) -> bool:
        """Return True if the client's loss was an outlier ``credits`` times."""
        return self.credits is not None and state.outlying.get(client, 0) >= self.credits

    def outliers(self, losses: Mapping[int, float], neighbours: int) -> list[int]:
        """Return the clients whose losses DBSCAN classifies as noise.

        A loss with at least ``neighbours`` neighbours, including itself, forms a cluster with them.

        >>> Pisces(outlier_distance=0.5).outliers({0: 1.0, 1: 1.2, 2: 1.1, 3: 2.0, 4: 1.4}, neighbours=3)
        [3]
        """
        values = np.fromiter(losses.values(), float)
        near = np.abs(values[:, None] - values) <= self.outlier_distance
        clustered = near[:, near.sum(axis=1) >= neighbours].any(axis=1)
        return [client for client, within in zip(losses, clustered.tolist(), strict=True) if not within]

    def _count_outliers(self, state: TripStatistics, update: Update, view: View) -> None:
        """Pool the clients' latest losses, and count each client's outliers.

        The pool covers the ``outlier_window`` base versions up to the base version of ``update``.
        """
        newest, size = update.base_version, self.concurrency or len(view.devices)
        state.losses.setdefault(newest, {})[update.client] = update.loss
        pool: dict[int, float] = {}
        for version in range(newest, newest - self.outlier_window, -1):
            pool = {**state.losses.get(version, {}), **pool}
        if len(pool) >= size:
            for client in self.outliers(pool, size // 2):
                state.outlying[client] = state.outlying.get(client, 0) + 1
        oldest = min((view.trained_from(client) for client in view.running), default=view.version)
        for version in [version for version in state.losses if version <= oldest - self.outlier_window]:
            del state.losses[version]

    def wake_s(self, state: TripStatistics, view: View) -> float:
        """Return the time of the next step: the time of the last step plus the interval I."""
        slowest_s = max((state.latency_s[client] for client in view.running), default=0.0)
        return state.stepped_s + slowest_s / (self.staleness_bound + 1)

    def step(self, state: TripStatistics, view: View) -> Step | None:
        if not view.held or view.now_s < self.wake_s(state, view):
            return None
        updates = sorted(view.held, key=lambda update: update.client)
        part = importance(self.weighting, updates)
        means = state.staleness.mean([update.client for update in updates]).tolist()
        discount = [math.pow(mean + 1.0, -self.staleness_discount) for mean in means]
        return Step(updates, [p * factor for p, factor in zip(part, discount, strict=True)])

    def stepped(self, state: TripStatistics, step: Step, view: View) -> None:
        state.stepped_s = view.now_s
