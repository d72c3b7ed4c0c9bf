"""A reproduction: a study's settings, arms and seeds, its runs, and the verdicts on its claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from edgefl import config, toml
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.results.comparison import estimate, reached
from edgefl.results.measures import applied_weight
from edgefl.results.record import Record
from edgefl.results.run_folder import EXPERIMENT_FILE, Result
from edgefl.run import supervisor

Verdict = Literal["reproduced", "not reproduced", "out of reach"]

TOO_SHORT = "runs ended before this was settled: more stop.trips"
"""Beside the verdict of `first` that it is out of reach."""


class Finding(NamedTuple):
    """One claim, judged."""

    claim: str
    source: str
    """Where the paper says so."""
    paper: str
    """The paper's figure."""
    ours: str
    verdict: Verdict
    note: str = ""


def verdict(holds: bool) -> Verdict:
    """In words."""
    return "reproduced" if holds else "not reproduced"


def above(mine: Sequence[float], other: Sequence[float], margin: float = 0.0) -> bool:
    """Whether ``mine`` exceeds ``other`` by more than ``margin`` in the mean over seeds, and in each seed.

    Seeds are paired: with three of them an interval of the mean is wide, but three of three is 1 in 8 by
    chance, and the mean says how much.

    >>> above([0.9, 0.8, 0.9], [0.7, 0.7, 0.8]), above([0.9, 0.6, 0.9], [0.7, 0.7, 0.8])
    (True, False)
    """
    pairs = list(zip(mine, other, strict=True))
    return bool(pairs) and all(a - b > margin for a, b in pairs)


def first(
    mine: Sequence[float], other: Sequence[float], mine_end: Sequence[float], other_end: Sequence[float]
) -> Verdict:
    """Whether ``mine`` was there first in every seed; "out of reach" where a run ended too soon to tell.

    What it took each of them, NaN where it did not get there, and where its run ended.

    >>> nan = math.nan
    >>> first([1.0, 2.0], [3.0, nan], [9.0, 9.0], [9.0, 9.0]), first([nan], [3.0], [9.0], [9.0])
    ('reproduced', 'not reproduced')
    >>> first([nan], [nan], [9.0], [9.0]), first([2.0], [nan], [9.0], [1.0])
    ('out of reach', 'out of reach')
    >>> first([nan], [3.0], [2.0], [9.0])
    'out of reach'
    """
    settled = True
    for a, b, a_end, b_end in zip(mine, other, mine_end, other_end, strict=True):
        if b <= a or (math.isnan(a) and b <= a_end):
            return "not reproduced"
        settled = settled and (a < b or (math.isnan(b) and a <= b_end))
    return "reproduced" if settled else "out of reach"


def share(values: Sequence[float]) -> str:
    """Accuracies over seeds, in per cent: mean ± half the 95% interval.

    >>> share([0.90, 0.91, 0.92])
    '91.0 ±2.5%'
    """
    found = estimate(values)
    return f"{found.mean:.1%}" if found.half is None else f"{found.mean * 100:.1f} ±{found.half * 100:.1f}%"


def times(values: Sequence[float], base: Sequence[float]) -> str:
    """How many times more than ``base``: the ratio of means, or in how many runs there is none.

    >>> times([300.0, 500.0], [100.0, 100.0]), times([math.nan, 2.0], [1.0, 1.0])
    ('4.0×', 'not there in 1 of 2 seeds, against 0 of 2')
    """
    missed, mine = (sum(map(math.isnan, row)) for row in (values, base))
    if missed or mine:
        return f"not there in {missed} of {len(values)} seeds, against {mine} of {len(base)}"
    return f"{sum(values) / sum(base):.1f}×"


LAST = 5
"""Evaluations at the end whose mean is the final accuracy: a single one swings by percents."""


