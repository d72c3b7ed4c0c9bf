"""The limits of ingest: the same processes and bytes without the system, started as a process of its own.

Bare sockets (`edgefl.lab.bare_sockets`): ZeroMQ for ``wire``, kernel sockets for ``shm``.

Bare memory: each client copies the model out of the parameter buffer and its update into a slot, all of
them at once and without a word; then the kernel alone sums the slots. Both use the whole machine, so a trip
takes at least the two times together. It is the memory of a run in the order of a run: trips take turns at
the slots, and after so many updates comes the next version. ``passes`` is the same with what a trip over
shared memory cannot do without: the update is not there to be copied, it is the difference of the trained
vector and the model, which is written into the slot with its checksum.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from edgefl import kernels
from edgefl.kernels.arguments import Floats, Update
from edgefl.lab.bare_sockets import trips_through_kernel, trips_through_zmq
from edgefl.lab.processes import forked
from edgefl.parameters.buffer import ParameterBuffer, Shape, ring_entries
from edgefl.run.channel import Channel, Closed
from edgefl.run.process import become_child

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
    slots = ask.clients + ask.updates
    ring = min(max(2, ask.clients), ring_entries(ask.parameters))
    buffer = ParameterBuffer.create(Shape(ask.parameters, ring, slots))
    copies = _copying(ask, buffer)
    weights, made = [1.0 / ask.updates] * ask.updates, itertools.count()

    def add() -> None:
        version = next(made)
        first = version * ask.updates
        updates = [buffer.slot(trip % slots) for trip in range(first, first + ask.updates)]
        kernels.weighted_sum(
            buffer.model((version + 1) % ring), buffer.model(version % ring), updates, weights
        )

    sums, seconds = _repeated(add, slots, ask)
    buffer.close()
    return 1.0 / (1.0 / copies + seconds / (sums * ask.updates))


def _copying(ask: Ask, buffer: ParameterBuffer) -> float:
    """Trips a second of all clients together, without the sum."""
    go, start = os.pipe()
    count, end = os.pipe()

    def client(number: int) -> None:
        os.close(start)
        trip = trip_of(ask, buffer, number)

        def begin() -> None:
            os.write(end, np.float64(0.0).tobytes())
            os.read(go, 1)

        trips, seconds = _repeated(trip, buffer.shape.slots, ask, begin)
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


def trip_of(ask: Ask, buffer: ParameterBuffer, client: int) -> Callable[[], None]:
    """What one client does with the memory in a trip, to be called again and again."""
    shape, trips = buffer.shape, itertools.count(client, ask.clients)
    base, trained = np.zeros(shape.size, np.float32), np.zeros(shape.size, np.float32)
    update = np.ones(shape.size, np.float32)

    def places() -> tuple[Floats, Update]:
        trip = next(trips)
        return buffer.model(trip // ask.updates % shape.ring), buffer.slot(trip % shape.slots)

    def copies() -> None:
        model, slot = places()
        np.copyto(base, model)
        np.copyto(slot, update)

    def passes() -> None:
        model, slot = places()
        np.copyto(trained, model)  # a training that changes nothing
        kernels.delta(slot, trained, model)

    return passes if ask.what == "passes" else copies


def _repeated(
    call: Callable[[], object], first: int, ask: Ask, begin: Callable[[], None] = lambda: None
) -> tuple[int, float]:
    """How often it was called in about half of the ask's seconds, and in how many exactly.

    The ``first`` calls, which find memory that was never touched, come before ``begin`` and do not count.
    """
    a_look = max(1, LOOK_PARAMETERS // ask.parameters)
    for _ in range(first):
        call()
    begin()
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
