"""Tests that a run's TCP port (its door) accepts only admitted keys, each under its own name."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from unittest.mock import Mock

import pytest
import zmq
from test_connection import heard

from edgefl.errors import RunError
from edgefl.regression.memory import kib, own_kib
from edgefl.zeromq import keys, strangers
from edgefl.zeromq.door import CallerSocket, DoorSocket
from edgefl.zeromq.sockets import Full, Unreachable
from tests.raw_caller import GREETING, RawCaller, named, sodium

BOUND_MS = 20_000
ONE, TWO = bytes(range(32)), bytes(range(1, 33))
SERVER = bytes(range(2, 34))
LARGEST = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory and descriptors are read in /proc")
LONG_COMMAND = 6
"""Flags of a ZMTP command frame whose length field has 8 bytes."""


@pytest.fixture
def door() -> Iterator[DoorSocket]:
    made = DoorSocket("tcp://127.0.0.1:*", SERVER, LARGEST)
    made.admit(b"one", keys.public(ONE))
    made.admit(b"two", keys.public(TWO))
    yield made
    made.close()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def caller(door: DoorSocket, secret: bytes, closing: ExitStack) -> CallerSocket:
    made = CallerSocket(door.address, secret, door.key)
    closing.callback(made.close)
    return made


def says(door: DoorSocket, peer: CallerSocket, name: bytes, word: bytes) -> None:
    """Let the peer send ``word``, and check that the door receives it under ``name``."""
    for _ in range(BOUND_MS):
        with suppress(Full):
            peer.send([word])
            assert heard(door, 1) == [(name, [word])]
            return
        peer.wait_to_send(1)
        door.wait(0)
    raise AssertionError("the peer could not send in time")


def stranger(kind: str, door: DoorSocket) -> zmq.Socket[bytes]:
    """Return a DEALER that the door must refuse; ``kind`` is its security mechanism or its wrong key."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    match kind:
        case "PLAIN":
            dealer.plain_username, dealer.plain_password = b"one", b"word"
        case "wrong key" | "wrong server":
            secret = os.urandom(32) if kind == "wrong key" else ONE
            dealer.curve_secretkey, dealer.curve_publickey = secret, keys.public(secret)
            dealer.curve_serverkey = door.key if kind == "wrong key" else keys.public(os.urandom(32))
        case "another's public key":
            dealer.curve_secretkey, dealer.curve_publickey = os.urandom(32), keys.public(ONE)
            dealer.curve_serverkey = door.key
    return dealer


@pytest.mark.parametrize("kind", ["NULL", "PLAIN", "wrong key", "wrong server", "another's public key"])
def test_a_caller_without_an_admitted_key_is_refused(door: DoorSocket, closing: ExitStack, kind: str) -> None:
    with stranger(kind, door) as dealer:
        failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        ends = failures | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED
        events = dealer.get_monitor_socket(ends)
        dealer.connect(door.address)
        while not events.poll(1):
            door.wait(0)
        assert int.from_bytes(events.recv_multipart()[0][:2], sys.byteorder) != zmq.EVENT_HANDSHAKE_SUCCEEDED
        dealer.disable_monitor()
        events.close()
    assert list(door.receive()) == []
    says(door, caller(door, ONE, closing), b"one", b"mine")
    zmq.Context.instance().term()


@pytest.mark.skipif(sodium() is None, reason="this pyzmq has no libsodium")
def test_a_caller_has_the_name_of_its_key_whatever_it_claims(door: DoorSocket, closing: ExitStack) -> None:
    honest = caller(door, ONE, closing)
    says(door, honest, b"one", b"first")
    liar = RawCaller(door.address, TWO, door.key)
    closing.callback(liar.socket.close)
    claims = b"".join(
        named(*claim) for claim in ((b"Identity", b"one"), (b"User-Id", b"one"), (b"__fd", b"0"))
    )
    thread = threading.Thread(target=liar.greet, args=(claims,))
    thread.start()
    while thread.is_alive():
        door.wait(1)
        assert list(door.receive()) == []
    thread.join()
    liar.send(b"I am one")
    assert heard(door, 1) == [(b"two", [b"I am one"])]
    door.send(b"one", [b"for one"])
    while (answer := honest.receive(1)) is None:
        door.wait(0)
    assert [bytes(part) for part in answer] == [b"for one"]
    says(door, honest, b"one", b"still here")


def test_the_later_of_two_callers_with_one_key_is_served(door: DoorSocket, closing: ExitStack) -> None:
    first = caller(door, ONE, closing)
    says(door, first, b"one", b"early")
    first._socket.disconnect(door.address)  # and does not reconnect by itself
    later = caller(door, ONE, closing)
    says(door, later, b"one", b"late")
    door.send(b"one", [b"answer"])
    while later.receive(1) is None:
        door.wait(0)


def test_a_disconnected_caller_is_not_let_in_again(door: DoorSocket, closing: ExitStack) -> None:
    ends = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
    peer, other = CallerSocket(door.address, ONE, door.key, events=ends), caller(door, TWO, closing)
    closing.callback(peer.close)
    closing.callback(peer._monitor.close)
    says(door, peer, b"one", b"ready")
    came = [int.from_bytes(peer._monitor.recv_multipart()[0][:2], sys.byteorder)]
    door.disconnect(b"one")
    door.disconnect(b"one")  # a second time has no effect
    with pytest.raises(Unreachable):
        door.send(b"one", [b"hello?"])
    while not peer._monitor.poll(1):  # ZeroMQ reconnects by itself
        with suppress(Full):
            peer.send([b"still here"])
        door.wait(0)
        assert list(door.receive()) == []
    came.append(int.from_bytes(peer._monitor.recv_multipart()[0][:2], sys.byteorder))
    assert came == [zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH]
    says(door, other, b"two", b"me too")


