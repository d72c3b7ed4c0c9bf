"""The limits of ingest: the same processes and bytes without the system, started as a process of its own.

Bare sockets pass the frames of real trips to and fro: ZeroMQ for ``wire``, a kernel socket a client
for ``shm``.

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
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import zmq

from edgefl import kernels
from edgefl.kernels.arguments import Floats, Update
from edgefl.lab.processes import forked
from edgefl.parameters.buffer import ParameterBuffer, Shape, ring_entries
from edgefl.run import control, messages
from edgefl.run.channel import Channel, Closed
from edgefl.run.process import become_child
from edgefl.run.transport_wire import PART_BYTES
from edgefl.run.zeromq_sockets import Endpoint

_SPENT = messages.Spent(0.001, 0.00123456)
TASK = messages.encode(
    messages.Task(client=3, task=12345, trip=1500, version=2400, entry=3, slot=7, cut=None, condition=None)
)
CHUNK = messages.encode(messages.Chunk(task=12345, slot=7, offset=0))
DONE = messages.encode(
    messages.Done(
        3, 0, 12345, 7, 2400, 600, 5, 2.3, 2**63 + 1, 1.5e9, _SPENT, _SPENT, _SPENT, _SPENT, 1e-4, 2e-3, 40.5,
        _SPENT,
    )
)  # fmt: skip
LEAVE = b""
LOOK_MS = 20


def trips_through_zmq(parameters: int, clients: int, seconds: float) -> float:
    """Trips a second of ZeroMQ with a model down and an update up in parts, by the ROUTER's clock."""
    body = np.ones(parameters, np.float32).tobytes()
    parts = [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]
    tell, told = os.pipe()

    def client(number: int) -> None:
        os.close(told)
        address = os.read(tell, 256).decode().split()[0]
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.routing_id = control.routing_id("client", number, 0)
        dealer.sndhwm = dealer.rcvhwm = 16
        dealer.immediate = True
        dealer.connect(address)
        dealer.send(DONE)
        while dealer.recv_multipart()[0] != LEAVE:
            for part in parts:
                dealer.send_multipart([CHUNK, part])
            dealer.send(DONE)
        context.destroy(linger=0)

    pids = forked(clients, client)
    os.close(tell)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.sndhwm = router.rcvhwm = 8
    router.router_mandatory = True  # at its mark it waits; by default it would drop the message
    endpoint = Endpoint(router)
    for _ in pids:  # each client reads its share
        os.write(told, endpoint.address.ljust(256).encode())
    os.close(told)
    ready = {router.recv_multipart()[0] for _ in pids}

    def answer(peer: bytes) -> None:
        router.send_multipart([peer, TASK, body])

    for peer in ready:
        answer(peer)

    def trip() -> None:
        while (frames := router.recv_multipart())[1] != DONE:
            pass
        answer(frames[0])

    rate = _rate(trip, seconds)
    for peer in ready:
        router.send_multipart([peer, LEAVE])
    left = set(pids)
    while left:  # one that is about to send waits until there is room
        if router.poll(LOOK_MS):
            router.recv_multipart()
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
    context.destroy(linger=0)
    endpoint.close()
    return rate


def trips_through_kernel(clients: int, seconds: float) -> float:
    """Trips a second of message-keeping kernel sockets with headers only, by the server's clock."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(clients)]

    def client(number: int) -> None:
        mine = pairs[number][1]
        for ours, theirs in pairs:
            ours.close()
            if theirs is not mine:
                theirs.close()
        mine.send(DONE)
        while mine.recv(messages.MAX_HEADER_BYTES):
            mine.send(DONE)

    pids = forked(clients, client)
    epoll = select.epoll()
    connections = {}
    for ours, theirs in pairs:
        theirs.close()
        connections[ours.fileno()] = ours
        epoll.register(ours, select.EPOLLIN)
    ready: list[tuple[int, int]] = []

    def trip() -> None:
        nonlocal ready
        ready = ready or epoll.poll()
        connection = connections[ready.pop()[0]]
        connection.recv(messages.MAX_HEADER_BYTES)
        connection.send(TASK)

    rate = _rate(trip, seconds)
    epoll.close()
    for connection in connections.values():
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    for pid in pids:
        os.waitpid(pid, 0)
    return rate


def _rate(trip: Callable[[], None], seconds: float) -> float:
    """How often ``trip`` can be called a second, after a first call."""
    trip()
    trips, first = 0, time.perf_counter()
    while (spent := time.perf_counter() - first) < seconds or not trips:
        trip()
        trips += 1
    return trips / spent


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