class Curves:
    """The records of a study, by arm and seed.

    Accuracies and counts come as one value a seed, in the order of the seeds, so that they can be paired.
    """

    def __init__(self, records: Mapping[str, Sequence[Record]]) -> None:
        self.records = {label: tuple(found) for label, found in records.items()}

    def accuracy(self, label: str) -> list[float]:
        """Final accuracy: the mean over the last evaluations."""
        out = []
        for record in self.records[label]:
            values = [row.accuracy for row in record.evaluations[-LAST:]]
            out.append(float(np.mean(values)) if values else math.nan)
        return out

    def mean_accuracy(self, label: str) -> list[float]:
        """Mean accuracy over all evaluations: who learns sooner has more."""
        return [
            float(np.mean([row.accuracy for row in record.evaluations])) if record.evaluations else math.nan
            for record in self.records[label]
        ]

    def best(self, label: str) -> list[float]:
        """The best accuracy at any evaluation."""
        return [
            max((row.accuracy for row in record.evaluations), default=math.nan)
            for record in self.records[label]
        ]

    def trips_to(self, label: str, target: float) -> list[float]:
        """Client trips until the first evaluation that reached ``target``; NaN where none did."""
        return [reached(record, target)[0] for record in self.records[label]]

    def seconds_to(self, label: str, target: float) -> list[float]:
        """Emulated seconds until the first evaluation that reached ``target``; NaN where none did."""
        return [reached(record, target)[1] for record in self.records[label]]

    def ended_s(self, label: str) -> list[float]:
        """Emulated seconds until the last evaluation; NaN where there is none."""
        return [
            record.evaluations[-1].at_s if record.evaluations else math.nan for record in self.records[label]
        ]

    def ended_trips(self, label: str) -> list[float]:
        """Client trips until the last evaluation; NaN where there is none."""
        return [
            float(record.evaluations[-1].trips) if record.evaluations else math.nan
            for record in self.records[label]
        ]

    def staleness(self, label: str) -> list[float]:
        """Mean staleness of the updates that arrived."""
        out = []
        for record in self.records[label]:
            trips = record.trips
            known = (trips["staleness"] >= 0) & ~np.isnan(trips["arrived_s"])
            out.append(float(trips["staleness"][known].mean()) if known.any() else math.nan)
        return out

    def weights(self, label: str, profile: str) -> list[float]:
        """Mean share of applied weight of a client of ``profile``, times n: 1 is fair."""
        out = []
        for record in self.records[label]:
            share = applied_weight(record)
            mine = [share.get(row.client, 0.0) for row in record.clients if row.profile == profile]
            out.append(float(np.mean(mine)) if mine else math.nan)
        return out

    def target(self, label: str) -> float:
        """The accuracy that the arm's runs were to stop at."""
        (record, *_) = self.records[label]
        target = config.load(record.folder / EXPERIMENT_FILE).stop.accuracy
        assert target is not None, "the settings stop at a target accuracy"
        return target


SEEDS = (1, 2, 3)
IN_SMALL = "In small (--quick): scikit-learn's digits and an MLP, whatever is said of data and models."

Judge = Callable[[Curves], Sequence[Finding]]


@dataclass(frozen=True)
class Arm:
    """One algorithm of a comparison: what it changes in the settings."""

    label: str
    changes: tuple[str, ...]
    """As ``edgefl run --set`` takes them."""
    full: tuple[str, ...] = ()
    """What else it changes at the paper's own size, such as the steps that the paper tuned there."""
    quick: tuple[str, ...] = ()
    """What else it changes with ``--quick``."""


