"""Forks ``edgefl`` commands and processes of ``edgefl exec`` from a process that has imported everything.

A short command spends most of its time importing torch. A command that is forked here has the state of
``python -m edgefl`` after its imports. The processes of its run are forked like those of a sweep
(`edgefl.host.fork_server`).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, NoReturn
from unittest import mock

import msgspec

from edgefl import Experiment, Fleet, Stop, config
from edgefl.devices import load_device, load_network
from edgefl.host import fork_server
from edgefl.host.channel import Channel, Closed, pair
from edgefl.host.children import exit_with
from edgefl.host.process import STOPS, become_child, child_environment, open_pidfd, start_process
from edgefl.learning.published_sets import read_bundled_table
from edgefl.results.page import Picture
from edgefl.results.result import Result
from edgefl.results.rows import TABLES, column_types
from edgefl.run import supervisor

RUN_MODULES = (
    *fork_server.IMPORTED,
    "edgefl.kernels.backend_c",
    "edgefl.strategies.fedavg",
    "edgefl.strategies.fedbuff",
    "encodings.ascii",
    "encodings.utf_8_sig",
)
COMMAND_MODULES = (
    "edgefl.__main__",
    "edgefl.cli",
    "edgefl.run.sweep",
    "edgefl.run.supervisor",
    "edgefl.results.report",
    "edgefl.programs.keeper",
    "edgefl.programs.relay",
)
WHEN_PARSING = ("typer._adapters", "pydantic.plugin._loader")
"""Modules that this release of typer imports when it first parses arguments."""
RUNS = {"run", "resume", "sweep"}
"""Commands that fork the processes of a run."""
READ_WHEN_IMPORTED = ("OMP_", "MKL_", "PYTHON", "LANG", "LC_", "PATH", "LD_", "HOME", "XDG_")
"""Prefixes of environment variables that are read only when an interpreter or a library starts."""


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Request to start an ``edgefl`` command or, if set, ``module`` as a child of the process ``parent``."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    module: str = ""
    parent: int = 0
    numbers: tuple[int, ...] = (0, 1, 2)
    """Descriptor numbers in the new process. The descriptors are sent with the request and with `More`."""


class More(msgspec.Struct, frozen=True, tag=True):
    """Carries further descriptors of a request, because a message has room for only `AT_ONCE`."""


AT_ONCE = 4


class Commands:
    """Client of the process that forks commands. A context manager."""

    def __init__(self, channel: Channel[int]) -> None:
        self.first = dict(os.environ)
        self._channel = channel

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def start(self, wanted: Wanted, *fds: int) -> int:
        """Start a process and return its pid. This process, a child subreaper, becomes the parent."""
        self._channel.send(wanted, *fds[:AT_ONCE])
        for first in range(AT_ONCE, len(fds), AT_ONCE):
            self._channel.send(More(), *fds[first : first + AT_ONCE])
        return self._channel.receive()

    def start_process(
        self,
        module: str,
        incoming: Any,
        environment: dict[str, str],
        *arguments: str,
        inherited: Sequence[int] = (),
    ) -> tuple[Forked, Channel[Any]]:
        """Do what `edgefl.host.process.start_process` does, but fork the process."""
        ours, theirs = pair()
        with theirs, open(os.devnull) as null:
            numbers = (0, 1, 2, theirs.fileno(), *inherited)
            words, made = (str(theirs.fileno()), *arguments), child_environment(environment)
            wanted = Wanted(words, made, os.getcwd(), module, os.getpid(), numbers)
            pid = self.start(wanted, null.fileno(), *numbers[1:])
        return Forked(pid), Channel(ours, incoming)

    def fit(self, environment: Mapping[str, str]) -> bool:
        """Return True if a command in this environment may be forked instead of started."""
        changed = environment.items() ^ self.first.items()
        encodable = "".join(f"{name}{value}" for name, value in changed).isprintable()  # as UTF-8
        return encodable and not any(name.startswith(READ_WHEN_IMPORTED) for name, _ in changed)


@contextlib.contextmanager
def started() -> Iterator[tuple[fork_server.ForkServer, Commands]]:
    """Start the process that forks commands, and a fork server as one of its forks."""
    environment = dict(os.environ)
    first, channel = start_process(__name__, int, environment)
    with Commands(channel) as commands:
        forked, ours = commands.start_process(fork_server.__name__, fork_server.FromForkServer, environment)
        with fork_server.ForkServer(ours) as server:
            yield server, commands
        forked.wait()
    first.wait()


commands: Commands | None = None
"""The client of this test session; None before its first process test."""


class WarmCommand(subprocess.Popen[str]):
    """A command forked by `Commands`."""

    def __init__(self, commands: Commands, wanted: Wanted) -> None:
        self._commands, self._wanted = commands, wanted
        pipe = subprocess.PIPE
        super().__init__(
            ["edgefl", *wanted.arguments], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )

    def _execute_child(self, *given: Any) -> None:
        pipes: Sequence[int] = given[10:16]
        read, _, _, write, _, error = pipes
        self.pid = self._commands.start(self._wanted, read, write, error)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Undrawn(supervisor._Supervisor):
    """A run whose report has no pictures: drawing them takes a fifth of the CPU time of a short run.

    `tests/unit/test_results.py` and `tests/process/test_results.py` draw the pictures of short runs.
    """

    pictures: ClassVar[bool] = False

    def run(self) -> Result:
        if self.pictures:
            return super().run()
        with contextlib.ExitStack() as stack:
            for name in DRAWING:
                stack.enter_context(mock.patch(f"edgefl.results.{name}", return_value=EMPTY))
            return super().run()


EMPTY = Picture('<svg aria-label="not drawn"></svg>')
DRAWING = (
    *(f"report.{name}" for name in ("draw_classes", "draw_weights", "draw_timeline")),
    "protection.curves_picture",
    "pictures.curves_picture",
)
"""The functions that draw a report's pictures."""


