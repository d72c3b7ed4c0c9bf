"""What a transport's sockets carry when nobody looks into the messages: ZeroMQ, or a kernel socket a peer.

A server and its clients pass the frames of real trips to and fro, as fast as they can.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

import numpy as np
import zmq

from edgefl.lab.processes import forked
from edgefl.run import control, messages
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
