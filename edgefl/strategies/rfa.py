"""RFA: the geometric median (Pillutla, Kakade, Harchaoui 2022, IEEE TSP, arXiv:1912.13445)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from edgefl.experiment import Count
from edgefl.sequences import added
from edgefl.strategies.base import Update, View, importance
from edgefl.strategies.buffered import Buffered
from edgefl.strategies.rows import Rows, check_buffer


@dataclass(frozen=True, kw_only=True)
class Rfa(Buffered):
    """w ← w + η_g · v, where v minimises Σ α_k ‖v − Δ_k‖: the geometric median of the updates in a buffer.

    The smoothed Weiszfeld algorithm (algorithm 2) repeats β_k = α_k / max(ν, ‖v − Δ_k‖) and
    v = Σ β_k Δ_k / Σ β_k, starting from v = Σ α_k Δ_k, where the α_k sum to 1. The algorithm needs only the
    inner products of the updates. With ``restart = "new-version"`` and ``max_staleness = 0``, all updates of
    a step start from the same version, as in the paper's rounds.
    """

    reads: ClassVar[Literal["metadata", "updates"]] = "updates"

    iterations: Count = 3
    """Number of iterations of the algorithm; the paper uses 3."""
    smoothing: Annotated[float, msgspec.Meta(gt=0)] = 1e-6
    """ν: lower bound on the distance by which α_k is divided; it prevents a division by 0."""
    weighting: Literal["examples", "uniform"] = "examples"
    """Whether the weights α_k are proportional to the clients' numbers of examples, as in the paper, or
    equal."""

    def check(self, clients: int) -> None:
        super().check(clients)
        check_buffer(self.size(clients))

    def weights(self, state: Any, updates: Sequence[Update], view: View) -> Sequence[float]:
        return importance(self.weighting, updates)

    def combine(self, rows: Rows, weights: Sequence[float]) -> Sequence[float]:
        first = np.asarray(weights) / added(weights)
        products, squares, now = rows.products, rows.products.diagonal(), first
        for _ in range(self.iterations):
            # ‖Σ_j now_j Δ_j − Δ_k‖²
            away = np.sqrt(np.maximum(now @ products @ now - 2 * products @ now + squares, 0.0))
            now = first / np.maximum(away, self.smoothing)
            now = now / now.sum()
        return [float(weight) for weight in now]
