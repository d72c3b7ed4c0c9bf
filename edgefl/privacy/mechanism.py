"""A private step: its updates clipped, noise for their sum, and the clipping norm of the next."""

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
    """What each update counts in the sum: at most its own weight times clip_norm in size."""
    within: float
    """The number of updates whose norm is at most the clipping norm; one that is summed as zero counts ½."""


@dataclass
class Mechanism:
    """Σ weights[k]·Δ_k·min(1, L/‖Δ_k‖), plus noise of deviation σ·L·``max_weight`` a node or step.

    L is ``rules.clip_norm``, or the norm that the last step left where it follows a quantile: each step then
    moves it by L ← L·exp(−η(b + noise − γ)), with b the share of updates within L (Andrew et al. 2021,
    arXiv:1905.03871, Algorithm 1), here by a factor of e at most.
    """

    rules: Privacy
    max_weight: float
    """The most that one update weighs in a step."""
    source: Source

    def __post_init__(self) -> None:
        rules = self.rules
        self.tree = TreeNoise(self.source, rules.restart_every, honaker=rules.honaker)

    def clip(self, weights: Sequence[float], squares: Sequence[float] | Doubles, clip_norm: float) -> Clipped:
        """Clip updates of these squared norms. An update that is zero or not finite is summed as zero.

        `next_norm` releases the count minus ½ per update. An update of zero counts ½ and so contributes 0.
        Any other update contributes ±½, the sensitivity for which the noise of the count is scaled.
        """
        sizes = np.asarray(squares, np.float64)
        factors = np.nan_to_num(kernels.clip_factors(squares, clip_norm))
        clipped = [weight * factor for weight, factor in zip(weights, factors.tolist(), strict=True)]
        empty = (sizes == 0.0) | ~np.isfinite(sizes)
        return Clipped(clipped, float(np.where(empty, 0.5, sizes <= clip_norm**2).sum()))

    def deviation(self, clip_norm: float) -> float:
        """Standard deviation of the noise of a node of the tree, or of a step, in the summed update."""
        return self.rules.noise_multiplier * clip_norm * self.max_weight

    def noise(self, version: int, size: int, salt: str = "") -> Floats:
        """Noise of deviation 1 for the step to ``version``, whose content is named ``salt``."""
        if self.rules.mechanism == "tree":
            return self.tree.step(version, size, salt)
        return self.source.normal(size, "privacy-step", version, *([salt] if salt else []))

    def next_norm(self, version: int, clipped: Clipped, clip_norm: float, salt: str = "") -> float | None:
        """The clipping norm after ``version``; None where it stays."""
        rules, count, expected = self.rules, len(clipped.weights), 1.0 / self.max_weight
        if rules.quantile is None:
            return None
        draw = self.source.normal(1, "privacy-quantile", version, *([salt] if salt else []))
        noise = rules.count_deviation(expected) * float(draw[0])
        # Counted about ½, a client that is absent or whose update is zero adds 0, any other ±½ (their theorem
        # 1). The size of a fixed cohort is public, and this value does not reveal the size of a drawn one.
        share = (clipped.within - count / 2 + noise) / expected + 0.5
        step = -rules.quantile_rate * (share - rules.quantile)
        return min(clip_norm * math.exp(min(max(step, -1.0), 1.0)), MAX_CLIP_NORM)
