"""A user at the prompt, for the tests of commands."""

from __future__ import annotations

import pytest

from edgefl.cli import main


class Shell:
    """Runs commands, and returns what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def shows(self, *arguments: str) -> str:
        """What a command that ends well prints; without colours."""
        assert main(arguments) == 0
        out, err = self._capsys.readouterr()
        assert err == ""
        assert "\x1b" not in out
        return out

    def fits(self, *arguments: str) -> str:
        """The same, in 80 columns."""
        out = self.shows(*arguments)
        assert max(map(len, out.splitlines())) <= 80
        return out

    def refuses(self, code: int, *arguments: str) -> str:
        """The one line on standard error; nothing is on standard output."""
        assert main(arguments) == code
        out, err = self._capsys.readouterr()
        assert (out, err[:8], err.count("\n")) == ("", "edgefl: ", 1)
        return err.removeprefix("edgefl: ").removesuffix("\n")
