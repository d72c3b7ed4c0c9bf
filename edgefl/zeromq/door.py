"""The door: the ZeroMQ socket to which peers (processes of a run) on other machines connect.

Connections use TCP with CURVE encryption and authentication. The public key of a connection determines the
name of its peer; names in messages are ignored. If a peer connects again with the same key, the newer
connection replaces the older one, so that a peer can reconnect immediately after a link failure. The number
of connections that have not yet sent a message is limited (`edgefl.zeromq.strangers`). TCP keep-alive detects
machines that have disappeared; the kernel does this even while a process is stopped.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import zmq

from edgefl.errors import ConfigError, RunError
from edgefl.zeromq import keys
from edgefl.zeromq.sockets import AT_ONCE, HANDSHAKE_MS, NOBLOCK, Dealer, Frame, Router, Unreachable
from edgefl.zeromq.strangers import Strangers, far_end, shut

VANISHED_S = 40
"""Seconds without a TCP acknowledgement after which a connection is closed."""
PROBE_S = 10
AGAIN_MS, MAX_AGAIN_MS = 100, 2000
"""Initial and maximum interval between attempts to connect, in milliseconds."""
BACKLOG = 1024
"""Maximum number of connections that may wait for ZeroMQ to accept them."""
LINGER_MS = 200
"""Time limit in milliseconds for sending the queued messages of a socket that is being closed."""
SEALED_BYTES = 64
"""Maximum number of bytes by which encryption lengthens a frame."""
_ADDRESS = re.compile(r"tcp://(?P<host>[^:/\[\]\s]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5}|\*)")


def endpoint(address: str, what: str, *, any_port: bool = False) -> tuple[str, str]:
    """Split the address ``tcp://HOST:PORT`` into host and port. If ``any_port`` is True, the port may be
    ``*``.

    Raises `ConfigError`, with a message that starts with ``what``, if the address is invalid.

    >>> endpoint("tcp://[::1]:7000", "--bind")
    ('[::1]', '7000')
    >>> endpoint("tcp://here:70000", "--bind")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: --bind: port must be from 1 to 65534, as the next one is used too (got 70000)
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or (found["port"] == "*" and not any_port):
        or_any = ", or tcp://HOST:* for any port" if any_port else ""
        raise ConfigError(f"{what}: must be tcp://HOST:PORT{or_any} (got {address!r})")
    if found["port"] != "*" and not 1 <= int(found["port"]) <= 65534:
        raise ConfigError(
            f"{what}: port must be from 1 to 65534, as the next one is used too (got {found['port']})"
        )
    return found["host"], found["port"]


class _Connection(NamedTuple):
    """A peer's connection: its ZeroMQ routing id and its file descriptor."""

    routing_id: bytes
    number: int