class Forked:
    """A child that another process may have forked; implements `edgefl.host.children.Child`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is not None:
            return self._code
        fd = open_pidfd(self.pid)
        try:
            if not select.select([fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        finally:
            os.close(fd)
        self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def serve(channel: Channel[Wanted | More]) -> NoReturn:
    """Fork a process for each request. Raises `Closed` when the client is gone."""
    while True:
        answer(channel)


def answer(channel: Channel[Wanted | More]) -> None:
    """Fork a process for the next request."""
    wanted = channel.receive()
    assert isinstance(wanted, Wanted)
    for _ in range(AT_ONCE, len(wanted.numbers), AT_ONCE):
        channel.receive()
    fds = [channel.descriptor() for _ in wanted.numbers]
    channel.send(_start(channel, wanted, fds))
    for fd in fds:
        os.close(fd)


def _start(channel: Channel[Wanted | More], wanted: Wanted, fds: Sequence[int]) -> int:
    """Fork a process that becomes a child of the subreaper; return its pid."""
    reader, writer = os.pipe()
    if (between := os.fork()) == 0:
        if (pid := os.fork()) == 0:
            os.close(reader)
            os.close(writer)
            channel.close()
            _place(fds, wanted.numbers)
            exit_with(lambda: _child(wanted) if wanted.module else command(wanted))
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    return pid


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Move these descriptors to these numbers, some of which may be in use by other descriptors."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(*fds, *numbers) + 1) for fd in fds]
    for fd, placed, number in zip(fds, high, numbers, strict=True):
        if fd not in numbers:
            os.close(fd)
        os.dup2(placed, number)
        os.close(placed)


def _child(wanted: Wanted) -> int:
    """Do what ``python -m MODULE FD PID ARGUMENTS`` does after its imports."""
    # Wait until the intermediate process has ended, because this process must not die with it.
    while os.getppid() != wanted.parent:
        time.sleep(1e-3)
    fork_server.set_up(wanted.environment, wanted.folder)
    fd, *arguments = wanted.arguments
    return _main_of(wanted.module, fd, str(wanted.parent), *arguments)


def _main_of(module: str, *arguments: str) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    sys.argv = [module, *arguments]
    if module == fork_server.__name__:
        fork_server.main(*map(int, arguments))
        return 0
    try:
        import_module(module).main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def command(wanted: Wanted) -> int:
    """Do what ``python -m edgefl ARGUMENTS`` does after its imports."""
    os.setsid()
    fork_server.set_up(wanted.environment, wanted.folder)
    sys.argv = ["edgefl", *wanted.arguments]
    sys.path.insert(0, wanted.folder)
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    with contextlib.ExitStack() as stack:
        if wanted.arguments[0] in RUNS:
            _run_warm(stack)
        if wanted.arguments[0] == "join":
            _join_warm(stack)
        stack.enter_context(mock.patch("edgefl.programs.running.start_process", _fork))
        code: int = import_module("edgefl.__main__").main()
    return code


_HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGCHLD: signal.SIG_DFL,
}


def _run_warm(stack: contextlib.ExitStack) -> None:
    """Fork the command's fork server, while this process has one thread and no open files."""
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
    there = [(Forked(pid), Channel[Any](ours, fork_server.FromForkServer))]
    cold = fork_server.start_process

    def start(*given: Any) -> tuple[Any, Channel[Any]]:
        return there.pop() if there else cold(*given)

    class Warm(Undrawn):
        def __post_init__(self) -> None:
            self.fork_server = self.fork_server or stack.enter_context(fork_server.ForkServer())
            super().__post_init__()

    stack.enter_context(mock.patch.object(fork_server, "start_process", start))
    stack.enter_context(mock.patch.object(supervisor, "_Supervisor", Warm))


