"""The reproduction of a paper: its settings, arms (algorithms to compare), seeds, runs, curves and report."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.text import Text

from edgefl import config, toml
from edgefl.errors import ConfigError, unknown
from edgefl.experiment import Experiment
from edgefl.files import write_json, write_text
from edgefl.results import compare, grouping, page, statistics, tables
from edgefl.results.groups import applied_weight, profile_of, slow_group
from edgefl.results.pictures import AXES, curves_picture
from edgefl.results.record import Record
from edgefl.results.run_folder import SUMMARY_FILE
from edgefl.results.statistics import Over
from edgefl.results.summary import rounded, summarize
from edgefl.results.targets import RaceTarget, settings_of, target_of, window_of
from edgefl.run.lanes import finished
from edgefl.run.sweep import warm

Verdict = Literal[
    "reproduced", "holds", "smaller", "not reproduced", "not settled", "same runs", "out of reach"
]
"""Verdicts on a claim. ``holds`` means that a mutant, a deliberately wrong implementation, also reproduces
the claim (`edgefl.lab.claims`)."""


class Finding(NamedTuple):
    """A claim in a paper, our result and our verdict on the claim."""

    claim: str
    source: str
    """Place in the paper where the claim is made."""
    paper: str
    """The result in the paper, as text."""
    ours: str
    verdict: Verdict
    note: str = ""
    mine: tuple[str, ...] = ()
    """Labels of the arms (algorithms) that the claim is about; mutants (wrong versions) take their place."""
    others: tuple[str, ...] = ()
    """Labels of the arms with which the arms ``mine`` are compared."""
    p: float | None = None
    """One-sided p-value, paired over seeds; None if the claim is judged without a statistical test."""
    survives: bool | None = None
    """True if the p-value passes the correction for multiple tests over all claims of the study."""
    family: str = ""
    """Key in `edgefl.lab.mutants.MUTANTS` of the mutants to run for this claim; "" stands for the strategy of
    the arm."""
    mutants: Mapping[str, Verdict] = {}
    """Verdict on the claim for each mutant that was run in place of the arms, keyed by the mutant's label."""

    @property
    def says(self) -> str:
        """The verdict as text, with the mutants that also pass, or with a note that no mutants were run.

        >>> Finding("", "", "", "", "holds", mutants={"α²": "reproduced", "α^¼": "smaller"}).says
        'holds, does not distinguish: α²'
        >>> Finding("", "", "", "", "reproduced", mine=("FedBuff",)).says
        'reproduced (mutants not run)'
        """
        if self.verdict == "holds":
            return f"holds, does not distinguish: {', '.join(self.undistinguished)}"
        untried = self.verdict == "reproduced" and self.mine and not self.mutants
        return f"{self.verdict} (mutants not run)" if untried else self.verdict

    @property
    def undistinguished(self) -> list[str]:
        """Labels of mutants with which the claim is also reproduced, or whose runs ended too early."""
        return [label for label, found in self.mutants.items() if found in ("reproduced", "out of reach")]

    @property
    def remark(self) -> str:
        """The note, the mutants with which the claim fails, and the p-value, as one text."""
        failing = [label for label in self.mutants if label not in self.undistinguished]
        parts = [self.note, f"fails with {', '.join(failing)}" if failing else ""]
        if self.p is not None and self.verdict in HOLDING:
            parts.append(f"p = {self.p:.2g}{'' if self.survives else ', does not survive the correction'}")
        return "; ".join(filter(None, parts))


HOLDING = ("reproduced", "holds", "smaller")
"""Verdicts that confirm an effect. If the claim is tested statistically, the confidence interval must exclude
a chance effect."""


def verdict(holds: bool) -> Verdict:
    return "reproduced" if holds else "not reproduced"


def share(values: Sequence[float]) -> str:
    """Format the mean of accuracies over seeds ± half the 95% interval, as percentages."""
    return statistics.share(statistics.estimate(values))


LAST = statistics.WINDOW
"""Number of evaluations at the end of a run over which the final accuracy is averaged."""


