"""Live view of a run: a panel that is redrawn on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from edgefl.devices.fleet import ClientInfos
from edgefl.experiment import NO_PROGRESS, Experiment, Stop
from edgefl.host.capacity import TimeScale
from edgefl.host.verdict import Conditions, unfit
from edgefl.results import headline
from edgefl.results.tables import FittedTable, PlainConsole, many, number, seconds, table
from edgefl.run import control
from edgefl.run.control import NO_VERDICT, Verdict
from edgefl.terminal import can_redraw, printable, say

LINE_S = 5.0
"""Minimum interval between lines of progress, in wall seconds."""
MAX_COLUMNS = 120
REDRAW_S = 0.5
"""Minimum interval between redraws, in wall seconds; it is long because the clients need the CPU."""
PACE_S = 600.0
"""The remaining time is estimated from the run's pace over the last `PACE_S` wall seconds."""
MAX_NAMED = 6
"""Maximum number of profiles that the first line lists."""
MAX_PROFILES, LINES_BESIDES_PROFILES, MAX_NAME = 12, 15, 20


class Goal(NamedTuple):
    """A stop condition and the progress towards it, from 0 to 1."""

    share: float
    text: str
    steady: bool = True
    """True if the remaining time can be estimated from the pace so far."""


def nearest_goal(stop: Stop, progress: control.Progress) -> Goal:
    """Return the stop condition that is closest to being met, by its progress from 0 to 1.

    A measured condition, such as an accuracy, is returned only if there is no other condition.
    """
    counted: list[tuple[str, float, float | None, Callable[[float], str]]] = [
        ("versions", progress.version, stop.versions, "{:,.0f}".format),
        ("trips", progress.trips, stop.trips, "{:,.0f}".format),
        ("emulated", progress.emulated_s, stop.emulated_s, seconds),
        ("wall", progress.wall_s, stop.wall_s, seconds),
    ]
    goals = [
        Goal(min(1.0, reached / target), f"{name} {text_of(reached)} of {text_of(target)}")
        for name, reached, target, text_of in counted
        if target is not None
    ]
    if goals:
        return max(goals)
    if (goal := stop.metric) is not None:
        value = ({"loss": progress.loss} | progress.metrics).get(goal.name)
        target = goal.at_least if goal.at_most is None else goal.at_most
        return Goal(
            float(value is not None and goal.met(value)),
            f"{printable(goal.name)} {number(value)} of {target:g}",
            False,
        )
    if stop.accuracy is None:
        return Goal(0.0, f"until {stop.patience_evaluations} evaluations are no better", steady=False)
    accuracy, target = progress.accuracy or 0.0, stop.accuracy
    return Goal(min(1.0, accuracy / target), f"accuracy {accuracy:.4g} of {target:g}", steady=False)


def verdict_of(summary: Mapping[str, Any]) -> Verdict:
    """Return the verdict on the fidelity of an ended run, taken from the run's ``summary``."""
    found = summary["fidelity"]
    if summary["clock"] == "virtual" and found["valid"]:
        return Verdict("times computed")
    stat = headline.fidelity(found, summary["clock"])
    return Verdict(stat.value, next(iter(found["reasons"]), stat.note))


def described(
    experiment: Experiment,
    clients: ClientInfos,
    prepared: control.Prepared,
    scale: TimeScale,
    remark: str = "",
) -> control.Described:
    """Return the description of a run that `RunView.describe` shows."""
    data, model = printable(prepared.dataset), printable(experiment.model.name)
    workload = f"{data}, {model} with {prepared.size:,} parameters"
    return control.Described(list(clients.kinds), workload, scale, remark)


