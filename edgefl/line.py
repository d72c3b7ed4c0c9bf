"""A peer's connection to the server: it sends, receives, and is heard also while it waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import zmq

from edgefl import control, wire
from edgefl.endpoint import receive_now, send_now
from edgefl.transport import Frame

FINE_WAIT_NS = 2_000_000
"""A socket's wait is whole milliseconds; the rest of a deadline is slept without listening."""


class Cancelled(Exception):
    """The server does not want the running task any more."""


class Leave(Exception):
    """The run is over, or whoever started this process is gone."""


class Line:
    """The client's connection: sends, receives, and keeps the heartbeat going while it waits."""

    def __init__(self, spec: control.Spawn, heartbeat_s: float, lifeline: int) -> None:
        self._spec = spec
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.routing_id = control.routing_id(spec.role, spec.peer, spec.epoch)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 16
        socket.immediate = True
        socket.connect(spec.endpoint)
        self._socket = socket
        self._lifeline = lifeline
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(lifeline, zmq.POLLIN)
        self._beat_ns = int(heartbeat_s * 1e9 / 3)
        self._next_beat_ns = time.monotonic_ns() + self._beat_ns
        self.task: int | None = None
        self._later: deque[tuple[wire.FromServer, list[Frame]]] = deque()

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message; waits where the server is behind, leaves where it is gone."""
        while True:
            try:
                send_now(self._socket, frames)
            except zmq.Again:
                self._poll_out()
            else:
                self._next_beat_ns = time.monotonic_ns() + self._beat_ns
                return

    def say(self, message: wire.FromClient) -> None:
        self.send([wire.encode(message)])

    def receive(self) -> tuple[wire.FromServer, list[Frame]]:
        """The next message and its payload frames."""
        if self._later:
            return self._later.popleft()
        while True:
            self._listen(self._beat_ns // 1_000_000)
            if (message := self._take()) is not None:
                return message

    def wait_until(self, deadline_ns: int) -> None:
        """The pacer's wait: to the deadline, unless the server cancels the task meanwhile."""
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            if left_ns > FINE_WAIT_NS:
                self._listen(min(left_ns - FINE_WAIT_NS, self._beat_ns) // 1_000_000)
                self.check()
            else:
                time.sleep(left_ns * 1e-9)

    def pulse(self) -> None:
        """Between two steps, which may not have waited at all: be heard, and hear a cancel."""
        self.check()
        if time.monotonic_ns() >= self._next_beat_ns:
            self._listen(0)

    def check(self) -> None:
        """Hear what the server says during a task. What is not about this task waits for its end."""
        while (got := self._take()) is not None:
            match got[0]:
                case wire.Cancel(task=task) if task == self.task:
                    raise Cancelled
                case wire.Bye():
                    raise Leave
                case _:
                    self._later.append(got)

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._context.term()

    def _take(self) -> tuple[wire.FromServer, list[Frame]] | None:
        try:
            frames = receive_now(self._socket, headers=1)
        except zmq.Again:
            return None
        return wire.decode_from_server(frames[0]), frames[1:]

    def _listen(self, timeout_ms: int) -> None:
        ready = dict(self._poller.poll(max(0, timeout_ms)))
        if self._lifeline in ready:
            raise Leave
        if time.monotonic_ns() >= self._next_beat_ns:
            self.say(wire.Beat(self._spec.peer, self._spec.epoch))

    def _poll_out(self) -> None:
        self._socket.poll(100, zmq.POLLOUT)
        if self._lifeline in dict(self._poller.poll(0)):
            raise Leave
