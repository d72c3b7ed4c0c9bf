"""What the device tests of one pytest process share: options, the measuring process, what was compared."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from edgefl.regression.process import MeasuringProcess
from edgefl.regression.verdict import TESTED, TOLERANCE, Compared, changed


class Options(NamedTuple):
    """What the command line asks for."""

    save: bool = False
    compare: bool = False
    tolerance: float = TOLERANCE
    invalid: Literal["fail", "skip"] = "fail"
    time_scale: float | None = None
    repetitions: int | None = None


class Session:
    """One pytest process; `close` it at its end."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._process: MeasuringProcess | None = None
        self._file: Path | None = None
        self._compared: dict[str, list[Compared]] = {}

    def process(self, file: Path) -> MeasuringProcess:
        """The measuring process of a test module: a module's figures do not depend on what ran before it."""
        if self._process is None or self._file != file or not self._process.alive:
            self.close()
            self._process, self._file = MeasuringProcess(), file
        return self._process

    def changed(self, group: str, devices: int, compared: list[Compared]) -> list[Compared]:
        """Which of these metrics grew, by Holm's correction over the group's devices.

        Those of devices that are still to come are not known yet and count as not changed. That costs no
        alarm: whatever they are, Holm rejects any of a group only if it rejects the clearest alone.
        """
        known = self._compared.setdefault(group, [])
        known += compared
        grown = changed(known, max(len(known), devices * len(TESTED)))
        return [one for one, grew in zip(known, grown, strict=True) if grew and one in compared]

    def close(self) -> None:
        """End the measuring process."""
        if self._process is not None:
            self._process.close()
            self._process = None
