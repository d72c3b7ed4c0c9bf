"""FedStaleWeight: weights that compensate for client slowness (Ma et al. 2024, arXiv:2406.02877)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edgefl.errors import shortened
from edgefl.experiment import Count, Decay, Positive
from edgefl.kernels import MovingAverage
from edgefl.sequences import added
from edgefl.strategies.base import Client, Step, Update, View, importance
from edgefl.strategies.buffered import Buffered


@dataclass
class Expectation:
    """The expected staleness E[τ_i] of every client, and the mean over all arrivals of the raw weight α."""

    average: MovingAverage
    relative: list[float]
    """Target share p_i of the total weight, times the number of clients n, for each client i."""
    arrivals: int = 0
    raw_mean: float = 0.0
    credit: dict[int, float] = field(default_factory=dict)
    """Credit of each client: the weight that ``max_step`` withheld and that no later step has applied."""
    due: dict[int, float] = field(default_factory=dict)
    """Weight of each client in the last computed step, including credit, before ``max_step`` reduced it."""


@dataclass(frozen=True, kw_only=True)
class FedStaleWeight(Buffered):
    """w ← w + η_g Σ_j α_j·Δ_j over a buffer of b updates.

    α_j is proportional to p_j·(E[τ_j] + 1) or to p_j·(b·E[τ_j] + 1), as ``form`` selects. E[τ_i] is a moving
    average of the staleness that client i's updates have on arrival, including the current update. By
    default (see ``normalize``), the weights in a buffer add up to 1, so updates without staleness are
    averaged with weights proportional to p_j, as in FedAvg. p_i is the share of the total weight that client
    i should have (eq. 1); a subclass may override `importance`.

    >>> FedStaleWeight().raw(staleness=2.0, size=5), FedStaleWeight(restart="immediate").raw(2.0, size=5)
    (3.0, 11.0)
    """

    importance_by: Literal["uniform", "examples"] = "uniform"
    """Whether p_i is 1/n (``uniform``) or the client's share of the fleet's examples (``examples``)."""
    restart: Literal["immediate", "new-version", "after-step"] = "after-step"
    """Rule for when a client may train again. The paper uses ``after-step`` (appendix A), but its published
    benchmark uses ``new-version``."""
    form: Literal["by-restart", "derivation", "algorithm-1"] = "by-restart"
    """Form of the weight: ``derivation`` is b·E[τ_i] + 1 (eq. 8), and ``algorithm-1`` is E[τ_i] + 1
    (Algorithm 1). A fair weight is the inverse of the rate at which a client sends updates. If ``restart`` is
    ``after-step``, a client contributes to one of every E[τ_i] + 1 versions, so ``algorithm-1`` is fair. If
    it is ``immediate`` or ``new-version``, a client sends one of every b·E[τ_i] + 1 updates, so
    ``derivation`` is fair. ``by-restart`` selects the fair form for the value of ``restart``."""
    normalize: Literal["buffer", "running", "credit"] = "buffer"
    """Divisor of the weights. With ``buffer``, as in the paper, it is the sum of α over the buffer. This
    violates the fairness of eq. 3, since the large weight of a slow client also increases its divisor. With
    ``running``, which is not in the paper, it is b times the mean α over all arrivals. ``credit`` is like
    ``running``, but later steps add the weight that ``max_step`` withheld."""
    max_step: Positive = 2.0
    """Maximum sum of the weights in a buffer, with ``running`` and ``credit``. Under this limit, clients that
    contribute to too few versions cannot reach their fair weight (see docs/findings.md)."""
    average: Literal["window", "cumulative", "exponential"] = "window"
    """Kind of moving average that estimates E[τ_i]."""
    window: Count = 5
    """Number of observations in the window of the moving average."""
    decay: Decay = 0.8
    """Decay of the ``exponential`` average: m ← decay·m + (1 − decay)·τ."""

    @property
    def fair_form(self) -> Literal["derivation", "algorithm-1"]:
        """The value of ``form`` whose weights are fair under this restart rule."""
        return "algorithm-1" if self.restart == "after-step" else "derivation"

    @property
    def remark(self) -> str:
        found = []
        if self.form not in ("by-restart", self.fair_form):
            found.append(
                f'strategy.form = "{self.form}" with strategy.restart = "{self.restart}" does not give each '
                f'client 1/n of the weight; "{self.fair_form}" does'
            )
        if self.concurrency is not None or self.arrival_process != "as-needed":
            found.append(
                "fedstaleweight assumes that no client waits to be drawn: with a strategy.concurrency below "
                "the fleet's size, or an arrival process, clients do not each have 1/n of the weight"
            )
        return "; ".join(found)

    def begin(self, devices: Sequence[Client]) -> Expectation:
        average = MovingAverage(len(devices), mode=self.average, window=self.window, decay=self.decay)
        p, mean = self.importance(devices), 1.0 / len(devices)
        fits = not isinstance(p, Mapping) and len(p) == len(devices) and min(p) >= 0
        if not fits or not math.isclose(sum(p), 1.0, rel_tol=1e-6):
            allowed = f"{len(devices)} numbers, one per client, at least 0 and adding up to 1"
            raise ValueError(f"importance must return {allowed}; got {shortened(repr(p))}")
        return Expectation(average, [one / mean for one in p])

    def importance(self, devices: Sequence[Client]) -> Sequence[float]:
        """Return the share p_i of each client; shares must be at least 0 and add up to 1."""
        return importance(self.importance_by, devices)

    def raw(self, staleness: float, size: int) -> float:
        """Return the unnormalised weight α for p_i = 1/n, from the expected staleness and buffer size."""
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
            total = added(raw) or 1.0  # the sum is 0 if p_j = 0 for all clients in the buffer
            return [one / total for one in raw]
        fair: Sequence[float] = [one / (size * (state.raw_mean or 1.0)) for one in raw]
        if self.normalize == "credit":
            fair = self._with_credit(state, updates, fair)
        scale = min(1.0, self.max_step / (added(fair) or 1.0))
        return [one * scale for one in fair]

    def _with_credit(
        self, state: Expectation, updates: Sequence[Update], fair: Sequence[float]
    ) -> Sequence[float]:
        """Add each client's credit to its first update; set ``state.due`` to the clients' weights."""
        state.due, paid = {}, []
        for update, one in zip(updates, fair, strict=True):
            before = state.due.get(update.client)
            paid.append(one + state.credit.get(update.client, 0.0) if before is None else one)
            state.due[update.client] = (before or 0.0) + paid[-1]
        return paid

    def stepped(self, state: Expectation, step: Step, view: View) -> None:
        """Record as credit the part of each client's weight that the step did not apply."""
        if self.normalize != "credit":
            return
        left = dict(state.due)
        for update, weight in zip(step.updates, step.weights, strict=True):
            left[update.client] -= weight
        for client, weight in left.items():
            if weight > 0.0:
                state.credit[client] = weight
            else:  # no credit is left, up to rounding errors
                state.credit.pop(client, None)
