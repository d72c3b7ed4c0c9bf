"""ZeroMQ: one ROUTER at the server, a DEALER at each peer, any number of frames of any size.

Where the server's socket is bound: reachable by this user on this host, and nothing left on disk.

On Linux the address is in the abstract namespace, which has no file, and the kernel's word on each peer's
user (``SO_PEERCRED``) keeps others out: what a 0700 folder does, without a folder that a killed run leaves
behind. Elsewhere it is a socket in a fresh 0700 folder, removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence

import zmq

from edgefl.run.connection import AT_ONCE, Frame, Full, Unreachable

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
LENT_BYTES = 1024 * 1024
"""Bytes from this size on are lent to ZeroMQ and not copied: models. What may change is always copied."""
LINGER_MS = 200
"""How long the server's last words may take to leave."""
PEER_LINGER_MS = 1000


def router_socket(context: zmq.Context[zmq.Socket[bytes]], largest_bytes: int) -> zmq.Socket[bytes]:
    """A ROUTER that says when a peer is gone, takes no message above ``largest_bytes`` and queues few.

    A high-water mark counts messages, whatever their size; each peer has one task at a time.
    """
    socket = context.socket(zmq.ROUTER)
    socket.router_mandatory = True
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 8
    socket.maxmsgsize = largest_bytes
    return socket


def dealer_socket(context: zmq.Context[zmq.Socket[bytes]], name: bytes) -> zmq.Socket[bytes]:
    """A DEALER that queues only for a connection that is there."""
    socket = context.socket(zmq.DEALER)
    socket.routing_id = name
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 16
    socket.immediate = True
    return socket


def send_now(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send a message without waiting; raises `zmq.ZMQError` as ``send_multipart`` does, at its first frame.

    A third of that one's time, most of which goes into the arithmetic of its flags.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE)
    last = frames[-1]
    if isinstance(last, bytes) and len(last) >= LENT_BYTES:
        socket.send(last, _NOBLOCK, copy=False)
    else:
        socket.send(last, _NOBLOCK)


def receive_now(socket: zmq.Socket[bytes], headers: int) -> list[Frame]:
    """The frames of a message that has arrived; raises `zmq.Again` if none has.

    The first ``headers`` frames are bytes. Those after them, which may be as large as a model, stay where
    ZeroMQ has them and are read only: nobody copies what is copied into its place at once anyway.
    """
    frames: list[Frame] = [socket.recv(_NOBLOCK)]
    while socket.getsockopt(_RCVMORE):
        if len(frames) < headers:
            frames.append(socket.recv(_NOBLOCK))
        else:
            frames.append(socket.recv(_NOBLOCK, copy=False).buffer)
    return frames


class ZeroMQServer:
    """A ROUTER bound to an address of its own."""

    def __init__(self, largest_bytes: int) -> None:
        self._context = zmq.Context()
        self._socket = router_socket(self._context, largest_bytes)
        self._endpoint = Endpoint(self._socket)
        self.address = self._endpoint.address
        self._poller = zmq.Poller()
        self._poller.register(self._socket, _POLLIN)
        self._watched: list[int] = []

    def watch(self, fd: int) -> None:
        self._poller.register(fd, _POLLIN)
        self._watched.append(fd)

    def wait(self, timeout_ms: int) -> bool:
        return any(which in self._watched for which, _ in self._poller.poll(timeout_ms))

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        for _ in range(AT_ONCE):
            try:
                frames = receive_now(self._socket, headers=2)
            except zmq.Again:
                return
            yield bytes(frames[0]), frames[1:]

    def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        message = [peer, *frames]
        try:
            try:
                send_now(self._socket, message)
            except zmq.Again:
                # ZeroMQ looks a thousand times a second whether a peer has taken what was sent before, and
                # one that is fast takes more small messages in that time: have it look, then judge.
                self._socket.getsockopt(zmq.EVENTS)
                send_now(self._socket, message)
        except zmq.Again:
            raise Full from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise Unreachable from None

    def close(self) -> None:
        self._endpoint.close()
        self._context.destroy(linger=LINGER_MS)


class ZeroMQPeer:
    """A DEALER connected to a `ZeroMQServer`."""

    def __init__(self, address: str, name: bytes) -> None:
        self._context = zmq.Context()
        self._socket = dealer_socket(self._context, name)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, _POLLIN)
        self._watched: list[int] = []

    def watch(self, fd: int) -> None:
        self._poller.register(fd, _POLLIN)
        self._watched.append(fd)

    def wait(self, timeout_ms: int, *, to_send: bool = False) -> bool:
        if to_send:
            self._socket.poll(timeout_ms, _POLLOUT)
            timeout_ms = 0
        return any(which in self._watched for which, _ in self._poller.poll(timeout_ms))

    def receive(self, timeout_ms: int = 0) -> Sequence[Frame] | None:
        if timeout_ms:
            self._poller.poll(timeout_ms)
        try:
            return receive_now(self._socket, headers=1)
        except zmq.Again:
            return None

    def send(self, frames: Sequence[Frame]) -> None:
        try:
            send_now(self._socket, frames)
        except zmq.Again:
            raise Full from None

    def close(self) -> None:
        self._socket.close(linger=PEER_LINGER_MS)
        self._context.term()


class Endpoint:
    """Binds a ROUTER to an ``ipc://`` address of its own."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._folder: str | None = None
        if sys.platform == "linux" and _only_this_user(socket):
            self.address = f"ipc://@edgefl-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="edgefl-")  # made with mode 0700
            self.address = f"ipc://{self._folder}/server"
        socket.bind(self.address)

    def close(self) -> None:
        """Remove what was made on disk, if anything was."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _only_this_user(socket: zmq.Socket[bytes]) -> bool:
    """Have the kernel refuse peers of other users; False where libzmq was built without it."""
    with contextlib.suppress(zmq.ZMQError, AttributeError):
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        return True
    return False
