"""edgefl emulates a fleet of heterogeneous phones on one machine, and runs federated learning on it.

    >>> import edgefl
    >>> phones = edgefl.Fleet(devices={"pixel-3a": 8, "pi-4": 4}, network="lte")
    >>> experiment = edgefl.Experiment(fleet=phones, stop=edgefl.Stop(versions=20))
    >>> edgefl.run(experiment).summary()["versions"]                                  # doctest: +SKIP
    20

ARCHITECTURE.md describes the packages, and the docstring of each package describes its files.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import sys
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


# The first import of the package edgefl.run binds the name ``run`` in this module to that package. Therefore
# import it before the function `run` is defined.
importlib.import_module("edgefl.run")

P = ParamSpec("P")
R = TypeVar("R")


def _short_traceback(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper of ``function`` that removes edgefl's own frames from the traceback of each
    `EdgeflError`."""

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except EdgeflError as error:
            raise error.with_traceback(None) from error.__cause__

    return entry


@_short_traceback
def run(
    experiment: Experiment | str | Path,
    out: str | Path | None = None,
    *,
    quiet: bool = True,
    web: bool | int = False,
    strategy: str | Strategy | type[Strategy] | None = None,
    model: str | Callable[..., Any] | None = None,
    data: str | Callable[..., Any] | Dataset | Sequence[Any] | None = None,
    partition: str | Callable[..., Any] | None = None,
) -> Result:
    """Run an experiment, which is an object or the path of a TOML file, and return its result.

    The run's files are written to the folder ``out``, by default a new folder in ``runs/``. If ``web`` is
    True, a local web page shows the run live, and its address is printed to standard error; if ``web`` is a
    number, it is the port of this page. The other arguments replace parts of the experiment: ``strategy`` is
    an object such as ``Mine(server_lr=0.1)``; ``model`` is a function that creates the model; ``data`` is a
    function that loads the data, a `Dataset`, or the sequence (train_x, train_y, test_x, test_y); and
    ``partition`` is a function that assigns the examples to clients. Each of them may also be a name, such as
    ``strategy="fedbuff"``, which selects a strategy with its default settings. Classes and functions must be
    defined in a file that can be imported, because the processes of the run import them again. Arrays are
    saved in the run's folder.

        >>> print(edgefl.run("experiments/minimal.toml", strategy="fedstaleweight"))      # doctest: +SKIP

    If the model did not learn, the result is still returned, and ``no_progress`` in its summary gives the
    reason. Raises `ConfigError` if the experiment is invalid, and `RunError` if the run fails.
    """
    from edgefl.config import objects
    from edgefl.run import supervisor
    from edgefl.run.web import page_socket
    from edgefl.validation import path, whole

    _not_while_imported("run")
    port = None if web is False else 0 if web is True else whole("web", web, 0, 65535)
    given, home = objects.opened(experiment)
    named = objects.name_objects(given, home, strategy=strategy, model=model, data=data, partition=partition)

    def into(folder: Path) -> Result:
        with (
            objects.trusting(named.trusted),
            objects.with_arrays(named, folder) as wanted,
            page_socket(port) as page,
        ):
            return supervisor.run(wanted, folder, quiet, named.base, page)

    if out is not None:
        return into(path("out", out))
    while True:
        with suppress(FolderTaken):  # another run took this name at the same moment, so try another name
            return into(new_run_folder(given.name))


