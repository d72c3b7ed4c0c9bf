"""A channel: a pipe for typed messages between two processes that trust each other.

A message is sent over a pair of stream sockets as a 4-byte length and its msgpack bytes. The stream ends when
the other process ends. Every process of a run has a channel, so no process waits forever for another that
has ended.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import select
import socket
import struct
from array import array
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

R = TypeVar("R")

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_MAX_DESCRIPTORS = 4
_encoder = msgspec.msgpack.Encoder()
_Socket = socket.socket
"""The original class of sockets; pytest-socket replaces ``socket.socket`` during tests."""


class Closed(Exception):
    """The other end of the channel is closed."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Report from a process that it cannot start or continue. The message is one line for the user."""

    message: str
    config: bool
    """True if the user's experiment or arguments are at fault (exit code 2), else False (exit code 1)."""


class Channel(Generic[R]):
    """One end of a channel. It receives messages of type ``incoming`` and sends any msgspec struct.

    >>> a, b = pair()
    >>> left, right = Channel(a, int), Channel(b, int)
    >>> left.send(7); right.receive()
    7
    >>> left.close(); right.receive()
    Traceback (most recent call last):
        ...
    edgefl.host.channel.Closed
    >>> right.close()
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[R] = msgspec.msgpack.Decoder(incoming)
        self._pending = bytearray()
        self._descriptors: list[int] = []

    @classmethod
    def inherit(cls, fd: int, incoming: Any) -> Channel[R]:
        """Open the end that the parent process passed on as descriptor ``fd``."""
        return cls(socket.socket(fileno=fd), incoming)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, *fds: int) -> None:
        """Send a message, with file descriptors if given. Raises `Closed` if the other end is closed.

        While the socket is full, this call waits and reads incoming messages. Otherwise two ends that both
        send more than a socket holds (about 280 small messages) would wait for each other forever.
        """
        body = _encoder.encode(message)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        while data:
            try:
                data = data[self._socket.sendmsg([data], rights, socket.MSG_DONTWAIT) :]
                rights = []
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._socket, select.POLLIN | select.POLLOUT)
                if any(event & ~select.POLLOUT for _, event in poller.poll()):
                    with contextlib.suppress(BlockingIOError):
                        self._read(socket.MSG_DONTWAIT)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise Closed from error

    def tell(self, message: Any, *fds: int) -> None:
        """Send a message, and ignore a closed channel, which `receive` will report."""
        with contextlib.suppress(Closed):
            self.send(message, *fds)

    @property
    def has_room(self) -> bool:
        """True if a small message can be sent without waiting."""
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        return bool(poller.poll(0))

    def receive(self) -> R:
        """Wait for the next message and return it. Raises `Closed` at the end of the stream."""
        while not self.waiting:
            self._read(0)
        return self._take()

    def receive_ready(self) -> Iterator[R]:
        """Yield every message that has arrived. Raises `Closed` after the last message of a closed stream."""
        closed = False
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except Closed:
            closed = True
        while self.waiting:
            yield self._take()
        if closed:
            raise Closed

    @property
    def waiting(self) -> bool:
        """True if a complete message has been read from the socket but not yet returned by `receive`."""
        head = self._pending[: _LENGTH.size]
        return len(head) == _LENGTH.size and len(self._pending) >= _LENGTH.size + _LENGTH.unpack(head)[0]

    def _take(self) -> R:
        end = _LENGTH.size + _LENGTH.unpack_from(self._pending)[0]
        message = bytes(self._pending[_LENGTH.size : end])
        del self._pending[:end]
        return self._decoder.decode(message)

    def descriptor(self) -> int:
        """Return the next file descriptor that was received with a message."""
        return self._descriptors.pop(0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _read(self, flags: int) -> None:
        # socket.recv_fds is not used here, because it ignores its flags.
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array("i").itemsize)
        try:
            data, rights, _, _ = self._socket.recvmsg(_READ_BYTES, room, flags)
        except ConnectionResetError as error:
            raise Closed from error
        if not data:
            raise Closed
        for level, kind, content in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for fd in array("i", content):
                    os.set_inheritable(fd, False)
                    self._descriptors.append(fd)
        self._pending += data


def pair() -> tuple[socket.socket, socket.socket]:
    """Create two connected sockets that are close-on-exec."""
    first, second = _socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return _Socket(fileno=first.detach()), _Socket(fileno=second.detach())