class Curves:
    """The records of all runs of a study, for each arm (algorithm) and seed.

    Each metric of an arm is a list with one value per seed, in the order of the seeds, so that arms can be
    paired by seed. The value is NaN if a run does not provide the metric.
    """

    def __init__(self, records: Mapping[str, Sequence[Record]], settings: str = "") -> None:
        self.records = {label: tuple(found) for label, found in records.items()}
        self.settings = settings
        """Name of the settings of these runs."""

    def hashes(self, label: str) -> list[str]:
        """Return, for each run of the arm, the hash of its final model."""
        return [record.meta.model_sha256 for record in self.records[label]]

    def twin(self, label: str) -> str:
        """Return the first other arm whose final models equal those of the arm ``label`` for every seed.

        Returns "" if there is no such arm.
        """
        mine = self.hashes(label)
        return next((other for other in self.records if self.hashes(other) == mine and other != label), "")

    def accuracy(self, label: str, last: int = LAST) -> list[float]:
        """Return, for each run, the mean accuracy over the ``last`` evaluations (0: over all evaluations).

        A mean over all evaluations also rewards fast learning.
        """
        runs = [record.evaluations for record in self.records[label]]
        return [fmean(row.accuracy for row in rows[-last:]) if rows else math.nan for rows in runs]

    def reached(self, label: str, target: float, over: Over) -> list[float]:
        """Return, for each run, the cost at which the smoothed accuracy reached ``target``.

        ``over`` selects the cost: client trips, emulated seconds or versions.
        """
        return [_race_target(record, target).reached(record, over) for record in self.records[label]]

    def ended(self, label: str, over: Over) -> list[float]:
        """Return, for each run, the cost at the end of the smoothed curve, or 0 if the curve is empty."""
        return [_race_target(record, 1.0).curve(record, over).end for record in self.records[label]]

    def race(self, mine: str, other: str, target: float, over: Over) -> statistics.CostRatio | None:
        """Return the ratio of two arms' costs of reaching ``target``: that of ``other`` divided by ``mine``.

        The result is None if runs ended too early, or if a run's first model already reached the target.
        ``over`` selects the cost as in `reached`.
        """
        reached = [self.reached(label, target, over) for label in (other, mine)]
        return statistics.ratio(*reached, *(self.ended(label, over) for label in (other, mine)))

    def staleness(self, label: str) -> list[float]:
        """Return, for each run, the mean staleness of updates on arrival."""
        out = []
        for trips in (record.trips for record in self.records[label]):
            known = trips["staleness"][(trips["staleness"] >= 0) & ~np.isnan(trips["arrived_s"])]
            out.append(float(known.mean()) if len(known) else math.nan)
        return out

    def weights(self, label: str, profile: str) -> list[float]:
        """Return, for each run, the mean share of the applied weight per client with ``profile``, times n.

        Here, n is the number of all clients; a value of 1 is fair.
        """
        out = []
        for record in self.records[label]:
            clients, share = applied_weight(record)
            mine = share[profile_of(record, clients) == profile]
            theirs = int((record.fleet["profile"] == profile).sum())
            out.append(fmean(mine.tolist()) if len(mine) else 0.0 if theirs else math.nan)
        return out

    def target(self, label: str) -> float:
        """Return the target accuracy at which runs of the arm (algorithm) stop."""
        (record, *_) = self.records[label]
        target = settings_of(record).stop.accuracy
        assert target is not None, "the settings stop at a target accuracy"
        return target


def _race_target(record: Record, target: float) -> RaceTarget:
    """Return the target accuracy for a run.

    Accuracies are smoothed over at most as many evaluations as in the rule that ends the run.
    """
    return RaceTarget(target, "", window=window_of(settings_of(record).stop))


SEEDS = (1, 2, 3)
QUICK = "quick"
"""Name of the settings with which runs take only minutes."""
IN_SMALL = "--quick: scikit-learn's digits and an MLP replace the data and models named here."
UNSETTLED = "runs ended too early to judge: raise stop.trips, or a stop.accuracy that was reached at once"


@dataclass(frozen=True)
class Arm:
    """An arm of a study: one of the algorithms that it compares, defined by changes to the settings."""

    label: str
    changes: tuple[str, ...]
    """Assignments in the form that ``edgefl run --set`` accepts."""
    at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further changes, such as step sizes from the paper, keyed by the name of the settings (see
    `Study.settings`). Tuned step sizes (`edgefl.lab.tuning`) override these changes."""
    grid: Mapping[str, tuple[float, ...]] | None = None
    """Values that tuning tries for each key; None stands for the study's grid."""
    steps_of: str = ""
    """Label of another arm whose tuned step sizes this arm uses; "" if it uses its own."""
    grid_at: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    """Grids that differ from ``grid`` for particular settings, keyed by the name of the settings."""
    only: tuple[str, ...] = ()
    """Names of the settings that include this arm; if empty, all settings include it."""


