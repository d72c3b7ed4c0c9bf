"""Runs edgefl's commands in tests."""

from __future__ import annotations

import pytest

from edgefl.cli import main


class Shell:
    """Runs commands in this process, and returns what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def shows(self, *arguments: str) -> str:
        """Return what a successful command prints, after a check that it has no colours and no errors."""
        assert main(arguments) == 0
        out, err = self._capsys.readouterr()
        assert err == ""
        assert "\x1b" not in out
        return out

    def fits(self, *arguments: str) -> str:
        """Do what `shows` does, and check that no line is longer than 80 columns."""
        out = self.shows(*arguments)
        assert max(map(len, out.splitlines())) <= 80
        return out

    def refuses(self, code: int, *arguments: str) -> str:
        """Return the error of a command that fails with ``code``, after a check that it prints one line."""
        assert main(arguments) == code
        out, err = self._capsys.readouterr()
        assert (out, err[:8], err.count("\n")) == ("", "edgefl: ", 1)
        return err.removeprefix("edgefl: ").removesuffix("\n")
