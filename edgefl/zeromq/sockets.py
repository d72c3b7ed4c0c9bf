"""A ZeroMQ socket of the run: frames in and out without waiting, and who is let in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

Frame = bytes | memoryview
Whose = Callable[..., bytes]
"""Returns the name of the one who has these credentials, b"" if that is nobody."""

AT_ONCE = 256
"""Most messages that are taken in before their reader looks at its other duties."""
LENT_BYTES = 1024 * 1024
"""Frames from this size on are lent to ZeroMQ and not copied: models. What may change is always copied."""
PEER_LINGER_MS = 1000
HANDSHAKE_MS = 10_000
"""Milliseconds that a connection may take to say whose it is."""
DOMAIN = b"edgefl"
NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)


class Full(Exception):
    """The other side has not taken what was sent before."""


class Unreachable(Exception):
    """The other side is gone, or was never there."""


class ZmqSocket:
    """A socket of its own context, and descriptors that are watched beside it."""

    def __init__(self, kind: int, marks: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = marks
        self._poller = zmq.Poller()
        self._poller.register(self._socket, _POLLIN)
        self._watched: set[int] = set()

    def watch(self, fd: int) -> None:
        """Have `wait` look at this descriptor too."""
        self._poller.register(fd, _POLLIN)
        self._watched.add(fd)

    def wait(self, timeout_ms: int) -> bool:
        """Wait for a message, at most so long; true if a watched descriptor is ready."""
        return any(which in self._watched for which, _ in self._poller.poll(timeout_ms))

    def _send(self, frames: Sequence[Frame]) -> None:
        """Send without waiting, in a third of ``send_multipart``'s time; `zmq.ZMQError` if it cannot."""
        for frame in frames[:-1]:
            self._socket.send(frame, _MORE)
        last = frames[-1]
        self._socket.send(last, NOBLOCK, copy=not (isinstance(last, bytes) and len(last) >= LENT_BYTES))

    def _receive(self, headers: int) -> list[Frame]:
        """The frames of a message that has arrived; `zmq.Again` if none has.

        Those after the first ``headers`` may be large: they stay where ZeroMQ has them, read only.
        """
        frames: list[Frame] = [self._socket.recv(NOBLOCK)]
        while self._socket.getsockopt(_RCVMORE):
            if len(frames) < headers:
                frames.append(self._socket.recv(NOBLOCK))
            else:
                frames.append(self._socket.recv(NOBLOCK, copy=False).buffer)
        return frames


class Entrance:
    """Answers ZeroMQ's question whom to let in (its RFC 27).

    Those come in who use ``mechanism`` and whose credentials ``whose`` knows, under the name that it says.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], mechanism: bytes, whose: Whose) -> None:
        self._mechanism, self._whose = mechanism, whose
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer what has been asked; if that is much, a part of it."""
        with suppress(zmq.Again):
            for _ in range(AT_ONCE):
                version, number, domain, _, _, mechanism, *credentials = self.socket.recv_multipart(NOBLOCK)
                fits = (domain, mechanism) == (DOMAIN, self._mechanism)
                name = self._whose(*credentials) if fits else b""
                verdict = (b"200", b"", name) if name else (b"400", b"not known", b"")
                self.socket.send_multipart([version, number, *verdict, b""])


class Router(ZmqSocket):
    """A ROUTER that lets in whom its entrance knows; no frame may be larger than ``largest_bytes``.

    A high-water mark counts messages, whatever their size; each peer has one task at a time, so few do.
    """

    def __init__(self, largest_bytes: int, mechanism: bytes, whose: Whose) -> None:
        super().__init__(zmq.ROUTER, marks=8)
        self._socket.zap_domain = DOMAIN
        self._socket.handshake_ivl = HANDSHAKE_MS
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = largest_bytes
        entrance = Entrance(self._context, mechanism, whose)
        self._entrances = {entrance.socket: entrance}
        self._poller.register(entrance.socket, _POLLIN)

    def beside(self, other: Router) -> None:
        """Have `wait` wait for the other's messages too, and look after its entrance."""
        self._poller.register(other._socket, _POLLIN)
        self._entrances |= other._entrances
        for asked in other._entrances:
            self._poller.register(asked, _POLLIN)

    def wait(self, timeout_ms: int) -> bool:
        watched = False
        for which, _ in self._poller.poll(timeout_ms):
            if which in self._watched:
                watched = True
            elif (entrance := self._entrances.get(which)) is not None:
                entrance.answer()
        return watched

    def _send_to(self, routing_id: bytes, frames: Sequence[Frame]) -> None:
        """Send without waiting; `Full` or `Unreachable` if that cannot be done."""
        message = [routing_id, *frames]
        try:
            try:
                self._send(message)
            except zmq.Again:
                # ZeroMQ looks a thousand times a second whether a peer has taken what was sent before, and
                # one that is fast takes more small messages in that time: have it look, then judge.
                self._socket.getsockopt(_EVENTS)
                self._send(message)
        except zmq.Again:
            raise Full from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise Unreachable from None


class Dealer(ZmqSocket):
    """A peer's DEALER; it queues only for a server that is there."""

    def __init__(self) -> None:
        super().__init__(zmq.DEALER, marks=16)

    def wait_to_send(self, timeout_ms: int) -> bool:
        """Wait for room to send, at most so long; true if a watched descriptor is ready."""
        self._socket.poll(timeout_ms, zmq.POLLOUT)
        return self.wait(0)

    def receive(self, timeout_ms: int = 0) -> Sequence[Frame] | None:
        """A message that has arrived, or does before the time is over or a watched descriptor is ready."""
        if timeout_ms:
            self._poller.poll(timeout_ms)
        # Nothing is there most of the time: to look first costs half of what an exception does.
        return self._receive(headers=1) if int(self._socket.getsockopt(_EVENTS)) & _POLLIN else None

    def send(self, frames: Sequence[Frame]) -> None:
        """Send without waiting; `Full` if that cannot be done."""
        try:
            self._send(frames)
        except zmq.Again:
            raise Full from None

    def close(self) -> None:
        """Close it, once what was sent has left or a second is over."""
        self._socket.close(linger=PEER_LINGER_MS)
        self._context.term()