@_short_traceback
def sweep(
    experiment: Experiment | str | Path,
    out: str | Path | None = None,
    *,
    seeds: Iterable[int] | None = None,
    grid: Mapping[str, Iterable[Any]] | None = None,
    target: float | None = None,
    fleets: int | None = None,
    jobs: int = 1,
    quiet: bool | None = None,
    strategy: str | Strategy | type[Strategy] | None = None,
    model: str | Callable[..., Any] | None = None,
    data: str | Callable[..., Any] | Dataset | Sequence[Any] | None = None,
    partition: str | Callable[..., Any] | None = None,
) -> Sweep:
    """Run an experiment once for every seed and every combination of the values in ``grid``.

    ``grid`` maps keys of the experiment to lists of values, such as ``{"strategy.server_lr": [0.1, 1.0]}``.
    The values of ``"strategy"`` may be objects and names: ``[Mine(), "fedbuff"]``. The ``seeds`` are 1, 2 and
    3 by default. Each run gives the same results as `run`. The folder ``out`` (by default
    ``runs/NAME-sweep``) contains the runs, a page that compares them (report.html), their curves (curves.pdf)
    and their results (runs.csv).

    Finished runs are not repeated: the same call continues a sweep after Ctrl-C, and a call with more seeds
    adds the runs of these seeds. The times that runs take to reach the accuracy ``target`` are compared seed
    by seed. The default target is ``stop.accuracy``, or the highest accuracy that every run reached if this
    key is not set. If ``fleets`` is given, the seeds are 1 to ``fleets``, and each seed draws other compute
    times for the devices, from the intervals in their profiles (`Sweep.fleets`). Up to ``jobs`` runs execute
    in parallel, each on its share of the cores; this needs the virtual clock. One line for each run is
    printed to standard error unless ``quiet`` is True; by default, it is printed only if standard error is a
    terminal. The other arguments and the errors are the same as those of `run`.

        >>> found = edgefl.sweep(experiment, grid={"strategy": [Mine(), "fedbuff"]})  # doctest: +SKIP
        >>> found.plot("figure.pdf")                                                  # doctest: +SKIP
    """
    from edgefl.config import objects
    from edgefl.run import sweep as sweeping
    from edgefl.terminal import say
    from edgefl.validation import path, require, whole

    _not_while_imported("sweep")
    jobs = whole("jobs", jobs, 1, 256)
    if fleets is not None:
        fleets = whole("fleets", fleets, 2, 10_000)
        if seeds is not None:
            raise ConfigError("seeds and fleets: give only one of them; each fleet has its own seed")
    given_seeds = range(1, 4 if fleets is None else fleets + 1) if seeds is None else _values("seeds", seeds)
    numbers = [whole("seeds", seed, 0) for seed in given_seeds]
    if grid is not None and not isinstance(grid, Mapping):
        raise ConfigError(f"grid: must map keys to lists of values, got {grid!r}")
    for name in grid or ():
        require("grid", name, isinstance(name, str), "keyed by strings, such as 'training.lr'")
    given, home = objects.opened(experiment, grid or ())
    silent = not sys.stderr.isatty() if quiet is None else quiet
    choices = {key: _values(f"grid {key!r}", values) for key, values in (grid or {}).items()}
    for what, value, replacing in (
        ("strategy", strategy, {"strategy", "strategy.name"} if isinstance(strategy, str) else {"strategy"}),
        ("model", model, {"model", "model.name"}),
        ("data", data, {"data"}),
        ("partition", partition, {"data", "data.partition"}),
    ):
        if value is not None and (key := next(iter(replacing & choices.keys()), None)) is not None:
            raise ConfigError(f"{what}: has no effect, because the grid replaces it (grid {key!r})")
    kinds = [each for each in choices.get("strategy", []) if not isinstance(each, Mapping)]
    named = objects.name_objects(
        given,
        home,
        strategy=strategy,
        model=model,
        data=data,
        partition=partition,
        strategies=kinds,
        grid=choices,
    )
    tables = iter(named.strategies)
    if "strategy" in choices:
        choices["strategy"] = [
            each if isinstance(each, Mapping) else next(tables) for each in choices["strategy"]
        ]
    folder = Path("runs") / f"{given.name}-sweep" if out is None else path("out", out)
    with objects.trusting(named.trusted), objects.with_arrays(named, folder) as wanted:
        return sweeping.sweep(
            wanted,
            folder,
            seeds=numbers,
            grid=sweeping.written(choices),
            base=named.base,
            say=lambda text: None if silent else say(text, err=True),
            quiet=silent,
            target=target,
            fleets=fleets is not None,
            jobs=jobs,
        )


def plot(runs: Any, file: str | Path, **how: Any) -> Path:
    """Plot learning curves and save the figure as ``file``, such as a PDF for a paper.

    ``runs`` is a list of finished runs, or maps each label to a list of finished runs with different seeds.
    The options in ``how`` are those of `edgefl.results.figure.plot`: the metric ``y`` (by default
    "accuracy"), ``over`` ("at_s", "trips" or "version"), ``band`` ("interval", "range" or "none"),
    ``width_in`` and ``height_in``.
    """
    from edgefl.results import figure

    return figure.plot(runs, file, **how)


def _values(what: str, given: Iterable[Any]) -> list[Any]:
    """Return the given values as a list. Raises `ConfigError` if a single value, such as a string, is
    given."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"{what}: must be a list of values, got {given!r}")
    return list(given)


def _not_while_imported(what: str) -> None:
    from edgefl.loading import importing

    if importing:
        raise ConfigError(
            f"edgefl.{what} was called while edgefl imported {importing[-1]}: put the call under "
            "if __name__ == '__main__':"
        )


def __getattr__(name: str) -> Any:
    """Import `Result` or `Sweep` when it is first used. They are not imported earlier, because they import
    numpy."""
    where = {"Result": "edgefl.results.result", "Sweep": "edgefl.results.sweep"}
    if name not in where:
        raise AttributeError(f"module 'edgefl' has no attribute {name!r}")
    return getattr(importlib.import_module(where[name]), name)


def new_run_folder(name: str) -> Path:
    """Return the path of a folder that does not exist yet, for a new run: ``runs/NAME-DATE-TIME``."""
    stem = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder, count = stem, 1
    while folder.exists():
        count += 1
        folder = stem.with_name(f"{stem.name}-{count}")
    return folder
