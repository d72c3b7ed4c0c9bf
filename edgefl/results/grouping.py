"""Load the runs of a comparison, group those that differ only in their seed, and average each group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edgefl import toml
from edgefl.errors import ConfigError
from edgefl.experiment import NO_PROGRESS
from edgefl.results.groups import Group, applied_weight, label_accuracy, profile_of, slow_group
from edgefl.results.record import Record
from edgefl.results.statistics import Estimate, estimate
from edgefl.results.summary import measures, rounded, summarize
from edgefl.results.targets import COSTS, RaceTarget, ToTarget, settings_of, target_of, to_target

NO_RESULT = ("name", "seed", "checkpoint", "clock.workers", "server.transport")
"""Keys and tables of an experiment that are ignored when runs are grouped: the seed, and settings that have
no effect on the results."""
LONGEST = 60
"""Maximum number of characters in a label that lists settings. In a longer label, the name of the run's
folder replaces the settings."""
FIGURES = ("accuracy", "loss", "slow_accuracy", "client_trips", "versions", "staleness_mean", "staleness_max",
           "slow_weight", "emulated_s", "trips_to_target", "emulated_s_to_target")  # fmt: skip
"""Names of the metrics that are averaged over seeds and compared."""
UNFINISHED = "unfinished"
"""Verdict on a run that was interrupted or killed, or is still running."""
SPLIT = ("evaluate_on", "test_split", "test_fraction", "validation_fraction", "image_size")
"""Keys of ``[data]`` that select and prepare the examples on which the global model is measured."""


class Run(NamedTuple):
    """One run of a comparison."""

    folder: Path
    record: Record
    summary: dict[str, Any]
    slow: Group
    """The slow profiles, and the classes that only their clients have: see `slow_group`.

    All runs of a comparison have the same slow profiles and classes.
    """

    @property
    def finished(self) -> bool:
        return self.record.meta.status == "done"

    @property
    def ranked(self) -> bool:
        """True if the run ended and its model made progress, so that it can be compared with other runs."""
        return self.finished and not self.summary["no_progress"]


class RunGroup(NamedTuple):
    """Runs that differ only in their seed: one row of the comparison."""

    label: str
    runs: tuple[Run, ...]
    figures: dict[str, Estimate]
    each: tuple[dict[str, float], ...]
    """The metrics of each run."""
    valid: bool
    to_target: ToTarget | None = None
    """The runs' costs of reaching the comparison's target, in emulated time and client trips."""

    def estimates(self) -> dict[str, Any]:
        """Return, for JSON, the mean of each metric and half the width of the mean's 95% interval."""
        return {k: {"mean": rounded(f.mean), "half_95": rounded(f.half)} for k, f in self.figures.items()}

    @property
    def ranked(self) -> bool:
        """True if all runs ended and their models made progress, so that the row can be ranked."""
        return all(run.ranked for run in self.runs)

    @property
    def stuck(self) -> bool:
        """True if the model of at least one run made no progress."""
        return any(run.summary["no_progress"] for run in self.runs)

    @property
    def verdict(self) -> str:
        """The verdict on the row: VALID or INVALID.

        Under the virtual clock, which measures no times, the verdict is ``computed`` instead of VALID. It is
        `NO_PROGRESS` if a run learned nothing, and `UNFINISHED` if a run has not ended; such a row is
        not ranked.
        """
        if self.stuck:
            return NO_PROGRESS
        if not self.ranked:
            return UNFINISHED
        if not self.valid:
            return "INVALID"
        return "computed" if all(run.record.meta.clock == "virtual" for run in self.runs) else "VALID"


def load(folders: Sequence[str | Path]) -> list[Run]:
    """Load the runs. Raises `ConfigError` if they cannot be compared."""
    if not folders:
        raise ConfigError("nothing to compare: name at least one run's folder")
    paths = [Path(folder) for folder in folders]
    real = [path.resolve() for path in paths]
    for place, path in enumerate(paths):
        if real[place] in real[:place]:
            raise ConfigError(f"run {path} is named twice")
    records = [Record(path) for path in paths]
    first = _data(records[0])
    for path, record in zip(paths, records, strict=True):
        for what, mine in _data(record).items():
            if None not in (mine, first[what]) and mine != first[what]:
                raise ConfigError(
                    f"runs on different data cannot be compared: {path} has {what} = {mine}, "
                    f"{paths[0]} has {first[what]}"
                )
    slow = slow_group(*records)
    return [Run(path, record, summarize(record), slow) for path, record in zip(paths, records, strict=True)]


def _data(record: Record) -> dict[str, Any]:
    """Return the properties of the data that must be equal in all runs; None for an unknown property."""
    classes = len(record.evaluations[0].total) if record.evaluations else 0
    known = {"data": record.meta.data, "test examples": record.meta.test_examples, "classes": classes}
    data = settings_of(record).tables.get("data", {})
    split = {f"data.{key}": data.get(key) for key in SPLIT}
    return {**{name: value or None for name, value in known.items()}, **split}


