"""The live view on a terminal: it leaves the terminal as it was."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from live_feed import (
    ESCAPE,
    HIDE_CURSOR,
    SHOW_CURSOR,
    Ticks,
    clients_of,
    experiment,
    prepared,
    progress,
    scale_of,
)
from rich.console import Console

from edgefl.run.live import Lines, Quiet, Screen, make_view


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
        "import sys; from edgefl.run.live import make_view; from edgefl.experiment import *\n"
        "trial = Experiment(fleet=Fleet(devices={'pi-4': 1}))\n"
        "make_view(trial, True); make_view(trial, False)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('rich', 'torch', 'numba')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")
