"""Tests what the connection between the server and its peers guarantees, on real sockets."""

from __future__ import annotations

import os
import resource
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from edgefl.run import connection, control, messages
from edgefl.run.connection import Connection, PeerSocket, ServerSocket
from edgefl.zeromq.door import CallerSocket, DoorSocket
from edgefl.zeromq.sockets import ZERO_COPY_BYTES, Dealer, Frame, Full, Unreachable

BOUND_MS = 20_000
SOME = 5
NOBODY = 65534
linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract addresses are Linux's")
pytestmark = pytest.mark.usefixtures("nothing_left")


DOOR = "tcp://127.0.0.1:*"
both = pytest.mark.parametrize("server", ["ipc", "tcp"], indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ServerSocket]:
    made = ServerSocket(messages.MAX_HEADER_BYTES, DOOR if getattr(request, "param", "ipc") == "tcp" else "")
    yield made
    made.close()


Connect = Callable[..., Dealer]


def address(server: ServerSocket, name: bytes) -> str:
    return control.address(server.root, server.secret, name)


def joined(server: ServerSocket, name: bytes) -> Dealer:
    """Create a peer that has the password for its name. The server connects to it or, over TCP, admits it."""
    if server.listening.door:
        server.admit(name)
        return caller(server, name)
    server.connect(name)
    return waiting(server, name)


def waiting(server: ServerSocket, name: bytes) -> PeerSocket:
    return PeerSocket(address(server, name), name, control.password(server.secret, name), os.getpid())


def caller(server: ServerSocket, name: bytes) -> CallerSocket:
    secret, about = control.secret_key(control.password(server.secret, name)), server.listening
    return CallerSocket(about.door, secret, about.key)


def spawn(server: ServerSocket, name: bytes, role: control.Role) -> control.Spawn:
    """Return the control message that starts the process with this name."""
    about, password = server.listening, control.password(server.secret, name)
    if not about.door:
        return control.Spawn(role, 0, 0, address(server, name), password, os.getpid(), 1.0)
    return control.Spawn(role, 0, 0, about.door, password, os.getpid(), 1.0, about.key)


@contextmanager
def client(server: ServerSocket, heartbeat_s: float = 1e6) -> Iterator[Connection]:
    """Open the connection of client 0. Its lifeline stays open, as if its parent process were running."""
    lifeline, other = os.pipe()
    name = control.routing_id(control.CLIENT, 0, 0)
    peer = Connection(spawn(server, name, control.CLIENT), heartbeat_s, lifeline)
    yield peer
    peer._socket.close()
    os.close(lifeline)
    os.close(other)


@pytest.fixture
def connect(server: ServerSocket) -> Iterator[Connect]:
    """Return a function that creates a peer with the given name and, unless ``says`` is empty, waits until
    the server has received the message ``says`` from it."""
    with ExitStack() as closing:

        def one(name: bytes = b"one", says: bytes = b"ready") -> Dealer:
            peer = joined(server, name)
            closing.callback(peer.close)
            if says:
                say(server, peer, says)
                assert heard(server, 1) == [(name, [says])]
            return peer

        yield one


def heard(server: ServerSocket | DoorSocket, count: int) -> list[tuple[bytes, list[bytes]]]:
    """Receive the next ``count`` messages; return the sender's name and the frames of each."""
    got: list[tuple[bytes, list[bytes]]] = []
    for _ in range(1000):
        if len(got) >= count:
            return got
        server.wait(BOUND_MS)
        got += [(name, [bytes(frame) for frame in frames]) for name, frames in server.receive()]
    raise AssertionError(f"{count} messages were expected, got {got}")


def say(server: ServerSocket, peer: Dealer, message: bytes) -> None:
    """Send a message as soon as the peer's queue has room. Until then, let the server poll: ZeroMQ connects
    in the background, and the server admits a peer only while it polls."""
    for _ in range(BOUND_MS):
        try:
            return peer.send([message])
        except Full:
            assert not peer.wait_to_send(1)
            server.wait(0)
    raise AssertionError("the peer could not send in time")


def answer(peer: Dealer) -> list[bytes]:
    while (frames := peer.receive()) is None:
        assert not peer.wait(BOUND_MS)
    return [bytes(frame) for frame in frames]


