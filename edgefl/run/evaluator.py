"""The evaluator: measures published versions on the server's test examples, beside the server's path."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from edgefl.errors import SlotError
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.run import control, messages
from edgefl.run.connection import Connection, Leave

if TYPE_CHECKING:
    from edgefl.run.workload import Workload


class Evaluator:
    """One process that answers each `Assess` with an `Assessed`."""

    def __init__(
        self, spec: control.Spawn, workload: Workload, buffer: ParameterBuffer, lifeline: int
    ) -> None:
        self._spec = spec
        self._workload = workload
        self._buffer = buffer
        self._server = Connection(spec, workload.experiment.server.heartbeat_s, lifeline)

    def run(self) -> None:
        """Answer until the server says goodbye."""
        self._server.say(messages.Ready(self._spec.peer, self._spec.epoch, os.getpid(), self._spec.role))
        try:
            while True:
                message, _ = self._server.receive()
                match message:
                    case messages.Assess(version=version, entry=entry):
                        self._server.say(self._assess(version, entry))
                    case messages.Bye():
                        return
                    case _:
                        raise SlotError(f"an evaluator cannot answer {type(message).__name__}")
        except Leave:
            pass
        finally:
            self._server.close()

    def _assess(self, version: int, entry: int) -> messages.Assessed:
        started = time.perf_counter()
        self._buffer.read_model(entry, version, self._workload.flat.array)
        result = self._workload.evaluate()
        return messages.Assessed(
            version=version,
            loss=float(result.loss),
            correct=[int(count) for count in result.correct],
            total=[int(count) for count in result.total],
            seconds=time.perf_counter() - started,
        )
