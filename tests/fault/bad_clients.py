"""A workload (``supervisor.run(workload=...)``) whose clients misbehave.

``EDGEFL_BAD``, such as ``beats:1,others:2``, lists kinds of misbehaviour, each with the number of the client
that misbehaves in this way on every second trip.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from edgefl.run import client, messages
from edgefl.run.workload import Workload
from edgefl.zeromq.sockets import Frame
from tests.wire_samples import DONE

__all__ = ["Workload"]

BAD = {int(number): what for what, number in (one.split(":") for one in os.environ["EDGEFL_BAD"].split(","))}
FLOOD = 20_000
"""Number of messages in a flood. The server ends the client long before it has received all of them."""
_honest = client.ClientProcess._answer


def _answer(self: client.ClientProcess, message: messages.FromServer, frames: Sequence[Frame]) -> None:
    for task in message.tasks if isinstance(message, messages.Tasks) else ():
        if task.trip % 2:
            _misbehave(self, BAD.get(task.client, ""), task)
    _honest(self, message, frames)


def _misbehave(self: client.ClientProcess, what: str, task: messages.Task) -> None:
    server, spec = self._server, self._server._spec
    match what:
        case "beats":
            for _ in range(FLOOD):
                server.send([messages.encode(messages.Beat())])
        case "others":
            for other in range(task.task - FLOOD, task.task):
                taken = msgspec.structs.replace(DONE, task=other)
                server.send([messages.encode(messages.Trained([taken]))])
        case "parts":
            for offset in range(2**40, 2**40 + FLOOD):
                server.send([messages.encode(messages.Chunk(task.task, task.slot, offset)), bytes(1024)])
        case "ready":
            for number in range(FLOOD):
                ready = messages.Ready(number, 0, "client", spec.password)
                server.send([messages.encode(ready)])


client.ClientProcess._answer = _answer  # type: ignore[method-assign]
