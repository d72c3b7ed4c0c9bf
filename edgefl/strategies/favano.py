"""FAVANO: polls clients at fixed intervals while they train (Leconte et al. 2023, arXiv:2305.16099)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgefl.strategies.base import Client, Until, View
from edgefl.strategies.polled import Polled, Polls


@dataclass(frozen=True, kw_only=True)
class FAVANO(Polled):
    """w ← (w + Σ_{i∈S} u_i)/(s + 1) at the times k·``interval_s``, with a uniform sample S of s clients.

    This is Algorithm 1 of the paper. u_i = w_init + (y_i − w_init)/α_i is the debiased model of client i,
    where y_i is its model after the E local steps since its last poll. A client stops after the K steps of
    ``[training]``. Polled clients restart from the new model; the others continue to train. α_i is E[min(E,
    K)] (``deterministic``) or P(E > 0)·min(E, K) (``stochastic``). E is random because the time of the
    client's next poll is random: each poll includes the client with probability s/n. All steps of a client
    are assumed to take as long as on its first trip.
    """

    form: Literal["deterministic", "stochastic"] = "deterministic"
    """Form of the divisor α_i of a client's progress: E[min(E, K)] (``deterministic``) or P(E > 0)·min(E, K)
    (``stochastic``), where E is the number of local steps since the last poll, and K is their maximum."""

    def until(self, state: Polls, client: int, view: View) -> Until:
        first_s = self.first_poll(state, view) * self.interval_s - view.now_s
        alpha = self.alpha(view.devices[client], first_s, len(view.devices))
        gain = 1.0 / alpha if alpha > 0.0 else 0.0
        return super().until(state, client, view)._replace(gain=gain, per_step=self.form == "stochastic")

    def alpha(self, device: Client, first_s: float, clients: int) -> float:
        """Return the mean of min(E, K), or P(E > 0), as ``form`` selects.

        E is the number of local steps for which the client has time before its next poll, and K is the
        number of steps of a trip. The client's first possible poll is ``first_s`` emulated seconds from now.

        >>> FAVANO(participants=1, interval_s=2.0).alpha(Client(0, "pi-4", 60, steps=3), 2.0, clients=2)
        3.0
        >>> slow = Client(0, "pi-4", 60, steps=4, compute_s=8.0)
        >>> FAVANO(participants=1, interval_s=2.0).alpha(slow, 2.0, clients=2)  # 1/2 + 2/4 + 3/8 + 4/8
        1.875
        """
        chance = self.size(clients) / clients
        step_s = device.compute_s / max(1, device.steps)
        last = 0
        if chance < 1.0:
            # Sum over the polls until all K steps are done or the probability of later polls is below 1e-12.
            busy_s = device.down_s + device.compute_s - first_s
            bound = math.ceil(math.log(1e-12) / math.log1p(-chance))
            last = min(max(0, math.ceil(busy_s / self.interval_s - 1e-9)), bound)
        at_s = first_s + self.interval_s * np.arange(last + 1) - device.down_s
        done = np.full(last + 1, device.steps) if step_s == 0.0 else np.floor(at_s / step_s + 1e-9)
        steps = np.clip(done, 0, device.steps)
        share = chance * (1.0 - chance) ** np.arange(last + 1)
        share[-1] = (1.0 - chance) ** last
        return float(share @ (steps if self.form == "deterministic" else steps > 0))
