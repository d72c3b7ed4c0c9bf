"""The live view: what it shows, and that it fits."""

from __future__ import annotations

import io
import itertools
import re

import msgspec
import pytest
from live_feed import (
    MANY,
    Ticks,
    clients_of,
    course_of,
    drawn,
    experiment,
    prepared,
    progress,
    scale_of,
)
from rich.cells import cell_len
from rich.console import Console

from edgefl.experiment import Stop
from edgefl.limits.capacity import Demand, choose_time_scale
from edgefl.run.course import MOST_POINTS, Course, duration
from edgefl.run.panel import MOST_LINES, Panel, apportion, chart


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("profiles", [["pi-4"], MANY, [f"a-very-long-profile-name-{i}" for i in range(40)]])
@pytest.mark.parametrize("each", [1, 12, 1500])
@pytest.mark.parametrize("known", [True, False])
def test_fits_the_terminal(width: int, profiles: list[str], each: int, known: bool) -> None:
    trial = experiment(dict.fromkeys(profiles, each), name="a long name for an experiment " * 3)
    figures = progress(trial, trips_each=10**6, version=10**7, emulated_s=400_000.0, dropped=10**6)
    if not known:
        figures = progress(trial, accuracy=None, loss=None, fidelity=None)
    course = course_of(trial, figures, figures)
    for height in (10, 16, 24, 50):
        lines = drawn(course, width, height)
        assert len(lines) <= min(MOST_LINES, height - 1)
        assert max(cell_len(line) for line in lines) <= width
        # Nothing sticks out of the frame, and nothing is short of it.
        assert {cell_len(line) for line in lines[:-1]} == {min(width, 120)}
        assert all(line[0] + line[-1] in ("╭╮", "││", "╰╯") for line in lines[:-1])


def test_narrower_than_sixty_columns_is_cut_and_not_wrapped() -> None:
    trial = experiment(dict.fromkeys(MANY, 3))
    assert max(map(len, drawn(course_of(trial, progress(trial)), width=30))) <= 30


def test_last_line_leaves_room_for_what_the_terminal_echoes() -> None:
    trial = experiment()
    assert len(drawn(course_of(trial, progress(trial)))[-1]) < 78


def test_shows_the_figures() -> None:
    trial = experiment({"pixel-4": 4, "pi-4": 8})
    text = "\n".join(drawn(course_of(trial, progress(trial, dropped=3))))
    for what in (
        "trial", "fedbuff", "wall clock, time_scale 1", "digits, mlp, 1,234 parameters", "25%",
        "versions 50 of 200", "0.8125", "0.7500", "mean 2.5, max 11", "VALID  error 0.20% median, 1.0% p95",
        "12 clients   ■ 6 training  □ 3 idle  · 3 absent", "emulated  30.0 s", "dropped   3",
    ):  # fmt: skip
        assert what in text
    assert re.search(r"pixel-4 +4  ■ ■ □ · +7 │", text)
    assert re.search(r"pi-4 +8  ■ ■ ■ ■ □ □ · · +7 │", text)


def test_wall_time_is_emulated_time_stretched() -> None:
    trial = experiment(stop=Stop(wall_s=120))
    course = Course(trial, Ticks())
    course.describe(clients_of(trial), prepared(), choose_time_scale([Demand(1.0, 1.0)], cores=4, scale=3.0))
    course.update(msgspec.structs.replace(progress(trial, emulated_s=20.0), wall_s=60.0))
    text = "\n".join(drawn(course))
    assert "wall 1 min 00 s of 2 min 00 s" in text
    assert "emulated  20.0 s" in text


def test_before_the_first_model_is_measured_there_is_a_dash() -> None:
    trial = experiment()
    lines = drawn(course_of(trial, progress(trial, accuracy=None, loss=None, fidelity=None)))
    for label in ("accuracy", "loss", "fidelity"):
        assert any(re.search(rf"{label} +–", line) for line in lines)


def test_what_is_too_much_is_summed_up() -> None:
    trial = experiment({f"phone-{i:02}": 4 for i in range(20)})
    lines = drawn(course_of(trial, progress(trial)), width=60)
    shown = sum("phone-" in line for line in lines)
    assert 0 < shown < 20
    assert any(f"{20 - shown} more profiles" in line and f"{7 * (20 - shown)} │" in line for line in lines)


def test_twelve_profiles_are_all_there_at_eighty_columns() -> None:
    trial = experiment(dict.fromkeys(MANY, 4))
    text = " ".join(drawn(course_of(trial, progress(trial))))
    assert all(f"{name} " in text for name in MANY)


def test_before_the_start_the_bar_counts_clients() -> None:
    trial = experiment({"pi-4": 4})
    text = "\n".join(drawn(course_of(trial, progress(trial, phase="starting"))))
    assert "3 of 4 clients connected" in text
    assert "starting the clients" in text


