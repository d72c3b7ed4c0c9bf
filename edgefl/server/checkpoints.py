"""When checkpoints are written: where the server says so, and now and then."""

from __future__ import annotations

import time
from typing import Protocol

from edgefl.server.clock import Alarms
from edgefl.server.stopwatch import Stopwatch

SHARE = 0.05
"""Most of the time that checkpoints may take."""


class Save(Protocol):
    """Writes a checkpoint of this instant."""

    def __call__(self, *, final: bool) -> None: ...


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, save: Save, every_s: float, alarms: Alarms, watch: Stopwatch) -> None:
        self._save, self._every_s, self._alarms, self._watch = save, every_s, alarms, watch

    def begin(self) -> None:
        """From now on one every so many wall seconds, but never for more than a small share of the time."""
        self._alarms.after(self._every_s, self._again)

    def write(self, *, final: bool = False) -> None:
        """Write one now; ``final`` also writes the model alone."""
        before = self._watch.to("checkpoint")
        self._save(final=final)
        self._watch.to(before)

    def _again(self) -> None:
        started = time.monotonic()
        self.write()
        took_s = time.monotonic() - started
        self._alarms.after(max(self._every_s, took_s / SHARE), self._again)
