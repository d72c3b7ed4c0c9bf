"""Asynchronous strategies: every client trains at its own pace, so many at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from edgefl.ascending import Changed, drawn
from edgefl.errors import ConfigError
from edgefl.experiment import Count
from edgefl.strategies.base import Arrivals, Strategy, Update, View


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Strategy):
    """Starts clients without rounds. A subclass adds `step`."""

    concurrency: Count | None = None
    """Clients training at once, each drawn uniformly from the idle ones; all by default."""
    restart: Literal["immediate", "new-version", "after-step"] = "immediate"
    """A client that delivered trains again at once, or waits: for a version that it has not trained on, or
    for the step that takes its update, so that none is in one step twice (the rule of FedBuff's appendix D
    and FedStaleWeight's appendix A, for proofs in which every client is equally likely in a step)."""
    arrival_process: Literal["as-needed", "constant", "poisson"] = "as-needed"
    """Clients start whenever there is room, or as they come, ``arrival_rate_per_s`` an emulated second: one
    is drawn uniformly from the idle ones, and turned away where ``concurrency`` are training."""
    arrival_rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    """Clients that come in an emulated second, with ``constant`` and ``poisson``."""
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
        return self.restart != "immediate"

    @property
    def starts_together(self) -> bool:
        return False

    def contributors(self, state: Any, view: View) -> Collection[int]:
        """Clients whose update waits for the next step."""
        return {update.client for update in view.held}

    def assign(self, state: Any, view: View) -> Sequence[int]:
        idle, room = view.idle, view.openings
        if self.concurrency is not None:
            room = min(room, self.concurrency - view.training)
        if room <= 0 or not idle:
            return ()
        ready = idle
        if self.restart != "immediate":
            after = self.restart == "after-step"
            ready = Changed(idle, self.contributors(state, view) if after else view.up_to_date)
        if not ready:
            return ()
        if self.concurrency is None and room >= len(view.devices):
            return list(ready)
        if room == 1:
            return (ready[int(view.rng.integers(len(ready)))],)
        return drawn(ready, room, view.rng)

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        stale = self.max_staleness is not None and update.staleness > self.max_staleness
        return (update,) if stale else ()

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        if self.max_staleness is None:
            return ()
        oldest = view.version - self.max_staleness
        return [client for client in view.running if view.trained_from(client) < oldest]
