"""SAFA: rounds that tolerate lag, over a cache of models (Wu et al. 2021, IEEE TC, arXiv:1910.01355)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import msgspec

from edgefl.errors import ConfigError
from edgefl.experiment import Count, Positive
from edgefl.strategies.base import Client, Step, Strategy, Update, View


@dataclass
class Cache:
    """The cache, the models that enter it with the next sum, and what is known of rounds and clients."""

    models: dict[int, Update] = field(default_factory=dict)
    """By client, its own last model; the others' entry is the global model."""
    bypassed: dict[int, Update] = field(default_factory=dict)
    """By client, models that came too late to be picked in the last round."""
    picked: frozenset[int] = frozenset()
    """Clients whose models the last round picked."""
    seen: frozenset[int] = frozenset()
    """Held tasks that did not arrive in this round."""
    began_s: float = 0.0
    given: dict[int, int] = field(default_factory=dict)
    """The version that each client was given last."""


@dataclass(frozen=True, kw_only=True)
class SAFA(Strategy):
    """w ← Σ_k (n_k/N)·w_k over a cache of each client's last model, n_k of all N examples.

    A round ends when ``participants`` clients delivered whom the last one did not pick; these are picked. If
    nobody is left to wait for, or after ``round_limit_s``, those come in who were picked before, first come
    first. Picked models enter the cache before the sum, those of the others after it, to count in the next.
    Who delivered starts again with the next round. The others train on, from a version at most
    ``lag_tolerance`` old: else they are cancelled and given the newest, and so is their entry in the cache.

    Two things differ from the paper. First, an entry that is not the client's own model (at the start,
    or after too much lag) is the current global model. The paper keeps the global model from the time at
    which the entry was made, which would need one more model per client; trajectories differ by up to 110%.
    Second, a client that goes offline loses the work that it has not delivered.
    """

    upload: ClassVar[Literal["delta", "model"]] = "model"

    participants: Count | None = None
    """C·m in the paper, m the clients; by default 10, or the whole fleet if that is smaller."""
    lag_tolerance: Annotated[int, msgspec.Meta(ge=0)] = 5
    """τ."""
    round_limit_s: Positive | None = None
    """T_lim, emulated seconds; None: no limit."""

    def size(self, clients: int) -> int:
        """Updates that a round waits for, in a fleet of so many clients."""
        return self.participants or min(10, clients)

    def check(self, clients: int) -> None:
        if self.size(clients) > clients:
            raise ConfigError(
                f"strategy.participants must be at most the fleet's {clients} clients, "
                f"got {self.participants}"
            )

    @property
    def lockstep(self) -> bool:
        return True

    def max_held(self, clients: int) -> int:
        return 3 * clients

    def slots(self, clients: int) -> int:
        """One for what a client does in this round, two for its models in the cache and on the way there."""
        return 3 * clients

    def begin(self, devices: Sequence[Client]) -> Cache:
        return Cache()

    def assign(self, state: Cache, view: View) -> Sequence[int]:
        delivered = {update.client for update in self.arrived(state, view)}
        start = [client for client in view.idle if client not in delivered]
        state.given.update(dict.fromkeys(start, view.version))
        return start

    def arrived(self, state: Cache, view: View) -> list[Update]:
        """Updates of this round, in the order of their arrival."""
        return [update for update in view.held if update.task not in state.seen]

    def arrive(self, state: Cache, update: Update, view: View) -> Sequence[Update]:
        return (update,) if update.staleness > self.lag_tolerance else ()

    def lost(self, state: Cache, client: int, view: View) -> None:
        """A model in the cache, or on its way there, may turn out to be bad when it is summed."""
        held = {update.task for update in view.held}
        for models in (state.models, state.bypassed):
            if client in models and models[client].task not in held:
                del models[client]

    def cancel(self, state: Cache, view: View) -> Sequence[int]:
        return [client for client in view.running if self.deprecated(state, client, view.version)]

    def deprecated(self, state: Cache, client: int, version: int) -> bool:
        """True for a client that was given its last version too long ago."""
        return version - state.given[client] > self.lag_tolerance

    def pick(self, state: Cache, view: View) -> list[Update] | None:
        """The models that this round picks; None while it goes on."""
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
        # Who delivered gets the new version now, so its entry is its own model however stale that was.
        state.given.update(dict.fromkeys((update.client for update in arrived), made))
        state.picked = frozenset(update.client for update in arrived if update.task in used)
        state.bypassed = {update.client: update for update in arrived if update.task not in used}
        current = (update for update in step.updates if not self.deprecated(state, update.client, made))
        state.models = {update.client: update for update in current}
        state.seen, state.began_s = frozenset(update.task for update in view.held), view.now_s

    def wake_s(self, state: Cache, view: View) -> float | None:
        return None if self.round_limit_s is None else state.began_s + self.round_limit_s
