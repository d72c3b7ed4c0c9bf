"""Fixed-point numbers modulo p, and weights as integers."""

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
"""Maximum magnitude of a sum. It is a quarter of p, so half of all field elements are not valid sums:
masks that do not cancel are detected in each element with probability 1/2."""


class FixedPoint(NamedTuple):
    """Encoding of float32 updates: each element is limited to [−clip, clip] and rounded to a multiple of
    `step`.

    Rounding is to nearest, ties to even. A sum of encoded updates with integer weights n_k, where Σ n_k is at
    most ``total_weight``, is exact: Σ n_k · Δ_k has an error of at most Σ n_k · step / 2, plus that of the
    final rounding to float32.

    >>> FixedPoint(clip=1.0, total_weight=1024).step == 2.0**-20
    True
    """

    clip: float
    """Limit of the magnitude of an element."""
    total_weight: int
    """Maximum sum of the weights."""

    @property
    def step(self) -> float:
        """Smallest power of two with which no sum exceeds `LARGEST_SUM`."""
        clip = float(np.float32(self.clip))
        exponent = math.frexp(clip * self.total_weight / LARGEST_SUM)[1] - 1
        while self.total_weight * math.ceil(clip / 2.0**exponent) > LARGEST_SUM:
            exponent += 1
        return float(2.0**exponent)

    @property
    def levels(self) -> int:
        """Largest encoded magnitude: ⌈clip / step⌉."""
        return math.ceil(float(np.float32(self.clip)) / self.step)

    def encode(self, out: Words, update: Floats, mask: Words, backend: str | None = None) -> int:
        """Write the encoded update plus ``mask``; return the number of limited elements."""
        return kernels.field_encode(out, update, mask, self.clip, 1.0 / self.step, backend)

    def decode(
        self, out: Floats, total: Words, mask: Words, weights: Sequence[int], backend: str | None = None
    ) -> None:
        """Write Σ n_k Δ_k from the masked ``total`` and the sum of its masks.

        Raises `SecureError` if the masks do not cancel: an element is larger than the ``weights`` allow.
        """
        largest = kernels.field_decode(out, total, mask, self.step, backend)
        allowed = sum(weights) * self.levels
        if largest > allowed:
            out[:] = 0.0
            raise SecureError(f"the masks do not cancel: an element of the sum is {largest}, over {allowed}")


def integer_weights(weights: Sequence[float], resolution: int) -> tuple[list[int], float]:
    """Approximate weights by integers from 0 to ``resolution`` times a unit: w_k ≈ n_k · unit.

    The unit is max w / resolution, so each weight is off by at most max w / (2 · resolution). Equal weights
    are exact. Raises ValueError if a weight is negative or not finite, or all are 0.

    >>> integer_weights([1.0, 0.5, 0.25], 100)
    ([100, 50, 25], 0.01)
    """
    if not weights or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights must be finite numbers of at least 0 (got {list(weights)!r})")
    if not (top := max(weights)) > 0:
        raise ValueError("weights must not all be 0")
    return [round(weight / top * resolution) for weight in weights], top / resolution
