"""The fork server: a process that has imported all modules of a run's processes, and forks these processes.

Consecutive runs share one fork server, because importing torch takes most of the time of a short run. A
forked process has the same state as a newly started one, so results are bit-identical.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn, Self

import msgspec

from edgefl import failpoints
from edgefl.errors import RunError
from edgefl.host import child
from edgefl.host.channel import Channel, Closed, pair
from edgefl.host.children import Child, collect, end_child, fork, kill
from edgefl.host.process import become_child, child_environment, open_pidfd, start_process

IMPORTED = ("edgefl.run.server_process", "edgefl.run.zygote", "edgefl.run.workload", "numpy.ma")
"""Modules that a run's processes need. numpy itself would import ``numpy.ma`` only on first use."""
GRACE_S = 1.0
"""Time limit in seconds for the exit of the fork server; after that, it is killed."""


class Fork(msgspec.Struct, frozen=True):
    """Request to run the ``main`` of a module in a forked process.

    A file descriptor is sent with the message: the new process's end of its channel.
    """

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    """The process's working directory."""


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """Report that all modules are imported."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    pid: int


class Reaped(msgspec.Struct, frozen=True, tag="reaped"):
    """Report that a process has ended. ``cpu_s`` includes the children that it waited for."""

    pid: int
    exit_code: int
    cpu_s: float


FromForkServer = Warm | Forked | Reaped


class ForkServer:
    """Starts processes with all modules already imported, and ends them when the context exits.

    If ``channel`` is given, it is connected to a fork server that another process has started (`another`).
    Raises `RunError` if the fork server's process has ended.
    """

    def __init__(self, channel: Channel[FromForkServer] | None = None) -> None:
        self._cpu_s = 0.0
        self._exit_codes: dict[int, int] = {}
        self._process: Child | None = None
        if channel is None:
            self._process, channel = start_process(__name__, FromForkServer, dict(os.environ))
        self._channel = channel
        try:
            self._expect(Warm)
        except BaseException:
            self.close()
            raise

    def start(
        self, module: str, incoming: Any, environment: dict[str, str], *arguments: str
    ) -> tuple[ForkedChild, Channel[Any]]:
        """Start a process, as `start_process` does. Its modules were imported when the fork server started,
        so files and environment variables that modules use at import were read at that time."""
        ours, theirs = pair()
        with theirs:
            request = Fork(module, arguments, child_environment(environment), os.getcwd())
            self._channel.tell(request, theirs.fileno())
        try:
            pid = self._expect(Forked).pid
            self._exit_codes.pop(pid, None)  # drop the code of an earlier process with the same id
            return ForkedChild(pid, self), Channel(ours, incoming)
        except BaseException:
            ours.close()
            raise

    def another(self) -> Channel[FromForkServer]:
        """Fork another fork server and return its channel.

        The new fork server exits when all processes have closed this channel.
        """
        return self.start(__name__, FromForkServer, dict(os.environ))[1]

    def cpu_s(self) -> float:
        """Return the CPU seconds used by all ended processes and by their children."""
        return self._cpu_s

    def exit_code(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit code of a process; None if it is still running after ``timeout`` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while pid not in self._exit_codes:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not self._channel.waiting and not poller.poll(None if left is None else 1000 * left):
                return None
            try:
                self._take(self._channel.receive())
            except Closed:  # the fork server is dead, and its processes died with it
                return -signal.SIGKILL
        return self._exit_codes[pid]

    def _expect(self, kind: type[Warm | Forked]) -> Any:
        try:
            while not isinstance(answer := self._channel.receive(), kind):
                self._take(answer)
            return answer
        except Closed:
            raise RunError("the fork server ended early") from None

    def _take(self, message: FromForkServer) -> None:
        if isinstance(message, Forked):
            return  # a signal interrupted `start`; the process ends, because `start` closed its channel
        assert isinstance(message, Reaped), f"unexpected {message}"
        self._cpu_s += message.cpu_s
        self._exit_codes[message.pid] = message.exit_code

    def close(self) -> None:
        """End the fork server and all processes that it has forked."""
        self._channel.close()
        if self._process is not None:
            end_child(self._process, GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkedChild:
    """A process that a fork server has started; it implements `edgefl.host.children.Child`."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._server.exit_code(self.pid, timeout)) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def kill(self) -> None:
        if self._server.exit_code(self.pid, 0.0) is None:
            kill(self.pid)


def serve(channel: Channel[Fork]) -> NoReturn:
    """Fork the requested processes, and report when they end. Raises `Closed` when the channel is closed."""
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    children: dict[int, int] = {}  # maps pidfds to process ids
    while True:
        for fd in [fd for fd, _ in poller.poll(0 if channel.waiting else None) if fd in children]:
            pid = children.pop(fd)
            poller.unregister(fd)
            os.close(fd)
            channel.send(Reaped(pid, *collect(pid)))
        for request in channel.receive_ready():
            pid = _fork(channel, request)
            children[fd := open_pidfd(pid)] = pid
            poller.register(fd, select.POLLIN)
            channel.send(Forked(pid))


def _fork(channel: Channel[Fork], request: Fork) -> int:
    """Fork a process that runs as ``python -m edgefl.host.child FD PID MODULE ARGUMENTS``; return its pid."""
    fd, parent = channel.descriptor(), os.getpid()

    def main() -> int:
        channel.close()
        set_up(request.environment, request.folder)
        return child.main(fd, parent, request.module, *request.arguments)

    pid = fork("edgefl-fork", main)
    os.close(fd)
    return pid


def set_up(environment: Mapping[str, str], folder: str) -> None:
    """Set the environment and working directory of this forked process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    failpoints.arm()


def main(channel_fd: int, parent_pid: int) -> None:
    become_child(parent_pid, "edgefl-forks")
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()
    channel: Channel[Fork] = Channel.inherit(channel_fd, Fork)
    with contextlib.suppress(Closed):
        channel.send(Warm())
        serve(channel)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
