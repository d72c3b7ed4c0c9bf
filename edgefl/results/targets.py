"""Time to accuracy: a target, each run's cost of reaching it, and ratios of costs over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from edgefl import toml
from edgefl.errors import ConfigError
from edgefl.experiment import Data, Evaluation, Stop
from edgefl.results.fleets import Ahead, ahead
from edgefl.results.record import Record
from edgefl.results.run_folder import EXPERIMENT_FILE
from edgefl.results.statistics import (
    WINDOW,
    CostRatio,
    LearningCurve,
    Over,
    estimate,
    filled,
    ratio,
    ratio_digits,
    smoothed,
)
from edgefl.results.summary import rounded, value_of

Cost = Literal["at_s", "trips"]
COSTS: dict[Cost, str] = {"at_s": "emulated_s_to_target", "trips": "trips_to_target"}
"""Field of summary.json that holds the cost of reaching the target, for each unit of cost."""


class RaceTarget(NamedTuple):
    """The value of a metric that runs have to reach."""

    value: float
    why: str
    """How the target was chosen, as text."""
    measure: str = "accuracy"
    at_most: bool = False
    """True if the metric has to fall to the value, as a loss does."""
    window: int = WINDOW
    """Number of consecutive evaluations whose mean has to reach the value."""

    def __str__(self) -> str:
        """Return the target as text.

        >>> print(RaceTarget(0.9, ""), RaceTarget(0.2, "", "loss", at_most=True), sep=", ")
        90.0% accuracy, loss ≤ 0.2
        """
        if self.measure == "accuracy":
            return f"{self.value:.1%} accuracy"
        return f"{self.measure} {'≤' if self.at_most else '≥'} {self.value:.4g}"

    @property
    def rule(self) -> str:
        """A sentence that states when a run has reached the target, and how the target was chosen."""
        how = f"the mean of {self.window} evaluations in a row" if self.window > 1 else "one evaluation"
        return f"Reached: {how} is {'below' if self.at_most else 'above'} the target ({self.why})."

    def curve(self, record: Record, over: Over) -> LearningCurve:
        """Return the run's curve of the metric, negated if the metric has to fall."""
        sign = -1.0 if self.at_most else 1.0
        rows = [row for row in record.evaluations if math.isfinite(value_of(row, self.measure))]
        costs = [float(getattr(row, over)) for row in rows]
        values = [sign * value_of(row, self.measure) for row in rows]
        settings, periodic = settings_of(record).evaluation, (costs, values)
        if settings.every_trips is not None:
            periodic = filled([row.trips for row in rows], costs, values, settings.every_trips)
        elif settings.every_s is not None:
            periodic = filled([row.at_s for row in rows], costs, values, settings.every_s)
        return LearningCurve(costs, values, periodic, self.window)

    def reached(self, record: Record, over: Over) -> float:
        """Return the run's cost of reaching the target (seconds, trips or versions), or NaN if it did not."""
        return self.curve(record, over).reached(-self.value if self.at_most else self.value)

    def at_once(self, record: Record) -> bool:
        """Return True if the mean of the run's first evaluations already reaches the target."""
        return self.curve(record, "at_s").at_once(-self.value if self.at_most else self.value)


def check_target(given: object) -> None:
    """Raise `ConfigError` unless ``given`` is None or an accuracy above 0 and at most 1."""
    number = float(given) if isinstance(given, int | float | np.floating) else None
    if given is not None and (number is None or not 0.0 < number <= 1.0):
        got = repr(given) if number is None else f"{number:g}"
        raise ConfigError(f"target: expected an accuracy above 0 and at most 1, such as 0.9; got {got}")


def check_scored(records: Sequence[Record]) -> None:
    """Raise `ConfigError` if the runs have evaluations, but none with an accuracy."""
    rows = [row for record in records for row in record.evaluations]
    if not rows or any(math.isfinite(row.accuracy) for row in rows):
        return
    have = ", ".join(sorted({"loss", *(name for row in rows for name in row.metrics)}))
    raise ConfigError(
        f"target: accuracy is not evaluated here, only {have}; leave the target out and set "
        'stop.metric = { name = "loss", at_most = … }'
    )