@dataclass(frozen=True)
class Tuning:
    """Chooses each arm's step sizes: those with the largest area under the learning curve."""

    grid: Mapping[str, tuple[float, ...]]
    """Values to try for each key of the experiment; all combinations are run."""
    over: Over
    """The cost over which the learning curve is integrated, which is also the cost that claims compare."""
    budget: Mapping[str, float]
    """Maximum cost of each tuning run, keyed by the name of the settings."""
    seeds: tuple[int, ...] = (101, 102)
    """Seeds of the tuning runs, which differ from the seeds of the study's own runs."""
    seeds_at: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Fewer seeds for settings with long runs, keyed by the name of the settings."""


@dataclass(frozen=True)
class Study:
    """A comparison of algorithms in a paper: its settings, arms (algorithms), seeds and claims."""

    name: str
    """Name of the study, and of its settings file in ``experiments/papers``. Files with other settings have a
    suffix such as ``-quick``."""
    title: str
    citation: str
    arms: tuple[Arm, ...]
    judge: Callable[[Curves], Sequence[Finding]]
    notes: tuple[str, ...] = ()
    """Differences from the paper, and the reasons for them."""
    notes_at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further notes for particular settings, keyed by the name of the settings."""
    seeds: tuple[int, ...] = SEEDS
    small_seeds: tuple[int, ...] = SEEDS
    """Seeds that are used with ``--quick``."""
    changes: tuple[str, ...] = ()
    """The user's changes to the settings of all arms, in the form that ``edgefl run --set`` accepts."""
    tuning: Tuning | None = None

    def arms_of(self, settings: str) -> list[Arm]:
        """Return the arms that are part of the given settings."""
        return [arm for arm in self.arms if not arm.only or settings in arm.only]

    def arm(self, label: str) -> Arm:
        return next(arm for arm in self.arms if arm.label == label)

    def changed(self, changes: Sequence[str]) -> Study:
        """Return a copy of the study with changed settings.

        Raises `ConfigError` if ``changes`` contains the seed, or a key in which arms differ.
        """
        for change in changes:
            keys, _ = toml.assignment(change)
            if keys == ("seed",):
                seeds = ", ".join(map(str, self.seeds))
                raise ConfigError(
                    f"--set {change} is not possible, because every arm runs with the study's seeds: {seeds}"
                )
            for arm in self.arms:
                further = (each for steps in arm.at.values() for each in steps)
                for own, _ in map(toml.assignment, (*arm.changes, *further)):
                    if own[: len(keys)] == keys[: len(own)] or own in config.ONE_OF.get(keys, ()):
                        what = f"{'.'.join(own)} distinguishes {arm.label} from the other arms"
                        raise ConfigError(f"--set {change}: {what}")
        note = (f"Changed by --set in every run: {', '.join(changes)}.",) if changes else ()
        return replace(self, changes=tuple(changes), notes=(*self.notes, *note))

    @property
    def changes_besides_data(self) -> list[str]:
        """The user's changes except the data set; each data set has its own file of tuned step sizes."""
        return [change for change in self.changes if toml.assignment(change)[0] != ("data", "name")]

    def settings(self) -> list[str]:
        """Return the names of the study's settings; "" stands for the settings file without a suffix.

        >>> from edgefl.lab.studies import load
        >>> load("fedbuff").settings()
        ['', '1000', 'quick']
        """
        found = (file.stem.removeprefix(self.name) for file in folder().glob(f"{self.name}*.toml"))
        return sorted(name.removeprefix("-") for name in found if not name or name.startswith("-"))

    def file(self, settings: str = "") -> Path:
        """Return the path of the file with the given settings. Raises `ConfigError` if it does not exist."""
        if settings and settings not in (known := self.settings()):
            raise ConfigError(unknown(f"settings of {self.name}", settings, [name for name in known if name]))
        return folder() / f"{self.name}{'-' if settings else ''}{settings}.toml"

    def steps_file(self, settings: str = "") -> Path:
        """Return the path of the file with step sizes tuned for these settings and their data set.

        The file may not exist.
        """
        data = config.load(self.file(settings), self.changes).data.name
        return folder() / "tuned" / f"{self.file(settings).stem}-{data.replace(':', '-')}.toml"

    def tuned(self, settings: str = "") -> dict[str, tuple[str, ...]]:
        """Return each arm's tuned step sizes as changes to its settings; empty if no arm was tuned."""
        steps = self._tuning_file(settings).get("steps", {})
        return {label: tuple(changes) for label, changes in steps.items()}

    def borders(self, settings: str = "") -> dict[str, tuple[str, ...]]:
        """Return, for each arm, the keys whose tuned value is at the border of the grid that was tried."""
        found = self._tuning_file(settings).get("border", {})
        at = {arm.label: found.get(arm.steps_of or arm.label, ()) for arm in self.arms_of(settings)}
        return {label: tuple(keys) for label, keys in at.items() if keys}

    def _tuning_file(self, settings: str) -> dict[str, Any]:
        file = self.steps_file(settings)
        return toml.read(file) if file.is_file() else {}

    def experiment(self, arm: Arm, seed: int, settings: str = "", more: Sequence[str] = ()) -> Experiment:
        """Return the experiment for an arm and a seed. The changes ``more`` replace the tuned step sizes."""
        tuned = self.tuned(settings)
        steps = tuned.get(arm.steps_of or arm.label, ()) if not more else ()
        changes = (*arm.changes, *arm.at.get(settings, ()), *steps, *self.changes, *more)
        made = config.load(self.file(settings), changes, seed=seed)
        without = not more and made.stop.accuracy is None
        if without and config.load(self.file(settings)).stop.accuracy is not None:
            given = " ".join(f"--set {change}" for change in self.changes)
            raise ConfigError(f"{given} removes stop.accuracy, the target accuracy of the claims; keep it")
        return made

    def runs_of(self, arms: Sequence[Arm], out: Path, settings: str = "") -> list[tuple[Arm, int, Path]]:
        """Return the arm, the seed and the folder of each run in the order in which they are executed."""
        seeds = self.small_seeds if settings == QUICK else self.seeds
        return [(arm, seed, out / "runs" / f"{slug(arm)}-{seed}") for seed in seeds for arm in arms]

    def run(
        self,
        out: Path,
        settings: str = "",
        *,
        arms: Sequence[Arm] | None = None,
        say: Callable[[str], None],
        quiet: bool = True,
    ) -> Curves:
        """Execute the runs that the folder ``out`` does not contain yet; return the records of all runs.

        By default, all arms of the study are run. Unless ``quiet`` is True, the progress of each run is shown
        on a terminal. Raises `ConfigError` if the data is missing, `RunError` if a run could not continue,
        and `KeyboardInterrupt` after Ctrl-C. After an interruption, the same call continues the runs.
        """
        arms = self.arms_of(settings) if arms is None else arms
        records: dict[str, list[Record]] = {arm.label: [] for arm in arms}
        runs = self.runs_of(arms, out, settings)
        with warm() as fork_server:
            for number, (arm, seed, folder) in enumerate(runs, 1):
                wanted = self.experiment(arm, seed, settings)
                base = self.file(settings).parent
                figures = finished(wanted, folder, base, fork_server, quiet).summary()
                accuracy = figures["accuracy"]
                found = "no accuracy" if accuracy is None else f"accuracy {accuracy:.1%}"
                say(
                    f"{number:>3} of {len(runs)}  {arm.label}, seed {seed}: {found}, "
                    f"{figures['client_trips']:,} trips, {figures['wall_s']:.0f} s"
                )
                records[arm.label].append(Record(folder))
        return Curves(records, settings)

    def remarks(self, settings: str = "") -> list[str]:
        """Return notes for the report: differences from the paper, and the origin of the step sizes."""
        small = [IN_SMALL] if settings == QUICK else []
        steps = []
        if self.tuning is not None:
            tuned, found = self.tuned(settings), self._tuning_file(settings)
            file = f"experiments/papers/tuned/{self.steps_file(settings).name}"
            on, given = found.get("evaluated_on"), found.get("set", [])
            there = f"Step sizes: tuned here for each arm, on other seeds and on {on} examples ({file})."
            if {*given} != {*self.changes_besides_data}:
                how = "".join(f" --set {change}" for change in given)
                there += f" They were tuned {f'with{how}' if given else 'without --set'}, unlike these runs."
            steps = [
                there if tuned else f"Step sizes: not tuned here, {file} is missing (--tune creates it)."
            ]
        return [*self.notes, *self.notes_at.get(settings, ()), *small, *steps]


