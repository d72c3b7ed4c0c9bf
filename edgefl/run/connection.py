"""ZeroMQ connections between the server (a ROUTER socket) and its peers (a DEALER socket each).

On the server's host, the server connects and the peers listen. Nobody there can connect to the server, so
nobody can exhaust its memory or descriptors with unauthenticated connections. Each peer has an address that
cannot be guessed. On Linux the address is in the abstract namespace, and ZeroMQ's filter by process id
(checked by the kernel) accepts only the server; elsewhere the socket is in a new folder of mode 0700. A peer
must present the password that belongs to its name (ZeroMQ's PLAIN mechanism) before its messages are read.
Peers on other hosts connect to the server's door, an encrypted TCP socket (`edgefl.zeromq.door`). Neither end
trusts the bytes that it receives: `edgefl.run.messages` checks them.
"""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq

from edgefl.devices.link import Disconnected
from edgefl.errors import SlotError, WireError, message_of
from edgefl.host.memory import is_no_memory
from edgefl.run import control, messages
from edgefl.terminal import printable
from edgefl.zeromq import keys
from edgefl.zeromq.door import LINGER_MS, CallerSocket, DoorSocket
from edgefl.zeromq.sockets import AT_ONCE, Dealer, Frame, Full, Router, Unreachable

ABSTRACT = "ipc://@edgefl-"
Message = tuple[messages.FromServer, Sequence[Frame]]
"""A message from the server, and its payload frames."""

CONNECTS_PER_S = 5000
"""Maximum number of connection attempts per second, in total for all peers that are still starting."""
FINE_WAIT_NS = 2_000_000
"""The wait on a socket ends this many nanoseconds before a deadline, because sockets can wait only for whole
milliseconds; a sleep covers the rest."""
SEND_WAIT_MS = 100
BEAT = (messages.encode(messages.Beat()),)
_MS_NS = 1_000_000


