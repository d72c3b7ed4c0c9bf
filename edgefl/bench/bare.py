"""The limits of ingest: the same processes and bytes without the system, started as a process of its own.

Bare ZeroMQ: a ROUTER and a DEALER a client pass the frames of real trips to and fro; nobody looks into them.
Bare memory: each client copies the model out of the parameter buffer and its update into its slot, all of
them at once and without a word; then the kernel alone sums the slots. Both use the whole machine, so a trip
takes at least the two times together.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import zmq

from edgefl import control, kernels, wire
from edgefl.buffer import ParameterBuffer, Shape
from edgefl.channel import Channel, Closed
from edgefl.endpoint import Endpoint
from edgefl.processes import become_child

Transport = Literal["shm", "wire"]
LOOK_PARAMETERS = 100_000
"""Parameters that are copied between two looks at the clock."""
_SPENT = wire.Spent(0.001, 0.00123456)
TASK = wire.encode(wire.Task(client=3, task=12345, trip=1500, version=2400, entry=3, slot=7))
CHUNK = wire.encode(wire.Chunk(task=12345, slot=7, offset=0))
DONE = wire.encode(
    wire.Done(
        3, 0, 12345, 7, 2400, 600, 5, 2.3, 2**63 + 1, 1.5e9, _SPENT, _SPENT, _SPENT, _SPENT, 1e-4, 2e-3, 40.5
    )
)  # fmt: skip
LEAVE = b""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Measure one limit for about ``seconds``."""

    what: Literal["zmq", "memory"]
    transport: Transport
    parameters: int
    clients: int
    updates: int
    """Updates in a sum."""
    seconds: float


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What the limit allows."""

    trips_per_s: float


def forked(count: int, life: Callable[[int], None]) -> list[int]:
    """``count`` children that run ``life(number)`` and end; their process ids."""
    parent = os.getpid()
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                become_child(parent, f"edgefl-bare-{number}")
                life(number)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def through_zmq(ask: Ask) -> float:
    """Trips a second of bare ZeroMQ, from the first update to the last by the ROUTER's clock."""
    body = np.ones(ask.parameters, np.float32).tobytes() if ask.transport == "wire" else None
    task = [TASK] if body is None else [TASK, body]
    update = [[DONE]] if body is None else [[CHUNK, body], [DONE]]
    tell, told = os.pipe()

    def client(number: int) -> None:
        os.close(told)
        address = os.read(tell, 256).decode().split()[0]
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.routing_id = control.routing_id("client", number, 0)
        socket.sndhwm = socket.rcvhwm = 16
        socket.immediate = True
        socket.connect(address)
        socket.send(DONE)
        while socket.recv_multipart()[0] != LEAVE:
            for frames in update:
                socket.send_multipart(frames)
        context.destroy(linger=0)

    pids = forked(ask.clients, client)
    os.close(tell)
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 8
    endpoint = Endpoint(socket)
    for _ in pids:  # each client reads its share
        os.write(told, endpoint.address.ljust(256).encode())
    os.close(told)
    ready = {socket.recv_multipart()[0] for _ in pids}
    for identity in ready:
        socket.send_multipart([identity, *task])
    trips, first, now = -1, 0.0, 0.0
    while trips < 1 or now < first + ask.seconds:
        frames = socket.recv_multipart()
        if frames[1] == DONE:
            now = time.perf_counter()
            first = first or now
            trips += 1
            socket.send_multipart([frames[0], *task])
    for identity in ready:
        socket.send_multipart([identity, LEAVE])
    for pid in pids:
        os.waitpid(pid, 0)
    context.destroy(linger=0)
    endpoint.close()
    return trips / (now - first)


def through_memory(ask: Ask) -> float:
    """Trips a second of copying at full speed and then summing at full speed."""
    buffer = ParameterBuffer.create(Shape(ask.parameters, 2, max(ask.clients, ask.updates)))
    copies = _copying(ask, buffer)
    slots = [buffer.slot(slot) for slot in range(ask.updates)]
    out, model, weights = buffer.model(1), buffer.model(0), [1.0 / ask.updates] * ask.updates
    sums, seconds = _repeated(lambda: kernels.weighted_sum(out, model, slots, weights), ask)
    buffer.close()
    return 1.0 / (1.0 / copies + seconds / (sums * ask.updates))


def _copying(ask: Ask, buffer: ParameterBuffer) -> float:
    """Trips of copying a second, of all clients together."""
    go, start = os.pipe()
    count, end = os.pipe()

    def client(number: int) -> None:
        os.close(start)
        base = np.zeros(ask.parameters, np.float32)
        update = np.ones(ask.parameters, np.float32)
        model, slot = buffer.model(0), buffer.slot(number)

        def trip() -> None:
            np.copyto(base, model)
            np.copyto(slot, update)

        trip()
        os.write(end, np.float64(0.0).tobytes())
        os.read(go, 1)
        trips, seconds = _repeated(trip, ask)
        os.write(end, np.float64(trips / seconds).tobytes())

    pids = forked(ask.clients, client)
    os.close(go)
    try:
        for _ in pids:
            os.read(count, 8)
        os.write(start, b"!" * len(pids))
        rates = [float(np.frombuffer(os.read(count, 8))[0]) for _ in pids]
    finally:
        for fd in (start, count, end):
            os.close(fd)
        for pid in pids:
            os.waitpid(pid, 0)
    return sum(rates)


def _repeated(call: Callable[[], object], ask: Ask) -> tuple[int, float]:
    """How often it was called in about half of the ask's seconds, and in how many exactly."""
    a_look = max(1, LOOK_PARAMETERS // ask.parameters)
    call()
    calls, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < ask.seconds / 2 or not calls:
        for _ in range(a_look):
            call()
        calls += a_look
    return calls, spent


def main(channel_fd: int, parent_pid: int) -> None:
    become_child(parent_pid, "edgefl-bare")
    channel: Channel[Ask] = Channel.inherit(channel_fd, Ask)
    try:
        while True:
            ask = channel.receive()
            channel.send(Answer(through_zmq(ask) if ask.what == "zmq" else through_memory(ask)))
    except Closed:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
