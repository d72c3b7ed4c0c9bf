"""How fast phones start and what memory they take, beside a process that imports torch for itself.

The real zygote with a real model and real data forks the real clients. A socket of our own takes the server's
place, so that only starting is measured: from the first fork until the last client has said that it is ready.
Then every client makes one trip, after which its memory is read: a client that has never trained has hardly
touched its pages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from edgefl.devices.fleet import ClientInfo
from edgefl.errors import RunError
from edgefl.experiment import Clock, Experiment, Fleet, Model, Training
from edgefl.lab.processes import expect, started
from edgefl.limits.capacity import host
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.run import control, messages
from edgefl.run.channel import Channel
from edgefl.run.connection import ServerSocket, bind
from edgefl.run.process import single_threaded_environment

COUNTS = (10, 50, 100, 300, 1000)
QUICK_COUNTS = COUNTS[:4]
TIME_SCALE = 1e-4
"""Emulated time runs so fast that pacing waits for nothing."""
PATIENCE_S = 120.0
"""Longest silence of a fleet that starts or trains."""
_IMPORT = """
import time; started = time.perf_counter()
import torch
seconds = time.perf_counter() - started
torch.set_num_threads(1); torch.nn.Linear(4, 4)(torch.zeros(1, 4)).sum().backward()
print(seconds, flush=True); input()
"""


class Memory(NamedTuple):
    """Of one process, MiB: a shared page counts once over all who map it, or not at all."""

    proportional_mib: float
    own_mib: float


def run(
    json_path: Path | str | None = None,
    quick: bool = False,
    *,
    counts: tuple[int, ...] | None = None,
    repetitions: int | None = None,
) -> dict[str, Any]:
    """Measure, print a table, write ``json_path`` if given, and return what it holds.

    ``rows`` has one entry a number of clients: ``ready_s`` from the first fork to the last `Ready` (median,
    with its ``spread``), ``ms_a_client``, and the medians over the clients of ``proportional_mib`` and
    ``own_mib`` (pages that nobody shares) after one trip each. ``torch`` is what one process pays that
    imports it for itself.

    Raises `RunError` if a client ended early or fell silent.
    """
    repetitions = repetitions or (2 if quick else 3)
    torch = [_import_torch() for _ in range(repetitions)]
    result = {
        "host": {**host()._asdict(), "load_1min": round(os.getloadavg()[0], 2)},
        "repetitions": repetitions,
        "torch": {
            "import_s": float(np.median([seconds for seconds, _ in torch])),
            "proportional_mib": float(np.median([memory.proportional_mib for _, memory in torch])),
            "own_mib": float(np.median([memory.own_mib for _, memory in torch])),
        },
        "rows": [_row(count, repetitions) for count in counts or (QUICK_COUNTS if quick else COUNTS)],
    }
    _print(result)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n")
    return result


def _row(clients: int, repetitions: int) -> dict[str, Any]:
    turns = [turn(clients) for _ in range(repetitions)]
    low, ready_s, high = np.percentile([seconds for seconds, _ in turns], [25, 50, 75]).tolist()
    memory = [one for _, found in turns for one in found]
    return {
        "clients": clients,
        "ready_s": ready_s,
        "spread": (high - low) / ready_s,
        "ms_a_client": ready_s / clients * 1e3,
        "proportional_mib": float(np.median([one.proportional_mib for one in memory])),
        "own_mib": float(np.median([one.own_mib for one in memory])),
    }


def turn(clients: int) -> tuple[float, list[Memory]]:
    """Start so many clients, let each make a trip: seconds until all were ready, and each one's memory."""
    experiment = Experiment(
        fleet=Fleet(devices={"pixel-4": clients}, network="fios"),
        model=Model(name="mlp", args={"hidden": [64]}),
        training=Training(steps=1),
        clock=Clock(kind="wall", time_scale=TIME_SCALE),
    )
    infos = [ClientInfo(client, "pixel-4", "fios") for client in range(clients)]
    with _socket() as socket, started("edgefl.run.zygote", control.FromZygote) as zygote:
        zygote.send(control.Prepare(experiment, "", infos))
        size = expect(zygote, control.Prepared).size
        buffer = ParameterBuffer.create(Shape(size, 2, clients))
        try:
            zygote.send(control.Adopt(initialise=True), fd=buffer.fd)
            expect(zygote, control.Adopted)
            began = time.perf_counter()
            for client in range(clients):
                zygote.send(control.Spawn(control.CLIENT, client, 0, socket.address, TIME_SCALE))
            heard = dict(_each(socket, zygote, messages.Ready, clients))
            ready_s = time.perf_counter() - began
            for identity, ready in heard.items():
                buffer.lease(ready.peer, task=ready.peer, client=ready.peer, base_version=0)
                number = ready.peer
                task = messages.Task(
                    number, number, trip=0, version=0, entry=0, slot=number, cut=None, condition=None
                )
                socket.send(identity, [messages.encode(task)])
            for _ in _each(socket, zygote, messages.Done, clients):
                pass
            memory = [_memory(ready.pid) for ready in heard.values()]
            for identity in heard:
                socket.send(identity, [messages.encode(messages.Bye())])
            for _ in heard:
                expect(zygote, control.Exited)
        finally:
            buffer.close()
    return ready_s, memory


