"""Reader of a sweep's folder: its runs with their settings and metrics, and a picture of the curves."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group

from edgefl.errors import ConfigError, damaged
from edgefl.results import compare
from edgefl.results.columns import Table, column
from edgefl.results.grouping import FIGURES
from edgefl.results.result import Result, summary_in
from edgefl.results.run_folder import RUNS, SUMMARY_FILE, is_sweep
from edgefl.results.tables import FittedTable, as_text
from edgefl.results.targets import RaceTarget
from edgefl.validation import path

FIGURES_OF_A_RUN = ("accuracy", "best_accuracy", "loss", "versions", "client_trips", "emulated_s", "wall_s",
                    "staleness_mean", "staleness_max", "slow_accuracy", "slow_weight", "trips_to_target",
                    "emulated_s_to_target")  # fmt: skip


class SweepRun(NamedTuple):
    """One run of a sweep."""

    label: str
    changes: dict[str, str]
    """This run's value for each key of the grid, in the syntax of ``--set``."""
    seed: int
    result: Result


class Sweep:
    """A finished sweep's folder. Raises `ConfigError` if the folder holds no sweep."""

    def __init__(self, folder: str | Path) -> None:
        self.dir = path("folder", folder)
        if not self.dir.is_dir():
            raise ConfigError(f"sweep folder {self.dir} not found")
        if (self.dir / RUNS).is_dir() and not (self.dir / SUMMARY_FILE).exists():
            raise ConfigError(
                f"{self.dir} holds an unfinished sweep or no sweep; repeat the command that began the sweep"
            )
        self._summary = summary_in(self.dir)
        found = self._summary.get("sweep")
        if not isinstance(found, dict):
            raise ConfigError(f"{self.dir} holds no sweep")
        self.keys = tuple(found["grid"])
        """The keys that the grid varies; the seed is not one of them."""
        self.runs = tuple(
            SweepRun(row["label"], row["changes"], row["seed"], Result(self.dir / row["folder"]))
            for row in found["runs"]
        )

    def __repr__(self) -> str:
        return f"Sweep({str(self.dir)!r})"

    def __str__(self) -> str:
        """Return the tables that `edgefl sweep` prints."""
        try:
            return as_text(self._tables())
        except ConfigError as error:
            return f"{self!r}: {error}"

    def _repr_html_(self) -> str | None:
        """Return the tables, and the learning curves as a picture."""
        try:
            tables = self._tables().renderables
        except ConfigError:
            return None
        found = [part._repr_html_() for part in tables if isinstance(part, FittedTable)]
        for measure in ("accuracy", "loss"):  # `plot` raises ConfigError if the measure is missing
            with contextlib.suppress(ConfigError), tempfile.TemporaryDirectory() as folder:
                drawn = self.plot(Path(folder) / "curves.svg", y=measure)
                found.append(drawn.read_text(encoding="utf-8"))
                break
        return "\n".join(found)

    def _tables(self) -> Group:
        with damaged(str(self.dir)):
            return compare.compare([], None, self.target, self._folders())

    @property
    def target(self) -> RaceTarget | None:
        """The target of the sweep's comparison."""
        found = self._summary["comparison"]["target"]
        return None if found is None else RaceTarget(**found)

    def _folders(self) -> dict[str, list[Path]]:
        return {label: [run.dir for run in runs] for label, runs in self.results().items()}

    def summary(self) -> dict[str, Any]:
        """Return the content of ``summary.json``.

        The content has the fields of the first run's summary, all runs (``runs``), their comparison
        (``comparison``), and the settings of the sweep (``sweep``).
        """
        return self._summary

    def results(self) -> dict[str, list[Result]]:
        """Return the runs of each label, in order of their seeds; `edgefl.plot` accepts the result."""
        found: dict[str, list[Result]] = {}
        for run in self.runs:
            found.setdefault(run.label, []).append(run.result)
        return found

    def table(self) -> Table:
        """Return one row per run: its label, the values of the grid's keys, its seed, and its metrics.

        The metrics are the accuracy, the best accuracy, the loss, the numbers of versions and client trips,
        the emulated and wall seconds, the mean and the maximum staleness, the accuracy for slow phones, the
        mean applied weight of slow phones (1 is fair), and the client trips and emulated seconds to the
        target (NaN if the run did not reach it). The last columns are the target; ``valid``, which is 1.0 for
        a valid run and otherwise 0.0; and ``no_progress``, which is 1.0 if the run has no meaningful result,
        because its model did not learn.
        """
        compared = {
            (row["label"], seed): found
            for row in self._summary["comparison"]["rows"]
            for seed, found in zip(row["seeds"], row["each"], strict=True)
        }
        rows = [{**compared[run.label, run.seed], **run.result.summary()} for run in self.runs]
        table = Table(label=column((run.label for run in self.runs), str))
        for key in self.keys:
            table[key] = _values([run.changes[key] for run in self.runs])
        table["seed"] = column((run.seed for run in self.runs), int)
        for name in FIGURES_OF_A_RUN:
            table[name] = column(row[name] for row in rows)
        target = self._summary["comparison"]["target"]
        table["target"] = column([target and target["value"]] * len(self.runs))
        table["valid"] = column(float(bool(each["fidelity"]["valid"])) for each in rows)
        table["no_progress"] = column(float(bool(each["no_progress"])) for each in rows)
        return table

    def fleets(self) -> Table:
        """Return one row per label except the first: in how many random fleets it was ahead of the first.

        A label is ahead if its run reached the target earlier in emulated time. ``share`` is the share of
        fleets in which it was ahead: a tie counts as half, and undecided fleets are left out. ``low_95`` and
        ``high_95`` are the ends of the share's 95% interval. ``ratio_low_90`` and ``ratio_high_90`` are the
        5th and 95th percentiles, over the fleets, of the label's time to the target divided by the first
        label's time; a percentile is NaN if runs that did not reach the target leave it unbounded. The table
        is empty for a sweep without ``fleets``.
        """
        found = {
            row["label"]: ahead
            for row in self._summary["comparison"]["rows"]
            if (ahead := (row["to_target"] or {}).get("ahead_of_first")) is not None
        }
        table = Table(label=column(found, str))
        for name in ("fleets", "ahead", "ties", "undecided", "share", "low_95", "high_95"):
            table[name] = column(ahead[name] for ahead in found.values())
        ends = [ahead["ratio_90"] or (None, None) for ahead in found.values()]
        table["ratio_low_90"] = column(low for low, _ in ends)
        table["ratio_high_90"] = column(high for _, high in ends)
        return table

    def means(self) -> Table:
        """Return one row per label, with the mean of each metric over seeds.

        A column ``…_half_95`` is half the width of the mean's 95% interval (Student's t); it is NaN if there
        is only one seed. A mean is NaN if a run lacks the metric, such as the time to a target that it did
        not reach; the tables of `edgefl sweep` have the mean of the runs that reached it. ``no_progress`` is
        1.0 if a run's model did not learn; such a row is not ranked.
        """
        rows = self._summary["comparison"]["rows"]
        names = dict.fromkeys(name for row in rows for name in row["figures"])
        table = Table(
            label=column((row["label"] for row in rows), str),
            seeds=column((len(row["seeds"]) for row in rows), int),
        )
        for name in sorted(names, key=lambda name: (name not in FIGURES, name)):
            figures = [row["figures"].get(name, {}) for row in rows]
            table[name] = column(figure.get("mean") for figure in figures)
            table[f"{name}_half_95"] = column(figure.get("half_95") for figure in figures)
        table["no_progress"] = column(float(row["no_progress"]) for row in rows)
        return table

    def evaluations(self) -> Table:
        """Return the evaluations of all runs: label, seed, and the columns of `Result.evaluations`."""
        parts = [(run, run.result.evaluations()) for run in self.runs]
        counts = [part.rows for _, part in parts]
        table = Table(
            label=np.repeat(column((run.label for run, _ in parts), str), counts),
            seed=np.repeat(column((run.seed for run, _ in parts), int), counts),
        )
        for name in dict.fromkeys(name for _, part in parts for name in part):
            table[name] = np.concatenate([part.get(name, np.full(part.rows, np.nan)) for _, part in parts])
        return table

    def track(self, tracker: str) -> list[str]:
        """Copy all runs to ``tracker``, as a group named after the sweep: see `Result.track`."""
        from edgefl.results.trackers import track

        group = self.dir.absolute().name
        return [track(run.result.dir, tracker, group) for run in self.runs]

    def plot(self, file: str | Path, **how: Any) -> Path:
        """Draw the learning curves into ``file``: see `edgefl.plot`."""
        from edgefl.results.figure import plot

        return plot(self.results(), file, **how)


def compare_folders(
    folders: Sequence[str | Path], out: str | Path | None = None, target: float | None = None
) -> Group:
    """Compare runs and sweeps as `compare.compare` does; the folder of a sweep stands for the sweep's runs.

    The rows of a sweep keep the sweep's labels and precede the rows of single runs. If a sweep is the only
    folder, its own target is used, unless ``target`` is given.
    """
    sweeps = [Sweep(folder) for folder in folders if is_sweep(Path(folder))]
    runs = [folder for folder in folders if not is_sweep(Path(folder))]
    alone = len(folders) == len(sweeps) == 1
    rows: dict[str, list[Path]] = {}
    for found in sweeps:
        for label, members in found._folders().items():
            name = label if alone else f"{label} ({found.dir.absolute().name})"
            name = f"{label} ({found.dir})" if name in rows else name
            rows.setdefault(name, []).extend(members)
    return compare.compare(runs, out, sweeps[0].target if alone and target is None else target, rows)


def _values(texts: list[str]) -> Any:
    """Return a column of the grid's values, as numbers if all of them are numbers."""
    try:
        return column([float(text) for text in texts])
    except ValueError:
        return column([text.strip("'\"") for text in texts], str)