class RunView:
    """Base class of the views. It stores the metrics of a run and displays nothing.

    A view is a context manager: enter it when the run starts, and exit it when the run ends.
    """

    def __init__(self, experiment: Experiment, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.experiment = experiment
        self.states = False
        """True if the view needs `control.Progress.states`."""
        self.title = f"{printable(experiment.name)}: {printable(str(experiment.strategy.get('name', '')))}"
        self.monotonic = monotonic
        self.note = ""
        """The current activity of the run, such as loading data; empty during training."""
        self.total = 0
        """Number of clients."""
        self.workload = ""
        self.scale: TimeScale | None = None
        self.progress: control.Progress | None = None
        self.running = False
        """True once emulated time has begun."""
        self.no_progress = ""
        """Reason why the ended run has no result, or "" if it has one."""
        self.judged: Verdict | None = None
        """Verdict on the fidelity of the ended run; None during the run."""

    def say(self, text: str, *, at_once: bool = False) -> None:
        """Set the current activity, such as ``"loading data and model"``.

        A `LineView` prints the text only if the fleet is known or ``at_once`` is True.
        """
        self.note = text

    def restarted(self, text: str) -> None:
        """Show that the clients are being started again; ``text`` is the reason."""
        self.running = False
        self.say(text)

    def describe(self, about: control.Described) -> None:
        """Set the fleet, the workload, the time scale and a remark."""
        self.total, self.scale = sum(count for *_, count in about.fleet), about.scale
        self.workload, self.note = about.workload, "starting the clients"

    def update(self, progress: control.Progress) -> None:
        """Show new metrics; this method is called a few times per second."""
        self.progress = progress
        if progress.connected is None and not self.running:
            self.running, self.note = True, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pass

    def goal(self, progress: control.Progress) -> Goal:
        """Return the next goal: all clients connected, then the nearest stop condition."""
        if self.running:
            return nearest_goal(self.experiment.stop, progress)
        there, text = progress.connected or 0, f"of {self.total:,} clients connected"
        return Goal(there / max(1, self.total), f"{there:,} {text}", steady=False)

    def verdict(self, progress: control.Progress) -> Verdict:
        """Return the verdict on the fidelity of recent trips or, after the run, of the whole run."""
        if self.judged is not None:
            return self.judged
        median = progress.fidelity_median
        overloaded = self.scale is not None and self.scale.verdict == "overloaded"
        if overloaded or (progress.invalid and median is not None):
            load = None if self.scale is None else self.scale.load
            why = next(iter(unfit(Conditions(load=load))), "the host is overloaded")
            return Verdict("INVALID", progress.invalid or why)
        if self.experiment.clock.kind == "virtual":
            return Verdict("times computed") if progress.trips else NO_VERDICT
        if median is None:
            return NO_VERDICT
        return Verdict("VALID", headline.errors(median, progress.fidelity_p95))

    def figures(self, progress: control.Progress) -> dict[str, str]:
        """Return the known metrics, the most important first."""
        fidelity, why = self.verdict(progress)
        rate = number(progress.trips / progress.wall_s) if progress.wall_s else "–"
        known = {
            "version": f"{progress.version:,}",
            "trips": f"{progress.trips:,} ({rate}/s)",
            "fidelity": fidelity,
            "because": why.partition(",")[0] if fidelity == "INVALID" else "",
            "wall": seconds(progress.wall_s),
            "accuracy": "" if progress.accuracy is None else f"{progress.accuracy:.4f}",
            "failed": many(progress.incidents, "process") if progress.incidents else "",
            "dropped": f"{progress.dropped:,}" if progress.dropped else "",
            "error": why.removeprefix("error ") if why.startswith("error ") else "",
            "loss": "" if progress.loss is None else f"{progress.loss:.4f}",
            **{printable(name): number(value, 4) for name, value in progress.metrics.items()},
            "staleness": f"mean {progress.staleness_mean:.3g}, max {progress.staleness_max:,}",
            "emulated": seconds(progress.emulated_s),
        }
        return {name: text for name, text in known.items() if text}

    def outcome(self, error: BaseException | None) -> str:
        """Return the outcome of the run in a few words."""
        if error is not None:
            return "interrupted" if isinstance(error, KeyboardInterrupt) else "ended early"
        if self.no_progress:
            return NO_PROGRESS
        how, ending, _ = self.note.partition(": writing a checkpoint")
        return (how if ending else "done") if self.running else "ended before the start"


class LineView(RunView):
    """Prints plain lines on stderr: a few at the start, one every five seconds, and one at the end.

    It prints nothing before the start, so that an error in the data or the model gives only one line.
    """

    _printed_s = 0.0

    def say(self, text: str, *, at_once: bool = False) -> None:
        super().say(text)
        if self.total or at_once:
            self._print(text)

    def describe(self, about: control.Described) -> None:
        super().describe(about)
        names = [f"{count:,} {printable(profile)}" for profile, _, count in about.fleet]
        if rest := about.fleet[MAX_NAMED:]:
            others = sum(count for *_, count in rest)
            names[MAX_NAMED:] = [f"{others:,} of {many(len(rest), 'other profile')}"]
        fleet = ", ".join(names)
        self._print(f"{self.title}, {many(self.total, 'client')} ({fleet}), {self.workload}")
        for line in filter(None, (about.scale.why, *about.remark.splitlines())):
            self._print(line)
        self._printed_s = self.monotonic()

    def update(self, progress: control.Progress) -> None:
        super().update(progress)
        if self.monotonic() - self._printed_s >= LINE_S:
            self._printed_s = self.monotonic()
            self._print(self._line(progress) if self.running else self.goal(progress).text)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        known = self.progress if self.running else None
        if self.total or error is None:
            self._print(f"{self.outcome(error)}: {self._line(known) if known else 'no client was trained'}")

    def _line(self, progress: control.Progress) -> str:
        """Return the metrics in one line, leaving out the last metrics if the line would be too long."""
        parts = [f"{int(100 * self.goal(progress).share)}%"]
        parts += [f"{name} {text}" for name, text in self.figures(progress).items()]
        while len(line := ", ".join(parts)) > MAX_COLUMNS - len("edgefl: interrupted: "):
            parts.pop()
        return line

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a closed pipe must not end the run
            say(f"edgefl: {printable(text)}", err=True)


class TerminalView(RunView):
    """Redraws a panel in place, without a thread.

    The last panel stays on the terminal unless the run is ``passing``, that is, one of many.
    """

    def __init__(
        self,
        experiment: Experiment,
        console: Console,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        passing: bool = False,
    ) -> None:
        super().__init__(experiment, monotonic)
        self._passing = passing
        # Show the output of Python code above the panel, unless stdout is a file.
        own_place = sys.stdout.isatty()
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=own_place, transient=passing)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),  # it may contain the name of a metric
            BarColumn(bar_width=None),
            "{task.fields[left]}",
            console=console,
            auto_refresh=False,
            speed_estimate_period=PACE_S,
            get_time=monotonic,
            expand=True,
        )
        self._task = self._bar.add_task("", total=1.0, left="")
        self._end: Text | None = None
        self._drawn_s = -REDRAW_S

    def say(self, text: str, *, at_once: bool = False) -> None:
        super().say(text)
        self._draw()

    def describe(self, about: control.Described) -> None:
        super().describe(about)
        if self._passing:
            return
        style = {"fits": "dim", "tight": "yellow", "overloaded": "bold red"}[about.scale.verdict]
        remark = f"\n{about.remark}" if about.remark else ""
        text = Text(about.scale.why, style=style).append(remark, style="dim")
        self._try(lambda: self._live.console.print(text))

    def update(self, progress: control.Progress) -> None:
        waited = not self.running
        super().update(progress)
        if waited and self.running:
            self._bar.reset(self._task)
        goal = self.goal(progress)
        self._bar.update(self._task, completed=goal.share, description=goal.text)
        left_s = self._bar.tasks[0].time_remaining if goal.steady else None
        left = f"{int(100 * goal.share)}%" + (f", {seconds(left_s)} left" if left_s else "")
        self._bar.update(self._task, left=left)
        if self.monotonic() - self._drawn_s >= REDRAW_S:
            self._draw()

    def __enter__(self) -> Self:
        self._live.start()
        self._draw()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        good = error is None and not self.no_progress
        self._end = _one_line(self.outcome(error), "green" if good else "bold red")
        self._bar.update(self._task, left="")
        self._draw()
        with suppress(OSError):
            self._live.stop()

    def _draw(self) -> None:
        self._drawn_s = self.monotonic()
        self._try(lambda: self._live.update(self.picture(), refresh=True))

    def _try(self, draw: Callable[[], object]) -> None:
        """Call ``draw`` during the run; if the terminal is closed, stop drawing and let the run continue."""
        try:
            if self._live.is_started:
                draw()
        except OSError:
            with suppress(OSError):
                self._live.stop()

    def picture(self) -> Group:
        """Return the current panel, which has about 15 lines and one more for each profile."""
        clock = f"{self.experiment.clock.kind} clock"
        if self.scale is not None:
            clock += f", time_scale {self.scale.value:g}, {self.workload}"
        parts: list[RenderableType] = [_one_line(self.title, "bold"), _one_line(clock, "dim")]
        if self.progress is not None:
            parts += [self._bar, *self._figures(self.progress), Text(), self._fleet(self.progress)]
        note = self.note or "Ctrl-C stops the run; it can be resumed"
        return Group(*parts, self._end or _one_line(note, "cyan"))

    def _figures(self, progress: control.Progress) -> tuple[Table, Text]:
        figures = self.figures(progress)
        grid = Table.grid(padding=(0, 2, 0, 0))
        scored = progress.accuracy is not None or progress.loss is None
        names = ["accuracy"] * scored + ["loss", *map(printable, progress.metrics), "staleness", "dropped"]
        names += ["failed"] * bool(progress.incidents)
        for left, right in zip_longest(("version", "trips", "wall", "emulated"), names, fillvalue=""):
            texts = left, figures.get(left, ""), right, figures.get(right, "–" if right else "")
            grid.add_row(*(_one_line(text, "" if place % 2 else "dim") for place, text in enumerate(texts)))
        word, why = self.verdict(progress)
        style = {"VALID": "green", "INVALID": "bold red"}.get(word, "")
        return grid, Text.assemble(("fidelity  ", "dim"), (word or "–", style), f", {why}" if why else "")

    def _fleet(self, progress: control.Progress) -> FittedTable:
        rows = list(progress.by_profile.items())
        everything = [sum(of) for of in zip(*progress.by_profile.values(), strict=True)]
        room = max(1, min(MAX_PROFILES, self._live.console.height - LINES_BESIDES_PROFILES))
        if len(rows) > room:
            rest = [counts for _, counts in rows[room - 1 :]]
            rows[room - 1 :] = [(f"{len(rest)} more profiles", [sum(of) for of in zip(*rest, strict=True)])]
        lines = [
            (_one_line(printable(name), "", MAX_NAME), *(f"{count:,}" for count in counts))
            for name, counts in (*rows, (many(self.total, "client"), everything))
        ]
        return table(
            ("profile", ">idle", ">training", ">absent", ">client trips"), [*lines[:-1], (), lines[-1]]
        )


def make_view(experiment: Experiment, quiet: bool, passing: bool = False) -> RunView:
    """Return the view on stderr: nothing if ``quiet``, a panel on a terminal, and plain lines elsewhere.

    The panel of a ``passing`` run, which is one of many, disappears when the run ends; such a run prints no
    lines.
    """
    if quiet:
        return RunView(experiment)
    console = PlainConsole(stderr=True, highlight=False)
    if can_redraw() and not console.options.ascii_only:
        return TerminalView(experiment, console, passing=passing)
    return RunView(experiment) if passing else LineView(experiment)


def _one_line(text: str, style: str, most: int | None = None) -> Text:
    line = Text(text, style, no_wrap=True, overflow="ellipsis")
    if most is not None:
        line.truncate(most)
    return line
