"""The duration of a step on a device as a function of the step's work.

    seconds = Σ operations of a class / its rate + Σ bytes of a kind / their bandwidth
            + planes, calls and parameters · unit cost + a fixed part

All costs apply to one *runtime*: the same step takes a different time with another library. Rates are
effective rates, fitted to measured steps (`edgefl.devices.fit`), not hardware peaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from edgefl.learning.operations import BatchWork, StepWork

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
MAX_FACTOR: Final = 100.0
MAX_VARIATION: Final = 5.0
Factor = Annotated[float, msgspec.Meta(ge=1, le=MAX_FACTOR)]
Variation = Annotated[float, msgspec.Meta(ge=0, le=MAX_VARIATION)]

ONE_RATE_FACTOR = 6.0
"""Typical error factor of predictions from a single rate, for networks unlike the network with which the rate
was measured (docs/profiles.md)."""

FEMNIST_STEP: Final = StepWork(
    conv_flop=602_112_000.0, thin_flop=25_088_000.0, matmul_flop=392_970_240.0, conv_bytes=4_450_688.0,
    matmul_bytes=79_477_768.0, pool_bytes=5_268_480.0, elementwise_bytes=8_048_704.0, calls=28.0,
    parameters=6_603_710.0,
)  # fmt: skip
"""A training step of LEAF's FEMNIST CNN on 10 images, as measured by FLASH. It is used to compare devices."""


class Prediction(NamedTuple):
    """The predicted time of a step; the 90% interval is ``low_s`` to ``high_s``."""

    seconds: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    """Time of each part of the step in seconds, the largest first; the times sum to ``seconds``."""
    unsure: tuple[str, ...] = ()
    """Parts whose uncertain costs widen the interval most, the worst first; () if all uncertain costs
    together widen it by a factor of at most `WIDER`."""


class TimeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of each class of operation in one runtime of a device.

    The classes are those of `edgefl.learning.operations.StepWork`. Kinds of bytes without a bandwidth have no
    cost of their own: their time is part of the operations' rates.
    """

    conv_gflops: Positive
    """Rate in 10⁹ floating-point operations per second, like all fields whose names end with ``_gflops``."""
    thin_gflops: Positive
    pointwise_gflops: Positive
    depthwise_gflops: Positive
    depthwise_backward_gflops: Positive
    matmul_gflops: Positive
    recurrent_gflops: Positive
    conv_gbytes_per_s: Positive | None = None
    """Bandwidth in 10⁹ bytes per second, like all fields whose names end with ``_gbytes_per_s``."""
    matmul_gbytes_per_s: Positive | None = None
    norm_gbytes_per_s: Positive | None = None
    pool_gbytes_per_s: Positive | None = None
    elementwise_gbytes_per_s: Positive | None = None
    copy_gbytes_per_s: Positive | None = None
    depthwise_plane_us: NotNegative = 0.0
    """Time of a depthwise convolution per group and image."""
    call_us: NotNegative = 0.0
    """Time per call of an operation such as a convolution; it is the same for all classes of operations."""
    parameter_ns: NotNegative = 0.0
    """Time of the optimizer per parameter."""
    fixed_ms: NotNegative = 0.0
    """The part of each step's time that does not depend on the step's work."""
    error_factor: Factor
    """Factor f of a step's 90% interval, time/f to time·f, if the step's costs are known and do not vary.

    In general the factor is exp √(ln² ``error_factor`` + Σ (vₖsₖ)² + ‖Lᵀs‖²), where s are the costs' shares
    of the step's time, v are ``cost_variations`` and L is ``cost_errors``; `error_factor_of` limits ‖Lᵀs‖.
    """
    cost_variations: tuple[Variation, ...] = ()
    """Variation v of each cost between networks: half the width of the 90% interval of ln(cost).

    There is a number for each of `TERMS` and one for the fixed part. Costs vary because the efficiency of a
    library's kernels depends on the shapes of its operands. If the tuple is empty, no cost varies.
    """
    cost_errors: tuple[tuple[float, ...], ...] = ()
    """Uncertainty of the costs: a lower triangle L with a row for each of `TERMS` and one for the fixed part.

    L·Lᵀ is the covariance of the costs' natural logarithms, scaled to 90% intervals. Costs that were only
    measured together are uncertain individually but certain in sum. If the triangle is empty, the costs are
    known.
    """

    @classmethod
    def of_rate(cls, gflops: float, error_factor: float = ONE_RATE_FACTOR) -> TimeModel:
        """Return the model of a device with only one known rate; moving bytes takes no time.

        >>> TimeModel.of_rate(2.0).conv_gflops
        2.0
        """
        rates = {name: gflops for name in cls.__struct_fields__ if name.endswith("_gflops")}
        return cls(**rates, error_factor=error_factor)  # type: ignore[arg-type]

    def costs(self) -> dict[str, float]:
        """Return the time in seconds that one unit of each field of `StepWork` takes."""
        costs = {}
        for work, (own, unit) in COSTS.items():
            value = getattr(self, own)
            costs[work] = 0.0 if value is None else value * unit if own[-2:] in _EACH else unit / value
        return costs

    def parts(self, work: StepWork) -> dict[str, float]:
        """Return the time in seconds of each part of a step, the largest first, without zeros.

        The parts are the fields of the step's work, and ``fixed``.
        """
        parts = {name: cost * getattr(work, name) for name, cost in self.costs().items()}
        parts["fixed"] = self.fixed_ms / 1e3
        return {
            name: parts[name] for name in sorted(parts, key=parts.__getitem__, reverse=True) if parts[name]
        }

    def seconds(self, work: StepWork) -> float:
        """Return the time in seconds that a step takes.

        >>> TimeModel.of_rate(2.0).seconds(StepWork(conv_flop=3e9, matmul_flop=1e9, copy_bytes=1e9))
        2.0
        """
        return sum(self.parts(work).values())

    def line(self, work: BatchWork) -> tuple[float, float]:
        """Return a step's fixed time and its time per example of the batch, in seconds."""
        fixed_s = self.fixed_ms / 1e3
        return self.seconds(work.fixed), self.seconds(work.per_example) - fixed_s

    def predict(self, work: StepWork) -> Prediction:
        """Predict the time of a step in seconds, with a 90% interval and the time of each part."""
        parts = self.parts(work)
        seconds = sum(parts.values())
        factor = self.error_factor_of(work)
        unsure = self._unsure(parts) if factor > WIDER * self._of_known_costs(shares_of(parts)) else ()
        return Prediction(seconds, seconds / factor, seconds * factor, parts, unsure)

    def error_factor_of(self, work: StepWork) -> float:
        """Return the factor of a step's 90% interval, which is larger if the step's costs were not measured.

        The contribution of ``cost_errors`` to this factor is at most a weighted mean of the factors of the
        individual costs, each of which is at most 7. The weights are the costs' shares of the step's time.
        """
        shares = shares_of(self.parts(work))
        known = self._of_known_costs(shares)
        if not self.cost_errors:
            return known
        columns = range(len(shares))
        off = (sum(self.cost_errors[at][to] * shares[at] for at in columns[to:]) for to in columns)
        alone = (min(_factor(row), MAX_UNSURE) for row in self.cost_errors)
        most = sum(factor * share for factor, share in zip(alone, shares, strict=True))
        return joined(known, max(min(_factor(off), most), 1.0))

    def _of_known_costs(self, shares: Sequence[float]) -> float:
        """Return the factor of the 90% interval of a step if its costs are known."""
        if not self.cost_variations:
            return self.error_factor
        varied = (v * share for v, share in zip(self.cost_variations, shares, strict=True))
        return joined(self.error_factor, _factor(varied))

    def _unsure(self, parts: Mapping[str, float]) -> tuple[str, ...]:
        """Return the terms that widen the interval more than half as much as the worst term does.

        The name of a term's largest part is used as the term's name.
        """
        off = [math.hypot(*row) * s for row, s in zip(self.cost_errors, _by_term(parts), strict=True)]
        worst = sorted((at for at in range(len(off)) if off[at] > max(off) / 2), key=lambda at: -off[at])
        return tuple(next(name for name in parts if name in (*TERMS, ("fixed",))[at]) for at in worst)

    def slowed(self, factor: float) -> TimeModel:
        """Return the model of a device on which everything takes ``factor`` times as long.

        >>> TimeModel.of_rate(2.0).slowed(4.0).conv_gflops
        0.5
        """
        changed = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in ERRORS and value is not None:
                changed[name] = value * factor if name[-2:] in _EACH else value / factor
        return msgspec.structs.replace(self, **changed)


