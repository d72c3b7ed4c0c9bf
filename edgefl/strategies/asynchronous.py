"""Asynchronous strategies: clients train at their own pace, up to a maximum concurrency."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from edgefl.errors import ConfigError
from edgefl.experiment import Count
from edgefl.sequences import PatchedSequence, sample
from edgefl.strategies.base import Arrivals, Strategy, Update, View, check_fits


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Strategy):
    """Starts clients without rounds. A subclass defines `step`."""

    starts_together: ClassVar[bool] = False

    concurrency: Count | None = None
    """Number of clients that train in parallel, drawn uniformly from the idle ones; default: all clients."""
    restart: Literal["immediate", "new-version", "after-step"] = "immediate"
    """Rule for when a client may train again after its update has arrived.

    With ``immediate`` it may do so without delay; with ``new-version``, as soon as there is a version from
    which it has not trained; with ``after-step``, after the step that uses its update, so that no step uses
    two updates of one client (appendix D of FedBuff and appendix A of FedStaleWeight, whose proofs assume
    that all clients are equally likely to be in a step)."""
    arrival_process: Literal["as-needed", "constant", "poisson"] = "as-needed"
    """Rule for when clients start. With ``as-needed`` they start whenever fewer than ``concurrency`` clients
    train. Otherwise they start at the times of an arrival process: each arrival starts one idle client, drawn
    uniformly, but has no effect while ``concurrency`` clients train."""
    arrival_rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    """Arrivals per emulated second, if the arrival process is ``constant`` or ``poisson``."""
    max_staleness: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Maximum staleness of an update. A task whose update would exceed this maximum is cancelled, and an
    update that exceeds it on arrival is discarded."""

    def check(self, clients: int) -> None:
        check_fits("concurrency", self.concurrency, clients)
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

    def contributors(self, state: Any, view: View) -> Collection[int]:
        """Return the clients whose updates the next step will use."""
        return {update.client for update in view.held}

    def waiting(self, state: Any, view: View) -> Collection[int]:
        """Return the clients that may not start yet, even if they are idle."""
        if self.restart == "immediate":
            return ()
        return self.contributors(state, view) if self.restart == "after-step" else view.up_to_date

    def assign(self, state: Any, view: View) -> Sequence[int]:
        idle, room = view.idle, view.openings
        if self.concurrency is not None:
            room = min(room, self.concurrency - view.training)
        if room <= 0 or not idle:
            return ()
        waiting = self.waiting(state, view)
        ready = PatchedSequence(idle, waiting) if waiting else idle
        if not ready:
            return ()
        if self.concurrency is None and room >= len(view.devices):
            return list(ready)
        if room == 1:
            return (ready[int(view.rng.integers(len(ready)))],)
        return sample(ready, room, view.rng)

    def arrive(self, state: Any, update: Update, view: View) -> Sequence[Update]:
        stale = self.max_staleness is not None and update.staleness > self.max_staleness
        return (update,) if stale else ()

    def cancel(self, state: Any, view: View) -> Sequence[int]:
        if self.max_staleness is None:
            return ()
        oldest = view.version - self.max_staleness
        return [client for client in view.running if view.trained_from(client) < oldest]
