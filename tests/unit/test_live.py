"""The live view: what it shows, that it fits, and that it leaves the terminal as it was."""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from edgefl import control
from edgefl.course import MOST_POINTS, Course, duration
from edgefl.emulation.capacity import Demand, TimeScale, choose_time_scale
from edgefl.experiment import Clock, Experiment, Fleet, Stop
from edgefl.live import LINE_S, MOST_COLUMNS, Lines, Quiet, Screen, make_view
from edgefl.panel import MOST_LINES, Panel, apportion, chart

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
    profiles: dict[str, int] | None = None, stop: Stop | None = None, name: str = "trial"
) -> Experiment:
    return Experiment(
        name=name,
        fleet=Fleet(devices=profiles or {"pixel-4": 4}),
        clock=Clock(kind="wall"),
        stop=stop or Stop(versions=200),
    )


def clients_of(trial: Experiment) -> list[control.ClientInfo]:
    assert isinstance(trial.fleet.devices, dict)
    names = [name for name, count in trial.fleet.devices.items() for _ in range(count)]
    return [control.ClientInfo(client, name, "wifi") for client, name in enumerate(names)]


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


def test_lines_where_there_is_no_terminal() -> None:
    trial, ticks, out = experiment(dict.fromkeys(MANY, 3)), Ticks(), io.StringIO()
    with Lines(trial, out, ticks) as view:
        view.describe(clients_of(trial), prepared(), scale_of())
        for _ in range(1 + 4 * 12):  # 12 s, four updates a second
            view.update(progress(trial, dropped=1))
            ticks.now_s += 0.25
    start, scale, *lines, end = out.getvalue().splitlines()
    assert start.startswith("edgefl: trial: fedbuff, 36 clients (3 profile-0, ")
    assert start.endswith("digits, mlp with 1,234 parameters")
    assert scale == f"edgefl: {scale_of().why}"
    assert len(lines) == 12 // LINE_S
    for line in (*lines, end):
        assert len(line) <= MOST_COLUMNS
        assert "version 50, trips 84" in line
        assert "accuracy 0.8125" in line
    assert "error 0.20% VALID, dropped 1" in lines[0]
    assert end.startswith("edgefl: done: 25%, wall 30.0 s, ")
    assert "\x1b" not in out.getvalue()


def test_long_figures_are_left_out_and_not_cut() -> None:
    trial, ticks, out = experiment(name="n" * 60), Ticks(), io.StringIO()
    with Lines(trial, out, ticks) as view:
        view.describe(clients_of(trial), prepared(), scale_of())
        ticks.now_s += LINE_S
        view.update(progress(trial, version=10**12, trips_each=10**12, dropped=10**12, emulated_s=9e6))
    *_, line, end = out.getvalue().splitlines()
    assert len(line) <= MOST_COLUMNS
    assert len(end) <= MOST_COLUMNS
    assert line.endswith("accuracy 0.8125")


def test_lines_say_how_it_ended() -> None:
    for error, word in ((RuntimeError("x"), "ended early"), (KeyboardInterrupt(), "interrupted")):
        out = io.StringIO()
        with pytest.raises(type(error)), Lines(experiment(), out):
            raise error
        assert out.getvalue() == f"edgefl: {word}: no client was trained\n"


def test_an_interrupted_run_that_ends_in_order_is_not_done() -> None:
    trial, out = experiment(), io.StringIO()
    with Lines(trial, out) as view:
        view.describe(clients_of(trial), prepared(), scale_of())
        view.update(progress(trial))
        view.say("interrupted: writing a checkpoint (again to stop at once)")
        view.update(progress(trial))
    assert out.getvalue().splitlines()[-1].startswith("edgefl: interrupted: 25%, wall 30.0 s, ")


def test_a_closed_pipe_ends_the_lines_and_not_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as stream, Lines(experiment(), stream) as view:
        view.say("one")
        view.say("two")
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # so that closing the stream has somewhere to flush


