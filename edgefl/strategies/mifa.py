"""MIFA: reuses the last updates of unavailable clients (Gu et al. 2021, NeurIPS, arXiv:2106.04159)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from edgefl.experiment import NonNegative
from edgefl.strategies.base import Step, Strategy, View


@dataclass(frozen=True, kw_only=True)
class MIFA(Strategy):
    """w ← w + (η/N) Σ_i G_i over all N clients, where G_i is client i's last update, initially 0.

    All connected clients train in a round; the step is due when each of them has delivered its update or has
    disconnected. A client that connects during a round waits for the next round. The server stores N updates,
    each scaled by the client learning rate of the round in which it was made. The paper stores G_i/η_t and
    applies the current η_t, which is equivalent if the client learning rate is constant.
    """

    reuses: ClassVar[bool] = True
    lockstep: ClassVar[bool] = True

    gather_s: NonNegative = 10.0
    """Maximum time, in emulated seconds, that the first round waits for the whole fleet to connect. In the
    paper, it waits for all clients without a limit."""

    def max_held(self, clients: int) -> int:
        return 2 * clients

    def assign(self, state: Any, view: View) -> Sequence[int]:
        gathering = view.version == 0 and len(view.idle) < len(view.devices) and view.now_s < self.gather_s
        return () if gathering or view.training or self._delivered(view) else view.idle

    def step(self, state: Any, view: View) -> Step | None:
        if view.training or not self._delivered(view):
            return None
        newest = {update.client: update for update in view.held}
        updates = sorted(newest.values(), key=lambda update: update.client)
        # Release a client's older update only after the step, in case the newer update is invalid.
        older = [update for update in view.held if newest[update.client] is not update]
        return Step(updates, [1.0 / len(view.devices)] * len(updates), keep=True, release=older)

    def wake_s(self, state: Any, view: View) -> float | None:
        return self.gather_s if view.version == 0 else None

    def _delivered(self, view: View) -> bool:
        """Return True if a client has delivered an update in this round."""
        return any(update.base_version == view.version for update in view.held)
