"""The connection between server and peers: ZeroMQ, a ROUTER at the server and a DEALER at each peer.

The server calls and the peers answer: nobody can connect to the server, so nobody can fill its memory or its
descriptors with connections that never say whose they are. Each peer waits at an address of its own that only
the run can know. On Linux that is in the abstract namespace, and the kernel's word on who connects lets the
server's process in and no other, of this user or another; elsewhere it is a socket in a fresh 0700 folder.
Who answers must know the password of its name (ZeroMQ's PLAIN) before a message of it is taken in, and has
the name that the server called. Neither end trusts what comes in: `edgefl.run.messages` reads the bytes.
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
from contextlib import suppress

import zmq

from edgefl.devices.link import Disconnected
from edgefl.errors import SlotError, WireError
from edgefl.run import control, messages
from edgefl.run.unfinished import Unfinished

ABSTRACT = "ipc://@edgefl-"
Frame = bytes | memoryview
Message = tuple[messages.FromServer, Sequence[Frame]]
"""A message of the server and its payload frames."""

AT_ONCE = 256
"""Most messages that are taken in before the server looks at its other duties."""
LENT_BYTES = 1024 * 1024
"""Frames from this size on are lent to ZeroMQ and not copied: models. What may change is always copied."""
LINGER_MS = 200
"""Milliseconds that the server's last messages may take to leave."""
PEER_LINGER_MS = 1000
HANDSHAKE_MS = 10_000
"""Milliseconds that a connection may take to say whose it is."""
CALLS_PER_S = 5000
"""Most attempts a second to reach peers that are still starting, all together."""
FINE_WAIT_NS = 2_000_000
"""A socket's wait is whole milliseconds: it ends so long before a deadline, and the rest is slept."""
SEND_WAIT_MS = 100
BEAT = (messages.encode(messages.Beat()),)
_MS_NS = 1_000_000
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)


class Full(Exception):
    """The other side has not taken what was sent before."""


class Unreachable(Exception):
    """The other side is gone, or was never there."""


class _Socket:
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
        self._socket.send(last, _NOBLOCK, copy=not (isinstance(last, bytes) and len(last) >= LENT_BYTES))

    def _receive(self, headers: int) -> list[Frame]:
        """The frames of a message that has arrived; `zmq.Again` if none has.

        Those after the first ``headers`` may be large: they stay where ZeroMQ has them, read only.
        """
        frames: list[Frame] = [self._socket.recv(_NOBLOCK)]
        while self._socket.getsockopt(_RCVMORE):
            if len(frames) < headers:
                frames.append(self._socket.recv(_NOBLOCK))
            else:
                frames.append(self._socket.recv(_NOBLOCK, copy=False).buffer)
        return frames


