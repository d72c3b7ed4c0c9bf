"""What every kind of connection between server and peers promises, over real sockets of both kinds."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from edgefl.run import connection, messages, zeromq_sockets
from edgefl.run.connection import Frame, Full, PeerSocket, ServerSocket, Unreachable

BOUND_MS = 20_000
SOME = 5
KINDS = ("shm", "wire")
NOBODY = 65534
linux = pytest.mark.skipif(sys.platform != "linux", reason="kernel sockets that keep messages are Linux's")
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[ServerSocket]:
    made = connection.bind(request.param, messages.MAX_HEADER_BYTES)
    yield made
    made.close()


@pytest.fixture
def local() -> Iterator[ServerSocket]:
    made = connection.bind("shm", messages.MAX_HEADER_BYTES)
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
            assert not peer.wait(BOUND_MS, to_send=True)
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
    peers = [connection.connect(server.address, f"client-{number}-0".encode()) for number in range(3)]
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
    peer = connection.connect(server.address, b"one")
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
    peer = connection.connect(server.address, b"one")
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
    peer = connection.connect(server.address, b"one")
    say(peer, b"ready")
    heard(server, 1)
    assert until_full(lambda: server.send(b"one", [bytes(1000)])) > 0
    other = connection.connect(server.address, b"two")
    say(other, b"hello")
    assert heard(server, 1) == [(b"two", [b"hello"])]
    for each in (peer, other):
        each.close()


def test_a_server_that_does_not_read_is_full_and_room_is_waited_for(server: ServerSocket) -> None:
    peer = connection.connect(server.address, b"one")
    say(peer, b"ready")
    sent = until_full(lambda: peer.send([bytes(1000)]))
    assert len(heard(server, 1 + sent)) == 1 + sent
    say(peer, b"now")
    assert heard(server, 1) == [(b"one", [b"now"])]
    peer.close()


@pytest.mark.parametrize("side", ["server", "peer"])
def test_another_descriptor_ends_the_wait(server: ServerSocket, side: str) -> None:
    peer = connection.connect(server.address, b"one")
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
        assert peer.wait(BOUND_MS, to_send=True) is True
    peer.close()
    for fd in (mine, other):
        if fd >= 0:
            os.close(fd)


@pytest.mark.parametrize("lent", [False, True])
def test_payload_frames_travel_on_the_wire(lent: bool) -> None:
    size = zeromq_sockets.LENT_BYTES if lent else zeromq_sockets.LENT_BYTES - 1
    pid = os.fork()  # frames whose memory is lent leave a thread of pyzmq's behind
    if pid == 0:
        code = 1
        with suppress(BaseException):
            payload_travels(os.urandom(size))
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def payload_travels(body: bytes) -> None:
    server = connection.bind("wire", len(body))
    peer = connection.connect(server.address, b"one")
    say(peer, b"ready")
    peer.send([b"head", body])
    assert heard(server, 2) == [(b"one", [b"ready"]), (b"one", [b"head", body])]
    frames: list[Frame] = [b"head", memoryview(body)]
    server.send(b"one", frames)
    assert answer(peer) == [b"head", body]
    peer.close()
    server.close()


# ---- kernel sockets only -----------------------------------------------------------------------


def raw(server: ServerSocket) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(BOUND_MS / 1000)
    made.connect("\0" + server.address.removeprefix("local://@"))
    return made


def turns(server: ServerSocket) -> list[tuple[bytes, list[bytes]]]:
    """What the server makes of all that has arrived."""
    got: list[tuple[bytes, list[bytes]]] = []
    for _ in range(10):
        server.wait(0)
        got += [(name, [bytes(frame) for frame in frames]) for name, frames in server.receive()]
    return got


@linux
def test_addresses_are_not_to_be_guessed_and_leave_no_file(local: ServerSocket) -> None:
    other = connection.bind("shm", 1)
    assert other.address != local.address
    assert local.address.startswith("local://@edgefl-")
    assert len(local.address) > len("local://@edgefl-") + 30
    other.close()
    with pytest.raises(Unreachable):
        connection.connect(other.address, b"late")


@linux
def test_a_name_that_is_taken_is_refused_and_its_owner_stays(local: ServerSocket) -> None:
    owner = connection.connect(local.address, b"one")
    say(owner, b"mine")
    assert heard(local, 1) == [(b"one", [b"mine"])]
    thief = raw(local)
    thief.send(b"one")
    assert turns(local) == []
    assert thief.recv(10) == b""
    thief.close()
    local.send(b"one", [b"still yours"])
    assert answer(owner) == [b"still yours"]
    owner.close()


@linux
@pytest.mark.parametrize("name", [b"x" * 256, b"x" * 70_000])
def test_a_name_that_is_too_long_is_refused(local: ServerSocket, name: bytes) -> None:
    stranger = raw(local)
    stranger.send(name)
    assert turns(local) == []
    with suppress(ConnectionResetError):
        assert stranger.recv(10) == b""
    stranger.close()


@linux
def test_an_empty_message_is_a_farewell(local: ServerSocket) -> None:
    peer = raw(local)
    peer.send(b"one")
    peer.send(b"")
    assert turns(local) == []
    with pytest.raises(Unreachable):
        local.send(b"one", [b"hello"])
    peer.close()


@linux
def test_a_header_that_is_too_long_is_no_message(local: ServerSocket) -> None:
    peer = raw(local)
    peer.send(b"one")
    peer.send(bytes(messages.MAX_HEADER_BYTES + 100))
    ((name, (frame,)),) = turns(local)
    assert name == b"one"
    with pytest.raises(messages.WireError, match="at most 65536 are allowed"):
        messages.decode_from_client(frame)
    peer.close()


@linux
def test_a_peer_knows_that_the_server_is_gone_but_hears_its_last_word(local: ServerSocket) -> None:
    peer = connection.connect(local.address, b"one")
    say(peer, b"ready")
    heard(local, 1)
    say(peer, b"never read")
    local.send(b"one", [b"bye"])
    local.close()
    assert answer(peer) == [b"bye"]
    with pytest.raises(Unreachable):
        until_gone(peer.receive)
    with pytest.raises(Unreachable):
        peer.send([b"hello?"])
    peer.close()


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_turned_away(local: ServerSocket) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(BaseException):
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            stranger = raw(local)
            with suppress(BrokenPipeError, ConnectionResetError):
                stranger.send(b"client-0-0")
            with suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
            code = 0
        os._exit(code)
    local.wait(BOUND_MS)
    assert turns(local) == []
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert turns(local) == []
    peer = connection.connect(local.address, b"client-0-0")
    say(peer, b"mine")
    assert heard(local, 1) == [(b"client-0-0", [b"mine"])]
    peer.close()
