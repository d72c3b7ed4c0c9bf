"""Inference times of phones in TFLite: measured, or estimated from a phone's core or one measured network.

A phone's costs are the times in milliseconds that each class of work takes in a typical network. Over all
phones, the logarithms of the costs have a joint normal distribution. Its covariance has two parts: the
variance of a whole phone's speed, which the phone's core, clock and RAM explain in part, and the covariance
`PhoneTable.spread` of the costs relative to this speed. A phone's core, clock and RAM therefore determine a
prior for its costs. One measured network reduces the median prediction error to about 4%.

The covariance of two phones' speeds (a Gaussian process; Rasmussen and Williams 2006, equation 2.25) is

    one + ghz · ln(c/2.2) · ln(c'/2.2) + ram · ln(r/4) · ln(r'/4)
        + family + core + model + unit

with the clock c in GHz and the RAM r in GiB. The term ``family`` is added only if both phones have the same
core design (`About.family`), and the next three terms only if they have the same core, model or unit.
`Similarity` holds the coefficients.
`edgefl.devices.phone_fit` fits the table to measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgefl import toml
from edgefl.devices.fit import NORMAL
from edgefl.devices.phone_networks import INTO, Layer, Weights, counts, weighted
from edgefl.devices.time_model import COSTS, TERMS, Factor, Positive, TimeModel, joined
from edgefl.learning.operations import StepWork
from edgefl.validation import convert

Array = NDArray[np.float64]
TFLITE: Final = "tflite"
"""Name of the runtime: inference in TensorFlow Lite on the processor."""
FILE: Final = "phones.toml"
"""Name of the table's file in the folder of profiles."""
CLASSES: Final[tuple[tuple[str, ...], ...]] = (
    ("thin_flop",),
    ("conv_flop",),
    ("pointwise_flop", "matmul_flop", "recurrent_flop"),
    ("depthwise_flop", "depthwise_backward_flop"),
    ("depthwise_planes",),
    ("conv_bytes", "matmul_bytes"),
    ("norm_bytes", "pool_bytes", "elementwise_bytes", "copy_bytes"),
    ("calls",),
    ("fixed", "parameters"),
)
"""Groups of `StepWork` fields that share one cost; ``fixed`` is the fixed part of a step."""
FAMILIES: Final[Mapping[str, str]] = {
    "Kryo 250 Gold": "A73",
    "Kryo 260 Gold": "A73",
    "Kryo 280": "A73",
    "Kryo 360 Gold": "A75",
    "Kryo 385 Gold": "A75",
    "Kryo 460 Gold": "A76",
    "Kryo 470 Gold": "A76",
    "Kryo 475 Prime": "A76",
    "Kryo 485": "A76",
    "Kryo 585": "A77",
    "Qualcomm Falkor V1/Kryo": "A73",
    "Qualcomm Kryo 3XX Gold": "A75",
    "Qualcomm Kryo 4XX Gold": "A76",
}
"""Maps a Qualcomm core to the Arm Cortex core on which it is based, according to Qualcomm."""
USUAL_GHZ: Final = 2.2
USUAL_RAM_GIB: Final = 4.0
"""Clock and RAM that are assumed for a phone if they are unknown."""
READ_NOISE: Final = 0.06
"""Standard deviation of ln(measured time of a network / its time at the phone's usual speed). Some phones
were throttled during the measurement of a network."""
SPREAD_SHARE: Final = 0.2
"""Share of `PhoneTable.spread` that is due to differences between phones; the rest is due to the uncertainty
of the fits. This value and `READ_NOISE` were chosen by cross-validation over phone models."""
ROUNDS: Final = 40
"""Number of Newton steps, each of half length, that adapt the costs to one measured network. Full steps may
oscillate."""


class About(NamedTuple):
    """Properties of a phone that are known without measurements. An unknown property is empty or None."""

    core: str = ""
    ghz: float | None = None
    ram_gib: float | None = None
    model: str = ""
    unit: str = ""

    @property
    def family(self) -> str:
        """Design of the core.

        For an Arm core, or a core based on one, this is the Arm core's name without ``Cortex-``. For other
        cores, it is the first word of the core's name.
        """
        return FAMILIES.get(self.core) or self.core.removeprefix("Cortex-").split(" ")[0]


