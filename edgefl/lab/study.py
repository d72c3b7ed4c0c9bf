"""A reproduction: a study's settings, arms and seeds, its runs, the verdicts on its claims, the output."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.text import Text

from edgefl import config, toml
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.files import write_text
from edgefl.results import compare, page, tables
from edgefl.results.record import EvaluationRow, Record
from edgefl.results.run_folder import EXPERIMENT_FILE, SUMMARY_FILE
from edgefl.results.summary import applied_weight, rounded, slow_group, summarize
from edgefl.run.sweep import finished, warm

Verdict = Literal["reproduced", "not reproduced", "out of reach"]


class Finding(NamedTuple):
    """One claim, judged."""

    claim: str
    source: str
    """The claim's place in the paper."""
    paper: str
    """The paper's figure."""
    ours: str
    verdict: Verdict
    note: str = ""


def verdict(holds: bool) -> Verdict:
    return "reproduced" if holds else "not reproduced"


def above(mine: Sequence[float], other: Sequence[float]) -> bool:
    """Tells whether ``mine`` exceeds ``other`` in each seed: three of three are 1 in 8 by chance.

    >>> above([0.9, 0.8, 0.9], [0.7, 0.7, 0.8]), above([0.9, 0.6, 0.9], [0.7, 0.7, 0.8])
    (True, False)
    """
    pairs = list(zip(mine, other, strict=True))
    return bool(pairs) and all(a > b for a, b in pairs)


def first(
    mine: Sequence[float], other: Sequence[float], mine_end: Sequence[float], other_end: Sequence[float]
) -> Verdict:
    """The verdict on ``mine`` being there first in every seed; "out of reach" where a run ended too soon.

    Given is what it took each of them, NaN where it did not get there, and where its run ended.

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
    """Accuracies over seeds, in per cent: mean ± half the 95% interval."""
    return compare.share(compare.estimate(values))


def times(values: Sequence[float], base: Sequence[float]) -> str:
    """The ratio of means to that of ``base``, or the number of runs in which there is none.

    >>> times([300.0, 500.0], [100.0, 100.0]), times([math.nan, 2.0], [1.0, 1.0])
    ('4.0×', 'not there in 1 of 2 seeds, against 0 of 2')
    """
    missed, mine = (sum(map(math.isnan, row)) for row in (values, base))
    if missed or mine:
        return f"not there in {missed} of {len(values)} seeds, against {mine} of {len(base)}"
    return f"{sum(values) / sum(base):.1f}×"


LAST = 5
"""Evaluations at the end whose mean is the final accuracy: a single one swings by percents."""
Over = Literal["trips", "at_s"]
"""A run's cost until an evaluation: client trips or emulated seconds."""


