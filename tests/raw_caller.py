"""A peer that implements ZeroMQ's protocol (ZMTP 3.0, CURVE) itself, so that it can make false claims."""

from __future__ import annotations

import ctypes
import os
import socket
from functools import cache
from pathlib import Path

import zmq

from edgefl.zeromq import keys

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG, COMMAND = 2, 4


@cache
def sodium() -> ctypes.CDLL | None:
    """Load libsodium from the installed pyzmq wheel; return None if it is not there."""
    places = [*Path(zmq.__file__).parent.parent.glob("pyzmq.libs/libsodium*")]
    return ctypes.CDLL(str(places[0])) if places else None


def crypto(call: str, text: bytes, grows: int, nonce: bytes, key: bytes, secret: bytes) -> bytes:
    """Encrypt (``crypto_box_easy``) or decrypt (``crypto_box_open_easy``) the text."""
    library, result = sodium(), ctypes.create_string_buffer(len(text) + grows)
    assert library[call](result, text, ctypes.c_ulonglong(len(text)), nonce, key, secret) == 0
    return result.raw


def frame(body: bytes, flags: int = 0) -> bytes:
    """Encode a message frame or a command as it is sent on the wire."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


def named(name: bytes, value: bytes) -> bytes:
    """Encode a metadata property for the handshake."""
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


class RawCaller:
    """A client with the secret key ``secret`` that knows the server's public key ``key``."""

    def __init__(self, address: str, secret: bytes, key: bytes) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self._secret, self._key = secret, key
        self._mine, self._theirs, self._count = os.urandom(32), b"", 0

    def greet(self, properties: bytes) -> None:
        """Do the handshake and claim these properties. Meanwhile, another thread must run the server."""
        self.socket.sendall(GREETING)
        self._take(len(GREETING))
        short, public = self._number(), keys.public(self._mine)
        hello = self._box(bytes(64), b"CurveZMQHELLO---" + short, self._key, self._mine)
        self.socket.sendall(frame(b"\x05HELLO\x01\x00" + bytes(72) + public + short + hello, COMMAND))
        welcome = self._command(b"\x07WELCOME")
        nonce = b"WELCOME-" + welcome[:16]
        text = crypto("crypto_box_open_easy", welcome[16:], -16, nonce, self._key, self._mine)
        self._theirs, cookie = text[:32], text[32:]
        nonce = os.urandom(16)
        vouch = self._box(public + self._key, b"VOUCH---" + nonce, self._theirs, self._secret)
        short = self._number()
        claims = keys.public(self._secret) + nonce + vouch + named(b"Socket-Type", b"DEALER") + properties
        sealed = self._box(claims, b"CurveZMQINITIATE" + short, self._theirs, self._mine)
        self.socket.sendall(frame(b"\x08INITIATE" + cookie + short + sealed, COMMAND))
        self._command(b"\x05READY")

    def send(self, body: bytes) -> None:
        short = self._number()
        text = self._box(b"\0" + body, b"CurveZMQMESSAGEC" + short, self._theirs, self._mine)
        self.socket.sendall(frame(b"\x07MESSAGE" + short + text))

    @staticmethod
    def _box(text: bytes, nonce: bytes, key: bytes, secret: bytes) -> bytes:
        return crypto("crypto_box_easy", text, 16, nonce, key, secret)

    def _number(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(8, "big")

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
            assert part, "the server has disconnected"
            got += part
        return got