@contextmanager
def _socket() -> Iterator[ServerSocket]:
    socket = bind("shm", messages.MAX_HEADER_BYTES)
    try:
        yield socket
    finally:
        socket.close()


def _each(
    socket: ServerSocket, zygote: Channel[control.FromZygote], kind: type[Any], count: int
) -> Iterator[tuple[bytes, Any]]:
    """The next ``count`` messages of this kind and who sent them; the zygote's news are read on the way."""
    until = time.monotonic() + PATIENCE_S
    while count:
        for news in zygote.receive_ready():
            if isinstance(news, control.Exited):
                raise RunError(f"client {news.peer} ended early: {news.reason}")
        if time.monotonic() > until:
            raise RunError(f"{count} clients were not heard within {PATIENCE_S:g} s")
        socket.wait(100)
        for identity, (header,) in socket.receive():
            message = messages.decode_from_client(header)
            if isinstance(message, messages.Gone):
                raise RunError(f"client {message.client} gave its task back: {message.reason}")
            if isinstance(message, kind):
                until = time.monotonic() + PATIENCE_S
                count -= 1
                yield identity, message


def _memory(pid: int) -> Memory:
    fields = {"Pss:": 0, "Private_Clean:": 0, "Private_Dirty:": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, kib, *_ = line.split()
        if name in fields:
            fields[name] = int(kib)
    return Memory(fields["Pss:"] / 1024, (fields["Private_Clean:"] + fields["Private_Dirty:"]) / 1024)


def _import_torch() -> tuple[float, Memory]:
    """What a process pays that imports torch for itself and takes one gradient."""
    with subprocess.Popen(
        [sys.executable, "-c", _IMPORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=single_threaded_environment(dict(os.environ)),
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        seconds = float(process.stdout.readline())
        memory = _memory(process.pid)
        process.stdin.write("\n")
        process.stdin.close()
    return seconds, memory


def _print(result: dict[str, Any]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="Clients forked from a zygote that holds torch")
    for head in ("clients", "all ready s", "ms each", "proportional MiB each", "own MiB each"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            str(row["clients"]),
            f"{row['ready_s']:.2f}",
            f"{row['ms_a_client']:.1f}",
            f"{row['proportional_mib']:.1f}",
            f"{row['own_mib']:.1f}",
        )
    console = Console()
    console.print(table)
    torch, facts = result["torch"], result["host"]
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']}; medians of "
        f"{result['repetitions']} starts, memory after one trip each. A process that imports torch for "
        f"itself takes {torch['import_s']:.2f} s and {torch['proportional_mib']:.0f} MiB "
        f"({torch['own_mib']:.0f} of its own)"
    )