def until_full(send: Callable[[], object]) -> int:
    """Send messages that nobody reads until `Full` is raised; return the number of messages sent."""
    for count in range(100_000):
        try:
            send()
        except Full:
            return count
    raise AssertionError("the socket is never full")


@both
def test_messages_arrive_in_order_with_their_senders_names(server: ServerSocket, connect: Connect) -> None:
    peers = {name: connect(name, b"") for name in (b"client-0-0", b"client-1-0", b"client-2-0")}
    for turn in range(SOME):
        for name, peer in peers.items():
            say(server, peer, b"%b:%d" % (name, turn))
    got = heard(server, 3 * SOME)
    for name, peer in peers.items():
        said = [frames for sender, frames in got if sender == name]
        assert said == [[b"%b:%d" % (name, turn)] for turn in range(SOME)]
        server.send(name, [b"you are"])
        server.send(name, [name])
        assert [answer(peer), answer(peer)] == [[b"you are"], [name]]
        assert peer.receive() is None


@both
def test_a_header_of_any_allowed_size_arrives(server: ServerSocket, connect: Connect) -> None:
    for size in (1, 1000, messages.MAX_HEADER_BYTES):
        message = os.urandom(size)
        peer = connect(b"%d" % size, message)
        server.send(b"%d" % size, [message])
        assert answer(peer) == [message]
    with pytest.raises(Unreachable):
        server.send(b"nobody", [b"hello"])


@both
def test_the_last_message_of_a_peer_that_left_arrives(server: ServerSocket, connect: Connect) -> None:
    peer = connect()
    server.send(b"one", [b"never read"])
    say(server, peer, b"last")
    peer.close()
    assert heard(server, 1) == [(b"one", [b"last"])]
    with suppress(Unreachable):  # over ipc the peer may return to its address
        until_full(lambda: server.send(b"one", [b"hello?"]))
    server.disconnect(b"one")
    with pytest.raises(Unreachable):
        server.send(b"one", [b"hello?"])
    server.disconnect(b"one")  # a second time has no effect


def test_a_lack_of_descriptors_is_reported(server: ServerSocket) -> None:
    """ZeroMQ itself reports no error: it silently retries forever."""
    assert server.refused() == ""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        assert server.refused() == "Too many open files"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert server.refused() == ""


@both
def test_messages_of_a_disconnected_peer_are_ignored(server: ServerSocket, connect: Connect) -> None:
    peer, other = connect(), connect(b"two", b"hello")
    server.disconnect(b"one")
    with suppress(Full):
        for _ in range(SOME):
            peer.send([b"still here"])
    say(server, other, b"me too")
    assert heard(server, 1) == [(b"two", [b"me too"])]


@both
def test_sending_to_a_peer_that_does_not_read_raises_full(server: ServerSocket, connect: Connect) -> None:
    connect()
    assert until_full(lambda: server.send(b"one", [bytes(1000)])) > 0
    connect(b"two", b"hello")


@both
def test_a_peer_waits_for_room_while_the_server_does_not_read(server: ServerSocket, connect: Connect) -> None:
    peer = connect()
    sent = until_full(lambda: peer.send([bytes(1000)]))
    assert len(heard(server, sent)) == sent
    say(server, peer, b"now")
    assert heard(server, 1) == [(b"one", [b"now"])]


@both
@pytest.mark.parametrize("side", ["server", "peer"])
def test_another_descriptor_ends_the_wait(server: ServerSocket, connect: Connect, side: str) -> None:
    peer = connect()
    mine, other = os.pipe()
    waiting: ServerSocket | Dealer = server if side == "server" else peer
    waiting.watch(mine)
    assert waiting.wait(0) is False
    os.write(other, b"!")
    assert waiting.wait(BOUND_MS) is True
    os.read(mine, 1)
    assert waiting.wait(0) is False
    os.close(other)  # the process that started this one has ended
    if side == "peer":
        assert peer.wait_to_send(BOUND_MS) is True
    peer.close()
    os.close(mine)