# ---- the terminal ------------------------------------------------------------------------------


class Tape(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Tape]:
    """Makes standard error a terminal; called in the test, since pytest sets its own after fixtures."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def make() -> Tape:
        tape = Tape()
        monkeypatch.setattr(sys, "stderr", tape)
        return tape

    return make


def test_a_terminal_gets_a_panel(terminal: Callable[[], Tape]) -> None:
    terminal()
    assert isinstance(make_view(experiment(), quiet=False), Screen)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    terminal: Callable[[], Tape], term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal()
    monkeypatch.setenv("TERM", term)
    assert isinstance(make_view(experiment(), quiet=False), Lines)


def test_a_terminal_without_the_signs_gets_lines(terminal: Callable[[], Tape]) -> None:
    terminal().encoding = "iso-8859-1"
    assert isinstance(make_view(experiment(), quiet=False), Lines)


def test_what_is_no_terminal_gets_lines_even_where_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_view(experiment(), quiet=False), Lines)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_cursor_and_streams_come_back_and_the_last_state_stays(
    terminal: Callable[[], Tape], error: type[BaseException] | None
) -> None:
    tape = terminal()
    trial, threads, stdout = experiment(), threading.active_count(), sys.stdout

    def run() -> None:
        view = make_view(trial, quiet=False)
        view.say("loading data and model")
        with view:
            view.describe(clients_of(trial), prepared(), scale_of())
            for version in range(10):
                view.update(progress(trial, version=version))
                assert threading.active_count() == threads
            assert HIDE_CURSOR in tape.getvalue()
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    text = tape.getvalue()
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert sys.stderr is tape
    assert sys.stdout is stdout
    assert threading.active_count() == threads
    assert "time_scale 1 was given" in text
    last = ESCAPE.sub("", text[text.rindex("╭") :])
    assert "versions 9 of 200" in last  # the latest figures, though drawn at most five times a second
    assert {None: "done", KeyboardInterrupt: "interrupted"}.get(error, "ended early") in last


def test_draws_no_more_than_five_times_a_second(terminal: Callable[[], Tape]) -> None:
    trial, ticks, tape = experiment(), Ticks(), terminal()
    with Screen(trial, Console(file=tape, width=80), ticks) as view:
        view.describe(clients_of(trial), prepared(), scale_of())
        view.update(progress(trial))
        before = len(tape.getvalue())
        for _ in range(100):
            view.update(progress(trial))
        assert len(tape.getvalue()) == before
        ticks.now_s += 0.25
        view.update(progress(trial))
        assert len(tape.getvalue()) > before


def test_a_terminal_that_is_gone_ends_the_drawing_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    trial = experiment()
    with open(slave, "w", encoding="utf-8", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with make_view(trial, quiet=False) as view:
            view.describe(clients_of(trial), prepared(), scale_of())
            os.close(master)  # from now on writing is EIO
            for version in range(3):
                view.update(progress(trial, version=version))
                view.say("still there")
        assert sys.stderr is stream
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), slave)


# ---- quiet -------------------------------------------------------------------------------------


def test_quiet_prints_nothing(terminal: Callable[[], Tape], capsys: pytest.CaptureFixture[str]) -> None:
    trial, tape = experiment(), terminal()
    view = make_view(trial, quiet=True)
    assert isinstance(view, Quiet)
    view.say("loading")
    with view:
        view.describe(clients_of(trial), prepared(), scale_of())
        view.update(progress(trial))
    assert tape.getvalue() == ""
    assert capsys.readouterr().out == ""


def test_neither_quiet_nor_lines_import_rich() -> None:
    code = (
        "import sys; from edgefl.live import make_view; from edgefl.experiment import *\n"
        "trial = Experiment(fleet=Fleet(devices={'pi-4': 1}))\n"
        "make_view(trial, True); make_view(trial, False)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('rich', 'torch', 'numba')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")
