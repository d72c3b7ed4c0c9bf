"""Programs that measure upper limits for `edgefl.lab.ingest`: they move a run's data, but skip its logic.

They start as many client processes as the run does, and move as many bytes.

    python -m edgefl.lab.bare socket wire 1000 8 5 0.75

The arguments are the fields of `LimitCase`. The program prints the number of trips per second.

``socket``: a ZeroMQ ROUTER and DEALERs exchange the frames of real trips without parsing them. For ``shm``,
the frames are only headers; for ``wire``, they also contain a model for the client and an update, in parts,
for the server.

``memory``: all clients copy the model from the parameter buffer and copy an update into a slot, without any
messages; when all clients have ended, the slots are summed with `edgefl.kernels`. If the copying and the
summing each use the whole machine, a trip takes at least the sum of both times. (With more cores than
clients, a run can do both at the same time, and exceed this limit.) Memory is accessed as in a run: trips use
the slots in turn, and each version is the sum of a fixed number of updates.

``passes`` is like ``memory``, but makes all passes over the data that a trip over shared memory needs: the
difference between the trained vector and the model is written into the slot, and its checksum is computed in
the same pass.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from typing import Literal, NamedTuple

import numpy as np
import zmq

from edgefl import kernels
from edgefl.errors import RunError
from edgefl.host.process import kill_forks_with_parent
from edgefl.parameters.buffer import ParameterBuffer, Shape, ring_entries
from edgefl.run.transport import PART_BYTES
from edgefl.zeromq.sockets import ZERO_COPY_BYTES

Transport = Literal["shm", "wire"]
Limit = Literal["socket", "memory", "passes"]
TASK, CHUNK, DONE, LEAVE = b"t" * 16, b"c" * 7, b"d" * 171, b""
"""Headers with the same lengths as in a run; the header ``LEAVE`` ends a client."""
PATIENCE_S = 60.0
"""Seconds without a message after which a process assumes that the other side has ended."""
READING_PARAMETERS = 100_000
"""Approximate number of parameters that a client processes between two readings of the clock. With a small
model, it makes several trips between them."""
FORK = multiprocessing.get_context("fork")


class LimitCase(NamedTuple):
    """A limit to measure (``what``), and the settings of the measurement; it takes about ``seconds`` s."""

    what: Limit
    transport: Transport
    parameters: int
    clients: int
    updates: int
    """Number of updates per sum."""
    seconds: float


@contextmanager
def _clients(count: int, life: Callable[[int], None]) -> Iterator[list[ForkProcess]]:
    """Run ``life(index)`` in ``count`` processes; on exit, wait for all. Raises `RunError` if one fails."""
    processes = [FORK.Process(target=life, args=(number,), daemon=True) for number in range(count)]
    for process in processes:
        process.start()
    yield processes
    for process in processes:
        process.join()
    if failed := sum(process.exitcode != 0 for process in processes):
        raise RunError(f"{failed} of {count} clients failed")


def _socket(kind: int, mark: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context().socket(kind)
    socket.sndhwm = socket.rcvhwm = mark
    socket.rcvtimeo = int(PATIENCE_S * 1e3)
    return socket


def _through_zeromq(case: LimitCase, folder: str) -> float:
    address = f"ipc://{folder}/router"
    model = np.ones(case.parameters, np.float32).tobytes() if case.transport == "wire" else b""
    parts = [model[at : at + PART_BYTES] for at in range(0, len(model), PART_BYTES)]
    task = [TASK, model] if model else [TASK]
    copies = len(model) < ZERO_COPY_BYTES  # as in a run, a larger model is sent without a copy

    def life(number: int) -> None:
        dealer = _socket(zmq.DEALER, 16)
        dealer.connect(address)
        dealer.send(DONE)
        while dealer.recv_multipart()[0] != LEAVE:
            for part in parts:
                dealer.send_multipart([CHUNK, part])
            dealer.send(DONE)
        dealer.context.destroy(linger=0)

    with _clients(case.clients, life) as processes:
        router = _socket(zmq.ROUTER, 8)
        router.router_mandatory = True  # wait at the high-water mark; the default drops messages
        router.bind(address)
        peers = {router.recv_multipart()[0] for _ in processes}
        for peer in peers:
            router.send_multipart([peer, *task], copy=copies)

        def trip() -> None:
            while (frames := router.recv_multipart())[1] != DONE:
                pass
            router.send_multipart([frames[0], *task], copy=copies)

        rate = _rate(trip, case.seconds)
        for peer in peers:
            router.send_multipart([peer, LEAVE])
        while any(process.is_alive() for process in processes):
            if router.poll(20):  # a client may be waiting for room to send
                router.recv_multipart()
        router.context.destroy(linger=0)
    return rate


def _through_memory(case: LimitCase) -> float:
    """Measure copying and then summing; return the trips per second if a trip takes the sum of both times."""
    slots = case.clients + case.updates
    ring = min(max(2, case.clients), ring_entries(case.parameters))
    buffer = ParameterBuffer.create(Shape(case.parameters, ring, slots))
    rates = FORK.RawArray("d", case.clients)
    all_are_there = FORK.Barrier(case.clients)
    trips_per_reading = max(1, READING_PARAMETERS // case.parameters)
    weights, versions = [1.0 / case.updates] * case.updates, itertools.count()

    def life(number: int) -> None:
        trip = trip_of(case, buffer, number)
        _repeat(trip, slots)
        all_are_there.wait(PATIENCE_S)
        rates[number] = trips_per_reading * _rate(lambda: _repeat(trip, trips_per_reading), case.seconds / 2)

    def add() -> None:
        version = next(versions)
        first = version * case.updates
        updates = [buffer.slot(trip % slots) for trip in range(first, first + case.updates)]
        kernels.weighted_sum(
            buffer.model((version + 1) % ring), buffer.model(version % ring), updates, weights
        )

    with _clients(case.clients, life):
        pass
    _repeat(add, slots)
    sums = _rate(add, case.seconds / 2)
    buffer.close()
    return float(1.0 / (1.0 / np.sum(rates) + 1.0 / (sums * case.updates)))


def trip_of(case: LimitCase, buffer: ParameterBuffer, client: int) -> Callable[[], None]:
    """Return a function that accesses memory in the same way as one trip of the client."""
    shape, trips = buffer.shape, itertools.count(client, case.clients)
    trained, update = np.zeros(shape.size, np.float32), np.ones(shape.size, np.float32)

    def make() -> None:
        trip = next(trips)
        model, slot = buffer.model(trip // case.updates % shape.ring), buffer.slot(trip % shape.slots)
        np.copyto(trained, model)
        if case.what == "passes":
            kernels.delta(slot, trained, model)  # costs the same as after real training
        else:
            np.copyto(slot, update)

    return make


def _repeat(call: Callable[[], None], times: int) -> None:
    """Call a function ``times`` times, to time short calls as a unit or to touch all memory beforehand."""
    for _ in range(times):
        call()


def _rate(call: Callable[[], None], seconds: float) -> float:
    """Return the number of calls per second; the first call is not timed."""
    call()
    calls, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds or not calls:
        call()
        calls += 1
    return calls / spent


def main(folder: str, what: Limit, transport: Transport, *figures: str) -> None:
    """Measure a limit and print it. Sockets are created in ``folder``, which the caller deletes."""
    parameters, clients, updates = map(int, figures[:3])
    case = LimitCase(what, transport, parameters, clients, updates, float(figures[3]))
    print(_through_zeromq(case, folder) if what == "socket" else _through_memory(case))


if __name__ == "__main__":
    kill_forks_with_parent()  # on Ctrl-C the parent kills only this process, not its forks
    main(*sys.argv[1:])  # type: ignore[arg-type]
