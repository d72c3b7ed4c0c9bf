"""Run a Flower app with Flower's own runtime on emulated phones.

Each SuperNode (Flower's client process) and every process that it starts are slowed down together like one
phone of `edgefl.programs`. Its connection to the SuperLink (Flower's server process) passes through the
phone's emulated link. The SuperLink and ``flwr run`` (`server.py`) run on this host without limits. The
programs that Flower installs, and the app, run unchanged.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from edgefl.errors import ConfigError, RunError
from edgefl.flower.server import CONNECTION
from edgefl.processes import command_of, finding_edgefl
from edgefl.programs import Phone, ProgramOptions, ProgramsResult, start

TURN_S = 0.2
COMMANDS = ("flwr", "flower-superlink", "flower-supernode")
_NODE_LINE = re.compile(rb"(Receiving|Sending): (\w+)\S* message")


class NodeMessage(NamedTuple):
    """A message that a SuperNode received and answered."""

    phone: int
    kind: str
    """Kind of the message: ``train``, ``evaluate`` or ``query``."""
    number: int
    """Index of the message among the phone's messages of the same kind, counted from 1."""
    seconds: float
    """Wall time in seconds from the SuperNode's receipt of the message to the start of its answer, with a
    resolution of 0.2 s."""


class FlowerResult(NamedTuple):
    """Result of a Flower app that ran on emulated phones."""

    exit_code: int
    """0 if the app's run completed, 1 if it did not, and 128 + n if signal n ended it."""
    phones: ProgramsResult
    """Results of the SuperNodes, which are stopped after the app's run, so their exit codes mean nothing."""
    messages: tuple[NodeMessage, ...]


def check(app: Path) -> None:
    """Raise `ConfigError` if ``app`` is not the folder of a Flower app, or if Flower is not installed."""
    try:
        tomllib.loads((app / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]["components"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        missing = "with a pyproject.toml that has [tool.flwr.app.components]"
        raise ConfigError(
            f"{app}: must be the folder of a Flower app {missing} ({type(error).__name__})"
        ) from None
    for command in COMMANDS:
        if shutil.which(command, path=_path()) is None:
            raise ConfigError(f"{command!r} not found: pip install 'edgefl[flower]'")


def run(
    app: Path, phones: Sequence[Phone], options: ProgramOptions, run_config: Sequence[str] = ()
) -> FlowerResult:
    """Run a Flower app on phones until it ends; this function sets the phones' commands and connections.

    The app's ServerApp starts once all SuperNodes are online. ``run_config`` contains values for the option
    ``--run-config`` of ``flwr run``. Raises `ConfigError` if an argument is invalid, and `RunError` if a
    SuperNode ends before the app starts, or if all of them end before the app.
    """
    check(app)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgefl-flower-")))
        link, way, *ports = free_ports(2 + len(phones))
        options = options._replace(out=options.out or home / "out", print_lines=False)
        nodes = [
            _node(phone, number, len(phones), way, link, ports[number], home)
            for number, phone in enumerate(phones)
        ]
        running = stack.enter_context(start(nodes, options))
        assert options.out is not None
        logs = [_NodeLog(number, options.out) for number in range(len(phones))]
        server = _server(app, link, len(phones), home, options.out, run_config)
        theirs = stack.enter_context(
            start([server], ProgramOptions(time_scale=1.0, throttle="off", memory="off"))
        )
        stack.enter_context(theirs.forwarding_signals())
        while theirs.running:
            running.turn(TURN_S)
            theirs.turn(0.0)
            for log in logs:
                log.read()
            ended = running.ended  # without any SuperNode, the app would wait forever
            if ended and (len(ended) == len(logs) or not any(log.active for log in logs)):
                why = running.why(ended[0]) or logs[ended[0]].last_line()
                raise RunError(f"the SuperNode of phone {ended[0]} ended: {why}")
    messages = tuple(message for log in logs for message in log.messages)
    return FlowerResult(theirs.result().exit_code, running.result(), messages)


def free_ports(count: int) -> list[int]:
    """Return ``count`` ports of 127.0.0.1 on which no process currently listens."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _path() -> str:
    """Return the search path for commands: the folder of the running Python interpreter, which contains
    Flower's commands, and then the folders in PATH."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a Flower program. They set FLWR_HOME to ``home``, set one thread by
    default, and turn off telemetry. gRPC connections to this host do not use a proxy."""
    home.mkdir(parents=True, exist_ok=True)
    direct = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")  # noqa: SIM112
    return {
        "PATH": _path(),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "no_grpc_proxy": ",".join(filter(None, [direct, "127.0.0.1"])),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _node(phone: Phone, number: int, count: int, way: int, link: int, port: int, home: Path) -> Phone:
    """Return a copy of ``phone`` whose command is a SuperNode."""
    command = (
        *("flower-supernode", "--insecure", "--superlink", f"{{connect:{way}}}"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--node-config", f"partition-id={number} num-partitions={count}"),
    )
    return replace(
        phone,
        command=command,
        environment={**phone.environment, **_environment(home / f"node-{number}")},
        connects={way: f"127.0.0.1:{link}"},
    )


def _server(app: Path, port: int, nodes: int, home: Path, out: Path, run_config: Sequence[str]) -> Phone:
    """Return a phone without limits whose command runs the SuperLink and ``flwr run``."""
    own = home / "superlink"
    environment = _environment(own)
    (own / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment["PYTHONPATH"] = finding_edgefl(os.environ).get("PYTHONPATH", "")
    words = (str(app.resolve()), str(port), str(nodes), str(out.resolve() / "superlink.log"), *run_config)
    command = tuple(command_of("edgefl.flower.server", *words))
    return Phone(device="pi-4", network="none", share=1.0, command=command, environment=environment)


class _NodeLog:
    """Reads a SuperNode's log, which contains a line for each message that it receives or answers."""

    def __init__(self, phone: int, out: Path) -> None:
        self._phone, self.messages = phone, list[NodeMessage]()
        self._folder, self._pattern = out / "phones", f"{phone}-*"
        self._offsets: dict[Path, int] = {}
        self._started: dict[str, float] = {}

    def read(self) -> None:
        """Parse the complete lines that were written since the last call."""
        for path in self._folder.glob(self._pattern):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(new) + len(newline)
            for found in _NODE_LINE.finditer(new):
                self._record(found[1] == b"Receiving", found[2].decode())

    @property
    def active(self) -> bool:
        """True once the SuperNode has received a message."""
        return bool(self.messages or self._started)

    def last_line(self) -> str:
        """Return the last line of the SuperNode's standard error."""
        errors = "".join(
            path.read_text(errors="replace") for path in self._folder.glob(f"{self._pattern}.err")
        )
        return errors.strip().rpartition("\n")[2] or "it printed no error"

    def _record(self, received: bool, kind: str) -> None:
        if received:
            self._started[kind] = time.monotonic()
        elif kind in self._started:
            number = 1 + sum(message.kind == kind for message in self.messages)
            took_s = time.monotonic() - self._started.pop(kind)
            self.messages.append(NodeMessage(self._phone, kind, number, took_s))
