"""ASO-Fed: asynchronous online learning with decayed gradients (Chen et al. 2020, arXiv:1911.02134)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgefl.experiment import Decay, NonNegative
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import Client, Given, LocalTerms, Step, Update, Vector, View


@dataclass
class Delays:
    """All examples; mean length of each client's trips so far, emulated seconds, and how many there were."""

    examples: int
    """N."""
    begun_s: dict[int, float]
    mean_s: list[float]
    trips: list[int]


@dataclass(frozen=True, kw_only=True)
class ASOFed(Asynchronous):
    """w ← w + r_k·(n_k/N)·Δζ_k on every arrival, n_k of all N examples being client k's.

    A client's gradient of a trip is ∇s_k = w_k − y, y being where SGD on f_k(y) + (λ/2)·‖y − w_k‖² leads. It
    sends Δζ_k = −(∇s_k − v_k + h_k) and then keeps h_k ← β·h_k + (1 − β)·v_k and v_k ← ∇s_k.
    r_k = max(1, ln d_k) makes up for its delays d_k, the mean length of its trips in emulated seconds: the
    paper leaves their unit open. Examples do not become more during a run. The server's feature learning is
    not here: it is no weighted sum of updates.

    >>> ASOFed().step_size(math.e ** 2), ASOFed().step_size(0.5)
    (2.0, 1.0)
    """

    client_vectors: ClassVar[tuple[str, ...]] = ("h", "v")

    lam: NonNegative = 0.01
    """λ."""
    beta: Decay = 0.5
    """β."""
    dynamic_step: bool = True
    """False: r_k = 1."""

    def local_rule(self) -> LocalTerms:
        return LocalTerms(prox_mu=self.lam)

    def end_trip(self, model: Vector, given: Given) -> None:
        h, v = given.kept["h"], given.kept["v"]
        gradient = given.start - model
        model[:] = given.start - (gradient - v + h)
        h[:] = self.beta * h + (1.0 - self.beta) * v
        v[:] = gradient

    def max_held(self, clients: int) -> int:
        return 1

    def begin(self, devices: Sequence[Client]) -> Delays:
        examples = sum(device.examples for device in devices)
        return Delays(examples, {}, [0.0] * len(devices), [0] * len(devices))

    def assign(self, state: Delays, view: View) -> Sequence[int]:
        start = super().assign(state, view)
        state.begun_s.update(dict.fromkeys(start, view.now_s))
        return start

    def arrive(self, state: Delays, update: Update, view: View) -> Sequence[Update]:
        client = update.client
        state.trips[client] += 1
        took_s = update.at_s - state.begun_s[client]
        state.mean_s[client] += (took_s - state.mean_s[client]) / state.trips[client]
        return super().arrive(state, update, view)

    def step_size(self, mean_s: float) -> float:
        """r_k of a client whose trips take so many emulated seconds."""
        return max(1.0, math.log(mean_s)) if self.dynamic_step and mean_s > 0.0 else 1.0

    def step(self, state: Delays, view: View) -> Step | None:
        if not view.held:
            return None
        update, examples = view.held[0], state.examples
        share = view.devices[update.client].examples / examples if examples else 1.0 / len(view.devices)
        return Step((update,), (self.step_size(state.mean_s[update.client]) * share,))