def window_of(stop: Stop) -> int:
    """Return the number of evaluations over which accuracies are smoothed: `WINDOW` or, if ``stop.accuracy``
    is set and ``stop.accuracy_over`` is smaller, ``stop.accuracy_over``."""
    return WINDOW if stop.accuracy is None else min(WINDOW, stop.accuracy_over)


def target_of(records: Sequence[Record], given: float | None = None) -> RaceTarget | None:
    """Return the target of a comparison.

    The target is the first of these that exists: ``given``; the goal ``stop.accuracy`` or ``stop.metric``, if
    it is the same for all runs; the highest smoothed accuracy that every run reached. It is None if none of
    them exists. The target's window, the number of evaluations over which values are smoothed, is 1 for
    ``stop.metric``, the result of `window_of` for ``stop.accuracy``, and otherwise `WINDOW`. Raises
    `ConfigError` if ``given`` is not above 0 and at most 1, or if it is given and the runs have evaluations
    but no accuracy.
    """
    check_target(given)
    stops = [settings_of(record).stop for record in records]
    same = len({(stop.accuracy, stop.accuracy_over, stop.metric) for stop in stops}) == 1
    stop = stops[0] if same else Stop()
    window = window_of(stop)
    if given is not None:
        check_scored(records)
        return RaceTarget(float(given), "given", window=window if given == stop.accuracy else WINDOW)
    if stop.accuracy is not None:
        return RaceTarget(stop.accuracy, "stop.accuracy of the runs", window=window)
    if (goal := stop.metric) is not None:
        falls = goal.at_most is not None
        value = goal.at_most if falls else goal.at_least
        if value is not None:
            return RaceTarget(value, "stop.metric of the runs", goal.name, falls, window=1)
    best = []
    for record in records:
        values = [row.accuracy for row in record.evaluations if math.isfinite(row.accuracy)]
        best.append(max(smoothed(values), default=math.nan))
    if not best or not all(map(math.isfinite, best)):
        return None
    # rounded down, so that even the worst run reaches it
    highest = math.floor(min(best) * 1e4) / 1e4
    return RaceTarget(highest, "the highest that every run reached, since no target was given")


class Settings(NamedTuple):
    """The settings of a run that a comparison depends on."""

    evaluation: Evaluation = Evaluation()
    stop: Stop = Stop()
    plausible: bool = False
    """True if compute times were drawn from the profiles' 90% intervals (``model_errors = "drawn"``)."""
    tables: Mapping[str, Any] = {}
    """The content of the experiment's file as plain data."""


def settings_of(record: Record) -> Settings:
    """Return the settings of the run, as recorded or, if the record has none, from the experiment's file.

    The settings are read only once, and the user's own code is not imported.
    """
    if (known := _known.get(record)) is not None:
        return known
    try:
        recorded, file = record.meta.toml, record.folder / EXPERIMENT_FILE
        tables = toml.parse(recorded, str(record.path)) if recorded else toml.read(file)
        evaluation = msgspec.convert(tables.get("evaluation", {}), Evaluation)
        plausible = tables.get("fleet", {}).get("model_errors") == "drawn"
        found = Settings(evaluation, msgspec.convert(tables.get("stop", {}), Stop), plausible, tables)
    except (ConfigError, OSError, msgspec.ValidationError):
        found = Settings()
    _known[record] = found
    return found


def evaluated_on(record: Record) -> str:
    """Return which examples the server evaluates the run's models on: ``test`` or ``validation``."""
    return str(settings_of(record).tables.get("data", {}).get("evaluate_on", Data().evaluate_on))


_known: WeakKeyDictionary[Record, Settings] = WeakKeyDictionary()
"""Cache of `settings_of`."""


