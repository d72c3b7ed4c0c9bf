"""A peer's connection to the server: it sends, receives, and is heard also while it waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from edgefl.devices.link import Disconnected
from edgefl.errors import SlotError, WireError
from edgefl.run import control, messages
from edgefl.run.connection import Frame, Full, Unreachable, connect

FINE_WAIT_NS = 2_000_000
"""A socket's wait is whole milliseconds; the rest of a deadline is slept without listening."""
SEND_WAIT_MS = 100


Message = tuple[messages.FromServer, Sequence[Frame]]
"""What the server said, and its payload frames."""


class Cancelled(Exception):
    """The server does not want the running task any more."""


class Leave(Exception):
    """The run is over, or whoever started this process is gone."""


def failure(error: Exception) -> str:
    """Why a task is given back, in one line; raises `MemoryError` for what torch says instead of it."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, SlotError | WireError | Disconnected):
        return str(error)
    if "can't allocate memory" in str(error):
        raise MemoryError(str(error)) from error
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


class Line:
    """The client's connection: sends, receives, and keeps the heartbeat going while it waits."""

    def __init__(self, spec: control.Spawn, heartbeat_s: float, lifeline: int) -> None:
        self._spec = spec
        self._socket = connect(spec.endpoint, control.routing_id(spec.role, spec.peer, spec.epoch))
        self._socket.watch(lifeline)
        self._beat_ns = int(heartbeat_s * 1e9 / 3)
        self._beat_ms = self._beat_ns // 1_000_000
        self._next_beat_ns = time.monotonic_ns() + self._beat_ns
        self.task: int | None = None
        self._later: deque[Message] = deque()

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message; waits where the server is behind, leaves where it is gone."""
        while True:
            try:
                self._socket.send(frames)
            except Full:
                if self._socket.wait(SEND_WAIT_MS, to_send=True):
                    raise Leave from None
            except Unreachable:
                raise Leave from None
            else:
                self._next_beat_ns = time.monotonic_ns() + self._beat_ns
                return

    def say(self, message: messages.FromClient) -> None:
        self.send((messages.encode(message),))

    def receive(self) -> Message:
        """The next message and its payload frames."""
        if self._later:
            return self._later.popleft()
        while (message := self._take(self._beat_ms)) is None:
            self._listen(0)
        return message

    def take(self) -> tuple[messages.FromServer, Sequence[Frame]] | None:
        """The next message if there is one, without waiting."""
        return self._later.popleft() if self._later else self._take()

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
        self.beat()

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

    def close(self) -> None:
        self._socket.close()

    def _take(self, timeout_ms: int = 0) -> Message | None:
        try:
            frames = self._socket.receive(timeout_ms)
        except Unreachable:
            raise Leave from None
        return None if frames is None else (messages.decode_from_server(frames[0]), frames[1:])

    def _listen(self, timeout_ms: int) -> None:
        if self._socket.wait(timeout_ms):
            raise Leave
        if time.monotonic_ns() >= self._next_beat_ns:
            self.say(messages.Beat(self._spec.peer, self._spec.epoch))
