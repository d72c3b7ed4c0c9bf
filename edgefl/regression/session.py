"""The options, the measuring process and the comparisons that the tests of one pytest process share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from edgefl.regression.against import AgainstBase, verdict_of
from edgefl.regression.checkout import Base
from edgefl.regression.process import FunctionLocation, MeasuringProcess, Surroundings
from edgefl.regression.sides import CallRequest
from edgefl.regression.verdict import TOLERANCE, Compared, Verdict


class SessionOptions(NamedTuple):
    """edgefl's options on pytest's command line."""

    save: bool = False
    compare: bool = False
    timed: bool = False
    """If true, times and memory on this host are also saved and compared."""
    tolerance: float = TOLERANCE
    time_scale: float | None = None
    repetitions: int | None = None
    limit_s: float | None = None
    """Maximum wall-clock time for the measurements of one test, in seconds."""
    against: Base | None = None
    """The commit with which the functions are compared, if any."""
    build: str | None = None
    """The shell command that prepares the checkout of this commit, if any."""


class Session:
    """The options, measuring process and comparisons of one pytest process. Call `close` at the end."""

    def __init__(self, options: SessionOptions, tell: Callable[[str], None] = lambda _: None) -> None:
        self.options, self.tell = options, tell
        self._process: MeasuringProcess | None = None
        self._serves: tuple[Path, Surroundings] | None = None
        self._modules: dict[str, str] = {}
        """Files of the modules whose functions the measuring process has run, keyed by module."""
        self.compared: dict[str, dict[str, tuple[Compared, ...]]] = {}
        """Comparisons of each device's first measurement with its baseline, keyed first by test and function,
        then by the name of the test with its device. A test that is run again replaces its comparisons."""
        self._against = None if options.against is None else AgainstBase(options.against, options.build)
        self.of_base: dict[tuple[str, bytes], Verdict] = {}
        """Verdicts of comparisons with the base, keyed by (test and function, encoded call).

        A verdict applies to all devices on which the test makes the same call.
        """
        self._asked: set[tuple[str, bytes, str]] = set()
        """Each key of ``of_base`` with each device for which its comparison was requested."""

    def process(self, file: Path, surroundings: Surroundings, function: FunctionLocation) -> MeasuringProcess:
        """Return the measuring process of a test module, which no other test module uses.

        A new process is started if the surroundings have changed, if the last one has ended, or if it has
        imported another module with the name of the function's module.
        """
        wanted = file, surroundings
        imported = self._modules.get(function.module, function.file)
        suits = self._serves == wanted and imported == function.file
        if self._process is None or not suits or self._process.popen.poll() is not None:
            self._end_process()
            self._process = MeasuringProcess(surroundings)
            self._serves, self._modules = wanted, {}
        self._modules[function.module] = function.file
        return self._process

    def against_base(self, group: str, label: str, call: CallRequest, tell: Callable[[str], None]) -> Verdict:
        """Compare a function with the base, once for all devices for which a test makes the same call,
        because its time on this host does not depend on the device.

        A second request for the same device means that the test is repeated, so the comparison is repeated
        too.
        """
        __tracebackhide__ = True
        assert self._against is not None
        same = msgspec.structs.replace(call, device="", network=None)
        key = group, msgspec.msgpack.encode(same)
        if key not in self.of_base or (*key, call.device) in self._asked:
            self._asked = {one for one in self._asked if one[:2] != key}
            tolerance = self.options.tolerance
            found = self._against.compare(label, call, tolerance, self.options.limit_s, tell)
            self.of_base[key] = verdict_of(found, tolerance)
        self._asked.add((*key, call.device))
        return self.of_base[key]

    def close(self) -> None:
        """End all processes, and remove the base's files."""
        self._end_process()
        if self._against is not None:
            self._against.close()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
