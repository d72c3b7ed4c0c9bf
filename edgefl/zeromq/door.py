"""A run's way in from other hosts: ZeroMQ over TCP, encrypted and open to admitted keys only (CURVE).

Who comes is known by its key: the name of a message's sender is what ZeroMQ's own question about the key was
answered with, never what the sender says. Where a key comes a second time the later connection holds, so that
a peer whose link broke is back at once. Few connections may have said nothing yet: `edgefl.zeromq.strangers`.
A host that vanished is found by TCP itself, in the kernel, which a process that is stopped does not disturb.
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
"""Seconds after which a host that acknowledges nothing is gone."""
PROBE_S = 10
AGAIN_MS, MOST_AGAIN_MS = 100, 2000
"""Milliseconds until a peer tries again to reach the door, at first and at most."""
BACKLOG = 1024
"""Connections that may wait until ZeroMQ takes them."""
LINGER_MS = 200
SEALED_BYTES = 64
"""By which a frame grows that is encrypted, at most."""
_ADDRESS = re.compile(r"tcp://(?P<host>[^:/\[\]\s]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5}|\*)")


def endpoint(address: str, what: str, *, any_port: bool = False) -> tuple[str, str]:
    """Host and port of ``tcp://HOST:PORT``, the address of ``what``; with ``any_port`` that may be ``*``.

    >>> endpoint("tcp://[::1]:7000", "--bind")
    ('[::1]', '7000')
    >>> endpoint("tcp://here:70000", "--bind")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: --bind: port must be from 1 to 65534, as the next is used too (got 70000)
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or (found["port"] == "*" and not any_port):
        or_any = ", or tcp://HOST:* for any port" if any_port else ""
        raise ConfigError(f"{what}: must be tcp://HOST:PORT{or_any} (got {address!r})")
    if found["port"] != "*" and not 1 <= int(found["port"]) <= 65534:
        raise ConfigError(
            f"{what}: port must be from 1 to 65534, as the next is used too (got {found['port']})"
        )
    return found["host"], found["port"]


class _Line(NamedTuple):
    """A name's connection: what ZeroMQ calls it, and its descriptor."""

    routing_id: bytes
    number: int


class DoorSocket(Router):
    """The ROUTER at ``address`` (``tcp://HOST:PORT``, or ``*`` as port), with the server's ``secret`` key.

    Raises `RunError` where that address cannot be had. ``anyone`` lets every key in, under a name of the key.
    """

    def __init__(self, address: str, secret: bytes, largest_bytes: int, *, anyone: bool = False) -> None:
        super().__init__(largest_bytes + SEALED_BYTES, b"CURVE", self._whose)
        self._anyone = anyone
        self._names: dict[bytes, bytes] = {}
        """By public key."""
        self._keys: dict[bytes, bytes] = {}
        self._lines: dict[bytes, _Line] = {}
        self._far: dict[bytes, str] = {}
        self.key = keys.public(secret)
        self.moved = {"in": 0, "out": 0}
        """Bytes of frames."""
        router = self._socket
        router.curve_server, router.curve_secretkey = True, secret
        router.ipv6, router.backlog = "[" in address, BACKLOG
        _keep(router)
        self._strangers = Strangers(router, self._context, self._names, self._far)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            why = "no address of this host" if error.errno == errno.ENODEV else zmq.strerror(error.errno or 0)
            raise RunError(f"{address}: {why}") from None
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def admit(self, name: bytes, key: bytes) -> None:
        """Let in the one who has the secret of this public key, under this name, from now on."""
        self._names[key], self._keys[name] = name, key

    def hang_up(self, name: bytes) -> None:
        """Let in this one no more, and hear no more of it."""
        if (key := self._keys.pop(name, None)) is not None:
            del self._names[key]
        if (line := self._lines.pop(name, None)) is not None:
            shut(line.number, self._far.pop(name))

    def _whose(self, key: bytes) -> bytes:
        name = self._names.get(key, b"")
        if not name and self._anyone:
            name = key.hex()[:16].encode()
            self.admit(name, key)
        return name

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        """Messages that have arrived, each with its sender's name, without waiting."""
        for _ in range(AT_ONCE):
            try:
                first = self._socket.recv(NOBLOCK, copy=False)
            except zmq.Again:
                return
            name = str(first.get("User-Id")).encode()
            frames = self._receive(headers=1)
            self.moved["in"] += sum(map(len, frames))
            if name in self._keys:
                with suppress(OSError):  # that connection has ended
                    self._comes_by(name, first)
                yield name, frames

    def _comes_by(self, name: bytes, first: Any) -> None:
        """Note by which connection this name speaks: the latest."""
        routing_id, line = first.bytes, self._lines.get(name)
        if line is None or (routing_id != line.routing_id and _is_later(routing_id, line.routing_id)):
            number = int(first.get("__fd"))
            far = far_end(number)
            if line is not None and far != self._far[name]:
                shut(line.number, self._far[name])
            self._lines[name], self._far[name] = _Line(routing_id, number), far

    def send(self, name: bytes, frames: Sequence[Frame]) -> None:
        """Send without waiting; `Full` or `Unreachable` if that cannot be done."""
        if (line := self._lines.get(name)) is None:
            raise Unreachable
        self._send_to(line.routing_id, frames)
        self.moved["out"] += sum(map(len, frames))

    def close(self) -> None:
        self._strangers.close()
        self._context.destroy(linger=LINGER_MS)


def _is_later(routing_id: bytes, than: bytes) -> bool:
    """Returns True if this connection was made after that one: ZeroMQ numbers them."""
    return 0 < (int.from_bytes(routing_id[1:]) - int.from_bytes(than[1:])) % 2**32 < 2**31


class CallerSocket(Dealer):
    """A DEALER that comes to the door at ``address`` with its ``secret`` key; ``key`` is the door's own.

    It tries until it is let in, and again where its link breaks; what was on the way then is lost. Of its
    connection's ``events`` (ZeroMQ's, from the first on) `_monitor` tells.
    """

    def __init__(self, address: str, secret: bytes, key: bytes, *, events: int = 0) -> None:
        super().__init__()
        dealer = self._socket
        dealer.curve_secretkey, dealer.curve_publickey = secret, keys.public(secret)
        dealer.curve_serverkey = key
        dealer.immediate = True
        dealer.handshake_ivl = dealer.connect_timeout = HANDSHAKE_MS
        dealer.reconnect_ivl, dealer.reconnect_ivl_max = AGAIN_MS, MOST_AGAIN_MS
        dealer.ipv6 = "[" in address
        _keep(dealer)
        if events:
            self._monitor = dealer.get_monitor_socket(events)
            self._poller.register(self._monitor, zmq.POLLIN)
        dealer.connect(address)


def _keep(socket: zmq.Socket[bytes]) -> None:
    """Have TCP find out that the other host is gone."""
    socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, PROBE_S, PROBE_S
    socket.tcp_keepalive_cnt = VANISHED_S // PROBE_S - 1
    socket.tcp_maxrt = 1000 * VANISHED_S
