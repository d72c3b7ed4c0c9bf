"""Fits the rates of ``cores.toml`` to measured boards, published values and similarities between core types.

The logarithm of a rate per MHz is a constant of the core type plus an error of the board. A core's constant
is the median over its boards, shrunk towards the mean of its relatives (the similar cores in lineage.toml).
The fewer boards there are, the stronger the shrinkage. For ``division``, ``float``, ``simd`` and
``interpreter`` the constant is fitted to published values instead, and is shrunk towards a power law of the
integer rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec
import numpy as np

from edgefl import toml
from edgefl.devices.boards import Board, BoardRow
from edgefl.devices.code import (
    CodeClass,
    CodeRate,
    Core,
    CoreTable,
    Parallel,
    find_core,
    lineages,
    unevenness,
)
from edgefl.devices.csv_lines import csv_lines
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import ConfigError

SOURCE = (
    "fitted: edgefl profiles cores, to ThomasKaiser/sbc-bench results (profiles/code/boards.csv), "
    "published.csv and lineage.toml; boards = 0: by relatives; spread: 90% within that factor"
)
Z = 1.645  # half the width of a normal distribution's 90% interval, in standard deviations
PLAUSIBLE = math.log(1.25)
"""Largest plausible deviation of ln(integer rate per MHz) from the median of the core type. Rows that deviate
more are left out, because their clock frequency must be wrong."""


class Prior(NamedTuple):
    """Standard deviations of the logarithm of a rate per MHz."""

    board: float
    """Standard deviation between the boards of one core type."""
    core: float
    """Standard deviation of the difference between a core type and the mean of its relatives."""


PRIORS: dict[str, Prior] = {
    "integer": Prior(0.035, 0.12),
    "memory": Prior(0.16, 0.20),
    "copy": Prior(0.40, 0.45),
    "crypto": Prior(0.03, 0.25),
    "crypto_without_aes": Prior(0.10, 0.25),
    "division": Prior(0.06, 0.25),
    "float": Prior(0.15, 0.25),
    "simd": Prior(0.15, 0.25),
    "interpreter": Prior(0.12, 0.20),
}
BY_INTEGER: dict[CodeClass, float] = {"division": 1.5, "float": 1.5, "simd": 2.3, "interpreter": 1.5}
"""Exponents of the power laws that predict these rates from a core's integer rate per MHz. The exponent of
``simd`` is derived from published.csv. The other exponents are assumed, because published.csv has values of
these classes for only one to three 64-bit cores."""
BY_DIVIDER = {"division"}
"""Classes of code whose rate depends on a core's division unit. Similar cores are expected to have the same
rate. 32-bit cores divide 64-bit numbers in software, so 32-bit and 64-bit cores are fitted separately."""
WITH_AES_PER_MHZ = 0.1
"""Rate of AES-256-CBC, in MB/s per MHz, that no core reaches without AES instructions."""

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Logarithms of rates per MHz, keyed by core type and then by board."""


def fit(boards: Sequence[Board]) -> CoreTable:
    """Fit all rates to measured boards and to published values."""
    narrow, published = arm32(boards), published_figures()
    usual = _medians(_samples("integer", boards, narrow))
    good = [_plausible(board, usual) for board in boards]
    rates: dict[str, dict[str, CodeRate]] = {}
    for name in ("integer", "memory", "copy", "crypto", "crypto_without_aes"):
        rates[name] = _class_rates(name, _samples(name, good, narrow))
    for name in BY_INTEGER:
        rates[name] = _by_integer(name, published.get(name, {}), rates["integer"])
    cores = {core: Core(**{name: of[core] for name, of in rates.items()}) for core in lineages()}
    alone = Parallel(0.0, 0.0, 0.0, 1.1)
    parallel: dict[CodeClass, Parallel] = dict.fromkeys(("crypto", *BY_INTEGER), alone)
    parallel["copy"] = Parallel(0.0, 0.0, -0.55, 1.5)
    parallel["integer"] = _parallel("integer", boards)
    parallel["memory"] = _parallel("memory", boards)
    return CoreTable(SOURCE, cores, parallel, narrow)


# ---- samples -------------------------------------------------------------------------------------


def _samples(name: str, boards: Iterable[Board], narrow: Mapping[str, CodeRate]) -> Samples:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for board in boards:
        for core, log in _board_samples(name, board):
            is_narrow = board.system_bits < lineages()[core].bits
            shift = math.log(narrow[name].per_mhz) if is_narrow and name in narrow else 0.0
            found[core][board.result].append(log - shift)
    return found


