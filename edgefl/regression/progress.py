"""Measurement progress: on a terminal, a line that is rewritten; elsewhere, a line every ten seconds."""

from __future__ import annotations

import contextlib
import time

import pytest

from edgefl.terminal import printable


class Progress:
    """Shows the current step of the measurement; on a terminal, at most twice a second."""

    def __init__(self, config: pytest.Config) -> None:
        self._reporter = config.pluginmanager.getplugin("terminalreporter")
        self._capture = config.pluginmanager.getplugin("capturemanager")
        self._every_s = 0.5 if self._reporter is not None and self._reporter.isatty else 10.0
        self._next_s = 0.0
        self._shown = False

    def __call__(self, text: str) -> None:
        """Show ``text``, unless another text was shown a moment ago; an empty string ends the line."""
        now_s = time.monotonic()
        if self._reporter is None or self._reporter.verbosity < 0:
            return
        if text and not self._next_s:
            self._next_s = now_s + self._every_s
        if text and now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            self._write(text)
        elif not text:
            if self._shown and self._reporter.isatty:
                self._write("")
            self._next_s, self._shown = 0.0, False

    def _write(self, text: str) -> None:
        capture = self._capture  # None with -p no:capture
        with contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled():
            if not self._shown:
                self._reporter.ensure_newline()
            if self._reporter.isatty:
                self._reporter.rewrite(printable(text), erase=True)
            else:
                self._reporter.write_line(f"edgefl: {printable(text)}")
            self._shown = True
