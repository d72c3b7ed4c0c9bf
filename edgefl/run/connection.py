"""The connection between server and peers: ZeroMQ, a ROUTER at the server and a DEALER at each peer.

On its own host the server calls and the peers answer: nobody can connect to the server, so nobody can fill
its memory or its descriptors with connections that never say whose they are. Each peer waits at an address of
its own that only the run can know. On Linux that is in the abstract namespace, and the kernel's word on who
connects lets the server's process in and no other, of this user or another; elsewhere it is a socket in a
fresh 0700 folder. Who answers must know the password of its name (ZeroMQ's PLAIN) before a message of it is
taken in, and has the name that the server called. Peers on other hosts come to the server's door
(`edgefl.zeromq.door`). Neither end trusts what comes in: `edgefl.run.messages` reads the bytes.
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
from edgefl.errors import SlotError, WireError
from edgefl.run import control, messages
from edgefl.terminal import printable
from edgefl.zeromq import keys
from edgefl.zeromq.door import CallerSocket, DoorSocket
from edgefl.zeromq.sockets import AT_ONCE, Dealer, Frame, Full, Router, Unreachable

ABSTRACT = "ipc://@edgefl-"
Message = tuple[messages.FromServer, Sequence[Frame]]
"""A message of the server and its payload frames."""

LINGER_MS = 200
"""Milliseconds that the server's last messages may take to leave."""
CALLS_PER_S = 5000
"""Most attempts a second to reach peers that are still starting, all together."""
FINE_WAIT_NS = 2_000_000
"""A socket's wait is whole milliseconds: it ends so long before a deadline, and the rest is slept."""
SEND_WAIT_MS = 100
BEAT = (messages.encode(messages.Beat()),)
_MS_NS = 1_000_000


