"""How a model and an update travel: through shared memory, or as frames on the wire. Same bits either way.

A transport has a server's end and a client's end with two methods each; everything else about a message is
the same. `shm` moves only the headers through the socket: the numbers are read from the ring and written
into the leased slot. `wire` sends them as payload frames, and the server puts them into the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgefl.errors import WireError
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.parameters.update_format import Raw
from edgefl.run.connection import Frame
from edgefl.run.messages import Chunk, Task

Floats = npt.NDArray[np.float32]


class ServerEnd(Protocol):
    """The server's end of a transport."""

    carries_updates: bool
    """Whether updates come over the socket, so that the server is the one to say that a slot is whole."""

    def model_frames(self, entry: int) -> list[Frame]:
        """Payload frames that carry a ring entry's model with a task."""

    def accept(self, chunk: Chunk, body: Frame) -> None:
        """Put a part of an update into its slot. `WireError` if it does not fit."""


class ClientEnd(Protocol):
    """A client's end of a transport."""

    def fetch(self, entry: int, version: int, frames: Sequence[Frame], out: Floats) -> None:
        """Read the task's model into ``out``."""

    def base(self, entry: int, version: int, frames: Sequence[Frame]) -> Floats:
        """The task's model where it lies, to be read only. `SlotError` if it is not there."""

    def keeps(self, task: Task) -> bool:
        """Whether `base` stays as it is until the task's update is whole."""

    def room(self, task: Task) -> Raw | None:
        """Where the update may be written so that it need not be put; None where there is no such place."""

    def put(self, task: Task, start: int, part: Raw) -> None:
        """Send bytes ``start`` to ``start + len(part)`` of the update."""


def server_end(kind: str, buffer: ParameterBuffer) -> ServerEnd:
    """The server's end of ``shm`` or ``wire``."""
    from edgefl.run import transport_shm, transport_wire

    return transport_shm.ShmServer() if kind == "shm" else transport_wire.WireServer(buffer)


def client_end(kind: str, buffer: ParameterBuffer, send: Callable[[list[Frame]], None]) -> ClientEnd:
    """A client's end of ``shm`` or ``wire``, which sends with ``send``."""
    from edgefl.run import transport_shm, transport_wire

    return (
        transport_shm.ShmClient(buffer)
        if kind == "shm"
        else transport_wire.WireClient(send, buffer.shape.size)
    )


def model_from(frames: Sequence[Frame], out: Floats) -> None:
    """Copy a payload frame of float32 into ``out``. `WireError` if its length is another."""
    np.copyto(out, model_in(frames, out.size))


def model_in(frames: Sequence[Frame], size: int) -> Floats:
    """The ``size`` parameters in a payload frame. `WireError` if its length is another."""
    if len(frames) != 1 or len(frames[0]) != 4 * size:
        raise WireError(f"a model of {sum(map(len, frames))} bytes where {4 * size} are due")
    return np.frombuffer(frames[0], dtype=np.float32)
