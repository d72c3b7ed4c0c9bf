"""Asynchronous strategies: every client trains at its own pace, so many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from edgefl.errors import ConfigError
from edgefl.strategies.base import Arrivals, Count, Positive, Strategy, Update, View


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Strategy):
    """Who trains when, without rounds. A subclass adds `step`."""

    concurrency: Count | None = None
    """Clients training at once, each drawn uniformly from the idle ones; all by default."""
    restart: Literal["immediate", "new-version"] = "immediate"
    """Whether a client that delivered trains again at once, or waits for a version it has not trained on."""
    arrival_process: Literal["as-needed", "constant", "poisson"] = "as-needed"
    """When clients start: whenever there is room, or as they come, ``arrival_rate_per_s`` of them an emulated
    second. One that comes is drawn uniformly from the idle ones, and turned away where ``concurrency`` are
    training."""
    arrival_rate_per_s: Positive | None = None
    max_staleness: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Tasks that would be staler are cancelled as soon as that is certain, and their updates discarded."""

    def check(self, clients: int) -> None:
        if self.concurrency is not None and self.concurrency > clients:
            raise ConfigError(
                f"strategy.concurrency must be at most the fleet's {clients} clients, got {self.concurrency}"
            )

        as_needed = self.arrival_process == "as-needed"
        if as_needed != (self.arrival_rate_per_s is None):
            raise ConfigError(
                "strategy.arrival_rate_per_s must be given with arrival_process = 'constant' or 'poisson', "
                f"and only then, got {self.arrival_rate_per_s} with {self.arrival_process!r}"
            )

    def arrivals(self) -> Arrivals | None:
        if self.arrival_process == "as-needed" or self.arrival_rate_per_s is None:
            return None
        return Arrivals(self.arrival_process, self.arrival_rate_per_s)

    def max_training(self, clients: int) -> int:
        return self.concurrency or clients

    @property
    def lockstep(self) -> bool:
        return self.restart == "new-version"

    def assign(self, state: Any, view: View) -> Sequence[int]:
        ready: Sequence[int] = view.idle
        if not ready:
            return ()
        if self.restart == "new-version":
            ready = [client for client in ready if view.trained_from(client) < view.version]
        room = view.openings
        if self.concurrency is not None:
            room = min(room, self.concurrency - view.training)
        elif room >= len(view.devices):
            return ready
        if room <= 0 or not ready:
            return ()
        if room == 1:
            return (ready[int(view.rng.integers(len(ready)))],)
        drawn = view.rng.permutation(len(ready))[:room]
        return [ready[int(index)] for index in drawn]

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        if self.max_staleness is not None and update.staleness > self.max_staleness:
            return (update,)
        return ()

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        if self.max_staleness is None:
            return ()
        oldest = view.version - self.max_staleness
        return [client for client in view.running if view.trained_from(client) < oldest]
