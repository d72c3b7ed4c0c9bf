"""Tests of the views of a run: the panel on a terminal, and lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console
from run_parts import Hand

from edgefl.devices.fleet import ClientInfos
from edgefl.experiment import Clock, Experiment, Fleet, MetricGoal, Stop
from edgefl.host.capacity import Demand, TimeScale, choose_time_scale
from edgefl.host.verdict import MEDIAN_MAX, P95_MAX, Conditions, exceeded, unfit
from edgefl.run import control
from edgefl.run.view import (
    LINE_S,
    REDRAW_S,
    LineView,
    RunView,
    TerminalView,
    described,
    make_view,
    nearest_goal,
    verdict_of,
)

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MANY = [f"profile-{i}" for i in range(12)]


def experiment(
    profiles: dict[str, int] | None = None, stop: Stop | None = None, name: str = "trial", clock: str = "wall"
) -> Experiment:
    return Experiment(
        name=name,
        fleet=Fleet(devices=profiles or {"pixel-4": 4}),
        clock=Clock(kind=clock),
        stop=stop or Stop(versions=200),
    )


def describe(view: RunView, load: float = 0.2) -> TimeScale:
    """Describe a small workload to the view; its phones use the fraction ``load`` of the host."""
    clients = ClientInfos([(name, "wifi", count) for name, count in view.experiment.fleet.devices.items()])
    prepared: Any = SimpleNamespace(size=1234, dataset="digits")
    scale = choose_time_scale([Demand(load / 2, 1.0)] * 4, cores=2, scale=1.0)
    view.describe(described(view.experiment, clients, prepared, scale))
    return scale


def progress(
    trial: Experiment,
    trips_each: int = 7,
    fidelity: tuple[float | None, float | None] = (0.002, 0.01),
    **changes: Any,
) -> control.Progress:
    by_profile = {
        name: [count // 4, count - 2 * (count // 4), count // 4, trips_each]
        for name, count in trial.fleet.devices.items()
    }
    trips = sum(row[3] for row in by_profile.values())
    beyond = [
        *exceeded("median error", fidelity[0], MEDIAN_MAX),
        *exceeded("95th percentile of errors", fidelity[1], P95_MAX),
    ]
    usual = control.Progress(
        emulated_s=30.0, wall_s=60.0, version=50, trips=trips, connected=None, staleness_mean=2.5,
        staleness_max=11, accuracy=0.8125, loss=0.75, metrics={}, by_profile=by_profile,
        fidelity_median=fidelity[0], fidelity_p95=fidelity[1],
        invalid=next(iter(beyond), ""), dropped=0, incidents=0,
    )  # fmt: skip
    return msgspec.structs.replace(usual, **changes)


def drawn(trial: Experiment, *figures: control.Progress, width: int = 80, colours: bool = True) -> str:
    """Return the panel as drawn on a 24-line terminal after updates with these figures, ten seconds apart."""
    console = Console(file=io.StringIO(), width=width, height=24, force_terminal=True)
    ticks = Hand()
    view = TerminalView(trial, console, ticks)
    describe(view)
    for one in figures:
        ticks.at += 10.0
        view.update(one)
    with console.capture() as captured:
        console.print(view.picture())
    return captured.get() if colours else ESCAPE.sub("", captured.get())


def lines_of(trial: Experiment, *figures: control.Progress, width: int = 80) -> list[str]:
    return [line.rstrip() for line in drawn(trial, *figures, width=width, colours=False).splitlines()]


def test_the_panel_shows_loss_and_own_metrics_without_an_accuracy() -> None:
    trial = experiment()
    own = progress(trial, accuracy=None, metrics={"mae": 0.12345, "evil\n": 2.0})
    text = "\n".join(lines_of(trial, own))
    assert "accuracy" not in text
    assert re.search(r"version +50 +loss +0.7500\n", text)
    assert re.search(r"trips +7 .* mae +0.1235\n", text)
    assert "evil?" in text
    assert "accuracy" in "\n".join(lines_of(trial, progress(trial, accuracy=None, loss=None)))


def test_the_nearest_stop_condition_is_the_goal() -> None:
    stop, figures = Stop(versions=100, trips=14, emulated_s=600.0, wall_s=80.0), progress(experiment())
    assert nearest_goal(stop, figures) == (0.75, "wall 60 s of 80 s", True)
    assert nearest_goal(Stop(versions=100, accuracy=0.82), figures)[:2] == (0.5, "versions 50 of 100")
    assert nearest_goal(Stop(versions=10), figures).share == 1.0
    patience = nearest_goal(Stop(patience_evaluations=5), figures)
    assert patience == (0.0, "until 5 evaluations are no better", False)


def test_a_metric_is_the_goal_if_there_is_no_other() -> None:
    trial, stop = experiment(), Stop(metric=MetricGoal(name="mae", at_most=0.5))
    for value, share in ((0.6, 0.0), (0.5, 1.0)):
        found = nearest_goal(stop, progress(trial, metrics={"mae": value}))
        assert found == (share, f"mae {value:g} of 0.5", False)
    assert nearest_goal(stop, progress(trial)).text == "mae – of 0.5"
    over_loss = Stop(metric=MetricGoal(name="loss", at_least=0.5))
    assert nearest_goal(over_loss, progress(trial)).share == 1.0


def test_the_panel_shows_the_figures() -> None:
    trial = experiment({"pixel-4": 4, "pi-4": 8})
    text = "\n".join(lines_of(trial, progress(trial, version=40), progress(trial, dropped=3, incidents=1)))
    for what in (
        "trial: fedbuff", "wall clock, time_scale 1, digits, mlp with 1,234 parameters",
        "versions 50 of 200", "25%", "0.8125", "0.7500", "mean 2.5, max 11",
        "VALID, error median 0.20%, p95 1.00%", "failed     1 process", "dropped    3",
    ):  # fmt: skip
        assert what in text
    for words in (
        r"version +50 ", r"trips +14 \(0.233/s\)", r"wall +60 s", r"emulated +30 s",
        r"pixel-4 +1 +2 +1 +7\n", r"pi-4 +2 +4 +2 +7\n", r"12 clients +3 +6 +3 +14\n",
    ):  # fmt: skip
        assert re.search(words, text)


def test_the_panel_fits_the_terminal() -> None:
    width, profiles = 60, [f"a-very-long-profile-name-{i}" for i in range(40)]
    trial = experiment(dict.fromkeys(profiles, 1500), name="a long name for an experiment " * 3)
    big = progress(trial, trips_each=10**6, version=10**7, emulated_s=400_000.0, dropped=10**6)
    for figures in (big, progress(trial, accuracy=None, loss=None, fidelity=(None, None))):
        lines = lines_of(trial, figures, width=width)
        assert len(lines) < 24
        assert max(cell_len(line) for line in lines) <= width
        assert lines[2].startswith("versions ")
        assert lines[-1] == "Ctrl-C stops the run; it can be resumed"


def test_profiles_that_do_not_fit_are_summed_in_one_line() -> None:
    trial = experiment({f"phone-{i:02}": 4 for i in range(20)})
    lines = lines_of(trial, progress(trial), width=60)
    shown = sum("phone-" in line for line in lines)
    assert 0 < shown < 20
    rest = 20 - shown
    (summed,) = (line for line in lines if f"{rest} more profiles" in line)
    assert summed.split()[-4:] == [f"{each * rest}" for each in (1, 2, 1, 7)]


def test_the_bar_counts_connected_clients_before_the_start() -> None:
    trial = experiment({"pi-4": 4})
    unmeasured = progress(trial, connected=3, accuracy=None, loss=None, fidelity=(None, None))
    text = "\n".join(lines_of(trial, unmeasured))
    assert "3 of 4 clients connected" in text
    assert "starting the clients" in text
    for label in ("accuracy", "loss", "fidelity"):
        assert re.search(rf"{label} +–", text)


def test_names_with_control_characters_or_markup_are_shown_as_text() -> None:
    trial = experiment({"pi\x1b]0;x\x07[red]": 2}, name="evil\x1b[2J\n[bold]name[/]")
    text = drawn(trial, progress(trial))
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "evil?[2J?[bold]name[/]" in text
    assert "pi?]0;x?[red]" in text


def test_the_name_of_the_goals_metric_is_shown_as_text() -> None:
    name = "[/x] f1[macro] :x:"
    trial = experiment(stop=Stop(metric=MetricGoal(name=name, at_least=0.5)))
    assert lines_of(trial, progress(trial, metrics={name: 0.25}))[2].startswith(f"{name} 0.25 of 0.5")


def test_the_verdict_is_coloured_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = experiment()
    bad = progress(trial, fidelity=(0.3, 0.6))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31mINVALID" in drawn(trial, bad)
    monkeypatch.setenv("NO_COLOR", "1")
    text = drawn(trial, bad)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)
    assert "INVALID, median error 30.0%, at most 5% is allowed" in ESCAPE.sub("", text)


@pytest.mark.parametrize(
    ("fidelity", "load", "clock", "says"),
    [
        ((0.049, 0.19), 0.2, "wall", "VALID"),
        ((0.051, 0.10), 0.2, "wall", "INVALID"),
        ((0.010, 0.21), 0.2, "wall", "INVALID"),
        ((None, None), 0.2, "wall", ""),
        ((None, None), 4.0, "wall", "INVALID"),
        ((0.010, 0.01), 4.0, "wall", "INVALID"),
        ((0.002, 0.01), 0.2, "virtual", "times computed"),
        ((0.3, 0.6), 0.2, "virtual", "INVALID"),
    ],
)
def test_the_verdict_follows_the_errors_and_the_load(
    fidelity: tuple[float | None, float | None], load: float, clock: str, says: str
) -> None:
    trial = experiment(clock=clock)
    view = RunView(trial)
    describe(view, load)
    figures = progress(trial, fidelity=fidelity)
    assert view.verdict(figures).word == says
    shown = view.figures(figures)
    assert ("error" in shown, "because" in shown) == (says == "VALID", says == "INVALID")
    if load > 1:
        assert shown["because"] == "host load 400.0%"


def test_lines_give_the_reason_of_a_verdict_and_not_errors_within_the_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = LineView(experiment())
    describe(view)
    view.update(progress(view.experiment, invalid=unfit(Conditions(steal=0.03))[0]))
    capsys.readouterr()
    view.__exit__(None, None, None)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "fidelity INVALID, because time stolen by the hypervisor 3.0%" in line
    assert "error median" not in line


@pytest.mark.parametrize(
    ("clock", "reasons", "says"),
    [
        ("wall", [], "fidelity VALID, wall 60 s, accuracy 0.8125"),
        ("wall", ["training took 5.9% more, at most"], "fidelity INVALID, because training took 5.9% more,"),
        ("virtual", [], "fidelity times computed, wall"),
    ],
)  # fmt: skip
def test_the_last_line_has_the_verdict_of_the_whole_run_and_not_of_recent_trips(
    clock: str, reasons: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {"median_abs_error": 0.02, "p95_abs_error": 0.04, "warnings": ["slow"]}
    found = {"clock": clock, "fidelity": {"valid": not reasons, "reasons": reasons, **errors}}
    with LineView(experiment(clock=clock), Hand()) as view:
        describe(view)
        view.update(progress(view.experiment, fidelity=(0.002, 0.01) if reasons else (0.3, 0.6)))
        view.judged = verdict_of(found)
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_the_first_line_names_only_some_profiles_of_a_large_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    for count, ends in ((6, "3 p4, 3 p5)"), (500, "3 p4, 3 p5, 1,482 of 494 other profiles)")):
        describe(LineView(experiment({f"p{k}": 3 for k in range(count)})))
        line = capsys.readouterr().err.splitlines()[0]
        assert f"{3 * count:,} clients (3 p0, 3 p1, 3 p2, 3 p3, {ends}, digits" in line


def test_the_time_left_of_a_resumed_run_is_computed_from_its_progress_since_the_start() -> None:
    trial = experiment()
    first, second = progress(trial, version=100), progress(trial, version=150)
    assert "left" not in lines_of(trial, first)[2]
    assert lines_of(trial, progress(trial, connected=3), first, second)[2].endswith("75%, 10 s left")


def test_lines_are_printed_periodically_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    trial, ticks = experiment(dict.fromkeys(MANY, 3)), Hand()
    with LineView(trial, ticks) as view:
        why = describe(view).why
        for _ in range(1 + 4 * 12):  # 12 s, four updates a second
            view.update(progress(trial, dropped=1))
            ticks.at += 0.25
    out, err = capsys.readouterr()
    start, scale, *lines, end = err.splitlines()
    assert out == ""
    assert start.startswith("edgefl: trial: fedbuff, 36 clients (3 profile-0, ")
    assert start.endswith("digits, mlp with 1,234 parameters")
    assert scale == f"edgefl: {why}"
    assert len(lines) == 12 // LINE_S
    for line in (*lines, end):
        assert "version 50, trips 84 (1.4/s), fidelity VALID, wall 60 s, accuracy 0.8125, dropped 1" in line
    assert end.startswith("edgefl: done: 25%, version 50")
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("error", "word"), [(RuntimeError("x"), "ended early"), (KeyboardInterrupt(), "interrupted")]
)
def test_the_last_line_says_how_the_run_ended(
    error: BaseException, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view = LineView(experiment())
    describe(view)
    with pytest.raises(type(error)), view:
        raise error
    assert capsys.readouterr().err.splitlines()[-1] == f"edgefl: {word}: no client was trained"


def test_nothing_is_printed_if_the_run_fails_before_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineView(experiment())
    view.say("loading data and model")
    with pytest.raises(RuntimeError), view:
        raise RuntimeError
    assert capsys.readouterr().err == ""


def test_a_run_that_writes_a_checkpoint_after_ctrl_c_is_interrupted_and_not_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trial = experiment()
    with LineView(trial, Hand()) as view:
        describe(view)
        view.update(progress(trial))
        view.say("interrupted: writing a checkpoint (Ctrl-C again stops at once)")
        view.update(progress(trial))
    assert capsys.readouterr().err.splitlines()[-1].startswith("edgefl: interrupted: 25%, version 50, ")


def test_a_closed_pipe_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with LineView(experiment()) as view:
            view.say("one")
            view.say("two")
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), write)  # closing the stream flushes it


class Tape(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Tape]:
    """Return a function that replaces standard error with a terminal. The test itself must call it, because
    pytest replaces standard error after fixtures have run."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def make() -> Tape:
        tape = Tape()
        monkeypatch.setattr(sys, "stderr", tape)
        return tape

    return make