class DoorSocket(Router):
    """A ROUTER socket that listens at ``address``; ``secret`` is the server's secret key.

    The address is ``tcp://HOST:PORT``, or ``tcp://HOST:*`` for any free port. If ``anyone`` is True, every
    key is accepted, and the name of a peer is the first 16 hexadecimal digits of its key. Raises `RunError`
    if the socket cannot be bound to the address.
    """

    def __init__(self, address: str, secret: bytes, largest_bytes: int, *, anyone: bool = False) -> None:
        super().__init__(largest_bytes + SEALED_BYTES, b"CURVE", self._whose)
        self._anyone = anyone
        self._names: dict[bytes, bytes] = {}
        """Name of each admitted peer, keyed by its public key."""
        self._keys: dict[bytes, bytes] = {}
        self._connections: dict[bytes, _Connection] = {}
        self._far: dict[bytes, str] = {}
        self.key = keys.public(secret)
        self.moved = {"in": 0, "out": 0}
        """Total number of bytes in the frames that were received ("in") and sent ("out")."""
        router = self._socket
        router.curve_server, router.curve_secretkey = True, secret
        router.ipv6, router.backlog = "[" in address, BACKLOG
        _keep(router)
        self._strangers = Strangers(router, self._context, self._names, self._far)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            foreign = error.errno == errno.ENODEV
            why = "not an address of this host" if foreign else zmq.strerror(error.errno or 0)
            raise RunError(f"{address}: {why}") from None
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def admit(self, name: bytes, key: bytes) -> None:
        """Accept connections with this public key, and treat them as connections of the peer ``name``."""
        self._names[key], self._keys[name] = name, key

    def disconnect(self, name: bytes) -> None:
        """Disconnect a peer and stop accepting its key."""
        if (key := self._keys.pop(name, None)) is not None:
            del self._names[key]
        if (connection := self._connections.pop(name, None)) is not None:
            shut(connection.number, self._far.pop(name))

    def _whose(self, key: bytes) -> bytes:
        name = self._names.get(key, b"")
        if not name and self._anyone:
            name = key.hex()[:16].encode()
            self.admit(name, key)
        return name

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        """Yield the messages that have already arrived, each with the name of its sender, without waiting."""
        for _ in range(AT_ONCE):
            try:
                first = self._socket.recv(NOBLOCK, copy=False)
            except zmq.Again:
                return
            name = str(first.get("User-Id")).encode()
            frames = self._receive(headers=1)
            self.moved["in"] += sum(map(len, frames))
            if name in self._keys:
                with suppress(OSError):  # the connection is closed
                    self._use_latest_connection(name, first)
                yield name, frames

    def _use_latest_connection(self, name: bytes, first: Any) -> None:
        """From now on, send to the peer over the connection on which its message ``first`` arrived, unless
        the peer has a newer connection."""
        routing_id, line = first.bytes, self._connections.get(name)
        if line is None or (routing_id != line.routing_id and _is_later(routing_id, line.routing_id)):
            number = int(first.get("__fd"))
            far = far_end(number)
            if line is not None and far != self._far[name]:
                shut(line.number, self._far[name])
            self._connections[name], self._far[name] = _Connection(routing_id, number), far

    def send(self, name: bytes, frames: Sequence[Frame]) -> None:
        """Send a message without blocking. Raises `Full` if the send queue is full, and `Unreachable` if the
        peer is not connected."""
        if (connection := self._connections.get(name)) is None:
            raise Unreachable
        self._send_to(connection.routing_id, frames)
        self.moved["out"] += sum(map(len, frames))

    def close(self) -> None:
        self._strangers.close()
        self._context.destroy(linger=LINGER_MS)


def _is_later(routing_id: bytes, than: bytes) -> bool:
    """Return True if a connection is newer than another one, by comparing the sequence numbers in ZeroMQ's
    ids of the connections."""
    return 0 < (int.from_bytes(routing_id[1:]) - int.from_bytes(than[1:])) % 2**32 < 2**31


class CallerSocket(Dealer):
    """A DEALER socket that connects to the door at ``address``. ``secret`` is its own secret key, and ``key``
    is the public key of the door.

    The socket retries until it is accepted, and reconnects after a link failure, which loses the messages in
    transit. If ``events`` is not 0, the socket `_monitor` reports these events of the ZeroMQ connection.
    """

    def __init__(self, address: str, secret: bytes, key: bytes, *, events: int = 0) -> None:
        super().__init__()
        dealer = self._socket
        dealer.curve_secretkey, dealer.curve_publickey = secret, keys.public(secret)
        dealer.curve_serverkey = key
        dealer.immediate = True
        dealer.handshake_ivl = dealer.connect_timeout = HANDSHAKE_MS
        dealer.reconnect_ivl, dealer.reconnect_ivl_max = AGAIN_MS, MAX_AGAIN_MS
        dealer.ipv6 = "[" in address
        _keep(dealer)
        if events:
            self._monitor = dealer.get_monitor_socket(events)
            self._poller.register(self._monitor, zmq.POLLIN)
        dealer.connect(address)


def _keep(socket: zmq.Socket[bytes]) -> None:
    """Enable TCP keep-alive, and close a connection after `VANISHED_S` seconds without an acknowledgement."""
    socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, PROBE_S, PROBE_S
    socket.tcp_keepalive_cnt = VANISHED_S // PROBE_S - 1
    socket.tcp_maxrt = 1000 * VANISHED_S
