"""edgefl emulates a fleet of heterogeneous phones on one machine, and runs federated learning on it.

    >>> import edgefl
    >>> phones = edgefl.Fleet(devices={"pixel-3a": 8, "pi-4": 4}, network="lte")
    >>> experiment = edgefl.Experiment(fleet=phones, stop=edgefl.Stop(versions=20))
    >>> edgefl.run(experiment).summary()["versions"]                                  # doctest: +SKIP
    20

ARCHITECTURE.md says what is in each package, and each package's docstring what is in its files.
"""

from __future__ import annotations

import datetime
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from edgefl.errors import ConfigError, EdgeflError, FolderTaken, ProfileError, RunError
from edgefl.experiment import (
    Checkpoint,
    Clock,
    Data,
    Evaluation,
    Experiment,
    Fleet,
    MetricGoal,
    Model,
    Server,
    Stop,
    Training,
)

if TYPE_CHECKING:
    from edgefl.learning.dataset import Dataset
    from edgefl.results.result import Result
    from edgefl.results.sweep import Sweep
    from edgefl.strategies.base import Strategy

__all__ = [
    "Checkpoint",
    "Clock",
    "ConfigError",
    "Data",
    "EdgeflError",
    "Evaluation",
    "Experiment",
    "Fleet",
    "MetricGoal",
    "Model",
    "ProfileError",
    "Result",
    "RunError",
    "Server",
    "Stop",
    "Sweep",
    "Training",
    "new_run_folder",
    "plot",
    "run",
    "sweep",
]


# Before the function below: the first import of a package sets its name in its parent, later ones do not.
importlib.import_module("edgefl.run")

P = ParamSpec("P")
R = TypeVar("R")


def _short_traceback(function: Callable[P, R]) -> Callable[P, R]:
    """Drop edgefl's own frames from the traceback of an `EdgeflError` that ``function`` raises."""

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except EdgeflError as error:
            raise error.with_traceback(None) from error.__cause__

    return entry


@_short_traceback
def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    quiet: bool = True,
    web: bool | int = False,
    strategy: Strategy | type[Strategy] | None = None,
    model: Callable[..., Any] | None = None,
    data: Callable[..., Any] | Dataset | Sequence[Any] | None = None,
    partition: Callable[..., Any] | None = None,
) -> Result:
    """Run an experiment; returns its result, whose files are in the folder ``out``.

    Without ``out`` a new folder under ``runs/`` is made. With ``web`` the run is shown live as a page on this
    machine, whose address is printed on standard error; a number is the page's port. The objects
    take the place of what the experiment names: a strategy (``Mine(server_lr=0.1)``), the function that makes
    the model, the one that loads the data, or the data themselves (a `Dataset`, or train_x, train_y, test_x,
    test_y), and the one that splits them. Classes and functions must be of a file that can be imported: the
    run's processes are started afresh, and its record says what ran. Arrays are kept in a file of the run's
    folder.

    A run whose model learned nothing is returned too: ``no_progress`` in its summary is the reason, empty for
    every other run. Raises `ConfigError` if the experiment cannot be done and `RunError` if the run could not
    go on.
    """
    from edgefl.config import objects
    from edgefl.run import supervisor
    from edgefl.run.web import page_socket

    _not_while_imported("run")
    named = objects.name_objects(experiment, strategy=strategy, model=model, data=data, partition=partition)

    def into(folder: Path) -> Result:
        with (
            objects.trusting(named.trusted),
            objects.with_arrays(named, folder) as wanted,
            page_socket(None if web is False else 0 if web is True else web) as page,
        ):
            return supervisor.run(wanted, folder, quiet, named.base, page)

    if out is not None:
        return into(Path(out))
    while True:
        with suppress(FolderTaken):  # by a run that was started at the same moment: the next name then
            return into(new_run_folder(experiment.name))