def _board_samples(name: str, board: Board) -> Iterator[tuple[str, float]]:
    for number, row in enumerate(board.rows):
        value, at = _measured(name, board, number, row)
        if value is not None and at.core is not None:
            yield at.core, math.log(value / at.mhz)


def _measured(name: str, board: Board, number: int, row: BoardRow) -> tuple[float | None, BoardRow]:
    """Return a row's rate for the class ``name``, and the row of the cluster in which it was measured."""
    if not name.startswith("crypto"):
        return {"integer": row.decompress, "memory": row.compress, "copy": row.memcpy_mb_s}[name], row
    if row.aes_mb_s is None:
        return None, row
    at = board.aes_row(number)
    with_aes = row.aes_mb_s > WITH_AES_PER_MHZ * at.mhz
    return (row.aes_mb_s if with_aes == (name == "crypto") else None), at


def arm32(boards: Sequence[Board]) -> dict[str, CodeRate]:
    """Return, for each class, the ratio of a core type's rate on 32-bit systems to that on 64-bit systems."""
    found: dict[str, CodeRate] = {}
    for name in ("integer", "memory", "crypto_without_aes"):
        by: dict[tuple[str, int], list[float]] = defaultdict(list)
        for board in boards:
            for core, log in _board_samples(name, board):
                by[core, min(board.system_bits, lineages()[core].bits)].append(log)
        pairs = [
            (by[core, 32], median(by[core, 64]))
            for core in lineages()
            if {(core, 32), (core, 64)} <= by.keys()
        ]
        logs = [log - wide for own, wide in pairs for log in own]
        if logs:
            deviation = 1.4826 * median(abs(log - median(logs)) for log in logs)
            spread = math.exp(Z * max(0.05, deviation))
            found[name] = CodeRate(_short(math.exp(median(logs))), _short(spread), len(logs))
    return found


def _medians(samples: Samples) -> dict[str, float]:
    return {core: median(fmean(logs) for logs in own.values()) for core, own in samples.items()}


def _plausible(board: Board, usual: Mapping[str, float]) -> Board:
    """Remove the core type from rows whose integer rate is implausible for their clock frequency.

    The fits ignore rows without a core type.
    """

    def good(row: BoardRow) -> bool:
        if row.core is None or row.decompress is None:
            return True
        shift = 0.2 if board.system_bits < lineages()[row.core].bits else 0.0
        return abs(math.log(row.decompress / row.mhz) - shift - usual[row.core]) < PLAUSIBLE

    rows = tuple(row if good(row) else row._replace(core=None) for row in board.rows)
    return board._replace(rows=rows)


# ---- constants of the cores -----------------------------------------------------------------------


def _relatives_mean(
    core: str, known: Mapping[str, float], above: frozenset[str] = frozenset()
) -> float | None:
    """Predict the logarithm of a core type's rate per MHz from the mean of similar core types (relatives).

    A relative without measurements is replaced by the mean of its own relatives. Return None if no relative
    was measured.
    """
    above |= {core}
    logs = []
    for other in lineages()[core].like:
        if other not in above:
            log = known[other] if other in known else _relatives_mean(other, known, above)
            logs += [] if log is None else [log]
    return fmean(logs) + math.log(lineages()[core].factor) if logs else None


def _class_rates(name: str, samples: Samples) -> dict[str, CodeRate]:
    prior = PRIORS[name]
    known = _medians(samples)
    if not known:
        raise ConfigError(f"no board has a rate of {name} for a core of known type; the fit needs one")
    middle = median(known.values())
    found = {}
    for core, lineage in lineages().items():
        own = [fmean(logs) for logs in samples.get(core, {}).values()]
        expected = _relatives_mean(core, known)
        sd = max(prior.core, math.log(lineage.spread) / Z)
        if expected is None:
            expected, sd = middle, 2 * prior.core
        found[core] = _posterior(own, expected, sd, prior.board)
    return found


def _by_integer(
    name: CodeClass, samples: Mapping[str, Sequence[float]], integer: Mapping[str, CodeRate]
) -> dict[str, CodeRate]:
    """Predict rates from the integer rates with a power law, and combine them with published values."""
    prior, power = PRIORS[name], BY_INTEGER[name]
    law = {core: power * math.log(rate.per_mhz) for core, rate in integer.items()}
    known = {core: median(logs) for core, logs in samples.items()}
    by_divider = name in BY_DIVIDER
    found = {}
    for core, lineage in lineages().items():
        alike = [other for other in known if not by_divider or lineages()[other].bits == lineage.bits]
        expected = median(known[other] - law[other] for other in alike) + law[core]
        if by_divider:
            expected = _relatives_mean(core, known) or expected
        sd = math.hypot(
            prior.core, power * math.log(integer[core].spread) / Z, math.log(lineage.spread) / Z / 2
        )
        found[core] = _posterior(list(samples.get(core, ())), expected, sd, prior.board)
    return found


