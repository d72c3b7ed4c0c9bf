"""SAFA: rounds that tolerate lag, with a cache of models (Wu et al. 2021, IEEE TC, arXiv:1910.01355)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import msgspec

from edgefl.experiment import Count, Positive
from edgefl.strategies.base import Client, Step, Strategy, Update, View, check_fits


@dataclass
class Cache:
    """The cache of clients' models, and the state of the current round."""

    models: dict[int, Update] = field(default_factory=dict)
    """Last model of each client; for a client that has no entry here, the global model is used."""
    bypassed: dict[int, Update] = field(default_factory=dict)
    """Models, keyed by client, that arrived in the last round but were not picked; the next sum includes
    them."""
    picked: frozenset[int] = frozenset()
    """Clients whose models were picked in the last round."""
    seen: frozenset[int] = frozenset()
    """Tasks of held updates that arrived in earlier rounds."""
    began_s: float = 0.0
    """Time at which the round started, in emulated seconds."""
    given: dict[int, int] = field(default_factory=dict)
    """The last version that each client received."""


@dataclass(frozen=True, kw_only=True)
class SAFA(Strategy):
    """w ← Σ_k (n_k/N)·w_k over a cache of each client's last model; client k holds n_k of all N examples.

    A round picks the first ``participants`` models that arrive from clients not picked in the last round, and
    then ends. If no client is training any more, or after ``round_limit_s``, models from clients picked in
    the last round fill the remaining places, in order of arrival. Picked models are put into the cache before
    the sum, and other models that arrived are put into it after the sum. A client that delivered its model
    restarts in the next round, while the other clients continue to train. If a client trains from a version
    that is more than ``lag_tolerance`` versions old, its task is cancelled and it restarts from the newest
    version; its cache entry becomes the global model.

    Differences from the paper: (1) A cache entry that is not the client's own model (at the start, or after
    too much lag) is the current global model. In the paper it is the global model at the time when the entry
    was made, which needs one more model per client. The two forms give different global models.
    (2) A client that goes offline loses its undelivered work.
    """

    upload: ClassVar[Literal["delta", "model"]] = "model"
    lockstep: ClassVar[bool] = True
    reuses: ClassVar[bool] = True

    participants: Count | None = None
    """Number of models per round (C·m in the paper, for m clients); default 10, or the number of clients
    if that is less."""
    lag_tolerance: Annotated[int, msgspec.Meta(ge=0)] = 5
    """τ: maximum age, in versions, of the base version from which a client trains."""
    round_limit_s: Positive | None = None
    """T_lim: maximum duration of a round, in emulated seconds; None if there is no limit."""

    def size(self, clients: int) -> int:
        """Return the number of updates per round, for a fleet of ``clients``."""
        return self.participants or min(10, clients)

    def check(self, clients: int) -> None:
        check_fits("participants", self.participants, clients)

    def max_held(self, clients: int) -> int:
        return 3 * clients

    def slots(self, clients: int) -> int:
        """Return the number of update slots: three per client.

        They are for the client's task, and for its models in `Cache.models` and `Cache.bypassed`.
        """
        return 3 * clients

    def begin(self, devices: Sequence[Client]) -> Cache:
        return Cache()

    def assign(self, state: Cache, view: View) -> Sequence[int]:
        delivered = {update.client for update in self.arrived(state, view)}
        start = [client for client in view.idle if client not in delivered]
        state.given.update(dict.fromkeys(start, view.version))
        return start

    def arrived(self, state: Cache, view: View) -> list[Update]:
        """Return the updates that arrived in this round, in order of arrival."""
        return [update for update in view.held if update.task not in state.seen]

    def arrive(self, state: Cache, update: Update, view: View) -> Sequence[Update]:
        return (update,) if update.staleness > self.lag_tolerance else ()

    def lost(self, state: Cache, client: int, view: View) -> None:
        """Remove the client's models from the cache if the server no longer holds them.

        The server stops holding a model that proves to be invalid when it is summed.
        """
        held = {update.task for update in view.held}
        for models in (state.models, state.bypassed):
            if client in models and models[client].task not in held:
                del models[client]

    def cancel(self, state: Cache, view: View) -> Sequence[int]:
        return [client for client in view.running if self.deprecated(state, client, view.version)]

    def deprecated(self, state: Cache, client: int, version: int) -> bool:
        """Return True if the client's base version is more than ``lag_tolerance`` versions old."""
        return version - state.given[client] > self.lag_tolerance

    def pick(self, state: Cache, view: View) -> list[Update] | None:
        """Return the models that the round picked, or None while the round continues."""
        arrived, size = self.arrived(state, view), self.size(len(view.devices))
        first = [update for update in arrived if update.client not in state.picked]
        if len(first) < size:
            over = self.round_limit_s is not None and view.now_s >= state.began_s + self.round_limit_s
            if not arrived or (view.training and not over):
                return None
            first += [update for update in arrived if update.client in state.picked]
        return first[:size]

    def step(self, state: Cache, view: View) -> Step | None:
        picked = self.pick(state, view)
        if picked is None:
            return None
        cache = {**state.models, **state.bypassed, **{update.client: update for update in picked}}
        updates = [cache[client] for client in sorted(cache)]
        total = sum(device.examples for device in view.devices)
        counts = [view.devices[update.client].examples if total else 1 for update in updates]
        weights = [count / (total or len(view.devices)) for count in counts]
        kept = {update.task for update in (*updates, *self.arrived(state, view))}
        release = [update for update in view.held if update.task not in kept]
        return Step(updates, weights, 1.0 - math.fsum(weights), keep=True, release=release)

    def stepped(self, state: Cache, step: Step, view: View) -> None:
        made, used = view.version, {update.task for update in step.updates}
        arrived = self.arrived(state, view)
        # A client that delivered its model receives the new version now. Its cache entry is therefore kept,
        # not replaced with the global model, however large its lag was.
        state.given.update(dict.fromkeys((update.client for update in arrived), made))
        state.picked = frozenset(update.client for update in arrived if update.task in used)
        state.bypassed = {update.client: update for update in arrived if update.task not in used}
        current = (update for update in step.updates if not self.deprecated(state, update.client, made))
        state.models = {update.client: update for update in current}
        state.seen, state.began_s = frozenset(update.task for update in view.held), view.now_s

    def wake_s(self, state: Cache, view: View) -> float | None:
        return None if self.round_limit_s is None else state.began_s + self.round_limit_s
