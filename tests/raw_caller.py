"""A peer that comes to a door and speaks ZeroMQ's protocol (ZMTP 3.0, CURVE) by itself."""

from __future__ import annotations

import ctypes
import os
import socket
from functools import cache
from pathlib import Path

import zmq

from edgefl.zeromq import keys
from tests.raw_peer import COMMAND, Raw, frame

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
DEALER = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"


@cache
def sodium() -> ctypes.CDLL | None:
    """The library with the ciphers, which pyzmq's wheels bring along; None where they do not."""
    places = [*Path(zmq.__file__).parent.parent.glob("pyzmq.libs/libsodium*")]
    return ctypes.CDLL(str(places[0])) if places else None


def box(text: bytes, nonce: bytes, key: bytes, secret: bytes) -> bytes:
    """The text, encrypted and signed by NaCl's ``crypto_box``."""
    library, sealed = sodium(), ctypes.create_string_buffer(len(text) + 16)
    assert library is not None
    assert len(nonce) == 24
    assert library.crypto_box_easy(sealed, text, ctypes.c_ulonglong(len(text)), nonce, key, secret) == 0
    return sealed.raw


def opened(sealed: bytes, nonce: bytes, key: bytes, secret: bytes) -> bytes:
    library, text = sodium(), ctypes.create_string_buffer(len(sealed) - 16)
    assert library is not None
    failed = library.crypto_box_open_easy(text, sealed, ctypes.c_ulonglong(len(sealed)), nonce, key, secret)
    assert not failed
    return text.raw


class RawCaller(Raw):
    """One who has the ``secret`` key and knows the door's public ``key``."""

    def __init__(self, address: str, secret: bytes, key: bytes) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self._secret, self._key = secret, key
        self._mine = os.urandom(32)
        self._theirs = b""
        self._count = 0

    def greet(self, properties: bytes = b"") -> None:
        """Introduce itself, with these properties besides; the door must be looked after meanwhile."""
        self.socket.sendall(GREETING)
        self._take(len(GREETING))
        short, public = self._number(), keys.public(self._mine)
        hello = box(bytes(64), b"CurveZMQHELLO---" + short, self._key, self._mine)
        self.socket.sendall(frame(b"\x05HELLO\x01\x00" + bytes(72) + public + short + hello, COMMAND))
        welcome = self._command(b"\x07WELCOME")
        text = opened(welcome[16:], b"WELCOME-" + welcome[:16], self._key, self._mine)
        self._theirs, cookie = text[:32], text[32:]
        nonce = os.urandom(16)
        vouch = box(public + self._key, b"VOUCH---" + nonce, self._theirs, self._secret)
        short, own = self._number(), keys.public(self._secret)
        said = own + nonce + vouch + DEALER + properties
        sealed = box(said, b"CurveZMQINITIATE" + short, self._theirs, self._mine)
        self.socket.sendall(frame(b"\x08INITIATE" + cookie + short + sealed, COMMAND))
        self._command(b"\x05READY")

    def sealed(self, body: bytes, flags: int = 0) -> bytes:
        short = self._number()
        text = box(bytes([flags]) + body, b"CurveZMQMESSAGEC" + short, self._theirs, self._mine)
        return frame(b"\x07MESSAGE" + short + text)

    def _number(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(8, "big")


def named(name: bytes, value: bytes) -> bytes:
    """A property of a greeting."""
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