def _posterior(own: Sequence[float], expected: float, sd_core: float, sd_board: float) -> CodeRate:
    """Combine a core type's measured rates with its expected rate.

    The interval of the result covers 90% of the boards that were not measured.
    """
    n = len(own)
    if n == 0:
        log, error = expected, sd_core
    else:
        precision = sd_core**-2 + n * sd_board**-2
        log = (expected * sd_core**-2 + median(own) * n * sd_board**-2) / precision
        error = precision**-0.5
    deviations = [min(abs(each - log), 3 * sd_board) for each in own]
    variance = (4 * sd_board**2 + math.fsum(d * d for d in deviations)) / (4 + n)
    spread = math.exp(Z * math.sqrt(variance + error**2))
    return CodeRate(_short(math.exp(log)), _short(spread), n)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def published_figures() -> dict[str, dict[str, list[float]]]:
    """Read the logarithms of published rates per MHz, keyed by class of code and then by core type."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, line in csv_lines(bundled_folder() / "code" / "published.csv", ("core", "mhz", "class", "value")):
        log = math.log(float(line["value"]) / float(line["mhz"]))
        found[line["class"]][find_core(line["core"])].append(log)
    return found


# ---- several threads ------------------------------------------------------------------------------


def _parallel(name: CodeClass, boards: Sequence[Board]) -> Parallel:
    """Fit the logarithm of the slowdown of n threads by least squares, and refit it without outliers."""
    found = [sample for board in boards if (sample := _parallel_sample(name, board)) is not None]
    if not found:
        needed = "an SoC of socs.toml with several cores, and the rates of all cores and of each type of core"
        raise ConfigError(f"the fit of {name} with several threads needs a board with {needed}")
    x, y = np.array([regressors for regressors, _ in found]), np.array([log for _, log in found])
    kept = np.ones(len(y), dtype=bool)
    for _ in range(3):
        costs, *_ = np.linalg.lstsq(x[kept], y[kept], rcond=None)
        error = np.abs(y - x @ costs)
        kept = error <= 3 * np.median(error)
    spread = math.exp(float(np.quantile(error, 0.93)))
    alone, mixed, doubling = (_short(cost) for cost in costs.tolist())
    return Parallel(alone, mixed, doubling, _short(spread))


def _parallel_sample(name: CodeClass, board: Board) -> tuple[tuple[float, float, float], float] | None:
    """Return a board's regressors (1, unevenness, log2 n) and the logarithm of its slowdown.

    The slowdown is the ratio of the rate on all n cores to the sum of the single-core rates. Return None if
    one of these rates or the number of cores is unknown, or if the board has only one core.
    """
    total = board.all_decompress if name == "integer" else board.all_compress
    clusters, known = board.clusters()
    n = sum(each.cores for each in clusters)
    if total is None or not known or n == 1:
        return None
    own: dict[str, list[float]] = defaultdict(list)
    for row in board.rows:
        value = row.decompress if name == "integer" else row.compress
        if value is not None and row.core is not None:
            own[row.core].append(value)
    if any(find_core(each.core) not in own for each in clusters):
        return None
    rates = [(fmean(own[find_core(each.core)]), each.cores) for each in clusters]
    alone = math.fsum(rate * cores for rate, cores in rates)
    return (1.0, unevenness(rates), math.log2(n)), math.log(total / alone)


# ---- the file -------------------------------------------------------------------------------------


def write(table: CoreTable) -> str:
    """Return the text of ``cores.toml``: a table for each core type, with a line for each class of code."""
    plain = msgspec.to_builtins(table)
    parts = [toml.write({"source": plain["source"]})]
    named = [("parallel", plain["parallel"]), ("arm32", plain["arm32"])]
    named += [(f"cores.{toml.literal(core)}", rates) for core, rates in plain["cores"].items()]
    for name, rates in named:
        parts.append(
            f"[{name}]\n" + "".join(f"{key} = {toml.literal(rate)}\n" for key, rate in rates.items())
        )
    return "\n".join(parts)
