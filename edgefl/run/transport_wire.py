"""The wire: models and updates travel as payload frames of the same messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgefl.errors import WireError
from edgefl.parameters.buffer import ParameterBuffer, SlotState
from edgefl.parameters.update_format import Raw
from edgefl.run.connection import Frame
from edgefl.run.messages import Chunk, Task, encode
from edgefl.run.transport import Floats, model_from, model_in

PART_BYTES = 256 * 1024
"""Most of an update in a message: so little is still in the cache when the server copies it into its slot,
and ZeroMQ uses the same memory for the next."""


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

    def fetch(self, entry: int, version: int, frames: Sequence[Frame], out: Floats) -> None:
        model_from(frames, out)

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        return model_in(frames, self._size)

    def keeps(self, task: Task) -> bool:
        return True  # the frame is this process's own

    def room(self, task: Task) -> Raw | None:
        return None

    def put(self, task: Task, start: int, part: Raw) -> None:
        for at in range(0, part.size, PART_BYTES):
            head = encode(Chunk(task=task.task, slot=task.slot, offset=start + at))
            self._send([head, part[at : at + PART_BYTES].data])