class Unit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured phone."""

    ms: tuple[Positive, ...]
    """Time that each of `CLASSES` takes in a typical network, in milliseconds."""
    error_factor: Factor
    """The measured times of 90% of networks outside the fit are within this factor of the predicted ones."""


class Phone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A phone model, and the costs of its measured units."""

    id: str
    model: str
    """The maker's model number, as written in the measurements."""
    name: str
    kind: str = msgspec.field(name="class", default="mid-range")
    year: int | None = None
    soc: str | None = None
    core: str = ""
    mhz: float | None = None
    ram_gib: float | None = None
    cores: int | None = None
    """Number of cores with the type ``core`` and the clock ``mhz``."""
    units: dict[str, Unit]

    def about(self, unit: str = "") -> About:
        """Return the properties of a phone of this model that are known without measurements."""
        return About(self.core, self.mhz and self.mhz / 1e3, self.ram_gib, self.model, unit)


class Similarity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of the covariance of two phones' speeds (see the equation in this module's docstring)."""

    one: float
    ghz: float
    ram: float
    family: float
    core: float
    model: float
    unit: float


class Neighbours(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prediction errors that all phones share on a network; similar networks have similar errors."""

    length: Positive
    """Length scale: the errors of two networks a distance d apart have the correlation
    exp(−d² / (2 · length²))."""
    points: tuple[tuple[float, ...], ...]
    """For each network, the values that `shares` returns for it on a typical phone."""
    errors: tuple[float, ...]
    """The coefficient of each point in the kernel-weighted sum that predicts the error of a network's time,
    ln(predicted time / measured time)."""


class Widths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Half-widths, in standard deviations, of intervals that contain 90% of the times of new phones.

    ``core`` is for phones whose core is known; ``one_network`` is for phones on which one network has also
    been measured.
    """

    core: Positive
    one_network: Positive


class PhoneTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters that were fitted to the measured phones, and the phones themselves."""

    source: str
    amounts: tuple[Positive, ...]
    """Amount of work in each of `CLASSES` in a typical network."""
    weights: Weights
    spread: tuple[tuple[float, ...], ...]
    """Covariance of the logarithms of a phone's costs, relative to the phone's speed."""
    noise: Positive
    """Standard deviation of ln(time of a network / time computed from its work)."""
    similarity: Similarity
    widths: Widths
    neighbours: Neighbours | None = None
    phones: tuple[Phone, ...] = ()

    @property
    def units(self) -> list[tuple[About, Unit]]:
        """All measured units, each with the properties of the phone that are known without measurements."""
        return [(phone.about(name), unit) for phone in self.phones for name, unit in phone.units.items()]

    def work(self, layers: Sequence[Layer]) -> StepWork:
        """Count the work of an inference, corrected for the prediction errors on similar networks."""
        return self.corrected(counts(layers))

    def corrected(self, found: Mapping[str, float]) -> StepWork:
        """Apply the weights to counted work, and correct it for the prediction errors on similar networks."""
        plain = weighted(found, self.weights)
        if self.neighbours is None:
            return plain
        typical_ms = np.exp(np.mean([np.log(unit.ms) for _, unit in self.units], axis=0))
        own = shares(found, self.weights, typical_ms / np.array(self.amounts))
        apart = ((np.array(self.neighbours.points) - own) ** 2).sum(1)
        error = np.exp(-apart / (2 * self.neighbours.length**2)) @ np.array(self.neighbours.errors)
        return plain.scaled(math.exp(-float(error)))

    def typical_work(self) -> StepWork:
        """Return the work of the typical network among the measured networks."""
        work = zip(CLASSES, self.amounts, strict=True)
        return StepWork(**{fields[0]: amount for fields, amount in work if fields[0] != "fixed"})


