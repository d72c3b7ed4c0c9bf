"""The command line's help: all commands have it, and it fits a terminal."""

from __future__ import annotations

import pytest

from edgefl.cli import main


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_nothing_asked_shows_help_and_fails(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: edgefl")


@pytest.mark.parametrize(
    "command",
    [
        *("", "run", "resume", "compare", "report", "trace", "verify", "reproduce"),
        *("calibrate", "doctor", "bench aggregate", "bench fidelity"),
        *("profiles", "profiles show", "profiles check", "profiles import", "profiles export"),
    ],
)
def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([*command.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"Usage: edgefl {command}".strip() in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
