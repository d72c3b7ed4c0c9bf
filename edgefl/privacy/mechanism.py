"""A server step with differential privacy: clipping, noise, and adaptation of the clipping norm."""

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

SMALLEST_FACTOR = 2.0**-100
"""If an update's clipping factor is below this number, the update is replaced with zeros. Factors become
float32 weights, which are imprecise below 2^−126, so the clipped update could exceed the clipping norm."""


def clip_factors(squares: Sequence[float] | Doubles, clip_norm: float) -> Doubles:
    """Return the clipping factors of updates with these squared norms: min(1, L/‖Δ‖) for L = ``clip_norm``.

    The factor is 0 for an update that is not finite, or whose factor would be below `SMALLEST_FACTOR`.

    >>> clip_factors([4.0, math.inf, 1e80], 1.0).tolist()
    [0.5, 0.0, 0.0]
    """
    factors: Doubles = np.nan_to_num(kernels.clip_factors(squares, clip_norm))
    factors[factors < SMALLEST_FACTOR] = 0.0
    return factors


class Clipped(NamedTuple):
    """The result of clipping the updates of one step."""

    weights: list[float]
    """Factor of each update in the sum: the update's weight times its clipping factor."""
    within: float
    """Number of updates whose norm is at most the clipping norm. An update that is replaced with
    zeros is counted as ½."""


@dataclass
class Mechanism:
    """Computes Σ weights[k]·Δ_k·min(1, L/‖Δ_k‖) plus noise. The standard deviation of the noise is
    σ·L·``max_weight`` in each node of the tree, or in each step without a tree.

    If the clients add local noise, they have already clipped their updates, and the sum is Σ weights[k]·Δ_k.

    L is ``rules.clip_norm``. If L adapts to a quantile γ, each step sets L ← L·exp(−η(b + noise − γ)), where
    b is the share of the updates whose norm is at most L (Andrew et al. 2021, arXiv:1905.03871, Algorithm 1).
    Here the factor is clipped to [1/e, e].
    """

    rules: Privacy
    max_weight: float
    """Maximum weight of an update in a step."""
    source: Source

    def __post_init__(self) -> None:
        rules = self.rules
        self.tree = TreeNoise(self.source, rules.restart_every, honaker=rules.honaker)

    def clip(self, weights: Sequence[float], squares: Sequence[float] | Doubles, clip_norm: float) -> Clipped:
        """Clip updates, whose squared norms are ``squares``. If the clients add noise, nothing is clipped,
        because the norms include the noise. An update that is zero or not finite contributes zeros, and so
        does one that is too large to be clipped precisely (`clip_factors`).

        `next_norm` uses the number of updates whose norm is within the clipping norm, minus ½ for each update
        and plus noise. A zero update is counted as ½, so it contributes 0. Any other update contributes ½
        or −½, and the noise is scaled to this largest contribution.
        """
        sizes = np.asarray(squares, np.float64)
        factors = clip_factors(squares, clip_norm)
        if self.rules.local_noise_multiplier:
            factors = np.isfinite(sizes).astype(np.float64)
        clipped = [weight * factor for weight, factor in zip(weights, factors.tolist(), strict=True)]
        empty = (sizes == 0.0) | ~np.isfinite(sizes)
        return Clipped(clipped, float(np.where(empty, 0.5, sizes <= clip_norm**2).sum()))

    def deviation(self, clip_norm: float) -> float:
        """Return the standard deviation of the noise in each node of the tree, or in each step without a
        tree, in the unit of the summed update."""
        return self.rules.noise_multiplier * clip_norm * self.max_weight

    def noise(self, version: int, size: int, salt: str = "") -> Floats:
        """Return noise with a standard deviation of 1 for the step that computes ``version``; ``salt`` is the
        digest of the updates in this step."""
        if self.rules.mechanism == "tree":
            return self.tree.step(version, size, salt)
        return self.source.normal(size, "privacy-step", version, *([salt] if salt else []))

    def next_norm(self, version: int, clipped: Clipped, clip_norm: float, salt: str = "") -> float | None:
        """Return the clipping norm for the step after ``version``, or None if the clipping norm is
        constant."""
        rules, count, expected = self.rules, len(clipped.weights), 1.0 / self.max_weight
        if rules.quantile is None:
            return None
        draw = self.source.normal(1, "privacy-quantile", version, *([salt] if salt else []))
        noise = rules.count_deviation(expected) * float(draw[0])
        # After ½ is subtracted for each update, an absent client or a zero update contributes 0, and any
        # other update ½ or −½ (Andrew et al. 2021, theorem 1). The number of clients in a step is public if
        # it is fixed; if it is drawn at random (Poisson sampling), `share` does not reveal it.
        share = (clipped.within - count / 2 + noise) / expected + 0.5
        step = -rules.quantile_rate * (share - rules.quantile)
        return min(clip_norm * math.exp(min(max(step, -1.0), 1.0)), MAX_CLIP_NORM)
