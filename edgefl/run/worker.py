"""Processes that compute at the full speed of the host: workers, which train for any client, and the
evaluator, which evaluates models."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edgefl import failpoints
from edgefl.errors import SlotError, WireError
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.run import control, messages
from edgefl.run.connection import Cancelled, Connection, Leave
from edgefl.run.transport import CLIENT_ENDS
from edgefl.run.update import UpdateMaker
from edgefl.zeromq.sockets import Frame

if TYPE_CHECKING:
    from edgefl.run.workload import Workload

SEND_NS = 300_000
"""Maximum time in nanoseconds for which a worker holds back results to send them together, while it has more
tasks to perform."""
POLL_NS = 2_000_000
"""Interval between checks for messages during training, in nanoseconds."""


class VirtualWorker:
    """Performs tasks until the server sends `Bye`."""

    def __init__(
        self,
        spec: control.Spawn,
        workload: Workload,
        buffer: ParameterBuffer,
        lifeline: int,
        begun: memoryview[int],
    ) -> None:
        """``begun`` is shared memory with the number of the task that this process began last; the zygote
        reads it if this process dies."""
        self._workload, self._begun = workload, begun
        server = workload.experiment.server
        self._server = Connection(spec, server.heartbeat_s, lifeline)
        self._transport = CLIENT_ENDS[server.transport](buffer, self._server.send)
        self._update = UpdateMaker(workload, buffer)
        self._queue: deque[tuple[messages.Task, Sequence[Frame]]] = deque()
        self._cancelled = False
        self._results: list[messages.TaskResult] = []
        self._sent_ns = self._next_poll_ns = 0

    def run(self) -> None:
        self._server.serve(self._answer)

    def _answer(self, message: messages.FromServer, frames: Sequence[Frame]) -> None:
        self._handle(message, frames)
        while self._queue:
            task, frames = self._queue.popleft()
            self._server.task, self._cancelled = task.task, False
            self._transport.begin(task)
            self._begun[0] = task.task  # if the process dies now, the death is blamed on this task
            self._server.attempt(task, partial(self._compute, task, frames))
            self._server.task = None
            if time.monotonic_ns() > self._sent_ns + SEND_NS:
                self._send_results()
            self._poll()
        self._send_results()

    def _send_results(self) -> None:
        if self._results:
            self._server.report(messages.Trained(self._results))
            self._results = []
        self._sent_ns = time.monotonic_ns()

    def _poll(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._next_poll_ns:
            return
        self._next_poll_ns = now_ns + POLL_NS
        while (got := self._server.poll()) is not None:
            self._handle(*got)
        self._server.beat()

    def _handle(self, message: messages.FromServer, frames: Sequence[Frame]) -> None:
        match message:
            case messages.Tasks(tasks=orders):
                self._unqueue([task.task for task in orders])  # replace repeated orders
                self._queue.extend((task, frames) for task in orders)
            case messages.Withdraw(tasks=tasks):
                self._cancelled |= self._server.task in tasks
                for task in self._unqueue(tasks):
                    self._server.return_task(task, "cancelled")
            case messages.Bye():
                raise Leave
            case _:
                raise WireError(f"unexpected message for a worker: {type(message).__name__}")

    def _unqueue(self, tasks: Sequence[int]) -> list[messages.Task]:
        taken = [task for task, _ in self._queue if task.task in tasks]
        if taken:
            self._queue = deque(item for item in self._queue if item[0].task not in tasks)
        return taken

    def _compute(self, task: messages.Task, frames: Sequence[Frame]) -> None:
        cpu_started = time.thread_time()
        place = (task.client, task.trip)
        # Nobody overwrites the base version until the task has ended, so the version is used in place.
        base = self._transport.base(task.entry, task.version, frames)
        vector, cut = self._workload.flat.whole, task.cut
        np.copyto(vector, base)
        steps = None
        if cut is not None:
            steps = self._workload.plan(*place, cut.end, task.condition).steps

        def after_step(_: float) -> None:
            self._poll()
            if self._cancelled:
                raise Cancelled

        trained = self._update.train(*place, task.version, base, after_step, cut, steps)
        if failpoints.hit("die", *place):
            failpoints.die("die")
        if failpoints.hit("leave", *place):
            raise SlotError("trip ended by a failpoint")
        if failpoints.hit("nan", *place):
            vector[0] = np.nan
        raw = self._transport.room(task)
        self._update.write(raw, task.client, task.task, base, cohort=task.cohort)
        checksum = self._update.checksum(raw)
        self._transport.base(task.entry, task.version, frames)  # raises if the entry was overwritten
        if failpoints.hit("alter", *place):
            raw[:1] = ~raw[:1]
        self._transport.send(task, 0, raw.size)
        self._transport.finish(task, checksum)
        cpu_s = time.thread_time() - cpu_started
        self._results.append(self._update.result(task, trained, checksum, cpu_s))


def run_evaluator(spec: control.Spawn, workload: Workload, buffer: ParameterBuffer, lifeline: int) -> None:
    """Evaluate published versions: answer each `Assess` message with an `Assessed` message.

    Versions that are requested in the meantime are queued or skipped; see `edgefl.run.evaluation`.
    """
    server = Connection(spec, workload.experiment.server.heartbeat_s, lifeline)

    def answer(message: messages.FromServer, frames: Sequence[Frame]) -> None:
        assert isinstance(message, messages.Assess), f"an evaluator cannot answer {message}"
        buffer.read_model(message.entry, message.version, workload.flat.whole)
        found, scores = workload.assess(message.version, server.beat)
        server.report(
            messages.Assessed(
                version=message.version,
                loss=float(found.loss),
                accuracy=float(found.accuracy),
                correct=[int(count) for count in found.correct],
                total=[int(count) for count in found.total],
                metrics=dict(found.metrics),
                clients=scores,
                problem=found.problem,
            )
        )

    server.serve(answer)
