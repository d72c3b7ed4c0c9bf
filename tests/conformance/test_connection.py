"""What the connection between server and peers promises, over real sockets."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from edgefl.run import connection, messages
from edgefl.run.connection import Frame, Full, PeerSocket, ServerSocket, Unreachable

BOUND_MS = 20_000
SOME = 5
NOBODY = 65534
linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract addresses are Linux's")
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def server() -> Iterator[ServerSocket]:
    made = ServerSocket(messages.MAX_HEADER_BYTES)
    yield made
    made.close()


def heard(server: ServerSocket, count: int) -> list[tuple[bytes, list[bytes]]]:
    """The next messages, as many as wanted."""
    got: list[tuple[bytes, list[bytes]]] = []
    for _ in range(1000):
        if len(got) >= count:
            return got
        server.wait(BOUND_MS)
        got += [(name, [bytes(frame) for frame in frames]) for name, frames in server.receive()]
    raise AssertionError(f"{count} messages were expected, got {got}")


def say(peer: PeerSocket, message: bytes) -> None:
    """Send, once there is room: a connection of ZeroMQ's is made in the background."""
    for _ in range(1000):
        try:
            return peer.send([message])
        except Full:
            assert not peer.wait_to_send(BOUND_MS)
    raise AssertionError("no room within the bound")


def answer(peer: PeerSocket) -> list[bytes]:
    while (frames := peer.receive()) is None:
        assert not peer.wait(BOUND_MS)
    return [bytes(frame) for frame in frames]


def until_full(send: Callable[[], object]) -> int:
    """How often something could be sent that nobody reads."""
    for count in range(100_000):
        try:
            send()
        except Full:
            return count
    raise AssertionError("a socket without an end")


