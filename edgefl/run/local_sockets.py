"""Kernel sockets that keep messages apart (``SOCK_SEQPACKET``), one a peer, for headers on one host.

The address is in Linux's abstract namespace, so nothing is left on disk, and the kernel's word on a peer's
user (``SO_PEERCRED``) keeps others out. A connection's first message is its name; a name that is taken is
refused. A message is one frame.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
from collections.abc import Iterator, Sequence

from edgefl.errors import RunError
from edgefl.run.connection import AT_ONCE, Frame, Full, Unreachable
from edgefl.run.messages import MAX_HEADER_BYTES

SCHEME = "local://@"
MOST_NAME_BYTES = 255
_READ_BYTES = MAX_HEADER_BYTES + 1  # so that one which is too long shows
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class LocalServer:
    """Listens at an address that cannot be guessed, and reads who is ready."""

    def __init__(self) -> None:
        name = f"edgefl-{secrets.token_hex(16)}"
        self.address = SCHEME + name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind("\0" + name)
        self._listener.listen(socket.SOMAXCONN)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, socket.socket] = {}
        self._names: dict[int, bytes] = {}
        self._by_name: dict[bytes, socket.socket] = {}
        self._watched: set[int] = set()
        self._ready: list[tuple[int, int]] = []

    def watch(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._watched.add(fd)

    def wait(self, timeout_ms: int) -> bool:
        self._ready = self._epoll.poll(timeout_ms / 1000, AT_ONCE)
        return not self._watched.isdisjoint([fd for fd, _ in self._ready])

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        """One message of each peer that has sent any, so that none keeps the others waiting."""
        ready, self._ready = self._ready, []
        for fd, _ in ready:
            connection = self._connections.get(fd)
            if connection is None:
                if fd == self._listener.fileno():
                    self._accept()
                continue
            try:
                message = connection.recv(_READ_BYTES)
            except (ConnectionResetError, BlockingIOError):
                continue  # it left without reading everything; what it said itself can still be read
            if not message:
                self._drop(fd)
            elif (name := self._names.get(fd)) is not None:
                yield name, (message,)
            else:
                self._introduce(fd, connection, message)

    def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        connection = self._by_name.get(peer)
        if connection is None:
            raise Unreachable
        (message,) = frames
        try:
            connection.send(message)
        except OSError as error:
            raise _not_sent(error) from None

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._by_name.clear()
        self._epoll.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        raise RunError(
                            f"no descriptor is left for peer {len(self._connections) + 1}: "
                            "raise the limit of open files (ulimit -n)"
                        ) from None
                    raise
                if _user_of(connection) != os.getuid():
                    connection.close()
                    continue
                connection.setblocking(False)
                self._connections[connection.fileno()] = connection
                self._epoll.register(connection, select.EPOLLIN)

    def _introduce(self, fd: int, connection: socket.socket, name: bytes) -> None:
        if len(name) > MOST_NAME_BYTES or name in self._by_name:
            self._drop(fd)
        else:
            self._names[fd], self._by_name[name] = name, connection

    def _drop(self, fd: int) -> None:
        name = self._names.pop(fd, None)
        if name is not None:
            del self._by_name[name]
        self._epoll.unregister(fd)
        self._connections.pop(fd).close()


class LocalPeer:
    """A connection to a `LocalServer`."""

    def __init__(self, address: str, name: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect("\0" + address.removeprefix(SCHEME))
            self.send((name,))
        except (OSError, Unreachable) as error:
            self._socket.close()
            raise Unreachable from error
        self._poll = select.poll()
        self._patience_ms = 0
        self._fd = self._socket.fileno()
        self._poll.register(self._fd, select.POLLIN)

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_ms: int, *, to_send: bool = False) -> bool:
        if not to_send:
            ready = self._poll.poll(timeout_ms)
        else:
            self._poll.modify(self._fd, select.POLLOUT)
            ready = self._poll.poll(timeout_ms)
            self._poll.modify(self._fd, select.POLLIN)
        if len(ready) == 1:  # as all but always: what follows takes as long as the wait itself
            return ready[0][0] != self._fd
        return len(ready) > 1

    def receive(self, timeout_ms: int = 0) -> Sequence[Frame] | None:
        if timeout_ms and timeout_ms != self._patience_ms:
            patience = _TIMEVAL.pack(timeout_ms // 1000, timeout_ms % 1000 * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            self._patience_ms = timeout_ms
        try:  # one call of the kernel, where to poll and then to read are two
            message = self._socket.recv(_READ_BYTES, 0 if timeout_ms else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return self.receive()  # it left without reading everything; its last word can still be read
        if not message:
            raise Unreachable
        return (message,)

    def send(self, frames: Sequence[Frame]) -> None:
        (message,) = frames
        try:
            self._socket.send(message, socket.MSG_DONTWAIT)
        except OSError as error:
            raise _not_sent(error) from None

    def close(self) -> None:
        self._socket.close()


def _not_sent(error: OSError) -> Exception:
    """Why a message was not sent."""
    if isinstance(error, BlockingIOError):
        return Full()
    return Unreachable() if isinstance(error, BrokenPipeError | ConnectionResetError) else error


def _user_of(connection: socket.socket) -> int:
    """The user at the other end, as the kernel has it."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])
