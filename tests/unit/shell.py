"""Running commands in tests."""

from __future__ import annotations

import pytest

from edgefl.cli import main


class Shell:
    """Runs commands and returns their output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def shows(self, *arguments: str) -> str:
        """The output of a command that succeeds and prints no colours."""
        assert main(arguments) == 0
        out, err = self._capsys.readouterr()
        assert err == ""
        assert "\x1b" not in out
        return out

    def fits(self, *arguments: str) -> str:
        """The same, checked to fit 80 columns."""
        out = self.shows(*arguments)
        assert max(map(len, out.splitlines())) <= 80
        return out

    def refuses(self, code: int, *arguments: str) -> str:
        """The one line on standard error of a command that fails with ``code``."""
        assert main(arguments) == code
        out, err = self._capsys.readouterr()
        assert (out, err[:8], err.count("\n")) == ("", "edgefl: ", 1)
        return err.removeprefix("edgefl: ").removesuffix("\n")
