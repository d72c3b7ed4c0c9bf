"""ASO-Fed: asynchronous online learning with decayed gradients (Chen et al. 2020, arXiv:1911.02134)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgefl.experiment import Decay, NonNegative
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import Client, LocalTerms, Step, TripInputs, Update, Vector, View


@dataclass
class Delays:
    """For each client, its number of examples and the durations of its trips, in emulated seconds."""

    examples: list[int]
    """n_k: number of examples that each client had at its last update."""
    begun_s: dict[int, float]
    """Time at which each client's last trip started."""
    mean_s: list[float]
    """Mean duration of each client's finished trips."""
    trips: list[int]
    """Number of finished trips of each client."""


@dataclass(frozen=True, kw_only=True)
class ASOFed(Asynchronous):
    """w ← w + r_k·(n_k/N)·Δζ_k on every arrival, where client k has n_k of the fleet's N examples so far.

    The gradient of a trip is ∇s_k = w_k − y, where w_k is the downloaded model and y results from SGD on
    f_k(y) + (λ/2)·‖y − w_k‖². The client sends Δζ_k = −(∇s_k − v_k + h_k), then sets
    h_k ← β·h_k + (1 − β)·v_k and v_k ← ∇s_k. The factor r_k = max(1, ln d_k) compensates for the delay d_k,
    which is the mean duration of the client's trips in emulated seconds; the paper does not state the unit of
    d_k. With ``data.growth``, clients gain examples during the run, as in the paper. Unlike in the paper, the
    server does no feature learning, which cannot be written as a weighted sum of updates.

    >>> ASOFed().step_size(math.e ** 2), ASOFed().step_size(0.5)
    (2.0, 1.0)
    """

    client_vectors: ClassVar[tuple[str, ...]] = ("h", "v")

    lam: NonNegative = 0.01
    """λ: weight of the proximal term."""
    beta: Decay = 0.5
    """β: decay of h_k, the moving average of the client's past gradients."""
    dynamic_step: bool = True
    """Whether updates are scaled by r_k, which compensates for the client's delay; if False, r_k = 1."""

    def local_rule(self) -> LocalTerms:
        return LocalTerms(prox_mu=self.lam)

    def end_trip(self, model: Vector, given: TripInputs) -> None:
        # Change everything except the running statistics, which are sent unchanged.
        weights = slice(model.size - given.statistics)
        start, h, v = (vector[weights] for vector in (given.start, given.kept["h"], given.kept["v"]))
        gradient = start - model[weights]
        model[weights] = start - (gradient - v + h)
        h[:] = self.beta * h + (1.0 - self.beta) * v
        v[:] = gradient

    def max_held(self, clients: int) -> int:
        return 1

    def begin(self, devices: Sequence[Client]) -> Delays:
        examples = [device.examples for device in devices]
        return Delays(examples, {}, [0.0] * len(devices), [0] * len(devices))

    def assign(self, state: Delays, view: View) -> Sequence[int]:
        start = super().assign(state, view)
        state.begun_s.update(dict.fromkeys(start, view.now_s))
        return start

    def arrive(self, state: Delays, update: Update, view: View) -> Sequence[Update]:
        client = update.client
        state.examples[client] = update.examples
        state.trips[client] += 1
        took_s = update.at_s - state.begun_s[client]
        state.mean_s[client] += (took_s - state.mean_s[client]) / state.trips[client]
        return super().arrive(state, update, view)

    def step_size(self, mean_s: float) -> float:
        """Return the step factor r_k of a client whose trips take ``mean_s`` emulated seconds on average."""
        return max(1.0, math.log(mean_s)) if self.dynamic_step and mean_s > 0.0 else 1.0

    def step(self, state: Delays, view: View) -> Step | None:
        if not view.held:
            return None
        update, total = view.held[0], sum(state.examples)
        share = state.examples[update.client] / total if total else 1.0 / len(state.examples)
        return Step((update,), (self.step_size(state.mean_s[update.client]) * share,))
