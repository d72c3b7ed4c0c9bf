"""An adder: the process of a node that sums the updates which lie there, for `edgefl.run.adders`.

It shares the node's parameter buffer with the node's clients or workers and with nobody else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from edgefl import kernels
from edgefl.errors import WireError
from edgefl.experiment import Server
from edgefl.kernels.arguments import Update
from edgefl.parameters.buffer import ParameterBuffer, SlotState
from edgefl.parameters.update_format import Raw
from edgefl.run import control, messages
from edgefl.run.connection import Connection
from edgefl.run.sockets import Frame
from edgefl.run.transport import PART_BYTES


def run_adder(spec: control.Spawn, server: Server, buffer: ParameterBuffer, lifeline: int) -> None:
    """Do errands for the server until it says goodbye."""
    connection, backend = Connection(spec, server.heartbeat_s, lifeline), server.kernel_backend

    def answer(message: messages.FromServer, frames: Sequence[Frame]) -> None:
        said, seconds = np.zeros(0, np.uint8), 0.0
        match message:
            case messages.Keep(version=version, entry=entry):
                buffer.retire(entry)
                buffer.model(entry)[:] = np.frombuffer(messages.payload(frames), np.float32)
                buffer.publish(version, entry)
            case messages.Add():
                started = time.perf_counter()
                said = partial_sum(buffer, messages.payload(frames), backend)
                seconds = time.perf_counter() - started
            case messages.Fetch(task=task, slot=slot):
                if _holds(buffer, task, slot):
                    said = buffer.raw(slot)
            case _:
                raise WireError(f"an adder cannot answer {type(message).__name__}")
        number = message.number
        for at in range(0, said.size, PART_BYTES):
            connection.send([messages.encode(messages.Piece(number, at)), said[at : at + PART_BYTES].data])
        connection.say(messages.Answered(number, seconds))

    connection.serve(answer)


def partial_sum(buffer: ParameterBuffer, wanted: bytes | memoryview, backend: str | None) -> Raw:
    """The answer to an `edgefl.run.messages.Add`, as bytes.

    An update that is not there is none that is finite: its norm is NaN.
    """
    words = np.frombuffer(wanted, np.int64)
    count = words.size // 3
    tasks, slots = words[:count].tolist(), words[count : 2 * count].tolist()
    weights = words[2 * count :].view(np.float64)
    here = np.array([_holds(buffer, task, slot) for task, slot in zip(tasks, slots, strict=True)], bool)
    size = buffer.shape.size
    made = np.zeros(size + 2 * count)
    updates: list[Update] = [buffer.slot(slot) for slot, there in zip(slots, here, strict=True) if there]
    norms, checksums = kernels.exact_sum(made[:size], updates, weights[here], backend)
    made[size : size + count] = np.nan
    made[size : size + count][here] = norms
    made[size + count :].view(np.uint64)[here] = checksums
    return made.view(np.uint8)


def _holds(buffer: ParameterBuffer, task: int, slot: int) -> bool:
    return buffer.task[slot] == task and buffer.state[slot] == SlotState.WRITTEN
