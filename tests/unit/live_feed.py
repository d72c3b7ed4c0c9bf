"""A made-up run to look at: experiments, progress and a clock that is moved by hand."""

from __future__ import annotations

import io
import re

from rich.console import Console

from edgefl.devices.fleet import ClientInfo
from edgefl.experiment import Clock, Experiment, Fleet, Stop
from edgefl.limits.capacity import Demand, TimeScale, choose_time_scale
from edgefl.limits.fidelity import Conditions, bounds
from edgefl.run import control
from edgefl.run.course import Course
from edgefl.run.panel import Panel

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MANY = [f"profile-{i}" for i in range(12)]


class Ticks:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def experiment(
    profiles: dict[str, int] | None = None, stop: Stop | None = None, name: str = "trial", clock: str = "wall"
) -> Experiment:
    return Experiment(
        name=name,
        fleet=Fleet(devices=profiles or {"pixel-4": 4}),
        clock=Clock(kind=clock),
        stop=stop or Stop(versions=200),
    )


def clients_of(trial: Experiment) -> list[ClientInfo]:
    assert isinstance(trial.fleet.devices, dict)
    names = [name for name, count in trial.fleet.devices.items() for _ in range(count)]
    return [ClientInfo(client, name, "wifi") for client, name in enumerate(names)]


def prepared(size: int = 1234) -> control.Prepared:
    return control.Prepared(
        size=size,
        layout=[],
        classes=10,
        examples=[],
        labels=[],
        flops_per_example=1.0,
        flops=[],
        steps=[],
        host_step_s=0.001,
        emulated_trip_s=[],
        emulated_down_s=[],
        emulated_compute_s=[],
        test_examples=360,
        dataset="digits",
    )


def scale_of(load: float = 0.2) -> TimeScale:
    return choose_time_scale([Demand(load / 2, 1.0)] * 4, cores=2, scale=1.0)


def progress(
    trial: Experiment,
    *,
    emulated_s: float = 30.0,
    version: int = 50,
    accuracy: float | None = 0.8125,
    loss: float | None = 0.75,
    fidelity: tuple[float, float] | None = (0.002, 0.01),
    phase: str = "running",
    dropped: int = 0,
    trips_each: int = 7,
) -> control.Progress:
    assert isinstance(trial.fleet.devices, dict)
    by_profile = {
        name: [count // 4, count - 2 * (count // 4), count // 4, trips_each]
        for name, count in trial.fleet.devices.items()
    }
    idle, training, absent, trips = (sum(row[i] for row in by_profile.values()) for i in range(4))
    return control.Progress(
        emulated_s=emulated_s,
        wall_s=emulated_s,
        version=version,
        trips=trips,
        idle=idle,
        training=training,
        absent=absent,
        staleness_mean=2.5,
        staleness_max=11,
        accuracy=accuracy,
        loss=loss,
        fidelity_median=fidelity[0] if fidelity else None,
        fidelity_p95=fidelity[1] if fidelity else None,
        invalid=next(iter(bounds(*(fidelity or (None, None)), Conditions())), ""),
        dropped=dropped,
        incidents=0,
        by_profile=by_profile,
        phase=phase,
    )


def course_of(trial: Experiment, *figures: control.Progress, load: float = 0.2) -> Course:
    ticks = Ticks()
    course = Course(trial, ticks)
    course.describe(clients_of(trial), prepared(), scale_of(load))
    for one in figures:
        ticks.now_s += 0.25
        course.update(one)
    return course


def drawn(course: Course, width: int = 80, height: int = 24) -> list[str]:
    """The lines as they are on a terminal, colours left out."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, no_color=True)
    console.print(Panel(course))
    return ESCAPE.sub("", out.getvalue()).splitlines()


# ---- the panel -------------------------------------------------------------------------------