def goal_of(runs: Sequence[Run], given: float | None = None) -> RaceTarget | None:
    """Return the comparison's target, which `targets.target_of` derives from the ranked runs."""
    return target_of([run.record for run in runs if run.ranked], given)


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each row, which differ only in their seed, keyed by the row's label.

    If two runs of a row would have the same seed, each of its runs gets a separate row.
    """
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kinds.setdefault(kind(run.record), []).append(run)
    parts: list[list[Run]] = []
    for members in kinds.values():
        seeds = {run.record.meta.seed for run in members}
        parts.extend([members] if len(seeds) == len(members) else [[run] for run in members])
    names = labels([part[0].record for part in parts])
    return {
        label if len(part) == 1 else f"{label} ×{len(part)}": part
        for label, part in zip(names, parts, strict=True)
    }


def rows_of(runs: Mapping[str, Sequence[Run]], target: RaceTarget | None = None) -> list[RunGroup]:
    """Return one row per label, with the runs' mean of each metric and their cost of reaching the target."""
    rows: list[RunGroup] = []
    first: list[Record] = []
    for label, part in runs.items():
        records = [run.record for run in part]
        first = first or records
        passed = None if target is None else to_target(target, records, first)
        each = tuple(_figures(run, passed, place) for place, run in enumerate(part))
        names = dict.fromkeys(name for found in each for name in found)
        figures = {name: estimate([found.get(name, nan) for found in each]) for name in names}
        valid = all(run.summary["fidelity"]["valid"] for run in part)
        rows.append(RunGroup(label, tuple(part), figures, each, valid, passed))
    return rows


def _figures(run: Run, passed: ToTarget | None, place: int) -> dict[str, float]:
    """Return the run's `FIGURES` and the user's metrics; a missing value is NaN.

    ``place`` is the index of the run in ``passed``.
    """
    summary, evaluations = run.summary, run.record.evaluations
    weight = applied_weight(run.record)
    theirs = weight.shares[np.isin(profile_of(run.record, weight.clients), run.slow.profiles)]
    plain = ("accuracy", "loss", "client_trips", "versions", "emulated_s")
    found = (
        measures(summary)
        | {name: summary[name] for name in plain}
        | {
            "slow_accuracy": label_accuracy(evaluations[-1], run.slow.labels) if evaluations else nan,
            "staleness_mean": summary["staleness"]["mean"],
            "staleness_max": summary["staleness"]["max"],
            "slow_weight": float(theirs.mean()) if len(theirs) else nan,
        }
        | {name: nan if passed is None else passed.costs[over][place] for over, name in COSTS.items()}
    )
    return {name: nan if found[name] is None else found[name] for name in (*FIGURES, *measures(summary))}


def own_names(rows: Sequence[RunGroup]) -> list[str]:
    """Return the names of the user's metrics: all metrics besides `FIGURES`."""
    return list(dict.fromkeys(name for row in rows for name in row.figures if name not in FIGURES))


def settings(record: Record) -> dict[str, Any]:
    """Return the settings that affect the run's results, keyed by dotted name.

    They include all fields of the run's strategy.
    """
    tables = settings_of(record).tables
    strategy = {**tables.get("strategy", {}), **record.meta.strategy_fields}
    found = dict(toml.flat({**tables, "strategy": strategy}))
    if "data.path" in found:  # the same data may have been copied to another folder
        found["data.path"] = Path(str(found["data.path"])).name
    dropped = tuple(f"{name}." for name in NO_RESULT)
    kept = (key for key, value in found.items() if value is not None and not f"{key}.".startswith(dropped))
    return {key: found[key] for key in kept}


def kind(record: Record) -> str:
    """Return a key that is equal for runs that differ only in their seed."""
    meta = record.meta
    parts = [meta.strategy, meta.clock, meta.partition, meta.model, meta.parameters, record.kinds()]
    parts += [msgspec.structs.asdict(meta.privacy)] if meta.privacy is not None else []
    return json.dumps([*parts, settings(record)], sort_keys=True, default=str)


def labels(records: Sequence[Record]) -> list[str]:
    """Return a label for each row of a comparison, given one record per row.

    A label is the strategy's name, or the folder's name if there is no strategy. Rows with the same name are
    distinguished by the settings in which they differ, or by their folders if they differ in no setting or in
    too many settings.
    """
    names = [record.meta.strategy or record.folder.absolute().name for record in records]
    found = list(names)
    for name in dict.fromkeys(names):
        places = [place for place, each in enumerate(names) if each == name]
        if len(places) > 1:
            same = [records[place] for place in places]
            for place, label in zip(places, _apart(name, same), strict=True):
                found[place] = label
    return [
        label if found.index(label) == place else str(records[place].folder)
        for place, label in enumerate(found)
    ]


def _apart(name: str, records: Sequence[Record]) -> list[str]:
    """Return labels that distinguish rows with the same name."""
    every = [settings(record) for record in records]
    names = dict.fromkeys(key for each in every for key in each)
    keys = [key for key in names if any(each.get(key) != every[0].get(key) for each in every)]
    last = [key.rpartition(".")[2] for key in keys]
    short = {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}
    found = []
    for each in every:
        inner = ", ".join(f"{short[key]}={_text(each[key])}" for key in keys if key in each)
        found.append(f"{name} ({inner})" if inner else name)
    if len({*found}) == len(found) and max(map(len, found)) <= LONGEST:
        return found
    return [f"{name} {record.folder.absolute().name}" for record in records]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else toml.literal(value)
