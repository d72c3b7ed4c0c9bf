"""The measuring process, seen from the test's: started when it is first needed, ended with the session."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from edgefl.errors import ConfigError, RunError
from edgefl.regression.orders import Ended, FromWorker, Order, Ready, Refused, Repeat, Repetition
from edgefl.run.channel import Channel, Closed, pair
from edgefl.run.process import single_threaded_environment

_ENDING_S = 1.0
"""For the measuring process to end by itself once nobody asks it anything."""


class MeasuringProcess:
    """Runs one module's functions; a context manager, or `close` it.

    Its state does not depend on what was measured before: it forks, and what it measures is in the forks.
    """

    def __init__(self) -> None:
        ours, theirs = pair()
        root = str(Path(__file__).resolve().parents[2])
        environment = single_threaded_environment(dict(os.environ))
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment.pop("PYTHONHASHSEED", None)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "edgefl.regression.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._channel: Channel[FromWorker] = Channel(ours, FromWorker)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def prepare(self, order: Order) -> Ready | Ended:
        """Import the function and learn what a call costs. ConfigError if that cannot be done."""
        answer = self._ask(order)
        assert isinstance(answer, Ready | Ended)
        return answer

    def repeat(self, repeat: Repeat) -> Repetition | Ended:
        """Measure the function of the last order once, in a process of its own."""
        answer = self._ask(repeat)
        assert isinstance(answer, Repetition | Ended)
        return answer

    def close(self) -> None:
        """End it and what it runs now, with all that this has started."""
        self._channel.close()
        try:
            self._process.wait(_ENDING_S)
        except BaseException as error:  # it is still importing the user's module, or nobody wants to wait
            for process in _with_children(self._process.pid):
                process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def __enter__(self) -> MeasuringProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, message: Order | Repeat) -> FromWorker:
        try:
            self._channel.send(message)
            answer = self._channel.receive()
        except Closed:
            code = self._process.wait()
            raise RunError(
                f"the measuring process ended with exit code {code}; its message is above"
            ) from None
        except BaseException:
            self.close()  # its answer is still to come, and would be taken for the next one's
            raise
        if isinstance(answer, Refused):
            raise ConfigError(answer.why)
        return answer


def _with_children(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [*process.children(recursive=True), process]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other edgefl test measures on this host: two at once spoil each other.

    What is locked is the folder of temporary files itself, so that no file is left behind.
    """
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
