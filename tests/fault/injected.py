"""System calls that fail: one call of a run's supervisor, server or zygote is made to, and the run is judged.

It ends well, or with one line and a non-zero exit code; either way without a traceback or a process left, and
resumed without the fault it ends as the undisturbed run did.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from edgefl import Experiment, config, seeds
from edgefl.errors import EdgeflError
from edgefl.host.fork_server import ForkServer
from edgefl.run import supervisor
from tests.fault import shim
from tests.patience import Patience
from tests.process.test_virtual_resume import outcome

ERRORS = {
    "open": ("EMFILE", "ENOMEM"),
    "create": ("ENOSPC", "EIO"),
    "read": ("EIO",),
    "write": ("ENOSPC", "EIO"),
    "truncate": ("ENOSPC", "EIO"),
    "sync": ("EIO",),
    "rename": ("ENOSPC", "EIO"),
    "unlink": ("EIO",),
    "mkdir": ("ENOSPC",),
    "allocate": ("ENOMEM",),
    "map": ("ENOMEM",),
    "socket": ("EMFILE", "ENOMEM"),
    "pipe": ("EMFILE",),
    "fork": ("ENOMEM",),
    "thread": ("EAGAIN",),
}
"""Kinds of calls, as `shim.c` names them, and what each may fail with."""


GOOD = ("ended well", "one line", "one line beside others' words", "not reached")
PATIENCE_S = 120.0
"""A run that was given so much of the machine (`Patience`) and has not ended hangs."""


class Fault(NamedTuple):
    """The call that fails."""

    who: str
    kind: str
    call: int
    error: str
    on: bool
    """All later ones fail too."""

    def __str__(self) -> str:
        on = " and all later ones" if self.on else ""
        return f"{self.who}: {self.kind} {self.call}{on}: {self.error}"

    @property
    def setting(self) -> str:
        """The value of ``EDGEFL_SHIM_FAIL``."""
        code = getattr(errno, self.error)
        return f"{self.who}:{self.kind}:{self.call}:{code}{':on' if self.on else ''}"


class Runs:
    """The experiment, run undisturbed once and then with faults."""

    def __init__(
        self, wanted: Experiment, place: Path, library: Path, fork_server: ForkServer | None = None
    ) -> None:
        """Resumed runs are started by the ``fork_server``, which spares them the imports."""
        self._place, self._library, self._fork_server = place, library, fork_server
        place.mkdir()
        self._file = place / "experiment.toml"
        self._file.write_text(config.dump(wanted))
        self.calls: dict[tuple[str, str], int] = {}
        code, said = self._run("nobody:open:0:0", place / "calm")
        assert code == 0, said
        for line in (place / "notes").read_text().splitlines():
            word, who, kind, *count = line.split()
            if word == "count":
                self.calls[who, kind] = int(count[0])
        self._calm = outcome(place / "calm")

    def faults(self, each: int, seed: int = 0) -> list[Fault]:
        """Up to ``each`` of the calls of each process and kind for each error, drawn and shuffled."""
        found = []
        for (who, kind), count in sorted(self.calls.items()):
            for error in ERRORS[kind]:
                rng = seeds.stream(seed, f"{who} {kind} {error}")
                for call in rng.permutation(count)[:each].tolist():
                    found.append(Fault(who, kind, call, error, bool(rng.integers(2))))
        return [found[index] for index in seeds.stream(seed, "order").permutation(len(found))]

    def __call__(self, fault: Fault) -> str:
        """Returns what became of the run."""
        folder = self._place / "run"
        shutil.rmtree(folder, ignore_errors=True)
        code, said = self._run(fault.setting, folder)
        wrong = f": exit code {code}: {said}"
        if "Traceback" in said:
            return f"a traceback{wrong}"
        if code < 0 or (code and "edgefl: " not in said):
            return f"no line{wrong}"
        if "hit" not in (self._place / "notes").read_text():
            return "not reached"
        if code and folder.exists():
            try:
                supervisor.resume(folder, quiet=True, fork_server=self._fork_server)
            except EdgeflError as error:
                return f"not resumed: {error}{wrong}"
        if folder.exists() and outcome(folder) != self._calm:
            return f"another outcome{wrong}"
        lines = said.splitlines()
        return (
            "ended well" if code == 0 else "one line" if len(lines) <= 1 else "one line beside others' words"
        )

    @staticmethod
    def _end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
        """Returns what it said. Raises `subprocess.TimeoutExpired` if it hangs."""
        patience = Patience(PATIENCE_S)
        while True:
            try:
                return process.communicate(timeout=1.0)
            except subprocess.TimeoutExpired:
                if patience.over():
                    raise

    def _run(self, fault: str, folder: Path) -> tuple[int, str]:
        (self._place / "notes").unlink(missing_ok=True)
        around = shim.environment(self._library, self._place, fail=fault, notes=self._place / "notes")
        words = ["run", str(self._file), "--out", str(folder), "--accept-invalid", "--quiet"]
        process = subprocess.Popen(
            [sys.executable, "-m", "edgefl", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **around},
        )
        try:
            _, said = self._end_of(process)
            patience = Patience(20.0)  # what the kernel kills with its parent takes a moment to be gone
            while not patience.over():
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
            said = f"Traceback: a process was left; {said}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = f"Traceback: it did not end; {process.communicate()[1]}"
        except ProcessLookupError:
            pass
        return process.returncode, said
