"""Shared memory: the socket carries headers, the numbers stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.errors import SlotError, WireError
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.parameters.update_format import Raw
from edgefl.run.connection import Frame
from edgefl.run.messages import Chunk, Task
from edgefl.run.transport import Floats


class ShmServer:
    """Nothing to send and nothing to receive."""

    carries_updates = False

    def model_frames(self, entry: int) -> list[Frame]:
        return []

    def accept(self, chunk: Chunk, body: Frame) -> None:
        raise WireError("a part of an update on the socket of a shared-memory run")


class ShmClient:
    """Reads the ring, writes the slot."""

    def __init__(self, buffer: ParameterBuffer) -> None:
        self._buffer = buffer

    def fetch(self, entry: int, version: int, frames: Sequence[Frame], out: Floats) -> None:
        self._buffer.read_model(entry, version, out)

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        if self._buffer.entry_version[entry] != version:
            raise SlotError(
                f"ring entry {entry} holds version {self._buffer.entry_version[entry]}, not {version}"
            )
        return self._buffer.model(entry)

    def keeps(self, task: Task) -> bool:
        return bool(self._buffer.lent[task.slot])

    def room(self, task: Task) -> Raw | None:
        return self._buffer.raw(task.slot)

    def put(self, task: Task, start: int, part: Raw) -> None:
        self._buffer.raw(task.slot)[start : start + part.size] = part