def _join_warm(stack: contextlib.ExitStack) -> None:
    """Fork the node's zygote from a fork server, which has no ZeroMQ threads."""
    _run_warm(stack)
    server = stack.enter_context(fork_server.ForkServer())

    def start(_: str, incoming: Any, environment: dict[str, str], module: str) -> tuple[Any, Channel[Any]]:
        return server.start(module, incoming, environment)

    stack.enter_context(mock.patch("edgefl.hosts.node.start_process", start))


def _fork(
    module: str, incoming: Any, environment: dict[str, str], *arguments: str, inherited: Sequence[int] = ()
) -> tuple[Forked, Channel[Any]]:
    """Do what `edgefl.host.process.start_process` does, but fork this process."""
    ours, theirs = pair()
    parent, numbers = os.getpid(), [1, 2, theirs.fileno(), *inherited]
    if (pid := os.fork()) == 0:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in (0, *numbers):
                with contextlib.suppress(OSError):  # the descriptor that listed them
                    os.close(fd)
        made = child_environment(environment)
        fork_server.set_up(made, os.getcwd())
        exit_with(lambda: _main_of(module, str(theirs.fileno()), str(parent), *arguments))
    theirs.close()
    return Forked(pid), Channel(ours, incoming)


def main(channel_fd: int, parent_pid: int) -> None:
    become_child(parent_pid, "edgefl-warm")
    channel: Channel[Wanted | More] = Channel.inherit(channel_fd, Wanted | More)
    ready_for_runs()
    with contextlib.suppress(Closed):
        answer(channel)  # forks the fork server, which is smaller without the modules of commands
        ready_for_commands()
        serve(channel)


def up() -> None:
    """Import the modules of commands and runs into this process, and read the files that runs need."""
    ready_for_runs()
    ready_for_commands()


def ready_for_runs() -> None:
    for name in RUN_MODULES:
        import_module(name)
    read_ahead()
    gc.collect()
    gc.freeze()


def ready_for_commands() -> None:
    for name in COMMAND_MODULES:
        import_module(name)
    for name in WHEN_PARSING:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()


def read_ahead() -> None:
    """Read and cache profiles, the digits data set and column types, which nearly every run needs."""
    read_bundled_table("digits", "digits.csv.gz")
    for device in ("pixel-4", "moto-g4", "pi-zero-2w", "watch-a7"):
        load_device(device)
    for network in ("fios", "lte"):
        load_network(network)
    for row in TABLES.values():
        column_types(row)
    config.validate(Experiment(fleet=Fleet(devices={"pixel-4": 1}, network="lte"), stop=Stop(versions=1)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
