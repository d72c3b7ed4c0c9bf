"""A pipe of typed messages between two processes of a run that trust each other.

Each message is a 4-byte length and its msgpack bytes on a stream socket pair. The end of the stream is the
other process's death, which is why every process of a run holds one: nobody waits on a process that is gone.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

R = TypeVar("R")

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class Closed(Exception):
    """The other end is gone."""


class Channel(Generic[R]):
    """One end of the pipe; receives messages of ``incoming``'s type, sends any msgspec struct.

    >>> a, b = pair()
    >>> left, right = Channel(a, int), Channel(b, int)
    >>> left.send(7); right.receive()
    7
    >>> left.close(); right.receive()
    Traceback (most recent call last):
        ...
    edgefl.channel.Closed
    >>> right.close()
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[R] = msgspec.msgpack.Decoder(incoming)
        self._pending = bytearray()
        self._descriptors: list[int] = []

    @classmethod
    def inherit(cls, fd: int, incoming: Any) -> Channel[R]:
        """The end that a parent process left open under ``fd``."""
        return cls(socket.socket(fileno=fd), incoming)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, *, fd: int | None = None) -> None:
        """Send a message, and with it a descriptor. `Closed` if nobody is there to read it."""
        body = _encoder.encode(message)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            if fd is not None:
                data = data[socket.send_fds(self._socket, [data], [fd]) :]
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive(self) -> R:
        """The next message, waiting for it. `Closed` at the end of the stream."""
        while (message := self._take()) is None:
            self._read(0)
        return self._decoder.decode(message)

    def receive_ready(self) -> Iterator[R]:
        """Every message that has arrived, without waiting. `Closed` after the last of a closed stream."""
        closed = False
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except Closed:
            closed = True
        while (message := self._take()) is not None:
            yield self._decoder.decode(message)
        if closed:
            raise Closed

    def descriptor(self) -> int:
        """The descriptor that came with the message received last."""
        return self._descriptors.pop(0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def _read(self, flags: int) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 18, 4, flags)
        except ConnectionResetError as error:
            raise Closed from error
        if not data:
            raise Closed
        self._descriptors += descriptors
        self._pending += data

    def _take(self) -> bytes | None:
        if len(self._pending) < _LENGTH.size:
            return None
        end = _LENGTH.size + int(_LENGTH.unpack_from(self._pending)[0])
        if len(self._pending) < end:
            return None
        message = bytes(self._pending[_LENGTH.size : end])
        del self._pending[:end]
        return message


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, closed on exec unless passed on by descriptor."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
