"""The live view where there is no terminal: plain lines."""

from __future__ import annotations

import io
import os

import pytest
from live_feed import (
    MANY,
    Ticks,
    clients_of,
    experiment,
    prepared,
    progress,
    scale_of,
)

from edgefl.run.live import LINE_S, MOST_COLUMNS, Lines


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


def test_no_error_is_shown_of_times_that_are_computed() -> None:
    trial, ticks, out = experiment(clock="virtual"), Ticks(), io.StringIO()
    with Lines(trial, out, ticks) as view:
        view.describe(clients_of(trial), prepared(), scale_of())
        ticks.now_s += LINE_S
        view.update(progress(trial))
        ticks.now_s += LINE_S
        view.update(progress(trial, fidelity=(0.3, 0.6)))
    *_, good, bad, end = out.getvalue().splitlines()
    assert "times computed" in good
    assert "error" not in good
    assert "VALID" not in good
    assert "INVALID" in bad
    assert max(map(len, (good, bad, end))) <= MOST_COLUMNS


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
