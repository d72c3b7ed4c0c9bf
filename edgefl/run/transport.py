"""Two transports for models and updates: shared memory (``shm``) and messages on a socket (``wire``).

Both give the same bits. With ``shm``, clients read the model from the ring and write their update into the
leased slot. With ``wire``, models and updates are payload frames of messages, and the server copies the parts
of an update into the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from edgefl.devices.link import ALIGN_BYTES
from edgefl.errors import SlotError, WireError
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer, Raw, SlotState
from edgefl.run.messages import Chunk, Task, encode
from edgefl.zeromq.sockets import Frame

PART_BYTES = 256 * 1024
"""Maximum size of a part of an update, in bytes. Small parts stay in the CPU cache until they are copied into
the slot, and ZeroMQ reuses their memory."""

REPEATED, SOME_PARTS = 4, 1000
"""An update may be sent in at most `REPEATED` parts per `ALIGN_BYTES` of its size, plus `SOME_PARTS` parts. A
peer that sends more is flooding the server."""


class ShmServer:
    """The server's end of the transport ``shm``. Data are in shared memory; nothing is sent or received."""

    carries_updates = False
    """True if updates arrive through the socket, so that the server must mark slots as written."""

    def __init__(self, buffer: ParameterBuffer) -> None:
        self._buffer = buffer

    def model_frames(self, entry: int) -> list[Frame]:
        """Return the frames with the model in a ring entry, which are sent as the payload of a task."""
        return []

    def is_complete(self, slot: int, task: int) -> bool:
        """Return True if the slot holds all parts of the task's update."""
        return True

    def accept(self, chunk: Chunk, body: Frame) -> None:
        """Copy a part of an update into its slot. Raises `WireError` if the part does not fit."""
        raise WireError("sent a part of an update, but this run uses shared memory")


class WireServer(ShmServer):
    """Sends the model with each task, and copies parts of updates into slots."""

    carries_updates = True
    _copied = (-1, -1)
    _copy = b""

    def __init__(self, buffer: ParameterBuffer) -> None:
        super().__init__(buffer)
        self._parts: list[tuple[int, int, dict[int, int]]] = [(-1, 0, {})] * buffer.shape.slots
        """For each slot, its task, the number of parts received, and the parts' sizes keyed by offset."""

    def is_complete(self, slot: int, task: int) -> bool:
        its, _, received = self._parts[slot]
        return its == task and sum(received.values()) >= self._buffer.shape.update_bytes

    def model_frames(self, entry: int) -> list[Frame]:
        # The ring entry may be overwritten before the socket has sent it, so send one copy per version.
        wanted = (entry, self._buffer.entry_version[entry])
        if wanted != self._copied:
            self._copy, self._copied = self._buffer.model(entry).tobytes(), wanted
        return [self._copy]

    def accept(self, chunk: Chunk, body: Frame) -> None:
        buffer, slot, part = self._buffer, chunk.slot, f"sent a part of an update for slot {chunk.slot}"
        if not 0 <= slot < buffer.shape.slots or buffer.task[slot] != chunk.task:
            raise WireError(f"{part}, which task {chunk.task} does not hold")
        if buffer.state[slot] != SlotState.LEASED:
            raise WireError(f"{part}, which is already complete")
        raw, end = buffer.raw(slot), chunk.offset + len(body)
        if not 0 <= chunk.offset <= end <= raw.size:
            raise WireError(
                f"{part} with {len(body)} bytes at offset {chunk.offset}, but the update has {raw.size} bytes"
            )
        task, parts, received = self._parts[slot]
        if task != chunk.task:
            parts, received = 0, {}
        parts += 1
        if parts > REPEATED * (raw.size // ALIGN_BYTES) + SOME_PARTS:
            raise WireError(f"{part}: too many parts ({parts})")
        received[chunk.offset] = len(body)
        self._parts[slot] = chunk.task, parts, received
        raw[chunk.offset : end] = np.frombuffer(body, dtype=np.uint8)


class ShmClient:
    """The client's end of the transport ``shm``: it reads the model in the ring and writes to the slot."""

    def __init__(self, buffer: ParameterBuffer, send: Callable[[list[Frame]], None]) -> None:
        self._buffer, self._send = buffer, send

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        """Return the task's model without copying it; the caller must not change it.

        Raises `SlotError` or `WireError` if the model is not available.
        """
        held = self._buffer.entry_version[entry]
        if held != version:
            raise SlotError(f"ring entry {entry} holds version {held}, not {version}")
        return self._buffer.model(entry)

    def keeps(self, task: Task) -> bool:
        """Return True if the array from `base` is not overwritten before the task's update is complete."""
        return bool(self._buffer.lent[task.slot])

    def room(self, task: Task) -> Raw:
        """Return the memory into which the update must be written."""
        return self._buffer.raw(task.slot)

    def begin(self, task: Task) -> None:
        """Mark the slot as incomplete when a worker begins the task, possibly for the second time."""
        self._buffer.state[task.slot] = SlotState.LEASED

    def send(self, task: Task, start: int, stop: int) -> None:
        """Send bytes ``start`` to ``stop`` of the update, which were written into its `room`."""

    def finish(self, task: Task, checksum: int) -> None:
        """Mark the update as complete, after all of its parts were sent."""
        self._buffer.written(task.slot, task=task.task, checksum=checksum)


class WireClient(ShmClient):
    """The client's end of the transport ``wire``: it receives the model as a payload, and sends each part of
    the update when this part is due."""

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        due = 4 * self._buffer.shape.size
        if len(frames) != 1 or len(frames[0]) != due:
            raise WireError(f"expected a model of {due} bytes, got {sum(map(len, frames))}")
        return np.frombuffer(frames[0], dtype=np.float32)

    def keeps(self, task: Task) -> bool:
        return True  # the frame is in this process's own memory

    @cached_property
    def _own(self) -> Raw:
        return np.zeros(self._buffer.shape.update_bytes, dtype=np.uint8)

    def room(self, task: Task) -> Raw:
        return self._own

    def send(self, task: Task, start: int, stop: int) -> None:
        for at in range(start, stop, PART_BYTES):
            head = encode(Chunk(task=task.task, slot=task.slot, offset=at))
            self._send([head, self._own[at : min(at + PART_BYTES, stop)].data])

    def finish(self, task: Task, checksum: int) -> None:
        """Do nothing: the server marks the slot when it receives the client's report."""


SERVER_ENDS = {"shm": ShmServer, "wire": WireServer}
CLIENT_ENDS = {"shm": ShmClient, "wire": WireClient}