class Curves:
    """The records of a study, by arm and seed.

    Each figure of an arm comes as one value a seed, in the order of the seeds, so that they can be paired;
    NaN where a run has none.
    """

    def __init__(self, records: Mapping[str, Sequence[Record]]) -> None:
        self.records = {label: tuple(found) for label, found in records.items()}

    def _each(self, label: str, figure: Callable[[list[EvaluationRow]], float]) -> list[float]:
        runs = [record.evaluations for record in self.records[label]]
        return [float(figure(rows)) if rows else math.nan for rows in runs]

    def accuracy(self, label: str, last: int = LAST) -> list[float]:
        """The mean over the last evaluations, or with 0 over all: who learns sooner has more."""
        return self._each(label, lambda rows: fmean(row.accuracy for row in rows[-last:]))

    def best(self, label: str) -> list[float]:
        """The best accuracy at any evaluation."""
        return self._each(label, lambda rows: max(row.accuracy for row in rows))

    def reached(self, label: str, target: float, over: Over) -> list[float]:
        """Client trips or emulated seconds until the first evaluation that reached ``target``."""
        found = [compare.reached(record, target) for record in self.records[label]]
        return [trips if over == "trips" else at_s for trips, at_s in found]

    def ended(self, label: str, over: Over) -> list[float]:
        """Client trips or emulated seconds until the last evaluation."""
        return self._each(label, lambda rows: getattr(rows[-1], over))

    def race(self, mine: str, other: str, target: float, over: Over) -> tuple[Verdict, str]:
        """The verdict on ``mine`` reaching the target first, see `first`; a note where it is not settled."""
        reached = [self.reached(label, target, over) for label in (mine, other)]
        found = first(*reached, *(self.ended(label, over) for label in (mine, other)))
        unsettled = "runs ended before this was settled: more stop.trips"
        return found, unsettled if found == "out of reach" else ""

    def staleness(self, label: str) -> list[float]:
        """Mean staleness of the updates that arrived."""
        out = []
        for trips in (record.trips for record in self.records[label]):
            known = trips["staleness"][(trips["staleness"] >= 0) & ~np.isnan(trips["arrived_s"])]
            out.append(float(known.mean()) if len(known) else math.nan)
        return out

    def weights(self, label: str, profile: str) -> list[float]:
        """Mean share of applied weight of a client of ``profile``, times n: 1 is fair."""
        out = []
        for record in self.records[label]:
            share = applied_weight(record)
            mine = [share.get(row.client, 0.0) for row in record.clients if row.profile == profile]
            out.append(fmean(mine) if mine else math.nan)
        return out

    def target(self, label: str) -> float:
        """The accuracy that the arm's runs were to stop at."""
        (record, *_) = self.records[label]
        target = config.load(record.folder / EXPERIMENT_FILE).stop.accuracy
        assert target is not None, "the settings stop at a target accuracy"
        return target


SEEDS = (1, 2, 3)
IN_SMALL = "In small (--quick): scikit-learn's digits and an MLP, whatever is said of data and models."


@dataclass(frozen=True)
class Arm:
    """One algorithm of a comparison, as what it changes in the settings."""

    label: str
    changes: tuple[str, ...]
    """As ``edgefl run --set`` takes them."""
    full: tuple[str, ...] = ()
    """Further changes at the paper's own size, such as the steps that the paper tuned there."""
    quick: tuple[str, ...] = ()
    """Further changes with ``--quick``."""


@dataclass(frozen=True)
class Study:
    """One paper's comparison."""

    name: str
    """Also the name of its settings in ``experiments/papers``; those of ``--quick`` end in ``-quick``."""
    title: str
    citation: str
    arms: tuple[Arm, ...]
    judge: Callable[[Curves], Sequence[Finding]]
    notes: tuple[str, ...] = ()
    """Differences from the paper, and their reasons."""
    seeds: tuple[int, ...] = SEEDS
    changes: tuple[str, ...] = ()
    """A user's changes of the settings of every arm, as ``edgefl run --set`` takes them."""

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
        return _folder() / f"{self.name}{'-quick' if quick else ''}.toml"

    def run(self, out: Path, *, quick: bool, say: Callable[[str], None]) -> Curves:
        """Make every run that is not in ``out`` yet; returns what they recorded.

        Raises `ConfigError` where the data is not there, `RunError` where a run could not go on, and
        KeyboardInterrupt after Ctrl-C: the same command then goes on from there.
        """
        records: dict[str, list[Record]] = {arm.label: [] for arm in self.arms}
        runs = [(arm, seed) for seed in self.seeds for arm in self.arms]
        with warm() as fork_server:
            for number, (arm, seed) in enumerate(runs, 1):
                folder = out / "runs" / f"{slug(arm)}-{seed}"
                wanted = self.experiment(arm, seed, quick=quick)
                base = self.file(quick).parent
                figures = finished(wanted, folder, base, fork_server).summary()
                accuracy = figures["accuracy"]
                found = "no accuracy" if accuracy is None else f"accuracy {accuracy:.1%}"
                say(
                    f"{number:>3} of {len(runs)}  {arm.label}, seed {seed}: {found}, "
                    f"{figures['client_trips']:,} trips, {figures['wall_s']:.0f} s"
                )
                records[arm.label].append(Record(folder))
        return Curves(records)