class Costs(NamedTuple):
    """A normal distribution of the logarithms of a phone's costs (milliseconds in a typical network)."""

    mean: Array
    covariance: Array


def shares(found: Mapping[str, float], weights: Weights, costs: Array) -> Array:
    """Return the square root of each kind of work's share of a network's time.

    There is one value for each of `CLASSES`, followed by one for each field of `Weights`. ``found`` is the
    network's work, as counted by `counts`.
    """
    by_field = {name: cost for fields, cost in zip(CLASSES, costs, strict=True) for name in fields}
    plain = [
        sum(found.get(name, float(name == "fixed")) * by_field[name] for name in fields) for fields in CLASSES
    ]
    extra = [found.get(name, 0.0) * getattr(weights, name) * by_field[into] for name, into in INTO.items()]
    parts: Array = np.array([*plain, *extra])
    roots: Array = np.sqrt(parts / parts.sum())
    return roots


@cache
def load(path: Path) -> PhoneTable:
    """Read a table. Raises `ConfigError` if it is invalid."""
    return convert(toml.read(path), PhoneTable)


def amounts(work: StepWork) -> Array:
    """Return the amount of work in each of `CLASSES`; the amount of the fixed part is 1."""
    fields = (sum(getattr(work, name, float(name == "fixed")) for name in names) for names in CLASSES)
    return np.array(list(fields), float)


def of_unit(unit: Unit) -> Costs:
    """Return the costs of a measured unit."""
    return Costs(np.log(unit.ms), np.zeros((len(CLASSES), len(CLASSES))))


def of_phone(phone: Phone) -> Costs:
    """Return the costs of a phone model: the geometric mean of its units' costs."""
    logs = np.array([np.log(unit.ms) for unit in phone.units.values()])
    return Costs(logs.mean(0), np.zeros((len(CLASSES), len(CLASSES))))


def prior(table: PhoneTable, about: About) -> Costs:
    """Estimate the costs of an unmeasured phone from its core, clock and RAM."""
    known = [each for each, _ in table.units]
    logs = np.array([np.log(unit.ms) for _, unit in table.units])
    speed = speeds(logs)
    shape = logs - speed[:, None]
    similar = table.similarity
    among, to = covariance(known, known, similar), covariance([about], known, similar)[0]
    with_ = np.linalg.solve(among + 1e-6 * np.eye(len(known)), to)
    expected = speed.mean() + with_ @ (speed - speed.mean())
    left = covariance([about], [about], similar)[0, 0] - with_ @ to
    alike = np.array([shape_likeness(about, each) for each in known])
    mean = shape.mean(0) + alike @ (shape - shape.mean(0)) / (alike.sum() + SHAPE_PRIOR)
    return Costs(expected + mean, left + SPREAD_SHARE * np.array(table.spread))


def speeds(costs: Array) -> Array:
    """Return the logarithm of each phone's time for the typical network.

    ``costs`` has the shape (phones, classes).
    """
    total: Array = np.log(np.exp(costs).sum(1))
    return total


SHAPE_PRIOR: Final = 1.0
"""Weight of the mean over all phones if the relative sizes of a phone's costs are estimated. A single phone
with the same core has the weight 1."""


def shape_likeness(one: About, other: About) -> float:
    """Return the weight of phone ``other`` in the estimate of the cost proportions of phone ``one``."""
    same_family = bool(one.core) and one.family == other.family
    return 0.5 * same_family + 0.5 * (bool(one.core) and one.core == other.core)


def covariance(ones: Sequence[About], others: Sequence[About], similar: Similarity) -> Array:
    """Return the covariances of the logarithmic speeds of two lists of phones.

    The shape is (len(ones), len(others)).
    """
    return np.array([[_likeness(one, other, similar) for other in others] for one in ones])


def _likeness(one: About, other: About, similar: Similarity) -> float:
    return (
        similar.one
        + similar.ghz * _log(one.ghz, USUAL_GHZ) * _log(other.ghz, USUAL_GHZ)
        + similar.ram * _log(one.ram_gib, USUAL_RAM_GIB) * _log(other.ram_gib, USUAL_RAM_GIB)
        + similar.family * (bool(one.core) and one.family == other.family)
        + similar.core * (bool(one.core) and one.core == other.core)
        + similar.model * (one is other or (bool(one.model) and one.model == other.model))
        + similar.unit * (one is other or (bool(one.unit) and one.unit == other.unit))
    )