COSTS: Final[Mapping[str, tuple[str, float]]] = {
    **{
        f"{kind}_flop": (f"{kind}_gflops", 1e-9)
        for kind in ("conv", "thin", "pointwise", "depthwise", "depthwise_backward", "matmul", "recurrent")
    },
    **{
        f"{kind}_bytes": (f"{kind}_gbytes_per_s", 1e-9)
        for kind in ("conv", "matmul", "norm", "pool", "elementwise", "copy")
    },
    "depthwise_planes": ("depthwise_plane_us", 1e-6),
    "calls": ("call_us", 1e-6),
    "parameters": ("parameter_ns", 1e-9),
}
"""Maps each field of `StepWork` to the field of `TimeModel` that states its cost, and to the cost in seconds
that a value of 1 in this field means."""
TERMS: Final[tuple[tuple[str, ...], ...]] = (
    *((name,) for name in COSTS if name.endswith("_flop")),
    ("conv_bytes",),
    ("matmul_bytes",),
    ("norm_bytes", "pool_bytes", "elementwise_bytes", "copy_bytes"),
    ("depthwise_planes",),
    ("parameters",),
    ("calls",),
)
"""Groups of `StepWork` fields that share one fitted cost. In arrays of costs, the fixed part follows."""
ERRORS: Final = ("error_factor", "cost_variations", "cost_errors")
"""Fields of `TimeModel` that state uncertainty, not costs."""
MAX_UNSURE: Final = 7.0
"""Maximum error factor of a cost without measurements, and of its effect on a step."""
WIDER: Final = 1.5
"""`Prediction.unsure` is empty unless uncertain costs widen a step's interval by more than this factor."""
_EACH = ("us", "ns", "ms")
"""Suffixes of fields that hold a time per unit; all other fields are rates."""


def joined(*factors: float) -> float:
    """Combine the error factors of independent errors into one factor.

    >>> round(joined(1.5, 1.0), 9), round(joined(1.2, 1.3), 3)
    (1.5, 1.376)
    """
    return math.exp(math.hypot(*map(math.log, factors)))


def _factor(logs: Iterable[float]) -> float:
    """Return the factor whose logarithm is the root of the sum of squares of ``logs``; at most e^700."""
    return math.exp(min(math.hypot(*logs), 700.0))


def _by_term(parts: Mapping[str, float]) -> list[float]:
    """Return the time in seconds that each of `TERMS` contributes, and that of the fixed part."""
    return [sum(parts.get(name, 0.0) for name in term) for term in (*TERMS, ("fixed",))]


def shares_of(parts: Mapping[str, float]) -> list[float]:
    """Return the fraction of a step's time that is due to each of `TERMS` and to the fixed part.

    All are 0 if the step takes no time.
    """
    seconds = sum(parts.values())
    return [part / seconds if seconds else 0.0 for part in _by_term(parts)]
