"""The server's address: this user gets through, others do not, and nothing stays on disk."""

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

from edgefl.run import zeromq_sockets
from edgefl.run.zeromq_sockets import Endpoint

BOUND_MS = 20_000
NOBODY = 65534

linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract addresses are Linux's")
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.linger = 0
        made.rcvtimeo = BOUND_MS
        yield made


def say(address: str, words: bytes, name: bytes = b"client-0-0") -> None:
    """Another process's part: connect, send, and wait until it is sent."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.routing_id = name
        dealer.linger = BOUND_MS
        dealer.connect(address)
        dealer.send(words)


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def greeting(address: str) -> bytes:
    """What a raw connection to the address is answered with: ZeroMQ's greeting, or nothing and the end."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(BOUND_MS / 1000)
        raw.connect("\0" + address.removeprefix("ipc://@"))
        try:
            return raw.recv(64)
        except ConnectionResetError:
            return b""


def test_a_peer_of_this_user_gets_through(router: zmq.Socket[bytes]) -> None:
    made = Endpoint(router)
    say(made.address, b"hello")
    assert router.recv_multipart() == [b"client-0-0", b"hello"]
    made.close()


@linux
def test_the_address_is_abstract_and_of_this_server_only(router: zmq.Socket[bytes]) -> None:
    before = set(os.listdir("/tmp")) | set(os.listdir("."))
    made = Endpoint(router)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as second:
        other = Endpoint(second)
        assert made.address != other.address
    assert made.address.startswith("ipc://@edgefl-")
    assert len(made.address) > len("ipc://@edgefl-") + 30  # not to be guessed
    assert len(made.address.removeprefix("ipc://")) < 100  # the kernel's bound is 108
    assert not [name for name in set(os.listdir("/tmp")) | set(os.listdir(".")) if name not in before]
    made.close()


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_peer_of_another_user_is_turned_away(router: zmq.Socket[bytes]) -> None:
    made = Endpoint(router)
    seen, told = os.pipe()

    def stranger() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.write(told, len(greeting(made.address)).to_bytes(1, "big"))
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            events = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            events.rcvtimeo = BOUND_MS
            dealer.connect(made.address)
            dealer.send(b"let me in")
            event = int.from_bytes(events.recv_multipart()[0][:2], sys.byteorder)
            os.write(told, b"in" if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else b"out")
            dealer.disable_monitor()
            events.close()

    with open(seen, "rb") as words:
        code = in_child(stranger)
        os.close(told)
        assert (words.read(), code) == (b"\x00out", 0)
    assert greeting(made.address)[:1] == b"\xff"  # this user is greeted
    say(made.address, b"mine")
    assert router.recv_multipart() == [b"client-0-0", b"mine"]
    with pytest.raises(zmq.Again):
        router.recv_multipart(zmq.NOBLOCK)
    made.close()


@pytest.mark.parametrize("why", ["no abstract addresses", "no peer credentials"])
def test_elsewhere_it_is_a_folder_of_this_user_and_goes_at_the_end(
    router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no abstract addresses":
        monkeypatch.setattr(zeromq_sockets.sys, "platform", "darwin")
    else:
        monkeypatch.setattr(zeromq_sockets, "_only_this_user", lambda _: False)
    made = Endpoint(router)
    monkeypatch.undo()
    place = Path(made.address.removeprefix("ipc://"))
    assert place.name == "server"
    assert place.is_socket()
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    say(made.address, b"hello")
    assert router.recv_multipart() == [b"client-0-0", b"hello"]
    made.close()
    assert not place.parent.exists()
    made.close()


def test_closing_an_abstract_address_is_nothing(router: zmq.Socket[bytes]) -> None:
    made = Endpoint(router)
    made.close()
    made.close()


def test_an_old_libzmq_is_not_taken_for_a_guard() -> None:
    class Old:
        def setsockopt(self, option: int, value: int) -> None:
            raise zmq.ZMQError(zmq.EINVAL)

    assert not zeromq_sockets._only_this_user(Old())  # type: ignore[arg-type]
