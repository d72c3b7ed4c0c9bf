"""Two ways for models and updates: shared memory, or frames on the wire. The bits are the same.

With ``shm`` the socket carries headers only: clients read the model from the ring and write their update into
the leased slot. With ``wire`` both are payload frames of the same messages, and the server puts the parts of
an update into the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from edgefl.errors import SlotError, WireError
from edgefl.parameters.buffer import Floats, ParameterBuffer, SlotState
from edgefl.parameters.update_format import Raw
from edgefl.run.connection import Frame
from edgefl.run.messages import Chunk, Task, encode

PART_BYTES = 256 * 1024
"""Most of an update in a message: so little is still in the cache when the server copies it into its slot,
and ZeroMQ uses the same memory for the next."""


class ServerEnd(Protocol):
    """The server's end of a transport."""

    carries_updates: bool
    """Updates come over the socket, so that the server is the one to say that a slot is whole."""

    def model_frames(self, entry: int) -> list[Frame]:
        """Payload frames that carry a ring entry's model with a task."""

    def accept(self, chunk: Chunk, body: Frame) -> None:
        """Put a part of an update into its slot. `WireError` if it does not fit."""


class ClientEnd(Protocol):
    """A client's end of a transport."""

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        """The task's model where it lies, to be read only. `SlotError` or `WireError` if it is not there."""

    def keeps(self, task: Task) -> bool:
        """Returns True if `base` stays as it is until the task's update is whole."""

    def room(self, task: Task) -> Raw | None:
        """The slot, where the update may be written directly; None where it must be `put`."""

    def put(self, task: Task, start: int, part: Raw) -> None:
        """Send bytes ``start`` to ``start + len(part)`` of the update."""


def server_end(kind: str, buffer: ParameterBuffer) -> ServerEnd:
    """The server's end of ``shm`` or ``wire``."""
    return ShmServer() if kind == "shm" else WireServer(buffer)


def client_end(kind: str, buffer: ParameterBuffer, send: Callable[[list[Frame]], None]) -> ClientEnd:
    """A client's end of ``shm`` or ``wire``, which sends with ``send``."""
    return ShmClient(buffer) if kind == "shm" else WireClient(send, buffer.shape.size)


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

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        held = self._buffer.entry_version[entry]
        if held != version:
            raise SlotError(f"ring entry {entry} holds version {held}, not {version}")
        return self._buffer.model(entry)

    def keeps(self, task: Task) -> bool:
        return bool(self._buffer.lent[task.slot])

    def room(self, task: Task) -> Raw | None:
        return self._buffer.raw(task.slot)

    def put(self, task: Task, start: int, part: Raw) -> None:
        self._buffer.raw(task.slot)[start : start + part.size] = part


class WireServer:
    """Sends a model with each task and puts the parts of an update into its slot."""

    carries_updates = True

    def __init__(self, buffer: ParameterBuffer) -> None:
        self._buffer = buffer
        self._copied = (-1, -1)
        self._copy = b""

    def model_frames(self, entry: int) -> list[Frame]:
        # A copy, because the ring entry may be overwritten before the socket has sent it; one a version.
        wanted = (entry, self._buffer.entry_version[entry])
        if wanted != self._copied:
            self._copy, self._copied = self._buffer.model(entry).tobytes(), wanted
        return [self._copy]

    def accept(self, chunk: Chunk, body: Frame) -> None:
        buffer = self._buffer
        if not 0 <= chunk.slot < buffer.shape.slots or buffer.task[chunk.slot] != chunk.task:
            raise WireError(
                f"a part of an update for slot {chunk.slot}, which task {chunk.task} does not hold"
            )
        if buffer.state[chunk.slot] != SlotState.LEASED:
            raise WireError(f"a part of an update for slot {chunk.slot}, which is already complete")
        raw, end = buffer.raw(chunk.slot), chunk.offset + len(body)
        if not 0 <= chunk.offset <= end <= raw.size:
            raise WireError(
                f"a part of {len(body)} bytes at byte {chunk.offset} where the update has {raw.size} bytes"
            )
        raw[chunk.offset : end] = np.frombuffer(body, dtype=np.uint8)


class WireClient:
    """Takes the model from the task's payload and sends each part of the update as it is due."""

    def __init__(self, send: Callable[[list[Frame]], None], size: int) -> None:
        self._send, self._size = send, size

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        if len(frames) != 1 or len(frames[0]) != 4 * self._size:
            raise WireError(f"a model of {sum(map(len, frames))} bytes where {4 * self._size} are due")
        return np.frombuffer(frames[0], dtype=np.float32)

    def keeps(self, task: Task) -> bool:
        return True  # the frame is this process's own

    def room(self, task: Task) -> Raw | None:
        return None

    def put(self, task: Task, start: int, part: Raw) -> None:
        for at in range(0, part.size, PART_BYTES):
            head = encode(Chunk(task=task.task, slot=task.slot, offset=start + at))
            self._send([head, part[at : at + PART_BYTES].data])
