"""Non-blocking ZeroMQ sockets with authentication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

Frame = bytes | memoryview
Whose = Callable[..., bytes]
"""A function that returns the name of the peer with the given credentials, or b"" if they are unknown."""

AT_ONCE = 256
"""Maximum number of messages that are read in one iteration of a process's main loop."""
ZERO_COPY_BYTES = 1024 * 1024
"""Minimum size, in bytes, of an immutable frame (such as a model) that is sent without a copy."""
PEER_LINGER_MS = 1000
HANDSHAKE_MS = 10_000
"""Time limit for the handshake of a connection, in milliseconds."""
DOMAIN = b"edgefl"
NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)


class Full(Exception):
    """The send queue is full, because the peer does not read its messages."""


class Unreachable(Exception):
    """The peer is not connected."""


class ZmqSocket:
    """A ZeroMQ socket with a context of its own, and file descriptors that are polled together with it."""

    def __init__(self, kind: int, marks: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = marks
        self._poller = zmq.Poller()
        self._poller.register(self._socket, _POLLIN)
        self._watched: set[int] = set()

    def watch(self, fd: int) -> None:
        """Make `wait` also poll this file descriptor."""
        self._poller.register(fd, _POLLIN)
        self._watched.add(fd)

    def wait(self, timeout_ms: int) -> bool:
        """Wait up to ``timeout_ms`` until a message or a watched file descriptor is ready to be read; return
        True if a file descriptor is ready."""
        return any(which in self._watched for which, _ in self._poller.poll(timeout_ms))

    def _send(self, frames: Sequence[Frame]) -> None:
        """Send a message without blocking. This takes a third of the time of ``send_multipart``. Raises
        `zmq.ZMQError` if the message cannot be sent."""
        for frame in frames[:-1]:
            self._socket.send(frame, _MORE)
        last = frames[-1]
        self._socket.send(last, NOBLOCK, copy=not (isinstance(last, bytes) and len(last) >= ZERO_COPY_BYTES))

    def _receive(self, headers: int) -> list[Frame]:
        """Return the frames of the next message. Raises `zmq.Again` if there is no message.

        Frames after the first ``headers`` frames may be large. They are not copied, but returned as read-only
        views of ZeroMQ's memory.
        """
        frames: list[Frame] = [self._socket.recv(NOBLOCK)]
        while self._socket.getsockopt(_RCVMORE):
            if len(frames) < headers:
                frames.append(self._socket.recv(NOBLOCK))
            else:
                frames.append(self._socket.recv(NOBLOCK, copy=False).buffer)
        return frames


class ZapAuthenticator:
    """Authenticates connections with ZeroMQ's authentication protocol, ZAP (ZeroMQ RFC 27).

    A connection is accepted if it uses the security ``mechanism`` and if the function ``whose`` returns a
    name for its credentials. This name becomes the name of the peer.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], mechanism: bytes, whose: Whose) -> None:
        self._mechanism, self._whose = mechanism, whose
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer up to `AT_ONCE` pending authentication requests."""
        with suppress(zmq.Again):
            for _ in range(AT_ONCE):
                version, number, domain, _, _, mechanism, *credentials = self.socket.recv_multipart(NOBLOCK)
                fits = (domain, mechanism) == (DOMAIN, self._mechanism)
                name = self._whose(*credentials) if fits else b""
                verdict = (b"200", b"", name) if name else (b"400", b"not known", b"")
                self.socket.send_multipart([version, number, *verdict, b""])


class Router(ZmqSocket):
    """A ROUTER socket with authentication. A received message may have at most ``largest_bytes``.

    The high-water mark, which limits the number of queued messages, is low because messages may be large and
    because a peer has only one task at a time.
    """

    def __init__(self, largest_bytes: int, mechanism: bytes, whose: Whose) -> None:
        super().__init__(zmq.ROUTER, marks=8)
        self._socket.zap_domain = DOMAIN
        self._socket.handshake_ivl = HANDSHAKE_MS
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = largest_bytes
        authenticator = ZapAuthenticator(self._context, mechanism, whose)
        self._authenticators = {authenticator.socket: authenticator}
        self._poller.register(authenticator.socket, _POLLIN)

    def beside(self, other: Router) -> None:
        """Make `wait` also poll another router, and answer that router's authentication requests."""
        self._poller.register(other._socket, _POLLIN)
        self._authenticators |= other._authenticators
        for asked in other._authenticators:
            self._poller.register(asked, _POLLIN)

    def wait(self, timeout_ms: int) -> bool:
        watched = False
        for which, _ in self._poller.poll(timeout_ms):
            if which in self._watched:
                watched = True
            elif (authenticator := self._authenticators.get(which)) is not None:
                authenticator.answer()
        return watched

    def _send_to(self, routing_id: bytes, frames: Sequence[Frame]) -> None:
        """Send a message to a peer without blocking. Raises `Full` if the send queue is full, and
        `Unreachable` if the peer is not connected."""
        message = [routing_id, *frames]
        try:
            try:
                self._send(message)
            except zmq.Again:
                # ZeroMQ updates the state of the send queue only about 1,000 times per second. Reading the
                # events forces an update, so that a fast peer is not mistaken for a peer that does not read.
                self._socket.getsockopt(_EVENTS)
                self._send(message)
        except zmq.Again:
            raise Full from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise Unreachable from None


class Dealer(ZmqSocket):
    """A peer's DEALER socket."""

    def __init__(self) -> None:
        super().__init__(zmq.DEALER, marks=16)

    def wait_to_send(self, timeout_ms: int) -> bool:
        """Wait up to ``timeout_ms`` until the send queue has room; return True if a watched file descriptor
        is ready."""
        self._socket.poll(timeout_ms, zmq.POLLOUT)
        return self.wait(0)

    def receive(self, timeout_ms: int = 0) -> Sequence[Frame] | None:
        """Return the next message, or None if no message has arrived when the timeout expires or a watched
        file descriptor becomes ready."""
        if timeout_ms:
            self._poller.poll(timeout_ms)
        # Usually there is no message; checking first costs half as much as an exception.
        return self._receive(headers=1) if int(self._socket.getsockopt(_EVENTS)) & _POLLIN else None

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message without blocking. Raises `Full` if the send queue is full."""
        try:
            self._send(frames)
        except zmq.Again:
            raise Full from None

    def close(self) -> None:
        """Close the socket when the queued messages have been sent, or after one second at the latest."""
        self._socket.close(linger=PEER_LINGER_MS)
        self._context.term()
