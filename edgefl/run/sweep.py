"""A sweep: the runs of an experiment over a grid of changed settings, with several seeds for each point."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import RenderableType

from edgefl import config, toml
from edgefl.errors import ConfigError, RunError
from edgefl.experiment import NO_PROGRESS, Experiment
from edgefl.host.channel import Closed, Refused
from edgefl.host.children import end_child, kill_tree
from edgefl.host.confinement import Enforcement
from edgefl.host.fork_server import ForkServer
from edgefl.host.process import allow_open_files
from edgefl.results import compare, grouping
from edgefl.results.figure import plot
from edgefl.results.headline import learned_by
from edgefl.results.record import Record
from edgefl.results.result import Result
from edgefl.results.run_folder import EXPERIMENT_FILE, RUNS, require_free
from edgefl.results.sweep import Sweep
from edgefl.results.targets import check_scored, check_target
from edgefl.run import control, demands, lanes, supervisor
from edgefl.strategies import resolve
from edgefl.strategies.base import Strategy

MAX_RUNS = 10_000
CURVES = "curves.pdf"
"""Name of the figure of the learning curves in a sweep's folder."""
APART = (
    "data.name",
    "data.path",
    *(f"data.{key}" for key in grouping.SPLIT),
    "evaluation.max_examples",
)
"""Keys that change the examples; runs on different examples cannot be compared."""
NOT_IN_A_GRID = {
    "seed": "set seeds with --seeds",
    "name": "it changes nothing in a run",
    **dict.fromkeys(APART, "runs on different examples cannot be compared"),
}
"""Keys that are rejected in a grid, each with the reason."""

Grid = Mapping[str, Sequence[str]]
"""Maps keys of the experiment to values in the syntax of ``--set``."""