@both
def test_a_wait_for_a_deadline_sleeps(server: ServerSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    wait = Dealer.wait

    def counted(self: Dealer, timeout_ms: int) -> bool:
        looks.append(timeout_ms)
        return wait(self, timeout_ms)

    monkeypatch.setattr(Dealer, "wait", counted)
    with client(server) as peer:
        for tenths_ms in range(120, 140):
            deadline_ns = time.monotonic_ns() + tenths_ms * 100_000
            peer.wait_until(deadline_ns)
            assert time.monotonic_ns() >= deadline_ns
    assert 0 not in looks  # which would be polling


@both
def test_an_error_of_a_task_with_characters_that_are_not_utf_8_is_reported(
    server: ServerSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Sequence[Frame]] = []
    task = messages.Task(client=0, task=1, trip=1, version=0, entry=0, slot=0, cut=None, condition=None)

    def fail() -> None:
        raise OSError("caf\udce9.csv is not there\nat all")  # a name that is not UTF-8

    with client(server) as peer:
        monkeypatch.setattr(peer, "send", sent.append)
        peer.attempt(task, fail)
    ((header, *_),) = sent
    assert messages.decode_from_client(header) == messages.Gone(0, 1, "OSError: caf?.csv is not there")


@both
def test_a_peer_whose_run_ends_before_the_server_connects_ends_silently(server: ServerSocket) -> None:
    lifeline, other = os.pipe()
    os.close(other)
    name = control.routing_id(control.WORKER, 0, 0)
    Connection(spawn(server, name, control.WORKER), 5.0, lifeline).serve(lambda message, frames: None)
    os.close(lifeline)


@pytest.mark.parametrize("door", ["", DOOR])
@pytest.mark.parametrize("lent", [False, True])
def test_payload_frames_arrive_whether_copied_or_lent(lent: bool, door: str) -> None:
    size = ZERO_COPY_BYTES if lent else ZERO_COPY_BYTES - 1
    pid = os.fork()  # pyzmq keeps a thread after it has lent the memory of frames
    if pid == 0:
        code = 1
        with suppress(BaseException):
            payload_travels(os.urandom(size), door)
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def payload_travels(body: bytes, door: str) -> None:
    server = ServerSocket(len(body), door)
    peer = joined(server, b"one")
    say(server, peer, b"ready")
    peer.send([b"head", body])
    assert heard(server, 2) == [(b"one", [b"ready"]), (b"one", [b"head", body])]
    frames: list[Frame] = [b"head", memoryview(body)]
    server.send(b"one", frames)
    assert answer(peer) == [b"head", body]
    peer.close()
    server.close()


def test_a_peer_has_the_name_of_its_address(server: ServerSocket, connect: Connect) -> None:
    connect()
    if server.root == connection.ABSTRACT:
        with socket.socket(socket.AF_UNIX) as thief, pytest.raises(OSError, match="already in use"):
            thief.bind("\0" + address(server, b"one").removeprefix("ipc://@"))
    server.connect(b"two")
    with zmq.Context() as context, context.socket(zmq.DEALER) as liar:
        liar.linger = 0
        liar.routing_id = b"three"  # the name of a peer that has not connected yet
        liar.plain_username = b"two"
        liar.plain_password = control.password(server.secret, b"two").encode()
        liar.bind(address(server, b"two"))
        while not liar.poll(1, zmq.POLLOUT):
            server.wait(0)
        liar.send(b"I am three")
        assert heard(server, 1) == [(b"two", [b"I am three"])]
        connect(b"three", b"I am")


@pytest.mark.parametrize("password", ["word", "00" * 32, "of another name"])
def test_a_peer_without_the_password_of_its_name_is_refused(server: ServerSocket, password: str) -> None:
    name = b"client-1-0"
    if password == "of another name":
        password = control.password(server.secret, b"client-0-0")
    server.connect(name)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.plain_username, dealer.plain_password = name, password.encode()
        events = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        dealer.bind(address(server, name))
        while not events.poll(1):
            server.wait(0)
        event = int.from_bytes(events.recv_multipart()[0][:2], sys.byteorder)
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        dealer.disable_monitor()
        events.close()
    assert list(server.receive()) == []
    peer = waiting(server, name)  # a late peer with the right password
    say(server, peer, b"mine")
    assert heard(server, 1) == [(name, [b"mine"])]
    peer.close()


def greetings(where: str, times: int, user: int) -> list[bytes]:
    """Connect ``times`` times from a process of the user ID ``user`` that sends its ZMTP greeting first.
    Return the length of each answer as a byte."""
    seen, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            if user != os.geteuid():
                os.setgid(user)
                os.setuid(user)
            for _ in range(times):
                with socket.socket(socket.AF_UNIX) as raw:
                    raw.connect("\0" + where.removeprefix("ipc://@"))
                    heard = b""
                    with suppress(ConnectionError):
                        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0"))
                        heard = raw.recv(64)
                    os.write(told, len(heard).to_bytes(1, "big"))
        os._exit(0)
    os.close(told)
    with open(seen, "rb") as words:
        said = words.read()
    os.waitpid(pid, 0)
    return [bytes([length]) for length in said]


@linux
@pytest.mark.parametrize("user", [os.geteuid(), NOBODY], ids=["of this user", "of another"])
def test_another_process_gets_no_answer(server: ServerSocket, connect: Connect, user: int) -> None:
    if user == NOBODY and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    connect(b"client-0-0", b"mine")
    before = set(os.listdir("/proc/self/fd"))
    assert greetings(address(server, b"client-0-0"), 300, user) == [b"\0"] * 300
    assert set(os.listdir("/proc/self/fd")) == before
    connect(b"client-1-0", b"mine too")
    listening = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    ours = [line for line in listening if line[-1] == "@" + address(server, b"client-0-0").partition("@")[2]]
    assert len(ours) == 2  # the peer listens, and it is connected; the server has no address


@both
def test_a_report_is_repeated_until_the_next_task_arrives(server: ServerSocket) -> None:
    name = control.routing_id(control.CLIENT, 0, 0)
    if server.listening.door:
        server.admit(name)
    else:
        server.connect(name)
    gone = messages.Gone(0, 3, "cannot")
    said: list[messages.FromClient] = []

    def hear(*expected: messages.FromClient) -> None:
        """Let the peer send until the last messages that the server received are ``expected``."""
        while said[-len(expected) :] != list(expected):
            peer.beat()
            server.wait(1)
            said.extend(messages.decode_from_client(frames[0]) for _, frames in server.receive())

    def tell(message: messages.FromServer) -> None:
        server.send(name, [messages.encode(message)])

    def told() -> messages.FromServer:
        """Return the next message to the peer. Both ends are in this thread, so neither may block."""
        while (found := peer.poll()) is None:
            server.wait(1)
            said.extend(messages.decode_from_client(frames[0]) for _, frames in server.receive())
        return found[0]

    with client(server, heartbeat_s=0.03) as peer:
        end = peer._socket
        while not end.wait_to_send(1) and not end._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
            server.wait(0)
        peer.report(gone)
        hear(gone, gone, gone)
        tell(messages.Withdraw([3]))  # no sign that the report arrived
        assert told() == messages.Withdraw([3])
        hear(gone, gone, gone)
        task = messages.Tasks([messages.Task(0, 4, 1, 0, 0, 0, None, None)])
        tell(task)
        assert told() == task
        hear(messages.Beat(), messages.Beat())
        peer.report(gone)
        tell(task)  # a second time
        hear(gone, gone, gone)
        assert peer.poll() is None


@linux
def test_addresses_are_random_and_leave_no_file(
    server: ServerSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tempfile.gettempdir())  # an empty folder of this test
    other = ServerSocket(1)
    peer = joined(other, b"one")
    where = {address(server, b"one"), address(server, b"two"), address(other, b"one")}
    assert len(where) == 3
    assert all(one.startswith("ipc://@edgefl-") for one in where)
    assert all(len("ipc://@edgefl-") + 30 < len(one) < 100 for one in where)  # Linux allows 108
    assert os.listdir(".") == []
    peer.close()
    other.close()
    other.close()


@pytest.mark.parametrize("why", ["no abstract addresses", "no peer credentials"])
def test_without_abstract_addresses_sockets_are_in_a_private_folder_that_is_removed(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    with monkeypatch.context() as patch:
        if why == "no abstract addresses":
            patch.setattr(sys, "platform", "darwin")
        else:
            patch.setattr(zmq, "IPC_FILTER_PID", -1)  # an old libzmq does not know the option
        server = ServerSocket(messages.MAX_HEADER_BYTES)
    place = Path(address(server, b"one").removeprefix("ipc://"))
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    peer = joined(server, b"one")
    assert place.is_socket()
    say(server, peer, b"hello")
    assert heard(server, 1) == [(b"one", [b"hello"])]
    peer.close()
    server.close()
    assert not place.parent.exists()
