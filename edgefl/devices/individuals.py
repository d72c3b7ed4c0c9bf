"""Individual phones (units of a model): their speed, the scatter of their trip times and their phase.

The phase is the fraction of a trip's time that a phone waits at the start of a run. All three are drawn from
the client's seeded random streams. The distributions are based on inference of 118 networks on 105 phones of
76 models, with 30 runs each (iitm-sysdl/Generalizable-DNN-cost-models at 0ee1170, Apache-2.0):

- Two units of one model differ by a factor of 1.05 (median), 1.28 (90th percentile) and 1.98 (maximum). A
  mixture of log-normal speeds (75% of the units with σ = 3%, 25% with σ = 20%) gives 1.05, 1.29 and, at the
  99th percentile, 1.65.
- The runs of one phone scatter by 0.9% on the median phone and 3% at the 90th percentile of the phones
  (standard deviation of the logarithm); the correlation of consecutive runs is 0.37.
- The first run of a series takes 1.10 times as long as the median run (this is the median over the series),
  and 1.39 times as long at the 90th percentile.
"""

from __future__ import annotations

import math
from array import array
from typing import Final

import numpy as np

from edgefl.seeds import stream

TYPICAL, UNUSUAL = 0.03, 0.20
"""Standard deviation of the logarithm of a unit's speed, for most units and for unusual units."""
UNUSUAL_SHARE: Final = 0.25
MAX_APART: Final = math.log(1.98)
QUIET: Final = 0.009
"""Standard deviation of the logarithm of a trip's compute time, on the median phone."""
NOISE_SPREAD: Final = math.log(0.03 / 0.009) / 1.2816
"""Standard deviation, over all phones, of the logarithm of a phone's scatter, whose median is `QUIET`."""
CORRELATION: Final = 0.37
FIRST: Final = 0.10
"""Median of the extra time of a trip's first step, relative to the usual time of a step."""
FIRST_SPREAD: Final = math.log(0.39 / 0.10) / 1.2816
NINETY: Final = 1.6449
"""A standard normal variable is between plus and minus this value with probability 90%."""
MAX_DEVIATIONS: Final = 3.0
"""Standard normal draws are clipped at ± this value, so that no trip takes a hundred times its usual time."""
BLOCK: Final = 64
"""Number of trips whose variation is drawn in one call; variations of different blocks are uncorrelated."""


def unit_factor(seed: int, client: int) -> float:
    """Return the ratio of the compute time on this client's phone to that on the median phone of its model.

    >>> apart = np.abs([np.log(unit_factor(1, c) / unit_factor(2, c)) for c in range(4000)])
    >>> np.exp(np.quantile(apart, (0.5, 0.9))).round(2).tolist()
    [1.05, 1.28]
    """
    rng = stream(seed, "unit", client)
    deviation = UNUSUAL if rng.random() < UNUSUAL_SHARE else TYPICAL
    return math.exp(min(max(-MAX_APART, deviation * rng.standard_normal()), MAX_APART))


def model_error(seed: int, profile: str, error_factor: float) -> float:
    """Draw a plausible ratio of the real device's compute time to the time predicted from the profile.

    The ratio is drawn with ``seed``. Its logarithm is normally distributed such that 90% of the draws are
    within ``error_factor``. All phones of a profile share the same ratio.

    >>> drawn = np.array([model_error(seed, "pi-4", 1.3) for seed in range(2000)])
    >>> round(float(np.mean((drawn < 1.3) & (drawn > 1 / 1.3))), 2)
    0.9
    """
    deviations = float(stream(seed, f"model error {profile}").standard_normal())
    deviations = min(max(deviations, -MAX_DEVIATIONS), MAX_DEVIATIONS)
    return math.exp(deviations / NINETY * math.log(error_factor))


class TripScatter:
    """Random variation of one client's compute times around the usual time of its phone.

    Trip t takes exp(σ z_t) + f_t / steps times the usual time. σ is drawn once per client. z is a
    first-order autoregressive process of unit variance. f_t is the extra time of the trip's first step, which
    follows a pause, as a fraction of a step's time. ``amount`` scales σ and f.
    """

    __slots__ = ("_amount", "_block", "_client", "_first", "_noise", "_seed", "_sigma")

    def __init__(self, seed: int, client: int, amount: float = 1.0) -> None:
        self._seed, self._client, self._amount = seed, client, amount
        normal = float(stream(seed, "noise", client).standard_normal())
        log = NOISE_SPREAD * min(max(-MAX_DEVIATIONS, normal), MAX_DEVIATIONS)
        self._sigma = amount * (QUIET * math.exp(log))
        self._block, self._noise, self._first = -1, array("d"), array("d")

    def factor(self, trip: int, steps: int) -> float:
        """Return the ratio of the compute time of a trip with ``steps`` steps to its usual time."""
        block, at = divmod(trip, BLOCK)
        if block != self._block:
            self._draw(block)
        return self._noise[at] + self._first[at] / max(1, steps)

    def _draw(self, block: int) -> None:
        rng = stream(self._seed, "scatter", self._client, block)
        normal = np.clip(rng.standard_normal((2, BLOCK)), -MAX_DEVIATIONS, MAX_DEVIATIONS)
        chain, fresh = normal[0].tolist(), math.sqrt(1.0 - CORRELATION**2)
        for at in range(1, BLOCK):
            chain[at] = CORRELATION * chain[at - 1] + fresh * chain[at]
        self._block = block
        # numpy's exp gives different last bits on processors with AVX-512; math.exp does not.
        first = self._amount * FIRST
        self._noise = array("d", [math.exp(self._sigma * z) for z in chain])
        self._first = array("d", [first * math.exp(FIRST_SPREAD * z) for z in normal[1].tolist()])


def phase(seed: int, client: int, *resumption: int) -> float:
    """Return a client's wait at the start of a run, as a fraction (0 to 1) of its first trip's time."""
    return float(stream(seed, "phase", client, *resumption).random())
