"""Chooses step sizes for the arms (algorithms) of a study.

A grid of step sizes is run with seeds that the study itself does not use, and the best ones are saved.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from edgefl import config, toml
from edgefl.errors import ConfigError
from edgefl.files import make_folder, write_text
from edgefl.lab.claims import COSTS
from edgefl.lab.study import Arm, Study, Tuning, slug
from edgefl.results.record import Record
from edgefl.results.statistics import area
from edgefl.run.lanes import existing, finished
from edgefl.run.sweep import warm

Grid = Mapping[str, Sequence[float]]
VALIDATION = 0.1
"""Share of the examples that tuning holds out for evaluation if the settings do not hold out any."""


class Chosen(NamedTuple):
    """The best step sizes of an arm (an algorithm in a study)."""

    label: str
    changes: tuple[str, ...]
    score: float
    border: tuple[str, ...]
    """Keys whose best value is at the border of the grid, so that a wider grid may contain a better value."""


def tune(
    study: Study, out: Path, settings: str = "", *, say: Callable[[str], None], quiet: bool = True
) -> Path:
    """Choose the step sizes of each arm and write them to the file that the study reads; return its path.

    Every point of the grid is run with the same budget (of the cost by which arms are compared) for each
    tuning seed. The point with the largest area under the accuracy curve is kept. Accuracy is measured on
    validation examples; if the settings contain `Data.validation_fraction`, the study's own runs do not use
    these examples. Runs that exist in ``out`` are not repeated. Raises the same errors as `Study.run`, and
    `ConfigError` if the study has no grid, or if ``out`` holds runs of the study with other settings.
    """
    tuning = study.tuning
    if tuning is None:
        raise ConfigError(f"--tune: {study.name} has no grid of step sizes, because its paper gives them")
    apart = config.load(study.file(settings), study.changes).data.validation_fraction or VALIDATION
    on = (f"data.validation_fraction={apart}", "data.evaluate_on=validation")
    budget, seeds = tuning.budget[settings], tuning.seeds_at.get(settings, tuning.seeds)
    arms = [arm for arm in study.arms_of(settings) if not arm.steps_of]
    grids = [arm.grid_at.get(settings, tuning.grid if arm.grid is None else arm.grid) for arm in arms]
    by_arm = {arm.label: choices(grid) for arm, grid in zip(arms, grids, strict=True)}
    points = [(arm, steps) for arm in arms for steps in by_arm[arm.label]]
    scores: dict[str, list[tuple[float, list[str]]]] = {arm.label: [] for arm in arms}
    base = study.file(settings).parent
    file = study.steps_file(settings)
    with contextlib.suppress(OSError):
        make_folder(file.parent)
    if not os.access(file.parent, os.W_OK):  # fail now, not after runs that take hours
        raise ConfigError(f"{file} cannot be written")
    _refuse_other_runs(study, out, settings, by_arm)
    with warm() as fork_server:
        for number, (arm, steps) in enumerate(points, 1):
            found = []
            for seed in seeds:
                wanted = study.experiment(arm, seed, settings, [*steps, *on, _until(tuning, budget)])
                folder = out / "tuning" / f"{slug(arm)}-{slug(Arm(' '.join(steps), ()))}-{seed}"
                finished(wanted, folder, base, fork_server, quiet)
                with Record(folder) as record:
                    rows = record.evaluations
                    costs = [float(getattr(row, tuning.over)) for row in rows]
                    found.append(area(costs, [row.accuracy for row in rows], budget))
            scores[arm.label].append((fmean(found), steps))
            say(f"{number:>3} of {len(points)}  {arm.label}, {', '.join(steps)}: {fmean(found):.1%}")
    best = [choose(arm.label, scores[arm.label], grid) for arm, grid in zip(arms, grids, strict=True)]
    return write_text(file, written(study, tuning, settings, best, grids))


def _refuse_other_runs(
    study: Study, out: Path, settings: str, points: Mapping[str, Sequence[Sequence[str]]]
) -> None:
    """Raise `ConfigError` if ``out`` holds a run that no choice of step sizes makes a part of the study.

    ``points`` lists the points of each arm's grid, keyed by the arm's label.
    """
    base = study.file(settings).parent
    plain = replace(study, changes=())  # the user's changes come last, as in the study's own runs
    for arm, seed, folder in study.runs_of(study.arms_of(settings), out, settings):
        errors = list[ConfigError]()
        for steps in points[arm.steps_of or arm.label]:
            wanted = plain.experiment(arm, seed, settings, [*steps, *study.changes])
            try:
                existing(wanted, folder, base)
                break
            except ConfigError as error:
                errors.append(error)
        else:
            raise errors[0]


def choices(grid: Grid) -> list[list[str]]:
    """Return every point of the grid as a list of changes to the settings.

    >>> choices({"strategy.server_lr": (0.1, 1.0), "training.lr": (0.05,)})
    [['strategy.server_lr=0.1', 'training.lr=0.05'], ['strategy.server_lr=1.0', 'training.lr=0.05']]
    """
    return [
        [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
        for values in itertools.product(*grid.values())
    ]


def choose(label: str, scored: Sequence[tuple[float, list[str]]], grid: Grid) -> Chosen:
    """Return the best point, or the first of several equally good ones. Points that diverged (NaN) rank last.

    >>> choose("a", [(0.2, ["training.lr=0.1"]), (0.5, ["training.lr=0.2"])], {"training.lr": (0.1, 0.2)})
    Chosen(label='a', changes=('training.lr=0.2',), score=0.5, border=('training.lr',))
    """
    score, steps = max(scored, key=lambda one: -math.inf if math.isnan(one[0]) else one[0])
    values = dict(step.split("=") for step in steps)
    ends = {key: (str(min(tried)), str(max(tried))) for key, tried in grid.items() if len(tried) > 1}
    border = tuple(key for key, end in ends.items() if values[key] in end)
    return Chosen(label, tuple(steps), score, border)


def written(
    study: Study, tuning: Tuning, settings: str, best: Sequence[Chosen], grids: Sequence[Grid]
) -> str:
    """Return the content of the file with the grid and the chosen step sizes of each arm."""
    of = COSTS[tuning.over]
    command = f"edgefl reproduce {study.name}{f' --settings {settings}' if settings else ''} --tune"
    given = "".join(f" --set {change}" for change in study.changes)
    used = tuning.seeds_at.get(settings, tuning.seeds)
    seeds = ", ".join(map(str, used))
    what = (
        f"{command}{given}: for each arm, the step sizes in its grid with the largest mean accuracy over "
        f"{tuning.budget[settings]:g} {of}, "
        f"{f'with seed {seeds}' if len(used) == 1 else f'averaged over the seeds {seeds}'}."
    )
    lines = [
        *(f"# {line}" for line in textwrap.wrap(what, 108, break_long_words=False, break_on_hyphens=False)),
        'evaluated_on = "validation"',
        *([f"set = {toml.literal(study.changes_besides_data)}"] if study.changes_besides_data else []),
        "",
        "[steps]",
    ]
    for one, grid in zip(best, grids, strict=True):
        tried = "; ".join(
            f"{key} {', '.join(f'{each:g}' for each in values)}" for key, values in grid.items()
        )
        lines.append(f"# {one.score:.1%}; tried: {tried}")
        lines.append(f"{toml.literal(one.label)} = {toml.literal(list(one.changes))}")
    lines += ["", "[border]", "# Keys whose best value is the smallest or largest that was tried."]
    lines += [f"{toml.literal(one.label)} = {toml.literal(list(one.border))}" for one in best if one.border]
    return "\n".join(lines) + "\n"


def _until(tuning: Tuning, budget: float) -> str:
    key = {"trips": "trips", "at_s": "emulated_s"}[tuning.over]
    return f"stop={{{key}={budget:g}}}"