def test_the_panel_is_used_only_on_a_terminal_that_can_show_it(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = terminal()
    assert isinstance(make_view(experiment(), quiet=False), TerminalView)
    for term in ("dumb", ""):
        monkeypatch.setenv("TERM", term)
        assert isinstance(make_view(experiment(), quiet=False), LineView)
    monkeypatch.setenv("TERM", "xterm")
    tape.encoding = "iso-8859-1"
    assert isinstance(make_view(experiment(), quiet=False), LineView)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_view(experiment(), quiet=False), LineView)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_cursor_and_streams_are_restored(terminal: Any, error: type[BaseException] | None) -> None:
    tape = terminal()
    trial, threads, stdout = experiment(), threading.active_count(), sys.stdout

    def run() -> None:
        view = make_view(trial, quiet=False)
        view.say("loading data and model")
        with view:
            describe(view)
            for version in range(10):
                view.update(progress(trial, version=version))
                assert threading.active_count() == threads
            assert HIDE_CURSOR in tape.getvalue()
            if error is not None:
                raise error

    with pytest.raises(error) if error else contextlib.nullcontext():
        run()
    text = tape.getvalue()
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert sys.stderr is tape
    assert sys.stdout is stdout
    assert "time_scale 1 was given" in text
    last = ESCAPE.sub("", text[text.rindex("trial: fedbuff") :])
    assert "left" not in last
    assert "versions 9 of 200" in last  # the latest figures, although not each update is drawn
    assert {None: "done", KeyboardInterrupt: "interrupted"}.get(error, "ended early") in last