def test_a_broken_connection_is_made_again(door: DoorSocket, closing: ExitStack) -> None:
    peer = caller(door, ONE, closing)
    says(door, peer, b"one", b"before")
    line = door._connections[b"one"]
    strangers.shut(line.number, door._far[b"one"])
    while peer._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
        peer.wait(1)
    says(door, peer, b"one", b"after")
    assert door._connections[b"one"].routing_id != line.routing_id


def test_a_door_for_anyone_admits_every_key(closing: ExitStack) -> None:
    door = DoorSocket("tcp://127.0.0.1:*", keys.OPEN, LARGEST, anyone=True)
    closing.callback(door.close)
    for secret in (ONE, TWO):
        peer = CallerSocket(door.address, secret, keys.public(keys.OPEN))
        closing.callback(peer.close)
        says(door, peer, keys.public(secret).hex()[:16].encode(), b"hello")


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("address", ["tcp://192.0.2.1:0", "tcp://no.such.host.invalid:5", ""])
def test_an_unusable_address_is_an_error_of_one_line(door: DoorSocket, address: str) -> None:
    address, why = (address, r"\w[^\n]+") if address else (door.address, "Address already in use")
    with pytest.raises(RunError, match=rf"^{address}: {why}$"):
        DoorSocket(address, SERVER, LARGEST)


@linux
@pytest.mark.parametrize("first", [b"", b"\xff", os.urandom(64)], ids=["silent", "begun", "rubbish"])
def test_the_number_of_connections_without_a_key_is_bounded(
    door: DoorSocket, closing: ExitStack, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(strangers, "MAX_STRANGERS", 20)
    shut = Mock(side_effect=strangers.shut)
    monkeypatch.setattr(strangers, "shut", shut)
    host, port = "127.0.0.1", int(door.address.rpartition(":")[2])
    honest = caller(door, TWO, closing)
    says(door, honest, b"two", b"here before")
    for _ in range(100):
        end = closing.enter_context(socket.create_connection((host, port)))
        with suppress(OSError):
            end.sendall(first)
    rubbish = len(first) > 1  # ZeroMQ itself closes such a connection
    while not (shut.called or rubbish) or len(door._strangers._open) > 22:
        door.wait(1)
    says(door, caller(door, ONE, closing), b"one", b"here now")
    says(door, honest, b"two", b"still here")


def test_a_unix_socket_with_the_descriptor_of_a_closed_connection_has_no_remote_address() -> None:
    """Regression: an IndexError ended the thread that limits strangers."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="not a connection over TCP"):
        strangers.far_end(ours.fileno())


@linux
def test_a_server_without_descriptors_closes_other_connections(door: DoorSocket, closing: ExitStack) -> None:
    host, port = "127.0.0.1", int(door.address.rpartition(":")[2])
    honest = caller(door, ONE, closing)
    says(door, honest, b"one", b"here")
    ends = [socket.socket() for _ in range(60)]
    for end in ends:
        closing.callback(end.close)
        end.setblocking(False)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(number) for number in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, before[1]))
    try:
        for end in ends:
            end.connect_ex((host, port))
        spare: list[int] = []
        while len(spare) < 5:  # as SQLite needs
            says(door, honest, b"one", b"still here")
            with suppress(OSError):
                spare.append(os.dup(0))
        for number in spare:
            os.close(number)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def fill(door: DoorSocket, rounds: int) -> int:
    """Start a process that opens ``rounds`` connections and sends an incomplete frame of 1 MiB on each, at
    most 200 MB/s in total; return its process ID."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            host, _, port = door.address.removeprefix("tcp://").rpartition(":")
            ends = [socket.create_connection((host, int(port))) for _ in range(rounds)]
            endless = bytes([LONG_COMMAND]) + LARGEST.to_bytes(8, "big") + bytes(LARGEST - 1)
            for place, end in enumerate(ends):
                with suppress(OSError):  # the door's thread may get no core: wait until it has closed one
                    while place >= 80 and ends[place - 80].recv(1000):
                        pass
                with suppress(OSError):
                    end.sendall(GREETING + endless)
                time.sleep(0.005)
            for end in ends[: -strangers.ALL_BYTES // LARGEST]:  # until the door closes it
                with suppress(OSError):
                    while end.recv(1000):
                        pass
        os._exit(0)
    return pid


@linux
@pytest.mark.usefixtures("nothing_left")
def test_strangers_cannot_fill_the_memory(door: DoorSocket, closing: ExitStack) -> None:
    honest = caller(door, TWO, closing)
    says(door, honest, b"two", b"here")
    pid, most_kib, before_kib = fill(door, 200), 0, own_kib(kib("status"))
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        door.wait(1)
        most_kib = max(most_kib, own_kib(kib("status")) - before_kib)
        assert list(door.receive()) == []
    assert most_kib < 120 * 1024  # 32 MiB and what arrives between two checks, at most 80 MB
    says(door, honest, b"two", b"still here")
