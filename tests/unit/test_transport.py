"""Both transports over real sockets, and what the seam between them promises."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from edgefl import kernels
from edgefl.errors import WireError
from edgefl.parameters.buffer import ParameterBuffer, Shape, SlotState
from edgefl.run import messages
from edgefl.run.transport import model_from, server_end
from edgefl.run.transport_shm import ShmClient
from edgefl.run.transport_wire import PART_BYTES, WireClient

SIZE = 300_000
BOUND_MS = 20_000
TASK = messages.Task(client=0, task=40, trip=0, version=0, entry=0, slot=1, cut=None, condition=None)


@pytest.fixture
def buffer() -> Iterator[ParameterBuffer]:
    made = ParameterBuffer.create(Shape(SIZE, 2, 2))
    made.model(0)[:] = np.random.default_rng(1).normal(size=SIZE)
    made.publish(version=0, entry=0)
    made.lease(1, task=40, client=0, base_version=0)
    yield made
    made.close()


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A server's and a client's socket with the marks that a run has."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.router_mandatory = True
        router.sndhwm = router.rcvhwm = 8
        router.maxmsgsize = 4 * SIZE + 4096
        dealer.sndhwm = dealer.rcvhwm = 16
        dealer.routing_id = b"client-0-0"
        for socket in (router, dealer):
            socket.linger = 0
            socket.rcvtimeo = socket.sndtimeo = BOUND_MS
        router.bind("inproc://server")
        dealer.connect("inproc://server")
        yield router, dealer


def test_a_trip_over_the_wire(
    buffer: ParameterBuffer, sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    router, dealer = sockets
    server, client = server_end("wire", buffer), WireClient(dealer.send_multipart, SIZE)
    dealer.send(messages.encode(messages.Ready(0, 0, 1, "client")))
    router.recv_multipart()
    router.send_multipart([b"client-0-0", messages.encode(TASK), *server.model_frames(TASK.entry)])
    buffer.model(0)[:] = 0  # the frames were made: the ring may move on

    header, *frames = dealer.recv_multipart()
    assert messages.decode_from_server(header) == TASK
    model = np.empty(SIZE, np.float32)
    client.fetch(TASK.entry, TASK.version, frames, model)
    assert model.tolist() == np.random.default_rng(1).normal(size=SIZE).astype(np.float32).tolist()

    update = np.random.default_rng(2).normal(size=SIZE).astype(np.float32)
    for begin in range(0, SIZE, 70_001):
        part = update[begin : begin + 70_001].copy()
        client.put(TASK, 4 * begin, part.view(np.uint8))
        part[:] = 0  # ZeroMQ has not sent it yet, perhaps
        for _ in range(0, part.nbytes, PART_BYTES):
            _, head, *body = router.recv_multipart()
            chunk = messages.decode_from_client(head)
            assert isinstance(chunk, messages.Chunk)
            server.accept(chunk, messages.payload([head, *body]))
    assert kernels.checksum(buffer.slot(1)) == kernels.checksum(update)
    assert not buffer.slot(0).any()
    assert buffer.state[1] == SlotState.LEASED  # whole only once the client has said so


def test_a_trip_through_shared_memory_sends_headers_only(buffer: ParameterBuffer) -> None:
    server, client = server_end("shm", buffer), ShmClient(ParameterBuffer.attach(buffer.fd))
    assert server.model_frames(0) == []
    model = np.empty(SIZE, np.float32)
    client.fetch(0, 0, [], model)
    assert model.tobytes() == buffer.model(0).tobytes()
    client.put(TASK, 40, model[10:20].view(np.uint8))
    assert buffer.slot(1)[10:20].tobytes() == model[10:20].tobytes()
    assert not buffer.slot(1)[:10].any()
    assert not buffer.slot(1)[20:].any()


def test_a_model_is_read_from_any_bytes_like_frame() -> None:
    numbers = np.arange(5, dtype=np.float32)
    for frame in (numbers.tobytes(), memoryview(numbers.tobytes()), memoryview(bytearray(numbers.tobytes()))):
        out = np.zeros(5, np.float32)
        model_from([frame], out)
        assert out.tolist() == numbers.tolist()


def test_a_part_of_an_update_never_runs_over_its_end(buffer: ParameterBuffer) -> None:
    server = server_end("wire", buffer)
    with pytest.raises(WireError, match=f"where the update has {4 * SIZE} bytes"):
        server.accept(messages.Chunk(40, 1, 4 * SIZE - 4), bytes(8))
    server.accept(messages.Chunk(40, 1, 4 * SIZE - 4), np.float32(7).tobytes())
    assert buffer.slot(1)[-1] == 7
    assert int(buffer.task[1]) == 40