def test_a_passing_runs_panel_is_erased_at_its_end(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, tape = experiment(), terminal()
    with make_view(trial, quiet=False, passing=True) as view:
        describe(view)
        view.update(progress(trial))
        drawn = ESCAPE.sub("", tape.getvalue())
        assert "trial: fedbuff" in drawn
        assert "time_scale 1 was given" not in drawn  # this line would stay above the panel
    lines_drawn = tape.getvalue().split("trial: fedbuff")[-1].count("\n")
    erased = tape.getvalue()[tape.getvalue().rindex(SHOW_CURSOR) :]
    assert erased.count("\x1b[2K") == lines_drawn > 5  # each line of the panel
    monkeypatch.setattr(sys, "stderr", tape := io.StringIO())  # without a terminal, the caller prints a line
    with make_view(trial, quiet=False, passing=True) as view:
        describe(view)
        view.update(progress(trial))
    assert tape.getvalue() == ""


def test_the_panel_is_drawn_at_most_every_redraw_s_and_not_at_all_if_quiet(
    terminal: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trial, ticks, tape = experiment(), Hand(), terminal()
    view = make_view(trial, quiet=True)
    view.say("loading")
    with view:
        describe(view)
        view.update(progress(trial))
    assert (tape.getvalue(), capsys.readouterr().out) == ("", "")
    with TerminalView(trial, Console(file=tape, width=80), ticks) as view:
        describe(view)
        view.update(progress(trial))
        before = len(tape.getvalue())
        for _ in range(100):
            view.update(progress(trial))
        assert len(tape.getvalue()) == before
        ticks.at += REDRAW_S
        view.update(progress(trial))
        assert len(tape.getvalue()) > before


def test_a_closed_terminal_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    trial = experiment()
    with open(slave, "w", encoding="utf-8", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with make_view(trial, quiet=False) as view:
            describe(view)
            os.close(master)  # from now on writing is EIO
            for version in range(3):
                view.update(progress(trial, version=version))
                view.say("still there")
        assert sys.stderr is stream
        monkeypatch.undo()
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), slave)