class ToTarget(NamedTuple):
    """The costs of reaching the target in one setting's runs, and their ratios to the first setting's."""

    runs: int
    reached: int
    """Number of runs that reached the target."""
    costs: dict[Cost, tuple[float, ...]]
    """Emulated seconds and client trips of each seed's run; NaN if the run did not reach the target."""
    ratios: dict[Cost, CostRatio | None]
    """The ratio of this setting's cost to the first setting's, paired by seed.

    None for the first setting itself; also if the two settings have no seed in common, if a run reached the
    target at a cost of 0, or if runs ended too early to give even a bound.
    """
    ahead: Ahead | None = None
    """Number of fleets in which this setting reached the target before the first setting did; None unless
    the fleets of all runs were drawn at random."""

    def text(self, over: Cost) -> str:
        """Return the mean cost of the runs that reached the target, ± half the width of its 95% interval.

        >>> nan = math.nan
        >>> two = ToTarget(2, 1, {"at_s": (40.0, nan), "trips": (1400.0, nan)}, {})
        >>> two.text("at_s"), two.text("trips"), two.passed
        ('40.0', '1,400', '1 of 2')
        >>> times = (0.06,), (0.06, 0.06), (0.31, 0.312)
        >>> [ToTarget(2, 2, {"at_s": at_s}, {}).text("at_s") for at_s in times]
        ['0.060', '0.060 ±0.000', '0.311 ±0.013']
        """
        there = [cost for cost in self.costs[over] if not math.isnan(cost)]
        if not there:
            return "–"
        found = estimate(there)
        if found.mean >= 1000 or over == "trips":
            return found.at(",.0f")
        # if the mean or the half-width is below 1, the smaller one gets two significant digits; a half-width
        # of 0 is ignored
        least = min(size for size in (found.mean, found.half or 0.0, 1.0) if size > 1e-4 * found.mean)
        return found.at(".1f" if least == 1.0 else f".{1 - math.floor(math.log10(least))}f")

    @property
    def passed(self) -> str:
        """The number of runs that reached the target, and the number of all runs, as text."""
        return f"{self.reached} of {self.runs}"

    def ratio_text(self, over: Cost) -> str:
        found = self.ratios.get(over)
        return "not settled" if found is None else ratio_text(found)

    def builtins(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "reached": self.reached,
            "runs": self.runs,
            **{name: [rounded(cost) for cost in self.costs[over]] for over, name in COSTS.items()},
            "over_first": {
                name: None
                if (found := self.ratios.get(over)) is None
                else {"mean": rounded(found.mean), "low_95": rounded(found.low or None),
                      "high_95": rounded(found.high), "at_least": found.at_least, "at_most": found.at_most}
                for over, name in COSTS.items()
            },
            "ahead_of_first": None if self.ahead is None else self.ahead.builtins(),
        }  # fmt: skip


def ratio_text(found: CostRatio) -> str:
    """Return a ratio with two decimals and its interval.

    >>> ratio_text(CostRatio(1.244, 1.04, 1.48)), ratio_text(CostRatio(3.0, 0.0, math.inf))
    ('1.24× (1.04 to 1.48)', '3.00× (one seed)')
    """
    open_ended = found.low == 0.0 and math.isinf(found.high)
    return found.for_tables() + (" (one seed)" if open_ended else "")


def to_target(target: RaceTarget, runs: Sequence[Record], first: Sequence[Record]) -> ToTarget:
    """Return the runs' costs of reaching the target, and their ratios to the costs of ``first``, by seed."""
    costs: dict[Cost, tuple[float, ...]] = {
        over: tuple(target.reached(run, over) for run in runs) for over in COSTS
    }
    here, there = ({run.meta.seed: run for run in part} for part in (runs, first))
    seeds = [seed for seed in here if seed in there]
    ratios: dict[Cost, CostRatio | None] = dict.fromkeys(COSTS)
    leads = None
    drawn = all(settings_of(run).plausible for run in (*runs, *first))
    for over in COSTS if seeds and [*runs] != [*first] else ():
        pair = [[part[seed] for seed in seeds] for part in (here, there)]
        passed = [[target.reached(run, over) for run in part] for part in pair]
        ends = [[target.curve(run, over).end for run in part] for part in pair]
        ratios[over] = ratio(*passed, *ends)
        if over == "at_s" and drawn:
            leads = ahead(*passed, *ends)
    return ToTarget(len(runs), int(np.isfinite(costs["at_s"]).sum()), costs, ratios, leads)


