"""Fits `PhoneTable`, mainly each phone's cost for each class of work, to measured inference times.

All phones are fitted together: each phone's costs are the most probable ones given its measured times, under
a normal prior whose mean and covariance are those of all phones (expectation-maximisation without the
posterior covariances; Dempster, Laird and Rubin 1977). Errors are logarithms of the ratio of predicted to
measured time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgefl.devices.fit import COVERAGE
from edgefl.devices.phone_networks import INTO, Layer, Weights, counts, networks_named, weighted
from edgefl.devices.phone_rows import PhoneRow
from edgefl.devices.phones import (
    CLASSES,
    About,
    Costs,
    Neighbours,
    Phone,
    PhoneTable,
    Similarity,
    Unit,
    Widths,
    amounts,
    covariance,
    observed,
    prior,
    shares,
    speeds,
)
from edgefl.errors import ConfigError

Array = NDArray[np.float64]
Networks = dict[str, tuple[Layer, ...]]

REFERENCE: Final = "110"
"""Name of the network whose measured times are used to estimate the intervals of `of_one_network`."""
ROUNDS: Final = 8
"""Number of rounds of expectation-maximisation."""
OWN: Final = 0.3
"""Prior standard deviation of the logarithm of a phone's cost, relative to the cost on the mean phone."""
PHONES_OF_PRIOR: Final = 8
"""Weight of the prior `OWN`, expressed as a number of phones."""
RIDGE: Final = 0.03
LENGTH: Final = 0.1
"""Length scale of the Gaussian process of the common errors, stored as `Neighbours.length`."""
COMMON: Final = 0.05
"""Standard deviation of the error that all phones have in common on one network."""
REST: Final = 0.02
"""Standard deviation of the remaining errors, which are treated as noise."""
HELD: Final = 0.92
"""Share of the measurements left out of a fit that the intervals must contain. The share is above 90%,
because the errors are larger on phones that were not measured."""
NETWORK_FOLDS: Final = 6
PHONE_FOLDS: Final = 8
LIKELY: Final = (0.02, 0.7, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Prior medians of the variances in `Similarity`."""
FEWEST: Final = 5
"""Minimum number of networks, and of phone models, for a fit."""


class Matrix(NamedTuple):
    """The measured times as a matrix; every network must have been measured on every unit."""

    units: list[About]
    networks: list[str]
    log_s: Array
    """Logarithms of the times in seconds; shape (units, networks)."""
    found: list[Counter[str]]
    """Work of each network, as counted by `counts`."""


class Fitted(NamedTuple):
    """Costs of all phones, and their common prior, as fitted by `_together`."""

    typical: Array
    costs: Array
    """Logarithm of the time in seconds that each class of work takes in the typical network on each unit;
    shape (units, classes)."""
    spread: Array
    noise: float
    errors: Array
    """Logarithms of the ratio of predicted to measured time; shape (units, networks)."""


def matrix(rows: Sequence[PhoneRow], networks: Networks) -> Matrix:
    """Arrange rows by unit and network; networks that were not measured on all units are left out."""
    times: dict[About, dict[str, float]] = {}
    for row in rows:
        times.setdefault(row.about, {})[row.network] = math.log(row.seconds)
    names = [name for name in networks if all(name in own for own in times.values())]
    networks_named(networks, [row.network for row in rows], "the networks' file")
    if len(names) < FEWEST or len({unit.model for unit in times}) < FEWEST:
        raise ConfigError(
            f"the fit needs at least {FEWEST} phone models, and {FEWEST} networks measured on all of them"
        )
    log_s = np.array([[own[name] for name in names] for own in times.values()])
    return Matrix(list(times), names, log_s, [counts(networks[name]) for name in names])


def fit(
    rows: Sequence[PhoneRow],
    networks: Networks,
    source: str,
    known: Sequence[Phone] = (),
    say: Callable[[str], None] = lambda _: None,
) -> PhoneTable:
    """Fit the table of all phones; ``source`` describes where the rows come from.

    For phones in ``known``, the fields that are written by hand (such as name, year and chip) are kept.
    """
    data = matrix(rows, networks)
    say("fitting all phones")
    table = _table(data, known, source)
    say("fitting without some of the networks to estimate the error factors of the phones")
    factors = _error_factors(data)
    phones = tuple(_with_factors(phone, factors) for phone in table.phones)
    say("fitting without some of the phones to estimate the widths of the intervals")
    return msgspec.structs.replace(table, phones=phones, widths=_widths(data))


def _table(data: Matrix, known: Sequence[Phone] = (), source: str = "") -> PhoneTable:
    """Fit the table, except for the error factors and the widths of the intervals."""
    weights, mean = _weights(data)
    plain = _work_matrix(data, weights)
    first = _together(plain, data.log_s)
    points = np.array([shares(found, weights, mean) for found in data.found])
    neighbours = _neighbours(points, np.median(first.errors, axis=0))
    common = _alike(points, np.array(neighbours.points)) @ np.array(neighbours.errors)
    found = _together(plain, data.log_s + common)
    units = {
        about: Unit(ms=_rounded(np.exp(costs) * 1e3), error_factor=1.0)
        for about, costs in zip(data.units, found.costs, strict=True)
    }
    return PhoneTable(
        source=source,
        amounts=_rounded(found.typical),
        weights=weights,
        spread=tuple(tuple(round(float(v), 5) for v in row) for row in found.spread),
        noise=round(found.noise, 4),
        similarity=_similarity(data.units, speeds(found.costs)),
        widths=Widths(core=1.0, one_network=1.0),
        neighbours=neighbours,
        phones=_phones(units, known),
    )


def _rounded(values: Array) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in values)


def _phones(units: dict[About, Unit], known: Sequence[Phone]) -> tuple[Phone, ...]:
    """Group units by model."""
    described = {phone.model: phone for phone in known}
    found: dict[str, Phone] = {}
    for about, unit in units.items():
        name = about.model.lower().replace("_", "-")
        new = Phone(id=name, model=about.model, name=about.model, units={})
        phone = found.get(about.model) or described.get(about.model, new)
        before = phone.units if about.model in found else {}
        found[about.model] = msgspec.structs.replace(
            phone,
            core=about.core,
            mhz=about.ghz and round(about.ghz * 1e3, 1),
            ram_gib=about.ram_gib,
            units={**before, about.unit: unit},
        )
    return tuple(sorted(found.values(), key=lambda phone: phone.id))


def _with_factors(phone: Phone, factors: dict[str, float]) -> Phone:
    units = {
        name: msgspec.structs.replace(unit, error_factor=factors[name]) for name, unit in phone.units.items()
    }
    return msgspec.structs.replace(phone, units=units)


# ---- the fit of all phones -----------------------------------------------------------------------


def _work_matrix(data: Matrix, weights: Weights) -> Array:
    """Return the work of each network in each of `CLASSES`; shape (networks, classes)."""
    return np.array([amounts(weighted(found, weights)) for found in data.found])


def _mean_phone(log_s: Array) -> Array:
    """Return the logarithm of the time in seconds that each network takes on the typical phone."""
    own = log_s.mean(1, keepdims=True)
    middle: Array = np.median(log_s - own, axis=0) + own.mean()
    return middle


def _weights(data: Matrix) -> tuple[Weights, Array]:
    """Fit the weights and the costs of `CLASSES` to the typical phone's times; return both."""
    plain = _work_matrix(data, Weights())
    extra = np.array([[found.get(name, 0.0) for name in INTO] for found in data.found])
    costs = _positive_costs(np.hstack([plain, extra]), _mean_phone(data.log_s))
    by_field = {fields[0]: cost for fields, cost in zip(CLASSES, costs, strict=False)}
    more = costs[len(CLASSES) :]
    values = {
        name: float(f"{cost / by_field[into]:.4g}")
        for (name, into), cost in zip(INTO.items(), more, strict=True)
    }
    return Weights(**values), costs[: len(CLASSES)]


def _typical(work: Array) -> Array:
    """Return the amount of work in each class, averaged over all networks; 1 for a class without any work."""
    mean: Array = work.mean(0)
    return np.where(mean > 0, mean, 1.0)


def _positive_costs(work: Array, log_s: Array) -> Array:
    """Fit the cost per unit of work for each column of ``work``, with a soft-L1 loss.

    A weak prior assumes that all columns take equal shares of the time.
    """
    from scipy.optimize import least_squares

    typical = _typical(work)
    start = np.full(work.shape[1], np.log(np.exp(log_s).mean() / work.shape[1]))

    def residuals(logs: Array) -> Array:
        error = np.log(work / typical @ np.exp(logs)) - log_s
        soft = np.sign(error) * np.sqrt(0.02 * (np.sqrt(1 + (error / 0.1) ** 2) - 1))
        return np.concatenate([soft, RIDGE * (logs - start)])

    logs = least_squares(residuals, start, max_nfev=300).x
    costs: Array = np.exp(logs) / typical
    return costs


def _together(work: Array, log_s: Array) -> Fitted:
    """Fit the costs of every phone under a common prior, whose mean and covariance are also fitted."""
    size, typical = work.shape[1], _typical(work)
    rows = work / typical
    mean = np.log(_positive_costs(work, _mean_phone(log_s)) * typical)
    own = OWN**2 * np.eye(size)
    spread, noise = own, 0.05
    costs = mean + log_s.mean(1, keepdims=True) - log_s.mean()
    errors = np.zeros_like(log_s)
    for turn in range(ROUNDS):
        firm = np.asarray(np.linalg.inv(spread + 10.0), float)  # 10 is the prior variance of the speed
        for at in range(len(costs)):
            steps = 3 if turn else 10
            costs[at], errors[at] = _most_probable(rows, log_s[at], mean, firm, costs[at], noise, steps)
        mean = costs.mean(0)
        apart = costs - speeds(costs)[:, None]
        apart = apart - apart.mean(0)
        spread = (apart.T @ apart + PHONES_OF_PRIOR * own) / (len(costs) + PHONES_OF_PRIOR)
        noise = max(float(np.median(np.abs(errors))) / 0.6745, 0.02)
    return Fitted(typical, costs, spread, noise, errors)


def _most_probable(
    rows: Array, log_s: Array, mean: Array, firm: Array, at: Array, noise: float, steps: int
) -> tuple[Array, Array]:
    """Find the most probable costs with Newton steps; errors above 3 · ``noise`` get less weight."""
    for _ in range(steps):
        part, error = _parts(rows, at, log_s)
        weight = 1 / (noise**2 * np.sqrt(1 + (error / (3 * noise)) ** 2))
        seen = (part * weight[:, None]).T
        step = np.linalg.solve(seen @ part + firm, seen @ error + firm @ (at - mean))
        at = at - step * min(1.0, 1.0 / max(float(np.abs(step).max()), 1e-9))
    return at, _parts(rows, at, log_s)[1]


def _parts(rows: Array, at: Array, log_s: Array) -> tuple[Array, Array]:
    """Return two arrays: the share of each class in a network's predicted time, and the network's error.

    The error is the logarithm of the ratio of the predicted to the measured time.
    """
    part = rows * np.exp(at)
    return part / part.sum(1, keepdims=True), np.log(part.sum(1)) - log_s


# ---- errors that all phones have in common -------------------------------------------------------


def _alike(ones: Array, others: Array) -> Array:
    apart = ((ones[:, None] - others[None]) ** 2).sum(-1)
    alike: Array = np.exp(-apart / (2 * LENGTH**2))
    return alike


def _neighbours(points: Array, errors: Array) -> Neighbours:
    """Fit a Gaussian process to ``errors``, the error that all phones have in common on each network."""
    among = COMMON**2 * _alike(points, points)
    solved = COMMON**2 * np.linalg.solve(among + REST**2 * np.eye(len(errors)), errors)
    rounded = tuple(tuple(round(float(v), 3) for v in point) for point in points)
    return Neighbours(length=LENGTH, points=rounded, errors=tuple(round(float(v), 4) for v in solved))


# ---- similar phones ------------------------------------------------------------------------------


def _similarity(units: Sequence[About], speed: Array) -> Similarity:
    """Return the variances that make the phones' speeds most likely, under a weak prior around `LIKELY`."""
    from scipy.optimize import minimize

    names = Similarity.__struct_fields__
    none = Similarity(**dict.fromkeys(names, 0.0))
    each = [covariance(units, units, msgspec.structs.replace(none, **{name: 1.0})) for name in names]
    apart = speed - speed.mean()

    def unlikely(logs: Array) -> float:
        all_ = sum(math.exp(log) * part for log, part in zip(logs, each, strict=True)) + 1e-6 * np.eye(
            len(units)
        )
        lower = np.linalg.cholesky(all_)
        white = np.linalg.solve(lower, apart)
        far = ((logs - start) ** 2).sum() / 10
        return float(white @ white / 2 + np.log(np.diag(lower)).sum() + far)

    start = np.log(LIKELY)
    best = minimize(unlikely, start, method="Nelder-Mead", options={"maxiter": 600}).x
    return Similarity(**{name: float(f"{math.exp(log):.3g}") for name, log in zip(names, best, strict=True)})


# ---- errors on left-out networks and phones ------------------------------------------------------


def _only(data: Matrix, units: Sequence[int], networks: Sequence[int]) -> Matrix:
    return Matrix(
        [data.units[at] for at in units],
        [data.networks[at] for at in networks],
        data.log_s[np.ix_(units, networks)],
        [data.found[at] for at in networks],
    )


def _error_factors(data: Matrix) -> dict[str, float]:
    """Return the error factor of each unit.

    On networks that were left out of the fit, a share `HELD` of the unit's times is within this factor of the
    predicted times.
    """
    errors: dict[str, list[float]] = {}
    all_units = range(len(data.units))
    for fold in range(NETWORK_FOLDS):
        kept = [at for at in range(len(data.networks)) if at % NETWORK_FOLDS != fold]
        out = [at for at in range(len(data.networks)) if at % NETWORK_FOLDS == fold]
        table = _table(_only(data, all_units, kept))
        known = {about.unit: np.log(unit.ms) for about, unit in table.units}
        for about, log_s in zip(data.units, data.log_s, strict=True):
            costs = known[about.unit]
            off = [_log_seconds(table, costs, data.found[at]) - log_s[at] for at in out]
            errors.setdefault(about.unit, []).extend(map(abs, off))
    return {name: round(math.exp(float(np.quantile(off, HELD))), 3) for name, off in errors.items()}


def _log_seconds(table: PhoneTable, costs: Array, found: Counter[str]) -> float:
    work = amounts(table.corrected(found)) / np.array(table.amounts)
    return float(np.log(work @ np.exp(costs) / 1e3))


def _widths(data: Matrix) -> Widths:
    """Measure how wide intervals must be for phones whose models were left out of the fit."""
    models = list(dict.fromkeys(unit.model for unit in data.units))
    core, one = [], []
    for fold in range(PHONE_FOLDS):
        out = set(models[fold::PHONE_FOLDS])
        kept = [at for at, unit in enumerate(data.units) if unit.model not in out]
        table = _table(_only(data, kept, range(len(data.networks))))
        for at in sorted(set(range(len(data.units))) - set(kept)):
            core += _scores(table, prior(table, data.units[at]), data, at)
            if REFERENCE in data.networks:
                one += _scores(table, _from_reference(table, data, at), data, at)
    return Widths(core=_held(core, COVERAGE), one_network=_held(one or core, HELD))


def _held(scores: Sequence[float], share: float) -> float:
    return round(float(np.quantile(scores, share)), 3)


def _from_reference(table: PhoneTable, data: Matrix, unit: int) -> Costs:
    at = data.networks.index(REFERENCE)
    seconds = math.exp(data.log_s[unit][at])
    return observed(prior(table, data.units[unit]), table.amounts, table.corrected(data.found[at]), seconds)


def _scores(table: PhoneTable, costs: Costs, data: Matrix, unit: int) -> list[float]:
    """Return a unit's absolute errors on all networks except `REFERENCE`.

    Each error is divided by its expected standard deviation.
    """
    scores = []
    for at, found in enumerate(data.found):
        if data.networks[at] != REFERENCE:
            row = amounts(table.corrected(found)) / np.array(table.amounts) * np.exp(costs.mean)
            share, error = row / row.sum(), math.log(row.sum() / 1e3) - data.log_s[unit][at]
            scores.append(abs(error) / math.sqrt(share @ costs.covariance @ share + table.noise**2))
    return scores
