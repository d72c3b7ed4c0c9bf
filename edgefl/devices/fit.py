"""Fits a runtime's time model to steps measured on a device.

The fit minimises the errors log(predicted / measured time), so that a 10 ms step has the same weight as a
10 s step. A soft-L1 loss keeps the effect of outliers small. A prior determines the costs that the measured
steps (rows) do not determine: every cost is the prior's cost times three fitted factors, one for the whole
device, one for the cost's family (operations or bytes) and one for this cost alone. The last two factors are
regularised towards 1 by a normal prior on their logarithms.

The uncertainty of the costs is the covariance of their logarithms given the rows, in a linear approximation.
If many networks were measured, the variation of each cost between networks is estimated too, from the errors
of rows that are left out of a fit. A step's interval depends on the shares of uncertain and varying
costs in its time. Intervals are scaled so that they contain 90% of the rows that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgefl.devices.time_model import (
    COSTS,
    MAX_FACTOR,
    MAX_UNSURE,
    MAX_VARIATION,
    TERMS,
    TimeModel,
    joined,
    shares_of,
)
from edgefl.errors import ConfigError
from edgefl.learning.operations import StepWork

Array = NDArray[np.float64]

FAMILIES: Final = ("_flop", "_bytes")
"""Suffixes of the fields of `StepWork` whose costs vary together between devices."""

TYPICAL: Final = TimeModel(
    conv_gflops=25.0,
    thin_gflops=15.0,
    pointwise_gflops=15.0,
    depthwise_gflops=0.5,
    depthwise_backward_gflops=1.5,
    matmul_gflops=35.0,
    recurrent_gflops=15.0,
    conv_gbytes_per_s=0.3,
    matmul_gbytes_per_s=2.0,
    norm_gbytes_per_s=2.0,
    pool_gbytes_per_s=2.0,
    elementwise_gbytes_per_s=2.0,
    copy_gbytes_per_s=2.0,
    depthwise_plane_us=8.0,
    parameter_ns=5.0,
    call_us=50.0,
    fixed_ms=1.0,
    error_factor=1.12,
)
"""Prior for an unknown device: orders of magnitude for torch on a Raspberry Pi 4."""
SPREAD: Final = MAX_UNSURE
"""Factor by which a cost may plausibly differ from that of another device or runtime."""
FAMILY: Final = 0.5
"""Strength of the regularisation of a family's factor, relative to that of a single cost."""
ODD: Final = 0.1
"""Absolute error of a row's logarithm above which the loss grows linearly instead of quadratically."""
NOISE: Final = 0.03
"""Standard deviation of the logarithm of a step's time if its costs are known and do not vary between
networks: five phones of one model differed by 2.5%."""
VARIATION: Final = 0.2
"""Prior median of the standard deviation of a cost's logarithm between networks."""
VARIED: Final = 1.0
"""Prior standard deviation of the logarithm of each variance: of a step's noise, and of each cost between
networks."""
FOLDS: Final = 50
"""Maximum number of fits from which the error on held-out networks is estimated."""
FEW_NETWORKS: Final = 10
"""With fewer networks than this, the fitted ``error_factor`` is at least the prior's."""
MANY_NETWORKS: Final = 100
"""With fewer networks than this, the variation of each cost between networks is not estimated, because the
estimate is too uncertain. In fits to 60 simulated networks whose costs did not vary, intervals contained 87%
of the steps of other networks with estimated variations, and 89% without."""
COVERAGE: Final = 0.9
NORMAL: Final = 1.645
"""Half the width of a normal distribution's 90% interval, in standard deviations. Intervals are at least this
wide if only a few networks were measured."""
WHOLE: Final = 5.0
"""Prior standard deviation of the logarithm of the whole device's factor: so large that only the rows
determine this factor."""
NONE_FITS: Final = f"no time model fits these steps within a factor of {MAX_FACTOR:g}"


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured step."""

    network: str
    work: StepWork
    seconds: float


class HeldOutPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step (row) and its prediction by a fit without the rows of the same network."""

    row: Row
    predicted_s: float
    error_factor: float = math.inf
    """The interval is from ``predicted_s`` / ``error_factor`` to ``predicted_s`` · ``error_factor``."""

    @property
    def factor(self) -> float:
        """Ratio of the predicted to the measured time."""
        return self.predicted_s / self.row.seconds

    @property
    def off(self) -> float:
        """Ratio of the predicted to the measured time, or its inverse if that is larger."""
        return max(self.factor, 1 / self.factor)

    @property
    def held(self) -> bool:
        """True if the measured time is within the interval."""
        return self.off <= self.error_factor


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted time model, its rows and its errors on held-out networks."""

    model: TimeModel
    rows: tuple[Row, ...]
    unseen: tuple[HeldOutPrediction, ...]
    """Prediction of each row by a fit without the row's network; empty if there is only one network."""


class ErrorSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of prediction errors. ``median`` and ``p90`` are quantiles of |predicted / measured − 1|.

    ``worst_factor`` is the largest ratio between predicted and measured times, in either direction.
    """

    rows: int
    median: float
    p90: float
    worst_factor: float
    held: float
    """Share of the rows whose measured time is within the interval."""


def fit(
    rows: Sequence[Row],
    prior: TimeModel = TYPICAL,
    *,
    spread: float = SPREAD,
    hold_out: bool = True,
    apart: float = 1.0,
) -> Fit:
    """Fit the time model of the device on which the rows were measured, and estimate its errors.

    ``prior`` should be the model of a similar device in the same runtime. The costs of the two devices may
    differ by a common factor, and each cost by another factor of about ``spread``. Intervals contain 90% of
    the rows of networks that are left out of a fit. Without ``hold_out``, or with fewer than `FEW_NETWORKS`
    networks, ``error_factor`` is at least that of the prior. With fewer than `MANY_NETWORKS`,
    ``cost_variations`` are those of the prior. ``apart`` is the factor by which the modelled device may
    differ from the measured one. Raises `ConfigError` if there are no rows, if a row's time is not positive
    and finite, or if no time model fits the rows within a factor of 100.

    >>> rows = [Row(network=str(n), work=StepWork(conv_flop=n * 1e9), seconds=n / 10) for n in range(1, 30)]
    >>> round(fit(rows).model.seconds(StepWork(conv_flop=7e9)), 2)
    0.7
    """
    for row in rows:
        if not (math.isfinite(row.seconds) and row.seconds > 0):
            raise ConfigError(f"{row.network}: seconds must be above 0, got {row.seconds}")
    if not rows:
        raise ConfigError("no rows to fit; at least one measured step is needed")
    problem = _Problem(prior, spread)
    amounts, seconds = _amounts(rows), np.array([row.seconds for row in rows])
    folds = list(_folds(problem, amounts, seconds, _groups(rows))) if hold_out else []
    left = _Errors.of(folds, amounts, seconds) if folds else None
    networks = len({row.network for row in rows})
    few = left is None or networks < FEW_NETWORKS
    known = np.array(prior.cost_variations or [0.0] * (len(TERMS) + 1)) / NORMAL
    variances = np.array([NOISE, *known]) ** 2
    if left and networks >= MANY_NETWORKS:
        variances = left.variances()
    times = max(_holding(left.scores(variances), COVERAGE) if left else 0.0, NORMAL if few else 0.0)
    unknown = max(times, NORMAL)  # a cost without rows keeps its full interval, however well the rows fit
    usual, *varied = times * np.sqrt(variances)
    usual = max(math.exp(usual), prior.error_factor if few else 1.0)
    if (whole := joined(usual, apart)) > MAX_FACTOR or max(varied) > MAX_VARIATION:
        raise ConfigError(f"{NONE_FITS}; check their measured_s")
    costs = problem.solve(amounts, seconds)
    model = _model(costs, whole, varied, unknown * problem.errors(costs, amounts, seconds))
    unseen: dict[int, HeldOutPrediction] = {}
    for fold in folds:
        without = _model(fold.costs, usual, varied, unknown * fold.errors)
        unseen |= {at: predicted(without, rows[at]) for at in fold.out}
    return Fit(model=model, rows=tuple(rows), unseen=tuple(unseen[at] for at in sorted(unseen)))


def predicted(model: TimeModel, row: Row) -> HeldOutPrediction:
    """Predict the time of a row."""
    return HeldOutPrediction(
        row=row, predicted_s=model.seconds(row.work), error_factor=model.error_factor_of(row.work)
    )


def widened(model: TimeModel, rows: Sequence[Row]) -> TimeModel:
    """Return the model with larger ``cost_variations``, so that its intervals contain 90% of these rows.

    The variations are estimated from the errors of these rows, to which the model was fitted, and are then
    scaled. If the intervals contain 90% of the rows already, the model is unchanged. Raises `ConfigError` if
    the variation of a cost would be too large for a profile.
    """
    found = [predicted(model, row) for row in rows]
    errors = np.log([one.factor for one in found])
    known = np.log([one.error_factor for one in found])
    squares = np.array([shares_of(model.parts(row.work)) for row in rows]) ** 2
    weights = np.column_stack([np.ones(len(rows)), squares])
    variances = _Errors(errors, (known / NORMAL) ** 2, weights).variances()[1:]
    beyond = np.sqrt(np.maximum(errors**2 - known**2, 0.0) / (squares @ variances))
    more = _holding(beyond, COVERAGE) * np.sqrt(variances)
    varied = np.hypot(model.cost_variations or 0.0, more)
    if varied.max() > MAX_VARIATION:
        raise ConfigError(f"{NONE_FITS}; check their times")
    return msgspec.structs.replace(model, cost_variations=_rounded(varied))


def summary(unseen: Iterable[HeldOutPrediction]) -> ErrorSummary:
    """Summarise prediction errors in five numbers."""
    unseen = list(unseen)
    errors = np.abs(np.array([found.factor for found in unseen]) - 1)
    return ErrorSummary(
        rows=len(errors),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        worst_factor=max(found.off for found in unseen),
        held=sum(found.held for found in unseen) / len(unseen),
    )


def holding(unseen: Sequence[HeldOutPrediction], share: float = COVERAGE) -> float:
    """Return the conformal error factor, within which a fraction ``share`` of new predictions is expected.

    With few predictions, it is the largest error.
    """
    return _holding([found.off for found in unseen], share)


def _holding(errors: Iterable[float], share: float) -> float:
    return float(np.quantile(list(errors), share, method="weibull"))


# ---- the least-squares problem -------------------------------------------------------------------


class _Problem:
    """The fit as a least-squares problem that is regularised by a prior."""

    def __init__(self, prior: TimeModel, spread: float) -> None:
        known, typical = prior.costs(), TYPICAL.costs()
        costs = [known[term[0]] or typical[term[0]] for term in TERMS]
        self._prior = np.array([*costs, (prior.fixed_ms or TYPICAL.fixed_ms) / 1e3])
        self._families = np.array(
            [[term[0].endswith(end) for end in FAMILIES] for term in TERMS] + [[False] * len(FAMILIES)], float
        )
        self._firmness = ODD / math.log(spread)
        unsure = np.zeros((len(TERMS) + 1, len(TERMS) + 1))
        for row, errors in zip(unsure, prior.cost_errors, strict=False):
            row[: len(errors)] = np.array(errors) / NORMAL
        apart = np.eye(len(unsure)) + self._families @ self._families.T / FAMILY**2
        self._unsure = WHOLE**2 + unsure @ unsure.T + math.log(spread) ** 2 * apart
        """Covariance of the costs' logarithms before any row is used."""

    def solve(self, amounts: Array, seconds: Array) -> Array:
        """Return the fitted cost of each of `TERMS` and of the fixed part, in seconds per unit of work."""
        from scipy.optimize import least_squares

        start = np.zeros(1 + len(FAMILIES) + len(self._prior))
        start[0] = np.median(np.log(seconds / (amounts @ self._prior)))
        found = least_squares(self._errors, start, args=(amounts, seconds), max_nfev=300)
        return self._costs(found.x)

    def errors(self, costs: Array, amounts: Array, seconds: Array) -> Array:
        """Return a lower triangular matrix L such that L·Lᵀ is the covariance of the logarithms of ``costs``.

        Each row is regarded as an observation, with the standard deviation ``ODD``, of a weighted sum of
        these logarithms. The weights are the costs' shares of the row's time. Outliers have less influence.
        """
        parts = amounts * costs
        shares = parts / parts.sum(1, keepdims=True)
        error = np.log(parts.sum(1) / seconds) / ODD
        seen = shares @ self._unsure
        of_rows = seen @ shares.T + np.diag(ODD**2 * np.sqrt(1 + error**2))
        left = self._unsure - seen.T @ np.linalg.solve(of_rows, seen)
        triangle: Array = np.linalg.cholesky((left + left.T) / 2 + 1e-9 * np.eye(len(left)))
        return triangle

    def _costs(self, x: Array) -> Array:
        whole, families, own = np.split(x, [1, 1 + len(FAMILIES)])
        costs: Array = self._prior * np.exp(whole + self._families @ families + own)
        return costs

    def _errors(self, x: Array, amounts: Array, seconds: Array) -> Array:
        error = np.log(amounts @ self._costs(x) / seconds) / ODD
        soft = ODD * np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        families, own = np.split(x[1:], [len(FAMILIES)])
        return np.concatenate([soft, self._firmness * FAMILY * families, self._firmness * own])