def _log(value: float | None, usual: float) -> float:
    return math.log(value / usual) if value else 0.0


def observed(costs: Costs, typical: Sequence[float], work: StepWork, seconds: float) -> Costs:
    """Find the most probable costs given one measured network, by Newton's method."""
    row, at = amounts(work) / np.array(typical), costs.mean
    firm = np.asarray(np.linalg.inv(costs.covariance), float)
    found = costs.covariance
    for _ in range(ROUNDS):
        parts = row * np.exp(at)
        share, error = parts / parts.sum(), float(np.log(parts.sum() / 1e3 / seconds))
        found = np.asarray(np.linalg.inv(firm + np.outer(share, share) / READ_NOISE**2), float)
        at = at - found @ (share * error / READ_NOISE**2 + firm @ (at - costs.mean)) / 2
    return Costs(at, found)


def time_model(
    costs: Costs, typical: Sequence[float], error_factor: float, width: float | None = None
) -> TimeModel:
    """Make a time model from costs.

    If ``width`` is given, the intervals include that many standard deviations of the costs.
    """
    by_field = {
        name: math.exp(log) / 1e3 / amount
        for fields, log, amount in zip(CLASSES, costs.mean, typical, strict=True)
        for name in fields
    }
    by_field["parameters"] = 0.0
    values = {"fixed_ms": by_field["fixed"] * 1e3, "error_factor": error_factor}
    for name, (own, unit) in COSTS.items():
        is_time = own.endswith(("_us", "_ns"))
        values[own] = by_field[name] / unit if is_time else unit / by_field[name]
    rounded = {name: float(f"{value:.4g}") for name, value in values.items()}
    unsure = () if width is None else _triangle(width**2 * costs.covariance)
    return TimeModel(**rounded, cost_variations=(), cost_errors=unsure)


def _triangle(covariance_: Array) -> tuple[tuple[float, ...], ...]:
    """Return the Cholesky factor (lower triangle) of a covariance of `CLASSES`, rearranged to the order of
    `TERMS` and the fixed part."""
    of_term = [
        next(at for at, fields in enumerate(CLASSES) if term[0] in fields) for term in (*TERMS, ("fixed",))
    ]
    all_ = covariance_[np.ix_(of_term, of_term)] + 1e-6 * np.eye(len(of_term))
    return tuple(
        tuple(round(float(v), 4) for v in row[: at + 1]) for at, row in enumerate(np.linalg.cholesky(all_))
    )


def of_core(table: PhoneTable, about: About) -> TimeModel:
    """Return the time model of a phone whose core, clock and RAM are known."""
    noise = math.exp(NORMAL * table.noise)
    return time_model(prior(table, about), table.amounts, noise, table.widths.core)


def of_one_network(table: PhoneTable, about: About, work: StepWork, seconds: float) -> TimeModel:
    """Return the time model of a phone with known core, clock and RAM on which one network was measured."""
    found = observed(prior(table, about), table.amounts, work, seconds)
    noise = math.exp(table.widths.one_network * table.noise)
    return time_model(found, table.amounts, noise, table.widths.one_network)


def of_measured(table: PhoneTable, phone: Phone, unit: str = "") -> TimeModel:
    """Return the time model of a measured unit, or of the mean unit (`of_phone`) if the unit is unknown."""
    if unit in phone.units:
        return time_model(of_unit(phone.units[unit]), table.amounts, phone.units[unit].error_factor)
    own = float(np.median([each.error_factor for each in phone.units.values()]))
    return time_model(of_phone(phone), table.amounts, joined(own, UNITS_APART))


UNITS_APART: Final = 1.28
"""With a probability of 90%, the times of two units of one model differ by less than this factor
(`edgefl.devices.individuals`)."""
