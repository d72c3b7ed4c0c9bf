"""The live view of a run in the terminal; a line now and then where there is no terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from edgefl.devices.fleet import ClientInfo
from edgefl.experiment import Experiment
from edgefl.limits.capacity import TimeScale
from edgefl.run import control
from edgefl.run.course import Course, duration, percent, printable, rate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

REDRAW_S = 0.2
"""Wall seconds between two pictures at least: no more than the server's updates."""
LINE_S = 5.0
"""Wall seconds between two lines of progress at least."""
MOST_COLUMNS = 100
"""Of a line of progress."""


class View(Protocol):
    """What the supervisor tells a view. It is entered when the run starts and left when it ends."""

    def say(self, text: str) -> None:
        """What is going on, such as ``"loading data and model"``."""

    def describe(self, clients: list[ClientInfo], prepared: control.Prepared, scale: TimeScale) -> None:
        """The workload and the time scale are known."""

    def update(self, progress: control.Progress) -> None:
        """New figures, a few times a second."""

    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Quiet:
    """Says nothing."""

    def say(self, text: str) -> None:
        pass

    def describe(self, clients: list[ClientInfo], prepared: control.Prepared, scale: TimeScale) -> None:
        pass

    def update(self, progress: control.Progress) -> None:
        pass

    def __enter__(self) -> Quiet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Lines:
    """Plain lines: three at the start, one every five seconds, one at the end.

    A stream that is gone (a closed pipe) ends the lines, not the run.

    >>> from edgefl.experiment import Experiment, Fleet
    >>> with Lines(Experiment(fleet=Fleet(devices={"pi-4": 2})), sys.stdout) as view:
    ...     view.say("loading data and model")
    edgefl: loading data and model
    edgefl: ended before the start: no client was trained
    """

    def __init__(
        self,
        experiment: Experiment,
        stream: TextIO | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._course = Course(experiment, monotonic)
        self._stream = stream or sys.stderr
        self._gone = False
        self._monotonic = monotonic
        self._printed_s = monotonic()

    def say(self, text: str) -> None:
        self._course.note = text
        self._print(text)

    def describe(self, clients: list[ClientInfo], prepared: control.Prepared, scale: TimeScale) -> None:
        self._course.describe(clients, prepared, scale)
        self._print(described(self._course))
        self._print(scale.why)

    def update(self, progress: control.Progress) -> None:
        self._course.update(progress)
        now_s = self._monotonic()
        if now_s - self._printed_s < LINE_S:
            return
        self._printed_s = now_s
        there = self._course.total - progress.absent
        self._print(
            figures(self._course, MOST_COLUMNS - len("edgefl: "))
            if self._course.running
            else f"{there} of {self._course.total} clients connected"
        )

    def _print(self, text: str) -> None:
        if self._gone:
            return
        try:
            print(f"edgefl: {text}", file=self._stream, flush=True)
        except OSError:
            self._gone = True

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        start = f"{self._course.outcome(error)}: "
        room = MOST_COLUMNS - len(f"edgefl: {start}")
        end = figures(self._course, room) if self._course.running else "no client was trained"
        self._print(start + end)


class Screen:
    """A panel that is redrawn in place, and stays when the run ends.

    It draws when it is told something and has no thread. A terminal that is gone ends the drawing, not the
    run.
    """

    def __init__(
        self, experiment: Experiment, console: Console, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.live import Live

        from edgefl.run.panel import Panel

        self._course = Course(experiment, monotonic)
        self._panel = Panel(self._course)
        self._console = console
        self._live: Live | None = Live(
            self._panel,
            console=console,
            auto_refresh=False,
            # What Python code prints meanwhile goes above the panel, unless it has a place of its own.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._monotonic = monotonic
        self._drawn_s = -REDRAW_S

    def say(self, text: str) -> None:
        self._course.note = text
        self._draw()

    def describe(self, clients: list[ClientInfo], prepared: control.Prepared, scale: TimeScale) -> None:
        self._course.describe(clients, prepared, scale)
        style = {"fits": "dim", "tight": "yellow", "overloaded": "bold red"}[scale.verdict]
        self._try(lambda live: live.console.print(scale.why, style=style, markup=False))

    def update(self, progress: control.Progress) -> None:
        self._course.update(progress)
        if self._monotonic() - self._drawn_s >= REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_s = self._monotonic()
        self._try(lambda live: live.refresh() if live.is_started else None)

    def _try(self, draw: Callable[[Live], None]) -> None:
        if self._live is None:
            return
        try:
            draw(self._live)
        except OSError:
            self._live = None

    def __enter__(self) -> Screen:
        self._try(lambda live: live.start(refresh=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._panel.state, self._panel.failed = self._course.outcome(error), error is not None
        self._try(lambda live: live.stop())


def make_view(experiment: Experiment, quiet: bool) -> View:
    """The view for this terminal: nothing if ``quiet``, a panel on a terminal, else lines on stderr.

    The panel is drawn on stderr, so that standard output may go into a file.
    """
    if quiet:
        return Quiet()
    encoding = (getattr(sys.stderr, "encoding", None) or "").lower().replace("-", "")
    if not sys.stderr.isatty() or os.environ.get("TERM") in (None, "", "dumb") or encoding != "utf8":
        return Lines(experiment)
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """rich's own ends the program."""
            raise

    return Screen(experiment, Terminal(stderr=True, highlight=False))


def described(course: Course) -> str:
    """The fleet and the workload in one line."""
    assert course.prepared is not None
    counts = ", ".join(f"{count} {profile}" for profile, count in course.clients.items())
    data, model = printable(course.prepared.dataset), printable(course.experiment.model.name)
    return (
        f"{course.name}: {course.strategy}, {course.total} clients ({counts}), {data}, "
        f"{model} with {course.prepared.size:,} parameters"
    )


def _fidelity(course: Course, progress: control.Progress) -> str:
    if course.valid is None:
        return ""
    if course.valid and course.computed:
        return "times computed"
    return f"error {percent(progress.fidelity_median)} {'VALID' if course.valid else 'INVALID'}"


def figures(course: Course, width: int) -> str:
    """The figures in one line of at most ``width`` columns; what there is no room for is left out."""
    progress = course.progress
    assert progress is not None
    goals = course.goals
    parts = [
        f"{int(100 * goals[0].share)}%" if goals else "",
        f"wall {duration(course.wall_s)}",
        f"version {progress.version}",
        f"trips {progress.trips}",
        "" if progress.accuracy is None else f"accuracy {progress.accuracy:.4f}",
        _fidelity(course, progress),
        f"dropped {progress.dropped}" if progress.dropped else "",
        f"failed clients {progress.incidents}" if progress.incidents else "",
        rate(course.trips_per_s),
        f"staleness {progress.staleness_mean:.3g}",
        "" if progress.loss is None else f"loss {progress.loss:.3f}",
    ]
    line = ""
    for part in filter(None, parts):
        longer = f"{line}, {part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line