class ServerSocket(Router):
    """The server's ROUTER socket, which connects to the peers on this host.

    Peers on other hosts connect to ``door``, an address of the form ``tcp://HOST:PORT``.
    """

    def __init__(self, largest_bytes: int, door: str = "") -> None:
        super().__init__(largest_bytes, b"PLAIN", self._whose)
        self.secret = secrets.token_hex(32)
        self._socket.plain_server = True
        self._addresses: dict[bytes, str] = {}
        """Addresses of the peers, keyed by the peers' names."""
        self._folder: str | None = None
        try:  # let the kernel reject other processes at the peers' sockets
            if sys.platform != "linux":
                raise AttributeError
            self._socket.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
            self.root = ABSTRACT
        except (zmq.ZMQError, AttributeError):
            self._folder = tempfile.mkdtemp(prefix="edgefl-")  # mode 0700
            self.root = f"ipc://{self._folder}/"
        self._door = DoorSocket(door, os.urandom(32), largest_bytes) if door else None
        if self._door is not None:
            self.beside(self._door)

    @property
    def listening(self) -> control.Listening:
        """The addresses and secrets that the peers of this server need."""
        where = (self._door.address, self._door.key) if self._door is not None else ()
        return control.Listening(self.root, self.secret, os.getpid(), *where)

    def connect(self, name: bytes) -> None:
        """Connect to a peer, which may not be listening yet. Each name can be used only once per run."""
        router = self._socket
        self._addresses[name] = where = control.address(self.root, self.secret, name)
        router.reconnect_ivl = max(10, 1000 * len(self._addresses) // CONNECTS_PER_S)
        router.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        router.connect(where)

    def admit(self, name: bytes) -> None:
        """Let the peer with this name connect to the door (the socket for peers on other hosts)."""
        assert self._door is not None, "this run has no door"
        self._door.admit(name, keys.public(control.secret_key(control.password(self.secret, name))))

    @property
    def network(self) -> dict[str, int]:
        """Total numbers of bytes received ("in") and sent ("out") through the door, the socket for peers on
        other hosts; empty if the run has no door."""
        return {} if self._door is None else dict(self._door.moved)

    def refused(self) -> str:
        """Return why this process cannot open a socket, or "" if it can.

        ZeroMQ does not report the reason: it silently retries forever.
        """
        try:
            socket.socket(socket.AF_UNIX).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def disconnect(self, name: bytes) -> None:
        """Disconnect a peer and drop its incomplete messages."""
        if (where := self._addresses.pop(name, None)) is not None:
            self._socket.disconnect(where)
        elif self._door is not None:
            self._door.disconnect(name)

    def _whose(self, name: bytes, password: bytes) -> bytes:
        known = hmac.compare_digest(password, control.password(self.secret, name).encode())
        return name if known else b""

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        """Yield the messages that have arrived, each with its sender's name, without blocking."""
        for _ in range(AT_ONCE):
            try:
                frames = self._receive(headers=2)
            except zmq.Again:
                break
            yield bytes(frames[0]), frames[1:]
        if self._door is not None:
            yield from self._door.receive()

    def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Send without blocking. Raises `Full` or `Unreachable` on failure."""
        if peer in self._addresses:
            self._send_to(peer, frames)
        elif self._door is not None:
            self._door.send(peer, frames)
        else:
            raise Unreachable

    def close(self) -> None:
        """Close the socket and remove its folder."""
        if self._door is not None:
            self._door.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._context.destroy(linger=LINGER_MS)


class PeerSocket(Dealer):
    """A DEALER socket that listens at ``address`` for the process whose id is ``server``.

    The socket queues messages only while it is connected.
    """

    def __init__(self, address: str, name: bytes, password: str, server: int) -> None:
        super().__init__()
        self._socket.plain_username, self._socket.plain_password = name, password.encode()
        if address.startswith(ABSTRACT):
            self._socket.setsockopt(zmq.IPC_FILTER_PID, server)
        self._socket.bind(address)


class Cancelled(Exception):
    """The server has cancelled the task that this peer is carrying out."""


class Leave(Exception):
    """The run has ended, or the parent of this process is dead."""


def _socket_of(spec: control.Spawn) -> Dealer:
    if spec.key:
        return CallerSocket(spec.address, control.secret_key(spec.password), spec.key)
    name = control.routing_id(spec.role, spec.peer, spec.epoch)
    return PeerSocket(spec.address, name, spec.password, spec.server)


def of_training(error: Exception) -> bool:
    """Return True if the error comes from the user's model or training, so that only the task fails."""
    others = (Cancelled, Leave, SlotError, WireError, Disconnected)
    cause = error.__cause__  # an error in the user's own function or loss is wrapped in an error of edgefl
    no_memory = is_no_memory(error) or (cause is not None and is_no_memory(cause))
    return not (isinstance(error, others) or no_memory)


def reason(error: Exception) -> str:
    """Describe a training error in one line."""
    return printable(f"{type(error).__name__}: {message_of(error)}".partition("\n")[0][:300])


class Connection:
    """A peer's connection to the server; it sends heartbeats even while it waits."""

    def __init__(self, spec: control.Spawn, heartbeat_s: float, lifeline: int) -> None:
        self._spec = spec
        self._socket = _socket_of(spec)
        self._socket.watch(lifeline)
        self._beat_ns = int(heartbeat_s * 1e9 / 3)
        self._beat_ms = self._beat_ns // _MS_NS
        self._next_beat_ns = time.monotonic_ns() + self._beat_ns
        self.task: int | None = None
        self._queued: deque[Message] = deque()
        self._unanswered: Sequence[Frame] | None = None
        """Frames of the last result or `Ready` message; None once the server has sent the next task."""
        self._latest = -1

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message, and wait while the queue to the server is full.

        Raises `Leave` if the parent is dead.
        """
        while True:
            try:
                self._socket.send(frames)
            except Full:
                if self._socket.wait_to_send(SEND_WAIT_MS):
                    raise Leave from None
            else:
                self._next_beat_ns = time.monotonic_ns() + self._beat_ns
                return

    def report(self, message: messages.FromClient) -> None:
        """Send a message, and repeat it at each heartbeat while this peer is idle, in case it was lost."""
        self._unanswered = (messages.encode(message),)
        self.send(self._unanswered)

    def serve(self, answer: Callable[[messages.FromServer, Sequence[Frame]], None]) -> None:
        """Send `Ready`, then pass every message to ``answer`` until the server sends `Bye`."""
        spec = self._spec
        try:
            self.report(messages.Ready(spec.peer, spec.epoch, spec.role, spec.password))
            while True:
                message, frames = self.receive()
                if isinstance(message, messages.Bye):
                    return
                answer(message, frames)
        except Leave:
            pass
        finally:
            self._socket.close()

    def attempt(self, task: messages.Task, carry_out: Callable[[], None]) -> None:
        """Carry out a task; if the task fails, return it to the server with a one-line reason.

        Raises `MemoryError` if memory runs out, even if torch raises another exception.
        """
        try:
            carry_out()
        except Cancelled:
            self.return_task(task, "cancelled")
        except (Leave, MemoryError):
            raise
        except (SlotError, WireError, Disconnected) as error:
            self.return_task(task, str(error))
        except Exception as error:  # a user's model may raise anything, and only the task fails
            if not of_training(error):
                raise MemoryError(str(error)) from error
            self.return_task(task, reason(error))

    def return_task(self, task: messages.Task, reason: str) -> None:
        self.report(messages.Gone(task.client, task.task, printable(reason), task.order))

    def receive(self) -> Message:
        """Wait for the next message; return it with its payload frames."""
        if self._queued:
            return self._queued.popleft()
        while (message := self._receive(self._beat_ms)) is None:
            self._wait(0)
        return message

    def poll(self) -> Message | None:
        """Return the next message without waiting, or None if no message has arrived."""
        return self._queued.popleft() if self._queued else self._receive()

    def wait_until(self, deadline_ns: int) -> None:
        """Wait until ``deadline_ns``, a time of the monotonic clock in nanoseconds.

        Raises `Cancelled` if the server cancels the task.
        """
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            if left_ns >= FINE_WAIT_NS + _MS_NS:  # the socket cannot wait for less than 1 ms
                self._wait(max(1, min(left_ns - FINE_WAIT_NS, self._beat_ns) // _MS_NS))
                self.check()
            else:
                time.sleep(left_ns * 1e-9)

    def beat(self) -> None:
        """Send a heartbeat if one is due. Raises `Leave` if the parent is dead."""
        if time.monotonic_ns() >= self._next_beat_ns:
            self._wait(0)

    def check(self) -> None:
        """Raise `Cancelled` if the server has cancelled the current task, and `Leave` after `Bye`; queue all
        other messages until the task has ended."""
        while (got := self._receive()) is not None:
            match got[0]:
                case messages.Withdraw(tasks=tasks) if self.task in tasks:
                    raise Cancelled
                case messages.Bye():
                    raise Leave
                case _:
                    self._queued.append(got)

    def _receive(self, timeout_ms: int = 0) -> Message | None:
        frames = self._socket.receive(timeout_ms)
        if frames is None:
            return None
        message = messages.decode_from_server(frames[0])
        if isinstance(message, messages.Tasks | messages.Assess):
            if message.number <= self._latest:
                return None  # a repeated or late message
            self._latest, self._unanswered = message.number, None
        return message, frames[1:]

    def _wait(self, timeout_ms: int) -> None:
        if self._socket.wait(timeout_ms):
            raise Leave
        if time.monotonic_ns() >= self._next_beat_ns:
            self.send(BEAT if self._unanswered is None or self.task is not None else self._unanswered)
