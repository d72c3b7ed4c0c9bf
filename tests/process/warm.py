"""``edgefl`` commands that are forked from a process that has imported everything.

Importing torch takes more time than all else that a short command does, so a suite of hundreds of commands is
mostly imports. A command that is started here is a process of its own, in the state of ``python -m edgefl``
after its imports. Its run's processes are forked as those of a sweep are (`edgefl.host.fork_server`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, NoReturn
from unittest import mock

import msgspec

from edgefl.host import fork_server
from edgefl.host.channel import Channel, Closed, pair
from edgefl.host.children import exit_with
from edgefl.host.process import become_child
from edgefl.results.result import Result
from edgefl.run import supervisor

MODULES = (
    *fork_server.IMPORTED,
    "edgefl.cli",
    "edgefl.run.sweep",
    "edgefl.run.supervisor",
    "edgefl.results.report",
)
RUNS = {"run", "resume", "sweep"}
"""Commands that fork the processes of a run."""
READ_WHEN_IMPORTED = ("OMP_", "MKL_", "PYTHON", "LANG", "LC_", "PATH", "LD_", "HOME", "XDG_")
"""Prefixes of environment variables that are read only when an interpreter or a library starts."""


class Wanted(msgspec.Struct, frozen=True):
    """Request to start a command; descriptors for stdin, stdout and stderr are sent with it."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str


class Commands:
    """Client of the process that forks commands. A context manager."""

    def __init__(self, server: fork_server.ForkServer) -> None:
        self.first = dict(os.environ)
        _, self.channel = server.start(__name__, int, self.first)

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def fit(self, environment: Mapping[str, str]) -> bool:
        """Returns True if a command in this environment may be forked instead of started."""
        changed = {name for name, _ in environment.items() ^ self.first.items()}
        return not any(name.startswith(READ_WHEN_IMPORTED) for name in changed)


commands: Commands | None = None
"""The client of this test session; None before its first process test."""


class WarmCommand(subprocess.Popen[str]):
    """A command forked by `Commands`. Its parent is this process, which must be a child subreaper."""

    def __init__(self, commands: Commands, wanted: Wanted) -> None:
        self._commands, self._wanted = commands, wanted
        pipe = subprocess.PIPE
        super().__init__(
            ["edgefl", *wanted.arguments], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )

    def _execute_child(self, *given: Any) -> None:
        pipes: Sequence[int] = given[10:16]
        read, _, _, write, _, error = pipes
        self._commands.channel.send(self._wanted, read, write, error)
        self.pid = self._commands.channel.receive()
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Undrawn(supervisor._Supervisor):
    """A run whose report has no pictures: drawing them takes a sixth of the CPU time of a short run.

    `tests/unit/test_results.py` and `tests/process/test_results.py` draw the pictures of short runs.
    """

    pictures: ClassVar[bool] = False

    def run(self) -> Result:
        if self.pictures:
            return super().run()
        with mock.patch("edgefl.results.pictures.Canvas.svg", lambda _, label: f"<svg>{label}</svg>"):
            return super().run()


class _Forked:
    """The fork server of one command; implements `edgefl.host.children.Child`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        fd = os.pidfd_open(self.pid)
        try:
            if not select.select([fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        finally:
            os.close(fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def serve(channel: Channel[Wanted]) -> NoReturn:
    """Fork a command for each request. Raises `Closed` when the client is gone."""
    while True:
        wanted = channel.receive()
        fds = [channel.descriptor() for _ in range(3)]
        told, tells = os.pipe()
        if (between := os.fork()) == 0:  # exits at once: the command becomes a child of the subreaper
            if (pid := os.fork()) == 0:
                os.close(told)
                os.close(tells)
                _command(channel, wanted, fds)
            os.write(tells, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        channel.send(int(os.read(told, 20)))
        for fd in (*fds, told, tells):
            os.close(fd)


def _command(channel: Channel[Wanted], wanted: Wanted, fds: Sequence[int]) -> NoReturn:
    """Run the command in this process, which was forked for it."""
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    channel.close()
    exit_with(lambda: _main(wanted))


def _main(wanted: Wanted) -> int:
    """Do what ``python -m edgefl ARGUMENTS`` does after its imports."""
    fork_server.set_up(wanted.environment, wanted.folder)
    sys.argv = ["edgefl", *wanted.arguments]
    sys.path[0] = wanted.folder
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    with contextlib.ExitStack() as stack:
        if wanted.arguments[0] in RUNS:
            _run_warm(stack)
        code: int = import_module("edgefl.__main__").main()
    return code


_HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGCHLD: signal.SIG_DFL,
}


def _run_warm(stack: contextlib.ExitStack) -> None:
    """Fork the command's fork server now, while this process has one thread and no open files."""
    ours, theirs = pair()
    me = os.getpid()
    if (pid := os.fork()) == 0:
        try:
            ours.close()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            fork_server.main(theirs.detach(), me)
        finally:
            os._exit(0)
    theirs.close()
    there = [(_Forked(pid), Channel[Any](ours, fork_server.FromForkServer))]
    cold = fork_server.start_process

    def start(*given: Any) -> tuple[Any, Channel[Any]]:
        return there.pop() if there else cold(*given)

    class Warm(Undrawn):
        def __post_init__(self) -> None:
            self.fork_server = self.fork_server or stack.enter_context(fork_server.ForkServer())
            super().__post_init__()

    stack.enter_context(mock.patch.object(fork_server, "start_process", start))
    stack.enter_context(mock.patch.object(supervisor, "_Supervisor", Warm))


def main(channel_fd: int, parent_pid: int) -> None:
    become_child(parent_pid, "edgefl-warm")
    for name in MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(Closed):
        serve(Channel.inherit(channel_fd, Wanted))
