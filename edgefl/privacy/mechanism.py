"""A private step: clips its updates, adds noise to their sum and adapts the clipping norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgefl import kernels
from edgefl.experiment import MAX_CLIP_NORM, Privacy
from edgefl.kernels.arguments import Doubles, Floats
from edgefl.privacy.source import Source
from edgefl.privacy.tree import TreeNoise


class Clipped(NamedTuple):
    """A step's updates after clipping."""

    weights: list[float]
    """Factor of each update in the sum: its weight times its clip factor."""
    within: float
    """Number of updates with a norm of at most the clipping norm; an update summed as zero counts ½."""


@dataclass
class Mechanism:
    """Σ weights[k]·Δ_k·min(1, L/‖Δ_k‖) plus noise of deviation σ·L·``max_weight`` per tree node or step.

    With local noise the clients have clipped already, and the sum is Σ weights[k]·Δ_k.

    L is ``rules.clip_norm``. If L adapts to a quantile γ, each step sets L ← L·exp(−η(b + noise − γ)), where
    b is the share of updates with a norm of at most L (Andrew et al. 2021, arXiv:1905.03871, Algorithm 1).
    Here the factor is limited to [1/e, e].
    """

    rules: Privacy
    max_weight: float
    """Maximum weight of one update in a step."""
    source: Source

    def __post_init__(self) -> None:
        rules = self.rules
        self.tree = TreeNoise(self.source, rules.restart_every, honaker=rules.honaker)

    def clip(self, weights: Sequence[float], squares: Sequence[float] | Doubles, clip_norm: float) -> Clipped:
        """Clip updates with the squared norms ``squares``; if clients add noise, nothing is clipped, because
        the norms include the noise. A zero or non-finite update is summed as zero.

        `next_norm` releases the number of updates within the bound, minus ½ per update. An update of zero
        counts ½ and so contributes 0. Any other update contributes ±½, the sensitivity to which the noise of
        the count is scaled.
        """
        sizes = np.asarray(squares, np.float64)
        factors = np.nan_to_num(kernels.clip_factors(squares, clip_norm))
        if self.rules.local_noise_multiplier:
            factors = np.isfinite(sizes).astype(np.float64)
        clipped = [weight * factor for weight, factor in zip(weights, factors.tolist(), strict=True)]
        empty = (sizes == 0.0) | ~np.isfinite(sizes)
        return Clipped(clipped, float(np.where(empty, 0.5, sizes <= clip_norm**2).sum()))

    def deviation(self, clip_norm: float) -> float:
        """Standard deviation of the noise per tree node or step, in units of the summed update."""
        return self.rules.noise_multiplier * clip_norm * self.max_weight

    def noise(self, version: int, size: int, salt: str = "") -> Floats:
        """Noise of deviation 1 for the step to ``version``; ``salt`` is the digest of its content."""
        if self.rules.mechanism == "tree":
            return self.tree.step(version, size, salt)
        return self.source.normal(size, "privacy-step", version, *([salt] if salt else []))

    def next_norm(self, version: int, clipped: Clipped, clip_norm: float, salt: str = "") -> float | None:
        """Clipping norm after ``version``; None if it is constant."""
        rules, count, expected = self.rules, len(clipped.weights), 1.0 / self.max_weight
        if rules.quantile is None:
            return None
        draw = self.source.normal(1, "privacy-quantile", version, *([salt] if salt else []))
        noise = rules.count_deviation(expected) * float(draw[0])
        # After ½ is subtracted per update, an absent client or an update of zero adds 0, any other ±½ (Andrew
        # et al. 2021, theorem 1). A fixed cohort's size is public, and this value does not reveal a Poisson
        # cohort's size.
        share = (clipped.within - count / 2 + noise) / expected + 0.5
        step = -rules.quantile_rate * (share - rules.quantile)
        return min(clip_norm * math.exp(min(max(step, -1.0), 1.0)), MAX_CLIP_NORM)
