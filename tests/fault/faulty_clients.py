"""A workload (``supervisor.run(workload=...)``) whose peers' sockets drop, repeat and reorder messages."""

from __future__ import annotations

import random
from collections.abc import Sequence

from edgefl.run import connection
from edgefl.run.connection import PeerSocket
from edgefl.run.workload import Workload
from edgefl.zeromq.sockets import Frame

__all__ = ["Workload"]

FAULT = 0.2


class FaultySocket(PeerSocket):
    """A peer's socket that drops, repeats or delays some messages."""

    def __init__(self, address: str, name: bytes, password: str, server: int) -> None:
        super().__init__(address, name, password, server)
        self._draw = random.Random(name)
        self._held: list[Sequence[Frame]] = []
        self._arrived: list[Sequence[Frame]] = []

    def _disturbed(self, message: Sequence[Frame], held: list[Sequence[Frame]]) -> list[Sequence[Frame]]:
        """Return the messages to deliver now; a message in ``held`` is delivered with the next one."""
        through, draw = [], self._draw.random
        if draw() >= FAULT:
            (held if draw() < FAULT else through).append(message)
            if draw() < FAULT:
                through.append(message)
        if through:
            through += held
            held.clear()
        return through

    def send(self, frames: Sequence[Frame]) -> None:
        for message in self._disturbed([bytes(frame) for frame in frames], self._held):
            super().send(message)

    def receive(self, timeout_ms: int = 0) -> Sequence[Frame] | None:
        if not self._arrived and (frames := super().receive(timeout_ms)) is not None:
            self._arrived = self._disturbed(frames, [])
        return self._arrived.pop(0) if self._arrived else None


connection.PeerSocket = FaultySocket  # type: ignore[misc]
