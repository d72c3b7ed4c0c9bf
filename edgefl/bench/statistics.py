"""The statistical tests that ``bench fidelity`` judges by, each a few lines over numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def kolmogorov_smirnov(samples: npt.ArrayLike, cdf: Callable[[Floats], Floats]) -> tuple[float, float]:
    """Largest distance D between the samples' distribution and ``cdf``, and the chance of one as large.

    The asymptotic distribution with Stephens' correction, good from some ten samples on:
    Q(λ) = 2 Σ (−1)^(j−1) exp(−2 j² λ²), λ = (√n + 0.12 + 0.11/√n) D.

    >>> d, p = kolmogorov_smirnov(np.linspace(0.005, 0.995, 100), lambda x: x)
    >>> round(d, 3), round(p, 3)
    (0.005, 1.0)
    >>> kolmogorov_smirnov(np.linspace(0, 0.5, 100), lambda x: x)[1] < 1e-6
    True
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    n = len(ordered)
    if not n:
        raise ValueError("samples must not be empty")
    below = cdf(ordered)
    distance = float(max((np.arange(1, n + 1) / n - below).max(), (below - np.arange(n) / n).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if scaled < 0.2:  # the series converges too slowly there, and is 1 to ten digits
        return distance, 1.0
    terms = [(-1.0) ** (j - 1) * math.exp(-2.0 * j * j * scaled * scaled) for j in range(1, 101)]
    return distance, min(1.0, max(0.0, 2.0 * sum(terms)))


def binomial_interval(trials: int, chance: float, confidence: float = 0.99) -> tuple[int, int]:
    """The narrowest central interval of counts that holds at least ``confidence`` of Binomial(n, p).

    >>> binomial_interval(1000, 0.05)
    (33, 69)
    """
    if trials < 0 or not 0.0 < chance < 1.0:
        raise ValueError(f"trials must be at least 0 and chance between 0 and 1 (got {trials}, {chance})")
    counts = np.arange(trials + 1)
    logs = (
        math.lgamma(trials + 1)
        - np.array([math.lgamma(k + 1) + math.lgamma(trials - k + 1) for k in counts.tolist()])
        + counts * math.log(chance)
        + (trials - counts) * math.log1p(-chance)
    )
    total = np.cumsum(np.exp(logs))
    tail = (1.0 - confidence) / 2
    return int(np.searchsorted(total, tail)), int(np.searchsorted(total, 1.0 - tail))


def spearman(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Rank correlation, ties at their mean rank.

    >>> round(spearman([1, 2, 3, 4], [10, 20, 40, 30]), 3)
    0.8
    """
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: npt.ArrayLike) -> Floats:
    _, place, count = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    ranks: Floats = (last - (count - 1) / 2)[place]
    return ranks
