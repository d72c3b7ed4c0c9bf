"""Two ways for models and updates: shared memory, or frames on the wire. The bits are the same.

With ``shm`` clients read the model from the ring and write their update into the leased slot; with ``wire``
both are payload frames, and the server puts the parts of an update into the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgefl.devices.link import ALIGN_BYTES
from edgefl.errors import SlotError, WireError
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer, SlotState
from edgefl.parameters.update_format import Raw
from edgefl.run.messages import Chunk, Task, encode
from edgefl.zeromq.sockets import Frame

PART_BYTES = 256 * 1024
"""Most of an update in a message: so little is still in the cache when the server copies it into its slot,
and ZeroMQ uses the same memory for the next."""

REPEATED, SOME_PARTS = 4, 1000
"""Times that each smallest part of an update may be sent, and extra parts; more count as a flood."""


class ShmServer:
    """The server's end with ``shm``: nothing to send and nothing to receive."""

    carries_updates = False
    """Updates come over the socket, so that the server is the one to say that a slot is whole."""

    def __init__(self, buffer: ParameterBuffer) -> None:
        self._buffer = buffer

    def model_frames(self, entry: int) -> list[Frame]:
        """Payload frames that carry a ring entry's model with a task."""
        return []

    def whole(self, slot: int, task: int) -> bool:
        """Returns True if no part of the task's update is missing in its slot."""
        return True

    def accept(self, chunk: Chunk, body: Frame) -> None:
        """Put a part of an update into its slot. `WireError` if it does not fit."""
        raise WireError("a part of an update on the socket of a shared-memory run")


class WireServer(ShmServer):
    """Sends a model with each task and puts the parts of an update into its slot."""

    carries_updates = True
    _copied = (-1, -1)
    _copy = b""

    def __init__(self, buffer: ParameterBuffer) -> None:
        super().__init__(buffer)
        self._parts: list[tuple[int, int, dict[int, int]]] = [(-1, 0, {})] * buffer.shape.slots
        """By slot, its task, how many parts of its update have come, and their bytes by offset."""

    def whole(self, slot: int, task: int) -> bool:
        its, _, there = self._parts[slot]
        return its == task and sum(there.values()) >= self._buffer.shape.update_bytes

    def model_frames(self, entry: int) -> list[Frame]:
        # A copy, because the ring entry may be overwritten before the socket has sent it; one a version.
        wanted = (entry, self._buffer.entry_version[entry])
        if wanted != self._copied:
            self._copy, self._copied = self._buffer.model(entry).tobytes(), wanted
        return [self._copy]

    def accept(self, chunk: Chunk, body: Frame) -> None:
        buffer, slot, part = self._buffer, chunk.slot, f"a part of an update for slot {chunk.slot}"
        if not 0 <= slot < buffer.shape.slots or buffer.task[slot] != chunk.task:
            raise WireError(f"{part}, which task {chunk.task} does not hold")
        if buffer.state[slot] != SlotState.LEASED:
            raise WireError(f"{part}, which is already complete")
        raw, end = buffer.raw(slot), chunk.offset + len(body)
        if not 0 <= chunk.offset <= end <= raw.size:
            raise WireError(
                f"a part of {len(body)} bytes at byte {chunk.offset} where the update has {raw.size} bytes"
            )
        task, parts, there = self._parts[slot]
        if task != chunk.task:
            parts, there = 0, {}
        parts += 1
        if parts > REPEATED * (raw.size // ALIGN_BYTES) + SOME_PARTS:
            raise WireError(f"{part}, the {parts}th")
        there[chunk.offset] = len(body)
        self._parts[slot] = chunk.task, parts, there
        raw[chunk.offset : end] = np.frombuffer(body, dtype=np.uint8)


class ShmClient:
    """A client's end with ``shm``: reads the ring, writes the slot."""

    def __init__(self, buffer: ParameterBuffer, send: Callable[[list[Frame]], None]) -> None:
        self._buffer, self._send = buffer, send

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        """The task's model where it lies, to be read only. `SlotError` or `WireError` if it is not there."""
        held = self._buffer.entry_version[entry]
        if held != version:
            raise SlotError(f"ring entry {entry} holds version {held}, not {version}")
        return self._buffer.model(entry)

    def keeps(self, task: Task) -> bool:
        """Returns True if `base` stays as it is until the task's update is whole."""
        return bool(self._buffer.lent[task.slot])

    def room(self, task: Task) -> Raw | None:
        """The slot, where the update may be written directly; None where it must be `put`."""
        return self._buffer.raw(task.slot)

    def begin(self, task: Task) -> None:
        """A worker begins the task, perhaps a second time: what was said of the first is lost."""
        self._buffer.state[task.slot] = SlotState.LEASED

    def put(self, task: Task, start: int, part: Raw) -> None:
        """Send bytes ``start`` to ``start + len(part)`` of the update."""
        self._buffer.raw(task.slot)[start : start + part.size] = part


class WireClient(ShmClient):
    """Takes the model from the task's payload and sends each part of the update as it is due."""

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        due = 4 * self._buffer.shape.size
        if len(frames) != 1 or len(frames[0]) != due:
            raise WireError(f"a model of {sum(map(len, frames))} bytes where {due} are due")
        return np.frombuffer(frames[0], dtype=np.float32)

    def keeps(self, task: Task) -> bool:
        return True  # the frame is this process's own

    def room(self, task: Task) -> Raw | None:
        return None

    def put(self, task: Task, start: int, part: Raw) -> None:
        for at in range(0, part.size, PART_BYTES):
            head = encode(Chunk(task=task.task, slot=task.slot, offset=start + at))
            self._send([head, part[at : at + PART_BYTES].data])


SERVER_ENDS = {"shm": ShmServer, "wire": WireServer}
CLIENT_ENDS = {"shm": ShmClient, "wire": WireClient}