class ServerSocket(_Socket):
    """The ROUTER, which calls its peers; no frame may be larger than ``largest_bytes``.

    A high-water mark counts messages, whatever their size; each peer has one task at a time, so few do.
    """

    def __init__(self, largest_bytes: int) -> None:
        super().__init__(zmq.ROUTER, marks=8)
        self.secret = secrets.token_hex(32)
        self._door: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._door.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks whom to let in (its RFC 27)
        self._poller.register(self._door, _POLLIN)
        self._socket.plain_server = True
        self._socket.zap_domain = b"edgefl"
        self._socket.handshake_ivl = HANDSHAKE_MS
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = largest_bytes
        self._called: dict[bytes, str] = {}
        """The peers' addresses."""
        self._unfinished = Unfinished(self._called)
        self._folder: str | None = None
        try:  # have the kernel refuse other processes, at the peers
            if sys.platform != "linux":
                raise AttributeError
            self._socket.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
            self.root = ABSTRACT
        except (zmq.ZMQError, AttributeError):
            self._folder = tempfile.mkdtemp(prefix="edgefl-")  # mode 0700
            self.root = f"ipc://{self._folder}/"

    def call(self, name: bytes) -> None:
        """Connect to the peer of this name, now or as soon as it is there. A name is called once in a run."""
        router = self._socket
        self._called[name] = where = control.address(self.root, self.secret, name)
        router.reconnect_ivl = max(10, 1000 * len(self._called) // CALLS_PER_S)
        router.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        router.connect(where)

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
            self._unfinished.spoke.discard(name)

    def wait(self, timeout_ms: int) -> bool:
        watched = False
        for which, _ in self._poller.poll(timeout_ms):
            if which is self._door:
                self._admit()
            elif which is not self._socket:
                watched = True
        return watched

    def _admit(self) -> None:
        """Let in those who know the password of the name that they come under."""
        with suppress(zmq.Again):
            while True:
                asked = self._door.recv_multipart(_NOBLOCK)
                name, password = asked[6:8] if len(asked) == 8 and asked[5] == b"PLAIN" else (b"", b"")
                known = hmac.compare_digest(password, control.password(self.secret, name).encode())
                answer = (b"200", b"", name) if known else (b"400", b"wrong password", b"")
                self._door.send_multipart([*asked[:2], *answer, b""])

    def receive(self) -> Iterator[tuple[bytes, Sequence[Frame]]]:
        """Messages that have arrived, each with its sender's name, without waiting."""
        for _ in range(AT_ONCE):
            try:
                frames = self._receive(headers=2)
            except zmq.Again:
                return
            name = bytes(frames[0])
            self._unfinished.spoke.add(name)
            yield name, frames[1:]

    def endless(self) -> bytes | None:
        """A peer that was filling this process's memory with a message that does not end."""
        return self._unfinished.found.popleft() if self._unfinished.found else None

    def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Send without waiting; `Full` or `Unreachable` if that cannot be done."""
        if peer not in self._called:
            raise Unreachable
        message = [peer, *frames]
        try:
            try:
                self._send(message)
            except zmq.Again:
                # ZeroMQ looks a thousand times a second whether a peer has taken what was sent before, and
                # one that is fast takes more small messages in that time: have it look, then judge.
                self._socket.getsockopt(zmq.EVENTS)
                self._send(message)
        except zmq.Again:
            raise Full from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise Unreachable from None

    def close(self) -> None:
        """Close it and remove what was made on disk, if anything was."""
        self._unfinished.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._context.destroy(linger=LINGER_MS)


class PeerSocket(_Socket):
    """A DEALER that waits at ``address`` for the process ``server``; it queues only for one that is there."""

    def __init__(self, address: str, name: bytes, password: str, server: int) -> None:
        super().__init__(zmq.DEALER, marks=16)
        self._socket.plain_username, self._socket.plain_password = name, password.encode()
        if address.startswith(ABSTRACT):
            self._socket.setsockopt(zmq.IPC_FILTER_PID, server)
        self._socket.bind(address)

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


class Cancelled(Exception):
    """The server does not want the running task any more."""


class Leave(Exception):
    """The run is over, or whoever started this process is gone."""


class Connection:
    """A peer's connection to the server: it sends, receives, and is heard also while it waits."""

    def __init__(self, spec: control.Spawn, heartbeat_s: float, lifeline: int) -> None:
        self._spec = spec
        name = control.routing_id(spec.role, spec.peer, spec.epoch)
        self._socket = PeerSocket(spec.address, name, spec.password, spec.server)
        self._socket.watch(lifeline)
        self._beat_ns = int(heartbeat_s * 1e9 / 3)
        self._beat_ms = self._beat_ns // _MS_NS
        self._next_beat_ns = time.monotonic_ns() + self._beat_ns
        self.task: int | None = None
        self._later: deque[Message] = deque()
        self._unanswered: Sequence[Frame] | None = None
        """What ended the last task, or said that this process is ready, until there is another."""
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
        self.say(messages.Gone(task.client, task.task, reason, task.order))

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
