"""FedStaleWeight: weights that compensate for client slowness (Ma et al. 2024, arXiv:2406.02877)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edgefl.errors import shortened
from edgefl.experiment import Count, Decay, Positive
from edgefl.kernels import MovingAverage
from edgefl.strategies.base import Client, Step, Update, View, importance
from edgefl.strategies.buffered import Buffered


@dataclass
class Expectation:
    """E[τ_i] of every client, and the mean of the raw weight α over arrivals."""

    average: MovingAverage
    relative: list[float]
    """n·p_i of every client."""
    arrivals: int = 0
    raw_mean: float = 0.0
    credit: dict[int, float] = field(default_factory=dict)
    """By client: weight withheld by ``max_step`` and not applied since."""
    due: dict[int, float] = field(default_factory=dict)
    """By client: weight in the last computed step, including credit, before ``max_step`` reduced it."""


@dataclass(frozen=True, kw_only=True)
class FedStaleWeight(Buffered):
    """w ← w + η_g Σ_j α_j·Δ_j over a buffer of b, α_j ∝ p_j·(E[τ_j] + 1) or p_j·(b·E[τ_j] + 1) (``form``).

    E[τ_i] is a moving average of the staleness of client i's updates on arrival, the current one included.
    The weights of a buffer add up to 1, so updates without staleness are averaged with weights ∝ p_j, as in
    FedAvg. p_i is the share of all weight that client i should have (eq. 1); a subclass may override
    `importance`.

    >>> FedStaleWeight().raw(staleness=2.0, size=5), FedStaleWeight(restart="immediate").raw(2.0, size=5)
    (3.0, 11.0)
    """

    importance_by: Literal["uniform", "examples"] = "uniform"
    """p_i: 1/n, or the client's share of the fleet's examples."""
    restart: Literal["immediate", "new-version", "after-step"] = "after-step"
    """``after-step`` is the paper's rule (appendix A); its published benchmark uses ``new-version``."""
    form: Literal["by-restart", "derivation", "algorithm-1"] = "by-restart"
    """``derivation`` is b·E[τ_i] + 1 (eq. 8), ``algorithm-1`` is E[τ_i] + 1 (Algorithm 1). A fair weight is
    the inverse of the client's rate of updates. With ``after-step`` a client is in one of every E[τ_i] + 1
    versions, so ``algorithm-1`` is fair. With ``immediate`` and ``new-version`` it sends one of every
    b·E[τ_i] + 1 updates, so ``derivation`` is fair. ``by-restart`` selects the fair one."""
    normalize: Literal["buffer", "running", "credit"] = "buffer"
    """Divisor of the weights. ``buffer``, as in the paper: the buffer's own Σ α. This violates the fairness
    of eq. 3, since a slow client's large weight also increases its divisor. ``running``, not in the paper: b
    times the mean α over all arrivals. ``credit``: as ``running``, but later steps add the weight that
    ``max_step`` withheld."""
    max_step: Positive = 2.0
    """With ``running`` and ``credit``: maximum sum of a buffer's weights. It limits the total weight of
    clients that contribute to few versions (docs/findings.md gives the threshold)."""
    average: Literal["window", "cumulative", "exponential"] = "window"
    """Kind of moving average that estimates E[τ_i]."""
    window: Count = 5
    """Number of observations in the window."""
    decay: Decay = 0.8
    """With ``exponential``: m ← decay·m + (1 − decay)·τ."""

    @property
    def fair_form(self) -> Literal["derivation", "algorithm-1"]:
        """The form with fair weights under this restart rule."""
        return "algorithm-1" if self.restart == "after-step" else "derivation"

    @property
    def remark(self) -> str:
        if self.form in ("by-restart", self.fair_form):
            return ""
        return (
            f'strategy.form = "{self.form}" with strategy.restart = "{self.restart}" does not give each '
            f'client 1/n of the weight; "{self.fair_form}" does'
        )

    def begin(self, devices: Sequence[Client]) -> Expectation:
        average = MovingAverage(len(devices), mode=self.average, window=self.window, decay=self.decay)
        p, mean = self.importance(devices), 1.0 / len(devices)
        fits = not isinstance(p, Mapping) and len(p) == len(devices) and min(p) >= 0
        if not fits or not math.isclose(sum(p), 1.0, rel_tol=1e-6):
            allowed = f"{len(devices)} numbers, one per client, at least 0 and adding up to 1"
            raise ValueError(f"importance must return {allowed}; got {shortened(repr(p))}")
        return Expectation(average, [one / mean for one in p])

    def importance(self, devices: Sequence[Client]) -> Sequence[float]:
        """Return p_i of each client, at least 0; they must add up to 1."""
        return importance(self.importance_by, devices)

    def raw(self, staleness: float, size: int) -> float:
        """Return α before normalisation for p_i = 1/n, an expected ``staleness`` and a buffer of ``size``."""
        form = self.fair_form if self.form == "by-restart" else self.form
        return (size if form == "derivation" else 1) * staleness + 1.0

    def arrive(self, state: Expectation, update: Update, view: View) -> Sequence[Update]:
        discarded = super().arrive(state, update, view)
        if not discarded:
            expected = state.average.observe(update.client, float(update.staleness))
            raw = state.relative[update.client] * self.raw(expected, self.size(len(view.devices)))
            state.arrivals += 1
            state.raw_mean += (raw - state.raw_mean) / state.arrivals
        return discarded

    def weights(self, state: Expectation, updates: Sequence[Update], view: View) -> Sequence[float]:
        size = len(updates)
        means = state.average.mean([update.client for update in updates]).tolist()
        raw = [
            state.relative[update.client] * self.raw(mean, size)
            for update, mean in zip(updates, means, strict=True)
        ]
        if self.normalize == "buffer":
            total = sum(raw) or 1.0  # 0 if p_j = 0 for the whole buffer
            return [one / total for one in raw]
        fair: Sequence[float] = [one / (size * (state.raw_mean or 1.0)) for one in raw]
        if self.normalize == "credit":
            fair = self._with_credit(state, updates, fair)
        scale = min(1.0, self.max_step / (sum(fair) or 1.0))
        return [one * scale for one in fair]

    def _with_credit(
        self, state: Expectation, updates: Sequence[Update], fair: Sequence[float]
    ) -> Sequence[float]:
        """Add each client's credit to its first update. Sets ``state.due`` to the clients' total weights."""
        state.due, paid = {}, []
        for update, one in zip(updates, fair, strict=True):
            before = state.due.get(update.client)
            paid.append(one + state.credit.get(update.client, 0.0) if before is None else one)
            state.due[update.client] = (before or 0.0) + paid[-1]
        return paid

    def stepped(self, state: Expectation, step: Step, view: View) -> None:
        """Credit each client with the part of its weight that the step did not apply."""
        if self.normalize != "credit":
            return
        left = dict(state.due)
        for update, weight in zip(step.updates, step.weights, strict=True):
            left[update.client] -= weight
        for client, weight in left.items():
            if weight > 0.0:
                state.credit[client] = weight
            else:  # nothing is left, up to rounding errors
                state.credit.pop(client, None)
