"""Weighted sums that may be made in parts: the same bits in any order, however updates are shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from edgefl.kernels import arguments
from edgefl.kernels.arguments import Checksums, Doubles, Floats, Update
from edgefl.kernels.selection import select, threads

GRID = 2.0**-40
"""Each product is rounded to a multiple of this."""
LARGEST = 2.0**11 - 1.0
"""Products and sums of all of them must stay below this in size; the 1 is for the rounding of the norms."""


class ExactArguments(NamedTuple):
    """Arguments of `exact_sum`: as the caller gave them, until they are `checked`."""

    out: Doubles
    updates: Sequence[Update]
    weights: Doubles
    scales: Sequence[Floats | None]

    def checked(self) -> ExactArguments:
        """Returns them with odd float64 weights (`_odd`), or raises the error that names the wrong one."""
        out = arguments.flat("out", self.out, writable=True)
        if out.dtype != np.float64 or not out.dtype.isnative:
            raise TypeError(f"out must be float64 (got {out.dtype})")
        if not out.flags.aligned:
            raise ValueError("out must be aligned to its numbers")
        vectors, numbers = arguments.items("updates", self.updates), arguments.items("weights", self.weights)
        given: Any = self.scales  # None for no scales, before this
        scales = [None] * len(vectors) if given is None else arguments.items("scales", given)
        for name, entries in (("weights", numbers), ("scales", scales)):
            if len(entries) != len(vectors):
                raise ValueError(f"{name} must have {len(vectors)} entries like updates (got {len(entries)})")
        try:
            weights = np.array([float(weight) for weight in numbers], dtype=np.float64)
        except (TypeError, ValueError):
            raise TypeError(f"weights must be numbers (got {numbers!r})") from None
        pairs = [
            arguments.update(f"updates[{k}]", each, out.size, scale)
            for k, (each, scale) in enumerate(zip(vectors, scales, strict=True))
        ]
        for k, pair in enumerate(pairs):
            for name, array in zip(("updates", "scales"), pair, strict=True):
                if array is not None and np.may_share_memory(out, array):
                    raise ValueError(f"{name}[{k}] must not overlap out, which is written while it is read")
        vectors, scales = [update for update, _ in pairs], [scale for _, scale in pairs]
        return ExactArguments(out, vectors, _odd(weights), scales)


def _odd(weights: Doubles) -> Doubles:
    """Returns the weights with the last bit of each set, but for zeros: 2e-16 of a weight at most.

    Then no product lies half-way between two multiples of `GRID` (kernels/exact.c has why), and rounding it
    where it is added is rounding it alone.
    """
    odd = weights.copy()
    odd.view(np.int64)[weights != 0.0] |= 1
    return odd


def exact_sum(
    out: Doubles,
    updates: Sequence[Update],
    weights: Sequence[float] | Doubles,
    backend: str | None = None,
    *,
    scales: Sequence[Floats | None] | None = None,
) -> tuple[Doubles, Checksums]:
    """Add Σ_k weights[k] · updates[k] to ``out``, flat float64; returns squared L2 norms and checksums.

    ``out`` holds zeros or other multiples of 2^−40, such as a sum of other updates.
    Each product, of a weight whose last bit is set, is rounded once, to the nearest multiple of 2^−40
    (9.1e-13); sums of such numbers below 2^11 in size are exact. So sums that several hosts make of parts of
    the updates add up to the bits of one host's sum, whoever has which (Demmel and Nguyen 2013, reproducible
    sums). `fits` says from the norms whether everything stayed below: else the sum means nothing.

    ``updates`` and ``scales`` are as for `edgefl.kernels.weighted_sum`, norms and checksums have its bits.
    Raises ValueError or TypeError naming the argument, ConfigError if ``backend`` is not there.

    >>> out = np.zeros(2)
    >>> norms, checksums = exact_sum(out, [np.array([3, 4], np.float32)], [0.5])
    >>> out.tolist(), norms.tolist(), fits([0.5], norms)
    ([1.5, 2.0], [25.0], True)
    """
    given: Any = (out, updates, weights, scales)  # not checked yet
    return select(backend).exact_sum(ExactArguments(*given).checked(), threads())


def fits(weights: Sequence[float], norms: Sequence[float] | Doubles) -> bool:
    """True if no element of Σ_k weights[k] · updates[k], nor of a part of it, is too large for `exact_sum`.

    ``norms`` are the squared ones, of all updates of the sum; NaN or inf do not fit. Every int8 number times
    its scale has to be finite in float32, too.

    >>> fits([1.0, 1.0], [1e6, 1e6]), fits([1.0, 2.0], [1e6, 1e6]), fits([1.0], [math.nan])
    (True, False, False)
    """
    most = sum(abs(weight) * math.sqrt(norm) for weight, norm in zip(weights, norms, strict=True))
    return most < LARGEST