def until_gone(call: Callable[[], object]) -> None:
    """Until a call says that the other side is gone; a kernel may need a moment to know."""
    for _ in range(BOUND_MS // 10):
        call()
    raise AssertionError("the other side is gone and nobody said so")


def test_messages_arrive_under_their_senders_names_and_in_their_order(server: ServerSocket) -> None:
    peers = [PeerSocket(server.address, f"client-{number}-0".encode()) for number in range(3)]
    for turn in range(SOME):
        for number, peer in enumerate(peers):
            say(peer, f"{number}:{turn}".encode())
    got = heard(server, 3 * SOME)
    for number, peer in enumerate(peers):
        name = f"client-{number}-0".encode()
        assert [frames for sender, frames in got if sender == name] == [
            [f"{number}:{turn}".encode()] for turn in range(SOME)
        ]
        server.send(name, [b"you are"])
        server.send(name, [name])
        assert [answer(peer), answer(peer)] == [[b"you are"], [name]]
        assert peer.receive() is None
        peer.close()


def test_a_header_of_any_allowed_size_comes_through(server: ServerSocket) -> None:
    peer = PeerSocket(server.address, b"one")
    for size in (1, 1000, messages.MAX_HEADER_BYTES):
        message = os.urandom(size)
        say(peer, message)
        assert heard(server, 1) == [(b"one", [message])]
        server.send(b"one", [message])
        assert answer(peer) == [message]
    peer.close()


def test_who_is_not_there_cannot_be_reached(server: ServerSocket) -> None:
    with pytest.raises(Unreachable):
        server.send(b"nobody", [b"hello"])


def test_a_peer_that_left_is_heard_to_the_end_and_then_gone(server: ServerSocket) -> None:
    peer = PeerSocket(server.address, b"one")
    say(peer, b"first")
    assert heard(server, 1) == [(b"one", [b"first"])]
    server.send(b"one", [b"never read"])
    say(peer, b"last")
    peer.close()
    assert heard(server, 1) == [(b"one", [b"last"])]

    def try_it() -> None:
        server.wait(10)
        assert list(server.receive()) == []
        with suppress(Full):
            server.send(b"one", [b"hello?"])

    with pytest.raises(Unreachable):
        until_gone(try_it)


def test_a_peer_that_does_not_read_is_full_and_nobody_waits(server: ServerSocket) -> None:
    peer = PeerSocket(server.address, b"one")
    say(peer, b"ready")
    heard(server, 1)
    assert until_full(lambda: server.send(b"one", [bytes(1000)])) > 0
    other = PeerSocket(server.address, b"two")
    say(other, b"hello")
    assert heard(server, 1) == [(b"two", [b"hello"])]
    for each in (peer, other):
        each.close()


def test_a_server_that_does_not_read_is_full_and_room_is_waited_for(server: ServerSocket) -> None:
    peer = PeerSocket(server.address, b"one")
    say(peer, b"ready")
    sent = until_full(lambda: peer.send([bytes(1000)]))
    assert len(heard(server, 1 + sent)) == 1 + sent
    say(peer, b"now")
    assert heard(server, 1) == [(b"one", [b"now"])]
    peer.close()


@pytest.mark.parametrize("side", ["server", "peer"])
def test_another_descriptor_ends_the_wait(server: ServerSocket, side: str) -> None:
    peer = PeerSocket(server.address, b"one")
    say(peer, b"ready")
    heard(server, 1)
    mine, other = os.pipe()
    waiting: ServerSocket | PeerSocket = server if side == "server" else peer
    waiting.watch(mine)
    assert waiting.wait(0) is False
    os.write(other, b"!")
    assert waiting.wait(BOUND_MS) is True
    os.read(mine, 1)
    assert waiting.wait(0) is False
    if side == "peer":
        os.close(other)  # the end of whoever started this process
        other = -1
        assert peer.wait_to_send(BOUND_MS) is True
    peer.close()
    for fd in (mine, other):
        if fd >= 0:
            os.close(fd)


@pytest.mark.parametrize("lent", [False, True])
def test_payload_frames_travel_on_the_wire(lent: bool) -> None:
    size = connection.LENT_BYTES if lent else connection.LENT_BYTES - 1
    pid = os.fork()  # frames whose memory is lent leave a thread of pyzmq's behind
    if pid == 0:
        code = 1
        with suppress(BaseException):
            payload_travels(os.urandom(size))
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def payload_travels(body: bytes) -> None:
    server = ServerSocket(len(body))
    peer = PeerSocket(server.address, b"one")
    say(peer, b"ready")
    peer.send([b"head", body])
    assert heard(server, 2) == [(b"one", [b"ready"]), (b"one", [b"head", body])]
    frames: list[Frame] = [b"head", memoryview(body)]
    server.send(b"one", frames)
    assert answer(peer) == [b"head", body]
    peer.close()
    server.close()


def test_a_name_that_is_taken_stays_its_owners(server: ServerSocket) -> None:
    owner = PeerSocket(server.address, b"one")
    say(owner, b"mine")
    assert heard(server, 1) == [(b"one", [b"mine"])]
    thief = PeerSocket(server.address, b"one")
    with suppress(Full):
        thief.send([b"mine too"])
    server.send(b"one", [b"still yours"])
    assert answer(owner) == [b"still yours"]
    assert thief.receive() is None
    for each in (owner, thief):
        each.close()


def greeting(address: str) -> bytes:
    """The answer to a raw connection to the address: ZeroMQ's greeting, or nothing and the end."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(BOUND_MS / 1000)
        raw.connect("\0" + address.removeprefix("ipc://@"))
        try:
            return raw.recv(64)
        except ConnectionResetError:
            return b""


@linux
def test_addresses_are_not_to_be_guessed_and_leave_no_file(server: ServerSocket) -> None:
    before = set(os.listdir("/tmp")) | set(os.listdir("."))
    other = ServerSocket(1)
    assert other.address != server.address
    assert server.address.startswith("ipc://@edgefl-")
    assert len("ipc://@edgefl-") + 30 < len(server.address) < 100  # the kernel's bound is 108
    assert not (set(os.listdir("/tmp")) | set(os.listdir("."))) - before
    other.close()
    other.close()


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_turned_away(server: ServerSocket) -> None:
    seen, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(told, len(greeting(server.address)).to_bytes(1, "big"))
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                events = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
                events.rcvtimeo = BOUND_MS
                dealer.connect(server.address)
                event = int.from_bytes(events.recv_multipart()[0][:2], sys.byteorder)
                os.write(told, b"in" if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else b"out")
                dealer.disable_monitor()
                events.close()
        os._exit(0)
    os.close(told)
    with open(seen, "rb") as words:
        assert words.read() == b"\x00out"
    os.waitpid(pid, 0)
    assert greeting(server.address)[:1] == b"\xff"  # this user is greeted
    peer = PeerSocket(server.address, b"client-0-0")
    say(peer, b"mine")
    assert heard(server, 1) == [(b"client-0-0", [b"mine"])]
    peer.close()


@pytest.mark.parametrize("why", ["no abstract addresses", "no peer credentials"])
def test_elsewhere_it_is_a_folder_of_this_user_and_goes_at_the_end(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    with monkeypatch.context() as patch:
        if why == "no abstract addresses":
            patch.setattr(sys, "platform", "darwin")
        else:
            patch.setattr(zmq, "IPC_FILTER_UID", -1)  # an old libzmq does not know the option
        server = ServerSocket(messages.MAX_HEADER_BYTES)
    place = Path(server.address.removeprefix("ipc://"))
    assert place.is_socket()
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    peer = PeerSocket(server.address, b"one")
    say(peer, b"hello")
    assert heard(server, 1) == [(b"one", [b"hello"])]
    peer.close()
    server.close()
    assert not place.parent.exists()
