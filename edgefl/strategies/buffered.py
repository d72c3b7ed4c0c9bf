"""Asynchronous strategies that step when a buffer of updates is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from edgefl.errors import ConfigError
from edgefl.strategies.base import Count, Device, Step, Strategy, Update, View


@dataclass(frozen=True, kw_only=True)
class Buffered(Strategy):
    """Clients train at their own pace; the model steps when ``buffer_size`` updates are held.

    A subclass says what each update weighs (`weights`), and nothing else if it has no state.
    """

    buffer_size: Count | None = None
    """Updates in a step (FedBuff's K, FedStaleWeight's b); 10, or the whole fleet if that is smaller."""
    concurrency: Count | None = None
    """Clients training at once, each drawn uniformly from the idle ones; all by default."""
    restart: Literal["immediate", "new-version"] = "immediate"
    """Whether a client that delivered trains again at once, or waits for a version it has not trained on."""
    max_staleness: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Tasks that would be staler are cancelled as soon as that is certain, and their updates discarded."""

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        """The weight of each update of a full buffer."""
        raise NotImplementedError

    def size(self, clients: int) -> int:
        """Updates in a step, for a fleet of so many clients."""
        return self.buffer_size or min(10, clients)

    def check(self, clients: int) -> None:
        if self.buffer_size is not None and self.buffer_size > clients:
            raise ConfigError(
                f"strategy.buffer_size must be at most the fleet's {clients} clients, got {self.buffer_size}"
            )
        if self.concurrency is None:
            return
        if self.concurrency > clients:
            raise ConfigError(
                f"strategy.concurrency must be at most the fleet's {clients} clients, got {self.concurrency}"
            )
        if self.restart == "new-version" and self.size(clients) > self.concurrency:
            raise ConfigError(
                f"strategy.buffer_size must be at most strategy.concurrency ({self.concurrency}) with "
                f'strategy.restart = "new-version", got {self.size(clients)}'
            )

    def max_held(self, clients: int) -> int:
        return self.size(clients)

    def begin(self, devices: Sequence[Device]) -> Any:
        return None

    def assign(self, state: Any, view: View) -> Sequence[int]:
        ready: Sequence[int] = view.idle
        if not ready:
            return ()
        if self.restart == "new-version":
            ready = [client for client in ready if view.trained_from(client) < view.version]
        if self.concurrency is None:
            return ready
        room = self.concurrency - view.training
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

    def step(self, state: Any, view: View) -> Step | None:
        size = self.size(len(view.devices))
        if len(view.held) < size:
            return None
        updates = view.held[:size]
        return Step(updates, self.weights(state, updates, view))