def written(choices: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """Convert a grid of Python values to the syntax of ``--grid``. Raises `ConfigError` for unsupported
    values.

    >>> written({"strategy.server_lr": [0.1, 1], "strategy.name": ["fedbuff"]})
    {'strategy.server_lr': ['0.1', '1'], 'strategy.name': ['"fedbuff"']}
    """
    found: dict[str, list[str]] = {}
    for key, values in choices.items():
        try:
            found[key] = [_literal(each) for each in values]
        except TypeError as error:
            raise ConfigError(f"grid {key}: {error}") from None
    return found


def _literal(value: Any) -> str:
    """Return a value of a grid as TOML. Raises `TypeError` for a struct, whose defaults would replace the
    experiment's values."""
    if isinstance(value, msgspec.Struct):
        return toml.literal(value)
    return toml.literal(config.plain(value))


class Planned(NamedTuple):
    """One planned run of a sweep, whose folder may not exist yet."""

    label: str
    changes: dict[str, str]
    seed: int
    folder: Path
    experiment: Experiment


def sweep(
    experiment: Experiment,
    out: Path,
    *,
    seeds: Sequence[int],
    grid: Grid | None = None,
    base: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    show: Callable[[RenderableType], None] = lambda _: None,
    quiet: bool = True,
    target: float | None = None,
    fleets: bool = False,
    jobs: int = 1,
    hosts: lanes.OpenHosts = lanes.this_host,
    adapted: Callable[[Experiment], Experiment] = lambda one: one,
) -> Sweep:
    """Execute the runs that are missing in ``out``, compare all runs, and return the sweep.

    ``jobs`` runs execute at the same time, each on its share of the cores and without a live view. ``hosts``
    provides the hosts of a run's clients or workers; ``adapted`` changes an experiment so that these hosts
    can run it.
    The comparison includes the time to the accuracy ``target`` (`targets.target_of`). With ``fleets``, each
    seed draws the compute times of its fleet from the profiles' 90% intervals (`drawn_fleets`); the fleet is
    the same for all settings. ``say`` is called with a line for each run, and ``show`` with the tables at the
    end. On a terminal, each run is shown live unless ``quiet``.

    Each run gives the same bits as `supervisor.run` with the same settings and seed. Raises `ConfigError`
    before the first run if any run is invalid, `RunError` if a run fails, and KeyboardInterrupt after Ctrl-C.
    Repeating the call continues the sweep.
    """
    base = (base or Path.cwd()).absolute()
    require_free(out, "sweep")
    check_target(target)
    planned = plan(experiment, out, seeds, grid or {}, base, adapted, fleets=fleets)
    if jobs > 1 and any(one.experiment.clock.kind != "virtual" for one in planned):
        raise ConfigError(f"--jobs {jobs}: parallel runs need the virtual clock; add --clock virtual")

    def made(number: int) -> None:
        one = planned[number]
        outcome = _outcome(Result(one.folder).summary())
        say(f"{number + 1:>3} of {len(planned)}  {one.label}, seed {one.seed}: {outcome}")
        if target is not None and number == 0:  # fail before the other runs start
            with Record(one.folder) as record:
                check_scored([record])

    with warm() as fork_server:
        _try_training(planned, base, fork_server)
        if jobs == 1:
            for number, one in enumerate(planned):
                lanes.finished(one.experiment, one.folder, base, fork_server, quiet, hosts)
                made(number)
        else:
            work = [lanes.Job(one.experiment, str(one.folder.absolute()), str(base)) for one in planned]
            lanes.make_all(work, jobs, made, fork_server)
    show(_compare(out, planned, grid or {}, target))
    return Sweep(out)


def drawn_fleets(experiment: Experiment) -> Experiment:
    """Return the experiment, changed so that each seed draws compute times from the profiles' 90% intervals.

    Raises `ConfigError` if the experiment uses the wall clock.
    """
    if experiment.clock.kind != "virtual":
        raise ConfigError("--fleets needs the virtual clock; add --clock virtual")
    fleet = msgspec.structs.replace(experiment.fleet, model_errors="drawn")
    return msgspec.structs.replace(experiment, fleet=fleet)


def _try_training(planned: Sequence[Planned], base: Path, fork_server: Callable[[], ForkServer]) -> None:
    """Try the user's training function at each grid point before the runs start.

    Points with the same client settings are tried only once. A single point is not tried here, because its
    first run begins with such a trial. Raises `ConfigError` if a function fails.
    """
    points = {one.label: one for one in reversed(planned)}
    if len(points) == 1:
        return
    clients = {label: _own_clients(one.experiment, base) for label, one in points.items()}
    tried = [clients[one.label] for one in points.values() if (one.folder / EXPERIMENT_FILE).is_file()]
    for label, one in reversed(points.items()):
        if clients[label] is None or clients[label] in tried:
            continue
        tried.append(clients[label])
        child, channel = fork_server().start("edgefl.run.zygote", control.FromZygote, dict(os.environ))
        try:
            channel.tell(control.Prepare(one.experiment, str(base), Enforcement()))
            answer = channel.receive()
        except Closed:
            raise RunError(f"{label}: the trial run of the training function ended unexpectedly") from None
        except KeyboardInterrupt:
            kill_tree(child)  # while it loads or trains, it would not notice that the channel is closed
            raise
        finally:
            channel.close()
            end_child(child, supervisor.GRACE_S)
        if isinstance(answer, Refused):
            kind = ConfigError if answer.config else RunError
            raise kind(f"{label}: {answer.message}")


def _own_clients(experiment: Experiment, base: Path) -> tuple[Any, ...] | None:
    """Return the settings that the user's training depends on, or None if clients use plain SGD."""
    strategy = resolve(experiment.strategy, [base])
    kind, methods = type(strategy), ("train", "begin_trip", "end_trip")
    if experiment.training.function is None and kind.train is Strategy.train:
        return None
    plain = all(getattr(kind, name) is getattr(Strategy, name) for name in methods)
    client = strategy.local_rule() if plain else strategy
    return experiment.fleet, experiment.data, experiment.model, experiment.training, client


@contextlib.contextmanager
def warm() -> Iterator[Callable[[], ForkServer]]:
    """Provide a function that returns a fork server; the first call starts the server."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda: stack.enter_context(ForkServer()))


def plan(
    experiment: Experiment,
    out: Path,
    seeds: Sequence[int],
    grid: Grid,
    base: Path,
    adapted: Callable[[Experiment], Experiment] = lambda one: one,
    *,
    fleets: bool = False,
) -> list[Planned]:
    """List all runs in the order of the grid points and, for each point, of the seeds.

    Each run's experiment is validated, and ``adapted`` changes it for the hosts of the run. For ``fleets``,
    see `sweep`.
    """
    _check(seeds, grid)
    if fleets and "fleet.model_errors" in grid:
        raise ConfigError("--fleets and --grid fleet.model_errors: give only one of them")
    planned: list[Planned] = []
    slugs: set[str] = set()
    labels: set[str] = set()
    points: dict[str, str] = {}
    for values in itertools.product(*grid.values()):
        changes = dict(zip(grid, values, strict=True))
        changed = config.change(
            experiment, [f"{key}={value}" for key, value in changes.items()], base, option="--grid"
        )
        try:
            changed = drawn_fleets(changed) if fleets else changed
            changed = adapted(demands.checked(changed, base))
        except ConfigError as error:
            raise ConfigError(f"{_label(changed, changes)}: {error}" if changes else str(error)) from None
        label = _label(changed, changes)
        if planned:
            _check_same_examples(label, changed, planned[0].experiment)
        if label in labels:
            raise ConfigError(f"--grid: {label} occurs twice; give the strategies' classes different names")
        labels.add(label)
        if (same := points.setdefault(config.dump(changed), label)) != label:
            why = "a later key of the grid replaces values of an earlier one"
            raise ConfigError(f"--grid: {label} and {same} have the same settings: {why}")
        slug = _slug(label, slugs)
        for seed in seeds:
            seeded = config.change(changed, [f"seed={seed}"], base, option="--seeds")
            planned.append(Planned(label, changes, seed, out / RUNS / f"{slug}-seed-{seed}", seeded))
    return planned


def _check(seeds: Sequence[int], grid: Grid) -> None:
    for key, values in grid.items():
        if key in NOT_IN_A_GRID or key.startswith("data.name"):
            why = NOT_IN_A_GRID.get(key, NOT_IN_A_GRID["data.name"])
            raise ConfigError(f"--grid {key}: {why}")
        found = [_value(key, value) for value in values]
        if not found or any(value in found[:place] for place, value in enumerate(found)):
            raise ConfigError(f"--grid {key}: expected different values, got {', '.join(values) or 'none'}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds: expected different seeds, got {', '.join(map(str, seeds)) or 'none'}")
    if (count := len(seeds) * math.prod(map(len, grid.values()))) > MAX_RUNS:
        raise ConfigError(f"a sweep of {count:,} runs is too large: at most {MAX_RUNS:,} are allowed")


def _value(key: str, text: str) -> Any:
    """Parse a value of a grid; return an invalid string unchanged, because `config.change` will reject it."""
    try:
        return toml.assignment(f"{key}={text}")[1]
    except ConfigError:
        return text


def _check_same_examples(label: str, experiment: Experiment, first: Experiment) -> None:
    """Raise `ConfigError` if this experiment's examples differ from those of the first run; this can happen
    if a grid varies a whole table, such as ``[data]``."""
    for key in APART:
        mine, others = (operator.attrgetter(key)(each) for each in (experiment, first))
        if mine != others:
            raise ConfigError(
                f"--grid: {label}: {key} is {mine}, but {others} in the first run; "
                "runs on different examples cannot be compared"
            )


def _label(experiment: Experiment, changes: Mapping[str, str]) -> str:
    """Describe a grid point, such as ``server_lr=0.1``; without a grid, return the strategy's name."""
    if not changes:
        return _short(experiment.strategy["name"])
    last = [key.rpartition(".")[2] for key in changes]
    names = [name if last.count(name) == 1 else key for name, key in zip(last, changes, strict=True)]
    parts = []
    for name, (key, value) in zip(names, changes.items(), strict=True):
        if key == "strategy":
            fields = {field: each for field, each in experiment.strategy.items() if field != "name"}
            inner = ", ".join(f"{field}={each}" for field, each in fields.items())
            parts.append(_short(experiment.strategy["name"]) + (f" ({inner})" if inner else ""))
        else:
            parts.append(_short(_plain(value)) if key == "strategy.name" else f"{name}={_plain(value)}")
    return ", ".join(parts)


def _short(name: str) -> str:
    """Return a strategy's name without its module."""
    return name.rpartition(":")[2]


def _plain(value: str) -> str:
    return value.strip("'\"")


def _slug(label: str, taken: set[str]) -> str:
    """Make a folder name that is not in ``taken`` from the first 80 characters of a label."""
    stem = re.sub(r"[^\w.=-]+", "-", label, flags=re.ASCII).strip("-.")[:80] or "run"
    names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
    slug = next(name for name in names if name not in taken)
    taken.add(slug)
    return slug


def _outcome(figures: Mapping[str, Any]) -> str:
    found = learned_by(figures)
    invalid = ", INVALID" if figures["fidelity"]["valid"] is False else ""
    stuck = f", {NO_PROGRESS}" if figures.get("no_progress") else ""
    took = f"{figures['client_trips']:,} trips, {figures['wall_s']:.3g} s"
    return f"{found.name.lower()} {found.value}, {took}{invalid}{stuck}"


def _compare(out: Path, planned: Sequence[Planned], grid: Grid, given: float | None) -> RenderableType:
    """Write the comparison of all runs into ``out``; return the table for the terminal."""
    allow_open_files()  # all records are open at the same time
    runs = grouping.load([one.folder for one in planned])
    target = grouping.goal_of(runs, given)
    by_label: dict[str, list[grouping.Run]] = {}
    for one, run in zip(planned, runs, strict=True):
        by_label.setdefault(one.label, []).append(run)
    rows = grouping.rows_of(by_label, target)
    described = {
        "grid": {key: list(values) for key, values in grid.items()},
        "seeds": list(dict.fromkeys(one.seed for one in planned)),
        "runs": [
            {
                "folder": f"{RUNS}/{one.folder.name}",
                "label": one.label,
                "changes": one.changes,
                "seed": one.seed,
            }
            for one in planned
        ],
    }
    compare.write(out, runs, rows, target, sweep=described)
    found = Sweep(out)
    found.table().write(out / "runs.csv")
    for name in ("fleets.csv", CURVES):  # an earlier sweep in this folder may have had other runs
        (out / name).unlink(missing_ok=True)
    if (over := found.fleets()).rows:
        over.write(out / "fleets.csv")
    scored = any(np.isfinite(row.figures["accuracy"].mean) for row in rows)
    measure = "accuracy" if scored else "loss"
    with contextlib.suppress(ConfigError):  # no figure if nothing was measured
        plot(found.results(), out / CURVES, y=measure)
    tables = compare.terminal_tables(runs, rows, target)
    for run in runs:
        run.record.close()
    return tables