def _folder() -> Path:
    with contextlib.suppress(ModuleNotFoundError):
        found = Path(str(resources.files("edgefl._experiments"))) / "papers"
        if found.is_dir():
            return found
    return Path(__file__).parents[2] / "experiments" / "papers"


def slug(arm: Arm) -> str:
    """The arm's name as a folder's.

    >>> slug(Arm("FedBuff, K = 10", ()))
    'fedbuff-k-10'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in arm.label.lower()).split())


# ---- output ----------------------------------------------------------------------------------

COLOURS = {"reproduced": "green", "not reproduced": "bold red", "out of reach": "yellow"}


def verdict_table(findings: Sequence[Finding]) -> tables.FittedTable:
    """The claims for a terminal of 80 columns."""
    cells = []
    for one in findings:
        ours = one.ours + (f"\n({one.note})" if one.note else "")
        cells.append((one.claim, one.paper, ours, Text(one.verdict, COLOURS[one.verdict])))
    return tables.table(("claim", "paper", "here", "verdict"), cells, fold=True)


def write_report(
    out: Path,
    title: str,
    citation: str,
    findings: Sequence[Finding],
    *,
    curves: Curves | None = None,
    notes: Sequence[str] = (),
    extra: dict[str, Any] | None = None,
) -> None:
    """Write ``summary.json`` and ``report.html`` into ``out``."""
    records = {} if curves is None else curves.records
    slow = slow_group(next(iter(records.values()))[0]).labels if records else ()
    arms = {
        label: [compare.Run(each.folder, each, summarize(each), slow) for each in found]
        for label, found in records.items()
    }
    target = compare.common_target([run for runs in arms.values() for run in runs]) if arms else None
    rows = [compare.run_group(label, runs, target) for label, runs in arms.items()]
    document = {
        "title": title,
        "citation": citation,
        **(extra or {}),
        "target_accuracy": rounded(target),
        "findings": [one._asdict() for one in findings],
        "arms": {
            row.label: {
                "seeds": [run.record.meta.seed for run in row.runs],
                "model_sha256": [run.summary["model_sha256"] for run in row.runs],
                "figures": row.estimates(),
            }
            for row in rows
        },
        "notes": list(notes),
    }
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(out / SUMMARY_FILE, text + "\n")
    write_text(out / "report.html", _page(title, citation, findings, rows, notes))


def _page(
    title: str,
    citation: str,
    findings: Sequence[Finding],
    rows: Sequence[compare.RunGroup],
    notes: Sequence[str],
) -> str:
    counts = [(each, sum(one.verdict == each for one in findings)) for each in COLOURS]
    tones = {"reproduced": "good", "not reproduced": "bad"}
    lines = "Thin: each seed; thick: their mean."
    pictures = (
        [
            page.figure("Accuracy over client trips", lines, compare.draw_accuracy(rows, "trips")),
            page.figure("Accuracy over emulated time", lines, compare.draw_accuracy(rows, "at_s")),
            *compare.profile_cards(rows),
        ]
        if rows
        else []
    )
    head = ["Claim", "Paper", "Here", "Verdict", "Source and note"]
    claims = [
        [one.claim, one.paper, one.ours, one.verdict, "; ".join(filter(None, (one.source, one.note)))]
        for one in findings
    ]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return page.page(
        "edgefl reproduction",
        title,
        citation,
        [
            page.stat(name.capitalize(), str(count), "of the claims", tones.get(name, "") if count else "")
            for name, count in counts
        ],
        {
            "Claims": [page.card("", "", tables.html_table(head, claims, wrap=(0, 1, 2, 4)))],
            "Pictures": pictures,
            "What differs from the paper": [page.card("", "", f"<ul>{items}</ul>")] if notes else [],
        },
        "Times are emulated seconds; ± is half the 95% interval of the mean over seeds.",
    )