@pytest.mark.parametrize(
    ("fidelity", "load", "verdict"),
    [
        ((0.049, 0.19), 0.2, True),
        ((0.051, 0.10), 0.2, False),
        ((0.010, 0.21), 0.2, False),
        (None, 0.2, None),
        (None, 4.0, False),
        ((0.010, 0.01), 4.0, False),
    ],
)
def test_verdict(fidelity: tuple[float, float] | None, load: float, verdict: bool | None) -> None:
    trial = experiment()
    assert course_of(trial, progress(trial, fidelity=fidelity), load=load).valid is verdict


@pytest.mark.parametrize(("width", "says"), [(100, "times computed, not enforced"), (62, "times computed")])
def test_times_that_are_computed_are_not_called_measured(width: int, says: str) -> None:
    trial = experiment(clock="virtual")
    text = "\n".join(drawn(course_of(trial, progress(trial)), width=width))
    assert re.search(rf"fidelity +{says} +│", text)
    assert "VALID" not in text


def test_colour_of_the_verdict_and_none_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = experiment()
    course = course_of(trial, progress(trial, fidelity=(0.3, 0.6)))

    def coded() -> str:
        out = io.StringIO()
        Console(file=out, width=80, force_terminal=True, color_system="standard").print(Panel(course))
        return out.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mINVALID" in coded()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", coded())
    assert "INVALID" in coded()


def test_names_cannot_command_the_terminal() -> None:
    trial = experiment({"pi\x1b]0;x\x07": 2}, name="evil\x1b[2J\nname")
    out = io.StringIO()
    Console(file=out, width=80, no_color=True).print(Panel(course_of(trial, progress(trial))))
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "evil?[2J?name" in out.getvalue()


# ---- what is worked out ------------------------------------------------------------------------


def test_nearest_stop_condition_comes_first() -> None:
    trial = experiment(stop=Stop(versions=100, trips=14, emulated_s=600.0, wall_s=31.0, accuracy=0.9))
    course = course_of(trial, progress(trial))
    assert [goal.name for goal in course.goals] == ["wall_s", "versions", "trips", "emulated_s"]


def test_accuracy_is_counted_towards_where_there_is_nothing_else() -> None:
    trial = experiment(stop=Stop(accuracy=0.9))
    course = course_of(trial, progress(trial, accuracy=0.6), progress(trial, accuracy=0.45))
    (goal,) = course.goals
    assert (goal.name, goal.reached, goal.target) == ("accuracy", 0.6, 0.9)
    assert course.left_s is None


def test_time_left_counts_from_where_a_resumed_run_began() -> None:
    trial = experiment(stop=Stop(versions=200))
    ticks = Ticks()
    course = Course(trial, ticks)
    course.describe(clients_of(trial), prepared(), scale_of())
    course.update(progress(trial, version=100))
    assert course.left_s is None
    ticks.now_s += 10.0
    course.update(progress(trial, version=150))
    assert course.left_s == pytest.approx(10.0)


def test_trips_a_second_are_those_of_late() -> None:
    trial, ticks = experiment(), Ticks()
    course = Course(trial, ticks)
    course.describe(clients_of(trial), prepared(), scale_of())
    course.update(progress(trial, trips_each=0))
    assert course.trips_per_s is None
    for trips in [*[0] * 100, *range(5, 205, 5)]:
        ticks.now_s += 0.25
        course.update(progress(trial, trips_each=trips))
    assert course.trips_per_s == pytest.approx(20.0)


def test_history_is_bounded_and_keeps_its_shape() -> None:
    trial = experiment()
    values = [i / 10_000 for i in range(1, 5001)]
    course = course_of(trial, *(progress(trial, accuracy=value) for value in values))
    assert MOST_POINTS / 2 <= len(course.accuracies) <= MOST_POINTS
    steps = {round(10_000 * (b - a)) for a, b in itertools.pairwise(course.accuracies)}
    assert len(steps) == 1
    assert course.best == values[-1]


def test_the_same_assessment_told_twice_is_one_point() -> None:
    trial = experiment()
    one, other = progress(trial, accuracy=0.5, loss=1.0), progress(trial, accuracy=0.5, loss=0.9)
    assert course_of(trial, one, one, other, other).accuracies == [0.5, 0.5]


def test_chart_of_little() -> None:
    assert chart([], 10) == ("", "")
    assert chart([0.5], 10) == (" ", "▁")
    assert chart([0.1, 0.9], 0) == ("", "")
    assert all(len(row) == 10 for row in chart([0.1, 0.9] * 50, 10))


def test_apportioned_cells_are_all_given_out() -> None:
    for counts in ([0, 0, 0], [1, 1, 1], [997, 2, 1], [0, 5000, 3]):
        for cells in range(12):
            assert sum(apportion(counts, cells)) == (cells if sum(counts) else 0)


def test_durations_do_not_round_into_the_next_unit() -> None:
    assert [duration(s) for s in (59.96, 3599.7, 86399.6)] == ["1 min 00 s", "1 h 00 min", "1 d 00 h"]


# ---- lines -------------------------------------------------------------------------------------