def _amounts(rows: Sequence[Row]) -> Array:
    """Return, for each row, the amount of work in each of `TERMS`, and 1 for the fixed part."""
    terms = [[sum(getattr(row.work, name) for name in term) for term in TERMS] + [1.0] for row in rows]
    return np.array(terms, float)


def _groups(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Return the index of each row's fold; rows with the same index are held out together."""
    place = {network: at % FOLDS for at, network in enumerate(sorted({row.network for row in rows}))}
    return np.array([place[row.network] for row in rows])


class _Fold(NamedTuple):
    """A fit without some of the rows."""

    out: list[int]
    """Indices of the rows that were left out."""
    costs: Array
    errors: Array


class _Errors(NamedTuple):
    """The prediction errors of rows, for a fit to these rows or for fits that leave them out.

    A row's variance is w · v + the variance due to uncertain costs. Here v are the variances of a row's noise
    and of each cost between networks, and w are 1 and the squares of the costs' shares of the row's time.
    """

    errors: Array
    """Natural logarithms of predicted / measured time, shape (rows,)."""
    unsure: Array
    """Variances of the predictions' logarithms due to uncertain costs, shape (rows,)."""
    weights: Array
    """The weights w, shape (rows, terms + 2)."""

    @classmethod
    def of(cls, folds: Sequence[_Fold], amounts: Array, seconds: Array) -> _Errors:
        """Return the errors of all rows in the fits that leave them out."""
        found = []
        for fold in folds:
            parts = amounts[fold.out] * fold.costs
            took = parts.sum(1)
            shares = parts / took[:, None]
            unsure = np.sum((shares @ fold.errors) ** 2, axis=1)
            weights = np.column_stack([np.ones(len(took)), shares**2])
            found.append(cls(np.log(took / seconds[fold.out]), unsure, weights))
        return cls(*map(np.concatenate, zip(*found, strict=True)))

    def scores(self, variances: Array) -> Array:
        """Return the absolute error of each row, divided by its expected standard deviation."""
        scores: Array = np.abs(self.errors) / np.sqrt(self.weights @ variances + self.unsure)
        return scores

    def variances(self) -> Array:
        """Return the maximum a posteriori estimate of the variances v.

        Errors are regarded as independent and normal, and the logarithms of the variances as normal around
        those of `NOISE` and `VARIATION`.
        """
        from scipy.optimize import minimize

        middle = np.array([NOISE, *[VARIATION] * (len(TERMS) + 1)]) ** 2

        def loss(x: Array) -> tuple[float, Array]:
            variances = middle * np.exp(x)
            row = self.weights @ variances + self.unsure
            slope = (1 / row - self.errors**2 / row**2) @ self.weights * variances + 2 * x / VARIED**2
            return float(np.sum(np.log(row) + self.errors**2 / row) + np.sum(x**2) / VARIED**2), slope

        found: Array = middle * np.exp(minimize(loss, np.zeros(len(middle)), jac=True, method="L-BFGS-B").x)
        return found


def _folds(problem: _Problem, amounts: Array, seconds: Array, groups: NDArray[np.int64]) -> Iterator[_Fold]:
    for group in np.unique(groups):
        out = groups == group
        if not out.all():
            costs = problem.solve(amounts[~out], seconds[~out])
            errors = problem.errors(costs, amounts[~out], seconds[~out])
            yield _Fold(np.flatnonzero(out).tolist(), costs, errors)


def _model(
    costs: Array, error_factor: float, cost_variations: Sequence[float], cost_errors: Array
) -> TimeModel:
    values = {"fixed_ms": costs[-1] * 1e3, "error_factor": error_factor}
    for term, cost in zip(TERMS, costs, strict=False):
        for name in term:
            own, unit = COSTS[name]
            values[own] = cost / unit if name in ("depthwise_planes", "calls", "parameters") else unit / cost
    rows = (tuple(round(float(v), 3) for v in row[: at + 1]) for at, row in enumerate(cost_errors))
    return TimeModel(
        **{name: float(f"{value:.4g}") for name, value in values.items()},
        cost_variations=_rounded(cost_variations),
        cost_errors=tuple(rows),
    )


def _rounded(cost_variations: Iterable[float]) -> tuple[float, ...]:
    """Return the variations rounded as in a profile; () if all are 0."""
    rounded = tuple(round(float(v), 3) for v in cost_variations)
    return rounded if any(rounded) else ()