@_short_traceback
def sweep(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    seeds: Iterable[int] = (1, 2, 3),
    grid: Mapping[str, Iterable[Any]] | None = None,
    target: float | None = None,
    quiet: bool = True,
    strategy: Strategy | type[Strategy] | None = None,
    model: Callable[..., Any] | None = None,
    data: Callable[..., Any] | Dataset | Sequence[Any] | None = None,
    partition: Callable[..., Any] | None = None,
) -> Sweep:
    """Run an experiment with every choice of ``grid`` and every seed, one after another; returns them all.

    ``grid`` has keys of the experiment, ``"strategy.server_lr": [0.1, 1.0]``, each with its values; those of
    ``"strategy"`` may be strategies: ``[Mine(), FedBuff()]``. Each run has the bits that `run` would give it.
    In ``out`` (``runs/NAME-sweep``) are the runs, a page that compares them (report.html), their curves
    (curves.pdf) and figures (runs.csv). Runs that are there are not made again: after Ctrl-C, or with more
    seeds, the same call goes on. The time to the accuracy ``target`` is compared seed by seed; by default to
    ``stop.accuracy``, else to the highest accuracy that every run reached. The objects are as for `run`,
    which also documents the errors.

        >>> found = edgefl.sweep(experiment, grid={"strategy": [Mine(), FedBuff()]})  # doctest: +SKIP
        >>> found.plot("figure.pdf")                                                  # doctest: +SKIP
    """
    from edgefl.config import objects
    from edgefl.run import sweep as sweeping
    from edgefl.terminal import say

    _not_while_imported("sweep")
    choices = {key: list(values) for key, values in (grid or {}).items()}
    kinds = [each for each in choices.get("strategy", []) if not isinstance(each, Mapping)]
    named = objects.name_objects(
        experiment, strategy=strategy, model=model, data=data, partition=partition, strategies=kinds
    )
    tables = iter(named.strategies)
    if "strategy" in choices:
        choices["strategy"] = [
            each if isinstance(each, Mapping) else next(tables) for each in choices["strategy"]
        ]
    folder = Path("runs") / f"{experiment.name}-sweep" if out is None else Path(out)
    with objects.trusting(named.trusted), objects.with_arrays(named, folder) as wanted:
        return sweeping.sweep(
            wanted,
            folder,
            seeds=list(seeds),
            grid=sweeping.written(choices),
            base=named.base,
            say=lambda text: None if quiet else say(text, err=True),
            target=target,
        )


def plot(runs: Any, file: str | Path, **how: Any) -> Path:
    """Draw learning curves for a paper into ``file``, a PDF for one: see `edgefl.results.figure.plot`.

    ``runs`` are finished runs by label, one for each seed, or a list of them; ``how`` the measure ``y``
    ("accuracy"), what it is ``over`` ("at_s", "trips" or "version"), the ``band`` ("interval", "range" or
    "none"), ``width_in`` and ``height_in``.
    """
    from edgefl.results import figure

    return figure.plot(runs, file, **how)


def _not_while_imported(what: str) -> None:
    from edgefl.loading import importing

    if importing:
        raise ConfigError(
            f"edgefl.{what} was called while {importing[-1]} was imported for what it defines: put the call "
            "under if __name__ == '__main__':"
        )


def __getattr__(name: str) -> Any:
    """`Result` and `Sweep`, which import numpy, when they are asked for."""
    where = {"Result": "edgefl.results.result", "Sweep": "edgefl.results.sweep"}
    if name not in where:
        raise AttributeError(f"module 'edgefl' has no attribute {name!r}")
    return getattr(importlib.import_module(where[name]), name)


def new_run_folder(name: str) -> Path:
    """A folder for a new run that does not exist yet: ``runs/NAME-DATE-TIME``."""
    stem = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder, count = stem, 1
    while folder.exists():
        count += 1
        folder = stem.with_name(f"{stem.name}-{count}")
    return folder