class ServerSocket(Router):
    """The ROUTER that calls its peers; with a ``door`` (``tcp://HOST:PORT``) others come to that by TCP."""

    def __init__(self, largest_bytes: int, door: str = "") -> None:
        super().__init__(largest_bytes, b"PLAIN", self._whose)
        self.secret = secrets.token_hex(32)
        self._socket.plain_server = True
        self._called: dict[bytes, str] = {}
        """The peers' addresses."""
        self._folder: str | None = None
        try:  # have the kernel refuse other processes, at the peers
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
        """All that is needed to start this server's peers."""
        where = (self._door.address, self._door.key) if self._door is not None else ()
        return control.Listening(self.root, self.secret, os.getpid(), *where)

    def call(self, name: bytes) -> None:
        """Connect to the peer of this name, now or as soon as it is there. A name is called once in a run."""
        router = self._socket
        self._called[name] = where = control.address(self.root, self.secret, name)
        router.reconnect_ivl = max(10, 1000 * len(self._called) // CALLS_PER_S)
        router.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        router.connect(where)

    def admit(self, name: bytes) -> None:
        """Let the peer of this name in at the door, from now on."""
        assert self._door is not None, "this run has no door"
        self._door.admit(name, keys.public(control.secret_key(control.password(self.secret, name))))

    @property
    def network(self) -> dict[str, int]:
        """Bytes of all frames that came in by the door, and that went out."""
        return {} if self._door is None else dict(self._door.moved)

    def refused(self) -> str:
        """The reason why this process may open no socket now; "" if it may.

        ZeroMQ does not say why it does not reach a peer: it tries again, for good.
        """
        try:
            socket.socket(socket.AF_UNIX).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def hang_up(self, name: bytes) -> None:
        """Hear this peer no more; what it had begun to say is forgotten."""
        if (where := self._called.pop(name, None)) is not None:
            self._socket.disconnect(where)
        elif self._door is not None:
            self._door.hang_up(name)

    def _whose(self, name: bytes, password: bytes) -> bytes:
        known = hmac.compare_digest(password, control.password(self.secret, name).encode())
        return name if known else b""

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        """Messages that have arrived, each with its sender's name, without waiting."""
        for _ in range(AT_ONCE):
            try:
                frames = self._receive(headers=2)
            except zmq.Again:
                break
            yield bytes(frames[0]), frames[1:]
        if self._door is not None:
            yield from self._door.receive()

    def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Send without waiting; `Full` or `Unreachable` if that cannot be done."""
        if peer in self._called:
            self._send_to(peer, frames)
        elif self._door is not None:
            self._door.send(peer, frames)
        else:
            raise Unreachable

    def close(self) -> None:
        """Close it and remove what was made on disk, if anything was."""
        if self._door is not None:
            self._door.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._context.destroy(linger=LINGER_MS)


class PeerSocket(Dealer):
    """A DEALER that waits at ``address`` for the process ``server``; it queues only for one that is there."""

    def __init__(self, address: str, name: bytes, password: str, server: int) -> None:
        super().__init__()
        self._socket.plain_username, self._socket.plain_password = name, password.encode()
        if address.startswith(ABSTRACT):
            self._socket.setsockopt(zmq.IPC_FILTER_PID, server)
        self._socket.bind(address)


class Cancelled(Exception):
    """The server does not want the running task any more."""


class Leave(Exception):
    """The run is over, or whoever started this process is gone."""


def _socket_of(spec: control.Spawn) -> Dealer:
    if spec.key:
        return CallerSocket(spec.address, control.secret_key(spec.password), spec.key)
    name = control.routing_id(spec.role, spec.peer, spec.epoch)
    return PeerSocket(spec.address, name, spec.password, spec.server)


class Connection:
    """A peer's connection to the server: it sends, receives, and is heard also while it waits."""

    def __init__(self, spec: control.Spawn, heartbeat_s: float, lifeline: int) -> None:
        self._spec = spec
        self._socket = _socket_of(spec)
        self._socket.watch(lifeline)
        self._beat_ns = int(heartbeat_s * 1e9 / 3)
        self._beat_ms = self._beat_ns // _MS_NS
        self._next_beat_ns = time.monotonic_ns() + self._beat_ns
        self.task: int | None = None
        self._later: deque[Message] = deque()
        self._unanswered: Sequence[Frame] | None = None
        """The last result or Ready message, until the server sends the next task."""
        self._latest = -1

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message; waits where the server is behind, leaves where it is gone."""
        while True:
            try:
                self._socket.send(frames)
            except Full:
                if self._socket.wait_to_send(SEND_WAIT_MS):
                    raise Leave from None
            else:
                self._next_beat_ns = time.monotonic_ns() + self._beat_ns
                return

    def say(self, message: messages.FromClient) -> None:
        """Say this, and again at each heartbeat with nothing to do: it may not have been heard."""
        self._unanswered = (messages.encode(message),)
        self.send(self._unanswered)

    def serve(self, answer: Callable[[messages.FromServer, Sequence[Frame]], None]) -> None:
        """Say that this process is ready, then have every message answered until the server says goodbye."""
        spec = self._spec
        try:
            self.say(messages.Ready(spec.peer, spec.epoch, spec.role, spec.password))
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
        """Carry out a task, or give it back to the server with the reason why it has no update, in one line.

        Raises `MemoryError`, also for what torch says instead of it.
        """
        try:
            carry_out()
        except Cancelled:
            self.give_back(task, "cancelled")
        except (Leave, MemoryError):
            raise
        except (SlotError, WireError, Disconnected) as error:
            self.give_back(task, str(error))
        except Exception as error:  # a user's model may raise anything: it costs the task, not the run
            if "can't allocate memory" in str(error):
                raise MemoryError(str(error)) from error
            self.give_back(task, f"{type(error).__name__}: {error}".partition("\n")[0][:300])

    def give_back(self, task: messages.Task, reason: str) -> None:
        self.say(messages.Gone(task.client, task.task, printable(reason), task.order))

    def receive(self) -> Message:
        """The next message and its payload frames."""
        if self._later:
            return self._later.popleft()
        while (message := self._take(self._beat_ms)) is None:
            self._listen(0)
        return message

    def take(self) -> Message | None:
        """The next message if there is one, without waiting."""
        return self._later.popleft() if self._later else self._take()

    def wait_until(self, deadline_ns: int) -> None:
        """The pacer's wait: to the deadline, unless the server cancels the task meanwhile."""
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            if left_ns >= FINE_WAIT_NS + _MS_NS:  # a shorter wait of the socket's would be none
                self._listen(max(1, min(left_ns - FINE_WAIT_NS, self._beat_ns) // _MS_NS))
                self.check()
            else:
                time.sleep(left_ns * 1e-9)

    def beat(self) -> None:
        """Be heard if it is time, and leave if whoever started this process is gone."""
        if time.monotonic_ns() >= self._next_beat_ns:
            self._listen(0)

    def check(self) -> None:
        """Hear what the server says during a task. What is not about this task waits for its end."""
        while (got := self._take()) is not None:
            match got[0]:
                case messages.Cancel(task=task) if task == self.task:
                    raise Cancelled
                case messages.Bye():
                    raise Leave
                case _:
                    self._later.append(got)

    def _take(self, timeout_ms: int = 0) -> Message | None:
        frames = self._socket.receive(timeout_ms)
        if frames is None:
            return None
        message = messages.decode_from_server(frames[0])
        if isinstance(message, messages.Task | messages.Tasks | messages.Assess):
            if message.number <= self._latest:
                return None  # it came twice, or late
            self._latest, self._unanswered = message.number, None
        return message, frames[1:]

    def _listen(self, timeout_ms: int) -> None:
        if self._socket.wait(timeout_ms):
            raise Leave
        if time.monotonic_ns() >= self._next_beat_ns:
            self.send(BEAT if self._unanswered is None or self.task is not None else self._unanswered)