def folder() -> Path:
    """Return the folder with the settings for all papers, in the package or in the source tree around it."""
    with contextlib.suppress(ModuleNotFoundError):
        found = Path(str(resources.files("edgefl._experiments"))) / "papers"
        if found.is_dir():
            return found
    return Path(__file__).parents[2] / "experiments" / "papers"


def slug(arm: Arm) -> str:
    """Return the arm's label in a form that is suitable as a folder name.

    >>> slug(Arm("FedBuff, K = 10", ()))
    'fedbuff-k-10'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in arm.label.lower()).split())


# ---- output ----------------------------------------------------------------------------------

VERDICTS = {
    "reproduced": ("green", "as in the paper"),
    "holds": ("yellow", "but wrong implementations pass too"),
    "smaller": ("yellow", "less than half of the paper's effect"),
    "not reproduced": ("bold red", "no such effect here"),
    "not settled": ("yellow", "a wider grid of step sizes could reverse it"),
    "same runs": ("dim", "two settings made the same models"),
    "out of reach": ("yellow", "not enough computing time"),
}
"""The colour of each verdict on a terminal, and its meaning."""


def verdict_table(findings: Sequence[Finding]) -> tables.FittedTable:
    """Return the table of claims and verdicts for a terminal with 80 columns."""
    cells = []
    for one in findings:
        ours = one.ours + (f"\n({one.remark})" if one.remark else "")
        cells.append((one.claim, one.paper, ours, Text(one.says, VERDICTS[one.verdict][0])))
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
    """Write ``summary.json`` and ``report.html`` into the folder ``out``."""
    records = {} if curves is None else curves.records
    every = [record for found in records.values() for record in found]
    slow = slow_group(*every) if every else None
    arms = {
        label: [grouping.Run(each.folder, each, summarize(each), slow) for each in found]
        for label, found in records.items()
        if slow is not None
    }
    target = target_of(every)
    rows = grouping.rows_of(arms, target)
    document = {
        "title": title,
        "citation": citation,
        **(extra or {}),
        "target_accuracy": None if target is None else rounded(target.value),
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
    write_json(out / SUMMARY_FILE, document)
    write_text(out / "report.html", _page(title, citation, findings, rows, notes))


def _page(
    title: str,
    citation: str,
    findings: Sequence[Finding],
    rows: Sequence[grouping.RunGroup],
    notes: Sequence[str],
) -> str:
    counts = {each: sum(one.verdict == each for one in findings) for each in VERDICTS}
    tones = {"reproduced": "good", "not reproduced": "bad"}
    lines = "Thin lines show each seed, and thick lines show the mean over seeds."
    drawn = (
        page.figure(f"Accuracy over {words}", lines, curves_picture(found, over))
        for over, (*_, words) in reversed(AXES.items())
        for found in [compare.curves(rows, "accuracy", over)]
    )
    pictures = [*drawn, *compare.profile_cards(rows)] if rows else []
    head = ["Claim", "Paper", "Here", "Verdict", "Source and note"]
    claims = [
        [one.claim, one.paper, one.ours, one.says, "; ".join(filter(None, (one.source, one.remark)))]
        for one in findings
    ]
    return page.page(
        "edgefl reproduction",
        title,
        citation,
        [
            page.stat(name.capitalize(), str(count), VERDICTS[name][1], tones.get(name, ""))
            for name, count in counts.items()
            if count
        ],
        {
            "Claims": [page.card("", "", page.html_table(head, claims, wrap=(0, 1, 2, 4)))],
            "Pictures": pictures,
            "What differs from the paper": [page.card("", "", page.bullets(notes))] if notes else [],
        },
        "Times are emulated seconds; ± is half the 95% interval of the mean over seeds.",
        lead=f"{counts['reproduced']} of {tables.many(len(findings), 'claim')} reproduced.",
    )
