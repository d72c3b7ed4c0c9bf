"""FedStaleWeight's weights as its paper derives them (Ma et al. 2024, arXiv:2406.02877)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


class Bounds(NamedTuple):
    """Between which the normalised weight of an update must lie."""

    low: float
    high: float


def bounds(buffer_size: int, largest_staleness: float) -> Bounds:
    """1/((b − 1)(b·τ_max + 1) + 1) ≤ α ≤ (b·τ_max + 1)/(b(τ_max + 1)), of theorem 1.

    The lower is reached by one fresh update among the stalest, the upper by the stalest among fresh ones.

    >>> bounds(5, 0.0)
    Bounds(low=0.2, high=0.2)
    >>> bounds(5, 4.0).high
    0.84
    """
    most = buffer_size * largest_staleness + 1.0
    return Bounds(1.0 / ((buffer_size - 1) * most + 1.0), most / (buffer_size * (largest_staleness + 1.0)))


def largest_deviation(buffer_size: int, largest_staleness: float) -> float:
    """U(τ_max) of theorem 1: the largest squared deviation of a normalised weight from 1/b.

    >>> largest_deviation(5, 0.0)
    0.0
    """
    low, high = bounds(buffer_size, largest_staleness)
    return max((1.0 / buffer_size - low) ** 2, (high - 1.0 / buffer_size) ** 2)


def expected_staleness(rates: Sequence[float], buffer_size: int) -> Doubles:
    """E[τ_i] = (Σ_j r_j/r_i − 1)/b of each client, j over all of them, itself included (eq. 6).

    >>> expected_staleness([1.0, 1.0, 2.0], 1).tolist()
    [3.0, 3.0, 1.0]
    """
    rate = np.asarray(rates, np.float64)
    return np.asarray((rate.sum() / rate - 1.0) / buffer_size)


def influence(staleness: Sequence[float] | Doubles, buffer_size: int) -> Doubles:
    """p_i = 1/(b·E[τ_i] + 1): the share of all updates that client i's are (eq. 7).

    >>> influence(expected_staleness([1.0, 1.0, 2.0], 5), 5).tolist()
    [0.25, 0.25, 0.5]
    """
    return np.asarray(1.0 / (buffer_size * np.asarray(staleness, np.float64) + 1.0))


def fair_weight(staleness: Sequence[float] | Doubles, buffer_size: int) -> Doubles:
    """α_i = (b·E[τ_i] + 1)/n, which makes every client's influence 1/n (eq. 8).

    >>> fair_weight(expected_staleness([1.0, 1.0, 2.0, 4.0], 5), 5).tolist()
    [2.0, 2.0, 1.0, 0.5]
    """
    return np.asarray(1.0 / (influence(staleness, buffer_size) * len(staleness)))
