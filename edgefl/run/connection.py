"""The connection between the server and its peers: messages of frames, whoever carries them.

    local.py     a kernel socket for each peer: headers only, on one host (Linux)
    zeromq.py    ROUTER and DEALER: headers and payload frames of any size
    endpoint.py  where the ROUTER is bound

The `shm` transport needs nothing but headers. A local socket carries them for a quarter of the CPU time that
ZeroMQ takes, whose I/O threads wake up twice a message, and spares each client two threads. The `wire`
transport, and `shm` where there are no such sockets, use ZeroMQ. Neither end trusts what comes in: a sender
is known by its connection, and `edgefl.run.messages` reads the bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

Frame = bytes | memoryview

AT_ONCE = 256
"""Most messages that are taken in before the server looks at its other duties."""


class Full(Exception):
    """The other side has not taken what was sent before."""


class Unreachable(Exception):
    """The other side is gone, or was never there."""


class ServerSocket(Protocol):
    """The server's end of all connections."""

    address: str

    def watch(self, fd: int) -> None:
        """Have `wait` look at this descriptor too."""

    def wait(self, timeout_ms: int) -> bool:
        """Until a message may have arrived, or the time is over; whether a watched descriptor is ready."""

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        """What has arrived, with its senders' names, without waiting."""

    def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Send without waiting; `Full` or `Unreachable` if that cannot be done."""

    def close(self) -> None: ...


class PeerSocket(Protocol):
    """A peer's connection to the server."""

    def watch(self, fd: int) -> None:
        """Have `wait` look at this descriptor too."""

    def wait(self, timeout_ms: int, *, to_send: bool = False) -> bool:
        """Until a message may have arrived (or one may be sent), or the time is over; whether a watched
        descriptor is ready."""

    def receive(self, timeout_ms: int = 0) -> Sequence[Frame] | None:
        """A message that has arrived, or does before the time is over, else None; `Unreachable` once the
        server is gone. Watched descriptors may, but need not, end it earlier."""

    def send(self, frames: Sequence[Frame]) -> None:
        """Send without waiting; `Full` or `Unreachable` if that cannot be done."""

    def close(self) -> None: ...


def bind(transport: str, largest_bytes: int) -> ServerSocket:
    """The server's socket for a transport, with an address of its own; ``largest_bytes`` bounds a frame."""
    if transport == "shm" and sys.platform == "linux":
        from edgefl.run.local_sockets import LocalServer

        return LocalServer()
    from edgefl.run.zeromq_sockets import ZeroMQServer

    return ZeroMQServer(largest_bytes)


def connect(address: str, name: bytes) -> PeerSocket:
    """A connection to the server at ``address`` under ``name``. `Unreachable` if nobody is there."""
    if address.startswith("local://"):
        from edgefl.run.local_sockets import LocalPeer

        return LocalPeer(address, name)
    from edgefl.run.zeromq_sockets import ZeroMQPeer

    return ZeroMQPeer(address, name)