@dataclass(frozen=True)
class Study:
    """One paper's comparison."""

    name: str
    title: str
    citation: str
    settings: str
    """File name in ``experiments/papers``; with ``-quick`` before its ending, the one of ``--quick``."""
    arms: tuple[Arm, ...]
    judge: Judge
    notes: tuple[str, ...] = ()
    """What differs from the paper, and why."""
    seeds: tuple[int, ...] = field(default=SEEDS)
    changes: tuple[str, ...] = ()
    """What a user changes in the settings of every arm, as ``edgefl run --set`` takes it."""

    def remarks(self, quick: bool) -> tuple[str, ...]:
        """The notes of a comparison at the paper's size, or in small."""
        return (*self.notes, IN_SMALL) if quick else self.notes

    def changed(self, changes: Sequence[str]) -> Study:
        """The same comparison under other settings. ConfigError for one that tells the arms apart."""
        for change in changes:
            keys, _ = toml.assignment(change)
            if keys == ("seed",):
                raise ConfigError(
                    f"--set {change}: every arm runs with seeds {', '.join(map(str, self.seeds))}"
                )
            for arm in self.arms:
                for own, _ in map(toml.assignment, (*arm.changes, *arm.full, *arm.quick)):
                    if own[: len(keys)] == keys[: len(own)] or own == config.ONE_OF.get(keys):
                        what = f"{'.'.join(own)} is what tells {arm.label} from the other arms"
                        raise ConfigError(f"--set {change}: {what}")
        note = (f"Changed by --set in every run: {', '.join(changes)}.",) if changes else ()
        return replace(self, changes=tuple(changes), notes=(*self.notes, *note))

    def experiment(self, arm: Arm, seed: int, *, quick: bool) -> Experiment:
        """The run of one arm and seed."""
        steps = arm.quick if quick else arm.full
        made = config.load(self.file(quick), (*arm.changes, *steps, *self.changes), seed=seed)
        if made.stop.accuracy is None and config.load(self.file(quick)).stop.accuracy is not None:
            given = " ".join(f"--set {change}" for change in self.changes)
            raise ConfigError(f"{given}: takes stop.accuracy away, the target that the claims are about")
        return made

    def file(self, quick: bool) -> Path:
        """The settings, as they lie in the package or beside it in a source tree."""
        name = self.settings.replace(".toml", "-quick.toml") if quick else self.settings
        return folder() / name


def folder() -> Path:
    """Where the papers' settings are."""
    try:
        found = Path(str(resources.files("edgefl._experiments"))) / "papers"
    except ModuleNotFoundError:
        found = Path(__file__).parents[2] / "experiments" / "papers"
    return found if found.is_dir() else Path(__file__).parents[2] / "experiments" / "papers"


Say = Callable[[str], None]


def run_study(study: Study, out: Path, *, quick: bool, say: Say) -> Curves:
    """Make every run that is not in ``out`` yet; returns what they recorded.

    Raises `ConfigError` where the data is not there, `RunError` where a run could not go on, and
    KeyboardInterrupt after Ctrl-C: the same command then goes on from there.
    """
    records: dict[str, list[Record]] = {}
    total, number = len(study.arms) * len(study.seeds), 0
    for seed in study.seeds:
        for arm in study.arms:
            number += 1
            wanted = study.experiment(arm, seed, quick=quick)
            folder = out / "runs" / f"{slug(arm)}-{seed}"
            result = _one(wanted, folder, study.file(quick).parent)
            figures = result.summary()
            accuracy = figures["accuracy"]
            found = "no accuracy" if accuracy is None else f"accuracy {accuracy:.1%}"
            say(
                f"{number:>3} of {total}  {arm.label}, seed {seed}: {found}, "
                f"{figures['client_trips']:,} trips, {figures['wall_s']:.0f} s"
            )
            records.setdefault(arm.label, []).append(Record(folder))
    return Curves(records)


def slug(arm: Arm) -> str:
    """The arm's name as a folder's.

    >>> slug(Arm("FedBuff, K = 10", ()))
    'fedbuff-k-10'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in arm.label.lower()).split())


def _one(wanted: Experiment, folder: Path, base: Path) -> Result:
    """The finished run of an experiment in ``folder``: as it is there, resumed, or made."""
    file = folder / EXPERIMENT_FILE
    checked = config.validate(wanted, base)
    if file.is_file():
        if config.dump(config.load(file)) != config.dump(checked):
            raise ConfigError(f"{folder} holds a run with other settings; give another --out, or remove it")
        if _done(folder):
            return Result(folder)
        return supervisor.resume(folder, quiet=True)
    return supervisor.run(wanted, folder, quiet=True, base=base)


def _done(folder: Path) -> bool:
    try:
        with Record(folder) as record:
            return record.meta.status == "done"
    except ConfigError:  # killed before its record was whole
        return False
