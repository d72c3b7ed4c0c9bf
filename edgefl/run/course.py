"""Where a run stands: what the live view works out from the server's figures. Pure, no terminal in it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgefl.devices.fleet import ClientInfo
from edgefl.experiment import Experiment
from edgefl.limits.capacity import TimeScale
from edgefl.run import control

RATE_WINDOW = 40
"""Updates over which trips a second are counted: ten seconds' worth."""
MOST_POINTS = 512
"""Accuracies kept; when there are more, every other one is dropped."""
ETA_FROM_S = 2.0
"""Wall seconds to watch a run before saying how long it will take."""


class Goal(NamedTuple):
    """A stop condition and how far towards it the run is."""

    name: str
    reached: float
    target: float

    @property
    def share(self) -> float:
        """Share of the way, from 0 to 1.

        >>> Goal("versions", 30, 120).share
        0.25
        """
        return min(1.0, max(0.0, self.reached / self.target))


class Course:
    """What a run has done so far and what it is heading for.

    >>> from edgefl.experiment import Experiment, Fleet, Stop
    >>> Course(Experiment(fleet=Fleet(devices={"pi-4": 2}), name="two", stop=Stop(versions=9))).strategy
    'fedbuff'
    """

    def __init__(self, experiment: Experiment, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.experiment = experiment
        self.name = printable(experiment.name)
        self.strategy = printable(str(experiment.strategy.get("name", "")))
        self.note = ""
        """What is going on besides training, such as loading."""
        self.clients: dict[str, int] = {}
        """Profile → clients."""
        self.prepared: control.Prepared | None = None
        self.scale: TimeScale | None = None
        self.progress: control.Progress | None = None
        self.accuracies: list[float] = []
        """The history, oldest first, thinned out where it is long."""
        self.best: float | None = None
        self._monotonic = monotonic
        self._trips: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self.running = False
        """Emulated time has begun."""
        self._first_s = self._latest_s = 0.0
        self._begun: dict[str, float] = {}
        self._assessed: tuple[float, float | None] | None = None
        self._every, self._seen = 1, 0

    def describe(self, clients: Sequence[ClientInfo], prepared: control.Prepared, scale: TimeScale) -> None:
        """The workload and the time scale are known."""
        counts = Counter(info.profile for info in clients)
        self.clients = {printable(profile): count for profile, count in counts.items()}
        self.prepared, self.scale = prepared, scale
        self.note = "starting the clients"

    def update(self, progress: control.Progress) -> None:
        """New figures."""
        self.progress, self._latest_s = progress, self._monotonic()
        if progress.phase != "running":
            return
        if not self.running:
            self.running, self.note, self._first_s = True, "", self._latest_s
            self._begun = {goal.name: goal.share for goal in self.goals}
        self._trips.append((self._latest_s, progress.trips))
        if progress.accuracy is not None and (progress.accuracy, progress.loss) != self._assessed:
            self._assessed = progress.accuracy, progress.loss
            self.best = max(progress.accuracy, self.best or 0.0)
            self._remember(progress.accuracy)

    def _remember(self, accuracy: float) -> None:
        if self._seen % self._every == 0:
            self.accuracies.append(accuracy)
        self._seen += 1
        if len(self.accuracies) > MOST_POINTS:
            del self.accuracies[1::2]
            self._every *= 2

    @property
    def total(self) -> int:
        """Clients in all."""
        return sum(self.clients.values())

    @property
    def wall_s(self) -> float:
        """Wall seconds of the run, interruptions left out."""
        return self.progress.wall_s if self.running and self.progress is not None else 0.0

    @property
    def trips_per_s(self) -> float | None:
        """Trips a wall second over the last ten seconds; None before there is anything to compare."""
        if len(self._trips) < 2:
            return None
        (start_s, before), (end_s, after) = self._trips[0], self._trips[-1]
        return (after - before) / (end_s - start_s) if end_s > start_s else None

    @property
    def goals(self) -> list[Goal]:
        """The experiment's stop conditions that can be counted towards, the nearest first.

        Accuracy is one of them only where there is no other: nobody knows how far off it is.
        """
        if (progress := self.progress) is None:
            return []
        stop = self.experiment.stop
        counted: list[tuple[str, float, float | None]] = [
            ("versions", progress.version, stop.versions),
            ("trips", progress.trips, stop.trips),
            ("emulated_s", progress.emulated_s, stop.emulated_s),
            ("wall_s", self.wall_s, stop.wall_s),
        ]
        found = [Goal(name, reached, target) for name, reached, target in counted if target is not None]
        if not found and stop.accuracy is not None:
            found = [Goal("accuracy", self.best or 0.0, stop.accuracy)]
        return sorted(found, key=lambda goal: -goal.share)

    @property
    def left_s(self) -> float | None:
        """Wall seconds until the nearest stop condition at the pace so far; None where that is not known."""
        goals, spent_s = self.goals, self._latest_s - self._first_s
        if not self.running or not goals or goals[0].name == "accuracy" or spent_s < ETA_FROM_S:
            return None
        gained = goals[0].share - self._begun[goals[0].name]
        return spent_s * (1.0 - goals[0].share) / gained if gained > 0 else None

    @property
    def valid(self) -> bool | None:
        """Whether the emulation has kept its bounds so far; None before there is a figure."""
        if self.scale is not None and self.scale.verdict == "overloaded":
            return False
        if self.progress is None or self.progress.fidelity_median is None:
            return None
        return not self.progress.invalid

    @property
    def computed(self) -> bool:
        """Whether its clients' times are computed: they are what was declared, and nothing measured them."""
        return self.experiment.clock.kind == "virtual"

    def outcome(self, error: BaseException | None) -> str:
        """How the run ended, in a word or two."""
        if error is not None:
            return "interrupted" if isinstance(error, KeyboardInterrupt) else "ended early"
        if not self.running:
            return "ended before the start"
        # After the start, what is going on besides training is that somebody wants it to end.
        return self.note.partition(":")[0] or "done"


def printable(text: str) -> str:
    """``text`` with nothing in it that a terminal would take for a command.

    >>> printable("a\\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(38.24), duration(125), duration(11_520), duration(266_400)
    ('38.2 s', '2 min 05 s', '3 h 12 min', '3 d 02 h')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def percent(share: float | None) -> str:
    """A share at two digits.

    >>> percent(0.00213), percent(0.0456), percent(0.31), percent(None)
    ('0.21%', '4.6%', '31%', '–')
    """
    if share is None:
        return "–"
    return f"{share:.{2 if share < 0.00995 else 1 if share < 0.0995 else 0}%}"


def rate(per_s: float | None) -> str:
    """Trips a second.

    >>> rate(12.34), rate(431.2), rate(None)
    ('12.3/s', '431/s', '')
    """
    if per_s is None:
        return ""
    return f"{per_s:.1f}/s" if per_s < 99.95 else f"{per_s:,.0f}/s"
