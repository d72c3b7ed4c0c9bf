"""The limits of ingest: the same processes and bytes without the system, started as a process of its own.

Bare sockets (`edgefl.bench.bare_sockets`): ZeroMQ for ``wire``, kernel sockets for ``shm``.

Bare memory: each client copies the model out of the parameter buffer and its update into its slot, all of
them at once and without a word; then the kernel alone sums the slots. Both use the whole machine, so a trip
takes at least the two times together. ``passes`` is the same with what a trip over shared memory cannot do
without: the update is not there to be copied, it is the difference of the trained vector and the model, which
is written into the slot with its checksum.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from edgefl import kernels
from edgefl.bench.bare_sockets import trips_through_kernel, trips_through_zmq
from edgefl.bench.forks import forked
from edgefl.channel import Channel, Closed
from edgefl.kernels.arguments import Floats, Update
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.processes import become_child

Transport = Literal["shm", "wire"]
Limit = Literal["socket", "memory", "passes"]
LOOK_PARAMETERS = 100_000
"""Parameters that are copied between two looks at the clock."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Measure one limit for about ``seconds``."""

    what: Limit
    transport: Transport
    parameters: int
    clients: int
    updates: int
    """Updates in a sum."""
    seconds: float


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What the limit allows."""

    trips_per_s: float


def through_socket(ask: Ask) -> float:
    """Trips a second of the transport's bare sockets."""
    if ask.transport == "shm":
        return trips_through_kernel(ask.clients, ask.seconds)
    return trips_through_zmq(ask.parameters, ask.clients, ask.seconds)


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
    """Trips a second of all clients together, without the sum."""
    go, start = os.pipe()
    count, end = os.pipe()

    def client(number: int) -> None:
        os.close(start)
        trip = trip_of(ask.what, buffer.model(0), buffer.slot(number))
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


def trip_of(what: Limit, model: Floats, slot: Update) -> Callable[[], None]:
    """What one client does with the memory in a trip, to be called again and again."""
    base, trained = np.zeros(model.shape, np.float32), np.zeros(model.shape, np.float32)
    update = np.ones(model.shape, np.float32)

    def copies() -> None:
        np.copyto(base, model)
        np.copyto(slot, update)

    def passes() -> None:
        np.copyto(trained, model)  # a training that changes nothing
        kernels.delta(slot, trained, model)

    return passes if what == "passes" else copies


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
            channel.send(Answer(through_socket(ask) if ask.what == "socket" else through_memory(ask)))
    except Closed:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
