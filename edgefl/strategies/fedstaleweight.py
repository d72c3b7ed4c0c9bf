"""FedStaleWeight: weights that make up for slowness (Ma et al. 2024, arXiv:2406.02877)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgefl.experiment import Count, Decay, Positive
from edgefl.kernels import MovingAverage
from edgefl.strategies.base import Client, Update, View
from edgefl.strategies.buffered import Buffered


@dataclass
class Expectation:
    """E[τ_i] of every client, and the running mean of the raw weight over arrivals."""

    average: MovingAverage
    arrivals: int = 0
    raw_mean: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FedStaleWeight(Buffered):
    """w ← w + η_g Σ_j α_j·Δ_j with α_j ∝ b·E[τ_j] + 1 over a buffer of b (eq. 8).

    E[τ_i] is a moving average of the staleness that client i's updates had on arrival, this one included.
    The weights of one buffer add up to 1, so fresh updates give the plain average (FedAvg).

    >>> FedStaleWeight(buffer_size=5).raw(staleness=2.0, size=5)
    11.0
    """

    restart: Literal["immediate", "new-version", "after-step"] = "after-step"
    """``after-step`` is the paper's rule (app. A); its published bench has ``new-version``."""
    form: Literal["derivation", "algorithm-1"] = "derivation"
    """α_i ∝ b·E[τ_i] + 1 as derived and proved (eq. 8), or E[τ_i] + 1 as Algorithm 1 writes it."""
    normalize: Literal["buffer", "running"] = "buffer"
    """Divide by the buffer's own Σ α (the paper), or by b times the mean α over all arrivals (ours). The
    first bends the fairness of eq. 3, since a slow client's large weight also enlarges its own divisor."""
    max_step: Positive = 2.0
    """With ``running``: the most that the weights of one buffer may add up to."""
    average: Literal["window", "cumulative", "exponential"] = "window"
    """The moving average of a client's staleness that stands for E[τ_i]."""
    window: Count = 5
    """Observations in the moving window; the oldest is dropped."""
    decay: Decay = 0.8
    """With ``exponential``: m ← decay·m + (1 − decay)·τ."""

    def begin(self, devices: Sequence[Client]) -> Expectation:
        average = MovingAverage(len(devices), mode=self.average, window=self.window, decay=self.decay)
        return Expectation(average)

    def raw(self, staleness: float, size: int) -> float:
        """α before normalisation, for an expected staleness and a buffer of ``size``."""
        return (size if self.form == "derivation" else 1) * staleness + 1.0

    def arrive(self, state: Expectation, update: Update, view: View) -> Sequence[Update]:
        discarded = super().arrive(state, update, view)
        if not discarded:
            expected = state.average.observe(update.client, float(update.staleness))
            raw = self.raw(expected, self.size(len(view.devices)))
            state.arrivals += 1
            state.raw_mean += (raw - state.raw_mean) / state.arrivals
        return discarded

    def weights(self, state: Expectation, updates: Sequence[Update], view: View) -> Sequence[float]:
        size = len(updates)
        means = state.average.mean([update.client for update in updates]).tolist()
        raw = [self.raw(mean, size) for mean in means]
        total = sum(raw)
        if self.normalize == "running":
            total = max(size * state.raw_mean, total / self.max_step)
        return [one / total for one in raw]
