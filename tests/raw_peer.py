"""A peer that speaks ZeroMQ's protocol (ZMTP 3.0, PLAIN) by itself, and so may say what no library would."""

from __future__ import annotations

import socket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame of a message, or a command, as it is on the wire."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


class Raw:
    """One end of a connection, of which a test has every byte in its hand."""

    socket: socket.socket

    def sealed(self, body: bytes, flags: int = 0) -> bytes:
        """A frame of a message as it is on the wire."""
        return frame(body, flags)

    def say(self, *frames: bytes) -> None:
        """Send a message of these frames."""
        *first, last = frames
        self.socket.sendall(b"".join([*(self.sealed(body, MORE) for body in first), self.sealed(last)]))

    def _command(self, name: bytes) -> bytes:
        flags, length = self._take(2)
        body = self._take(length)
        assert flags == COMMAND, (flags, body)
        assert body.startswith(name), body
        return body[len(name) :]

    def _take(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            part = self.socket.recv(count - len(got))
            if not part:
                raise ConnectionError("the server has hung up")
            got += part
        return got

    def close(self) -> None:
        self.socket.close()


class RawPeer(Raw):
    """The peer of this name, which waits ``where`` the server calls it; on Linux."""

    def __init__(self, where: str, name: bytes, password: str) -> None:
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.bind("\0" + where.removeprefix("ipc://@"))
            waiting.listen(1)
            self.socket, _ = waiting.accept()
        self._name, self._password = name, password.encode()

    def greet(self) -> None:
        """Introduce itself; the server must be looking at its connections meanwhile."""
        self.socket.sendall(GREETING)
        self._take(len(GREETING))
        word = b"".join(bytes([len(part)]) + part for part in (self._name, self._password))
        self.socket.sendall(frame(b"\x05HELLO" + word, COMMAND))
        self._command(b"\x07WELCOME")
        kind = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        self.socket.sendall(frame(b"\x08INITIATE" + kind, COMMAND))
        self._command(b"\x05READY")
