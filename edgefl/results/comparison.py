"""Runs side by side, as figures: which are comparable, what each reached, how sure a mean over seeds is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from edgefl.errors import ConfigError
from edgefl.results.measures import label_accuracy, rounded, slow_group
from edgefl.results.record import Record
from edgefl.results.summary import summarize

FIGURES = ("accuracy", "slow_accuracy", "client_trips", "versions", "staleness_mean", "staleness_max",
           "slow_weight", "emulated_s", "trips_to_target", "emulated_s_to_target")  # fmt: skip
"""The figures that are compared, and averaged over seeds."""


class Run(NamedTuple):
    """One run of a comparison."""

    folder: Path
    record: Record
    summary: dict[str, Any]
    slow_labels: tuple[int, ...]
    """The classes of the first run's slow clients (`measures.slow_group`): the same for all runs."""


class Estimate(NamedTuple):
    """A figure over seeds: its mean, and half the width of the mean's 95% interval (None for one seed)."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4g}" + ("" if self.half is None else f" ±{self.half:.2g}")


class RunGroup(NamedTuple):
    """Runs that differ in nothing but their seed."""

    label: str
    runs: tuple[Run, ...]
    figures: dict[str, Estimate]
    valid: bool

    def estimates(self) -> dict[str, Any]:
        """The figures for JSON: mean and half the width of its 95% interval."""
        return {
            name: {"mean": rounded(mean), "half_95": None if half is None else rounded(half)}
            for name, (mean, half) in self.figures.items()
        }

    @property
    def verdict(self) -> str:
        """VALID or INVALID; under the virtual clock nothing is measured that could be valid."""
        if not self.valid:
            return "INVALID"
        return "computed" if all(run.record.meta.clock == "virtual" for run in self.runs) else "VALID"


def load(folders: Sequence[str | Path]) -> list[Run]:
    """The runs, checked to be comparable."""
    if not folders:
        raise ConfigError("nothing to compare: name at least one run's folder")
    paths = [Path(folder) for folder in folders]
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise ConfigError(f"run {path} is named twice")
        seen.add(path.resolve())
    records = [Record(path) for path in paths]
    first = records[0]
    for path, record in zip(paths, records, strict=True):
        for what, mine, other in zip(
            ("data", "test examples", "classes"), _data(record), _data(first), strict=True
        ):
            if mine and other and mine != other:
                raise ConfigError(
                    f"runs on different data do not compare: {path} has {what} {mine}, {paths[0]} has {other}"
                )
    labels = slow_group(first).labels
    return [Run(path, record, summarize(record), labels) for path, record in zip(paths, records, strict=True)]


def _data(record: Record) -> tuple[str, int, int]:
    classes = len(record.evaluations[0].total) if record.evaluations else 0
    return record.meta.data, record.meta.test_examples, classes


def figures_of(run: Run, target: float | None) -> dict[str, float]:
    """The run's figures by name of `FIGURES`; NaN where it has none."""
    summary, nan = run.summary, math.nan
    last = run.record.evaluations[-1] if run.record.evaluations else None
    trips, at_s = reached(run.record, target)
    weight = summary["slow_phones"]["applied_weight"]
    return {
        "accuracy": nan if summary["accuracy"] is None else summary["accuracy"],
        "slow_accuracy": label_accuracy(last, run.slow_labels) if last else nan,
        "client_trips": summary["client_trips"],
        "versions": summary["versions"],
        "staleness_mean": summary["staleness"]["mean"],
        "staleness_max": summary["staleness"]["max"],
        "slow_weight": nan if weight is None else weight,
        "emulated_s": nan if summary["emulated_s"] is None else summary["emulated_s"],
        "trips_to_target": trips,
        "emulated_s_to_target": at_s,
    }


def common_target(runs: Sequence[Run]) -> float | None:
    """The highest accuracy that every run reached; None if some run has no evaluation."""
    best = [run.summary["best_accuracy"] for run in runs]
    return None if any(value is None for value in best) else min(best)


def reached(record: Record, target: float | None) -> tuple[float, float]:
    """Client trips and emulated seconds at the first evaluation that reached ``target``; NaN if none did."""
    for row in record.evaluations:
        # best_accuracy is rounded to six digits
        if target is not None and row.accuracy >= target - 1e-6:
            return float(row.trips), row.at_s
    return math.nan, math.nan


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and half the 95% interval of the mean (Student's t).

    >>> str(estimate([1.0, 2.0, 3.0])), str(estimate([0.5]))
    ('2 ±2.5', '0.5')
    """
    x = np.array(values, dtype=np.float64)
    mean = float(x.mean())
    if len(x) < 2 or not np.isfinite(mean):
        return Estimate(mean, None)
    t95 = float(stdtrit(len(x) - 1, 0.975))
    return Estimate(mean, t95 * float(x.std(ddof=1)) / math.sqrt(len(x)))


def group(runs: Sequence[Run]) -> list[RunGroup]:
    """Runs of one experiment under several seeds together; a seed that comes twice keeps its runs apart."""
    target = common_target(runs)
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kinds.setdefault(_kind(run), []).append(run)
    parts: list[list[Run]] = []
    for members in kinds.values():
        seeds = {run.record.meta.seed for run in members}
        parts.extend([members] if len(seeds) == len(members) else [[run] for run in members])
    names = [part[0].record.meta.strategy or part[0].folder.name for part in parts]
    rows = []
    for part, name in zip(parts, names, strict=True):
        label = name if names.count(name) == 1 else f"{name} {part[0].folder.name}"
        rows.append(run_group(label if len(part) == 1 else f"{label} ×{len(part)}", part, target))
    return rows


def run_group(label: str, runs: Sequence[Run], target: float | None) -> RunGroup:
    """The runs together, with each figure's mean over them."""
    each = [figures_of(run, target) for run in runs]
    return RunGroup(
        label,
        tuple(runs),
        {name: estimate([figures[name] for figures in each]) for name in FIGURES},
        all(run.summary["fidelity"]["valid"] for run in runs),
    )


def _kind(run: Run) -> str:
    meta = run.record.meta
    fleet = sorted((row.profile, row.network) for row in run.record.clients)
    fields = [meta.strategy, meta.strategy_fields, meta.clock, meta.partition, meta.model, meta.parameters]
    return json.dumps([*fields, fleet], sort_keys=True, default=str)


def share(value: Estimate) -> str:
    """An estimate of a share, in per cent."""
    if not np.isfinite(value.mean):
        return "–"
    return f"{value.mean:.1%}" if value.half is None else f"{value.mean * 100:.1f} ±{value.half * 100:.1f}%"


def count(value: Estimate) -> str:
    """An estimate of a count."""
    return "–" if not np.isfinite(value.mean) else f"{value.mean:,.0f}"
