"""Conversion of updates to fixed-point numbers modulo p, and of weights to integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgefl import kernels
from edgefl.kernels.arguments import Floats
from edgefl.kernels.field import Words
from edgefl.secure import SecureError

LARGEST_SUM = 2**30
"""Maximum magnitude of a sum. It is a quarter of p, so half of all integers modulo p are not valid sums. If
masks do not cancel, each element of the sum therefore reveals the error with probability 1/2."""


class FixedPoint(NamedTuple):
    """Encoding of float32 updates: each element is clipped to [−clip, clip] and rounded to a multiple of
    `step`.

    Elements are rounded to the nearest multiple, and ties to the even multiple. The sum of encoded updates
    with integer weights n_k is exact if Σ n_k is at most ``total_weight``. Compared with Σ n_k · Δ_k of the
    clipped updates, the error is therefore at most Σ n_k · step / 2, plus the error of the final rounding
    to float32.

    >>> FixedPoint(clip=1.0, total_weight=1024).step == 2.0**-20
    True
    """

    clip: float
    """Maximum magnitude of an element; larger elements are clipped."""
    total_weight: int
    """Maximum sum of the integer weights of the updates in one sum."""

    @property
    def step(self) -> float:
        """Elements are rounded to multiples of this number: the smallest power of two with which no sum
        exceeds `LARGEST_SUM`."""
        clip = float(np.float32(self.clip))
        exponent = math.frexp(clip * self.total_weight / LARGEST_SUM)[1] - 1
        while self.total_weight * math.ceil(clip / 2.0**exponent) > LARGEST_SUM:
            exponent += 1
        return float(2.0**exponent)

    @property
    def levels(self) -> int:
        """Largest magnitude of an encoded element: ⌈clip / step⌉."""
        return math.ceil(float(np.float32(self.clip)) / self.step)

    def encode(self, out: Words, update: Floats, mask: Words) -> int:
        """Write the encoded ``update`` plus ``mask`` to ``out``; return the number of elements that were
        clipped."""
        return kernels.field_encode(out, update, mask, self.clip, 1.0 / self.step)

    def decode(self, out: Floats, total: Words, mask: Words, weights: Sequence[int]) -> None:
        """Subtract ``mask``, the sum of the masks, from the masked ``total``, and write the decoded sum
        Σ n_k Δ_k to ``out``.

        Raises `SecureError` if an element is larger than the ``weights`` allow, which shows that the masks do
        not cancel.
        """
        largest = kernels.field_decode(out, total, mask, self.step)
        allowed = sum(weights) * self.levels
        if largest > allowed:
            out[:] = 0.0
            raise SecureError(f"the masks do not cancel: an element of the sum is {largest}, above {allowed}")


def integer_weights(weights: Sequence[float], resolution: int) -> tuple[list[int], float]:
    """Approximate each weight w_k by n_k · unit, where n_k is an integer from 0 to ``resolution``; return
    the integers and the unit.

    The unit is max w / resolution, so the error of each weight is at most max w / (2 · resolution). If all
    weights are equal, there is no error. Raises ValueError if a weight is negative or not finite, or if all
    weights are 0.

    >>> integer_weights([1.0, 0.5, 0.25], 100)
    ([100, 50, 25], 0.01)
    """
    if not weights or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights must be finite numbers of at least 0 (got {list(weights)!r})")
    if not (top := max(weights)) > 0:
        raise ValueError("weights must not all be 0")
    return [round(weight / top * resolution) for weight in weights], top / resolution
