"""Asynchronous strategies that publish a new version whenever a buffer of updates is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgefl.experiment import Count
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import Step, Update, View, check_fits


@dataclass(frozen=True, kw_only=True)
class Buffered(Asynchronous):
    """Clients train at their own pace; a new version is published when ``buffer_size`` updates are held.

    A subclass may define `weights`.
    """

    buffer_size: Count | None = None
    """Updates per step (K in FedBuff, b in FedStaleWeight); default 10, or the number of clients if that is
    less."""

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        """Return the weights of the updates in a full buffer; by default they are equal and sum to 1."""
        return [1.0 / len(updates)] * len(updates)

    def size(self, clients: int) -> int:
        """Return the number of updates per step, for a fleet of ``clients``."""
        return self.buffer_size or min(10, clients)

    def check(self, clients: int) -> None:
        super().check(clients)
        check_fits("buffer_size", self.size(clients), clients)

    def max_held(self, clients: int) -> int:
        return self.size(clients)

    def step(self, state: Any, view: View) -> Step | None:
        size = self.size(len(view.devices))
        if len(view.held) < size:
            return None
        updates = view.held[:size]
        return Step(updates, self.weights(state, updates, view))