def race_in_words(rows: Mapping[str, Sequence[Record]], target: RaceTarget | None) -> str:
    """Describe which setting reached the target first in emulated time, and how certain this is.

    As in the tables, the denominator of a ratio is the time of the earlier row in ``rows``. A second sentence
    names the other settings whose first evaluations already reached the target.
    """
    if target is None or len(rows) < 2:
        return ""
    found = {label: to_target(target, runs, runs) for label, runs in rows.items()}
    ranks = {label: _rank(one) for label, one in found.items()}
    leaders = [label for label, rank in ranks.items() if rank == min(ranks.values())]
    text = _order_in_words(rows, target, found, leaders)
    others = [label for label in rows if leaders != [label]]
    if not (early := [label for label in others if any(map(target.at_once, rows[label]))]):
        return text
    names = " and ".join(early)
    return (
        f"{text} The mean of the first {target.window} evaluations of {names} is already at the target, so "
        f"{names} may have reached it earlier than shown; a smaller {_period(rows[early[0]][0])} would tell."
    )


def _order_in_words(
    rows: Mapping[str, Sequence[Record]],
    target: RaceTarget,
    found: Mapping[str, ToTarget],
    leaders: Sequence[str],
) -> str:
    """Return the first sentence of `race_in_words`, for two or more rows.

    ``found`` holds the costs of each row, and ``leaders`` are the rows with the best rank.
    """
    first, second, *_ = sorted(found, key=lambda label: _rank(found[label]))
    if not found[first].reached:
        return _too_few_evaluations([run for runs in rows.values() for run in runs], target) or (
            f"No run reached {target}; a lower target, a longer run ([stop]) or another training.lr may help."
        )
    in_s = f"in {found[first].text('at_s')} emulated seconds"
    if found[first].reached < found[first].runs:
        in_s += f" ({found[first].passed} runs reached it)"
    if len(leaders) > 1:
        return f"{' and '.join(leaders)} reached {target} at the same time: {in_s}."
    text = f"{first} reached {target} first: {in_s}"
    base = next(label for label in rows if label in (first, second))
    other = second if base == first else first
    known = to_target(target, rows[other], rows[base]).ratios["at_s"]
    if known is None:
        late = found[second]
        return f"{text}; {second}: {late.text('at_s')} ({late.passed} runs reached it), not settled."
    times = known.for_tables().removesuffix(")")
    times += ", 95% interval)" if "(" in times else ""
    times = times.replace("> ", "at least ").replace("< ", "at most ")
    text += f"; {second} took {times} as long" if base == first else f", {times} the time of {second}"
    if math.isinf(known.high) and known.low == 0.0:
        order = ""  # the rows are in the order of their means, which may include other seeds
        if ratio_digits(known.mean) == "1.00" and not (known.at_least or known.at_most):
            order = " On the seed that both have, they took equally long."
        elif known.mean < 1.0 if base == first else known.mean > 1.0:
            order = f" On the seed that both have, {second} is first."
        return f"{text}.{order} That is one seed: another may reverse the order."
    certain = known.low > 1.0 if base == first else known.high < 1.0
    if known.high < 1.0 if base == first else known.low > 1.0:
        return f"{text}. So on the seeds that both have, {second} is first."
    return f"{text}." if certain else f"{text}, so these seeds do not tell them apart."


def _too_few_evaluations(runs: Sequence[Record], target: RaceTarget) -> str:
    """Return a hint if a single evaluation reached the target and the runs have few evaluations, so that more
    of them might let a mean reach it; otherwise return ""."""
    single = target._replace(window=1)
    most = max(len(target.curve(run, "at_s").accuracies) for run in runs)
    if most >= 3 * target.window or all(math.isnan(single.reached(run, "at_s")) for run in runs):
        return ""
    return (
        f"No run reached {target} in the mean of {target.window} evaluations in a row, only in single ones; "
        f"a run has at most {most} evaluations here, and a smaller {_period(runs[0])} gives more."
    )


def _period(run: Record) -> str:
    """Return the experiment key that sets the interval between the run's evaluations."""
    rules = settings_of(run).evaluation
    every = "every_s" if rules.every_s else "every_trips" if rules.every_trips else "every_versions"
    return f"evaluation.{every}"


def _rank(found: ToTarget) -> tuple[float, float]:
    """Return a sort key: the share of runs that reached the target, then their mean time."""
    there = [cost for cost in found.costs["at_s"] if not math.isnan(cost)]
    return -found.reached / found.runs, float(np.mean(there)) if there else math.inf
