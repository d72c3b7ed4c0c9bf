"""A client process, which downloads, trains and uploads at the speed of its device.

Each task leads to one trip. A paced phase takes as long as it would take on the device:

task → fetch the model → paced download → training with paced steps → paced upload into the slot → `Trained`
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgefl import failpoints
from edgefl.devices.link import move
from edgefl.errors import SlotError
from edgefl.host.confinement import ClientLimits
from edgefl.host.held import Cost, HeldPhase
from edgefl.host.memory import Growth
from edgefl.host.pacing import Pacer, Phase, PhaseTime
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer, Raw, TripPhase
from edgefl.run import control, messages
from edgefl.run.connection import Connection
from edgefl.run.transport import CLIENT_ENDS
from edgefl.run.update import UpdateMaker
from edgefl.zeromq.sockets import Frame

if TYPE_CHECKING:
    from edgefl.devices.plan import TripPlan
    from edgefl.learning.train import TrainResult
    from edgefl.run.workload import Workload


class ClientProcess:
    """Runs the tasks of one client."""

    def __init__(
        self,
        spec: control.Spawn,
        workload: Workload,
        buffer: ParameterBuffer,
        lifeline: int,
        limits: ClientLimits,
    ) -> None:
        experiment = workload.experiment
        self._workload, self._buffer = workload, buffer
        self._mortal = experiment.fleet.churn.die_per_trip > 0
        self._own_pace = spec.as_is
        self._server = Connection(spec, experiment.server.heartbeat_s, lifeline)
        self._witness = Witness(spec.peer)
        self._transport = CLIENT_ENDS[experiment.server.transport](buffer, self._server.send)
        wait = (lambda _: self._server.check()) if spec.as_is else self._server.wait_until
        self._pacer = Pacer(time_scale=spec.time_scale, wait=wait)
        # The base model of the update: the version in the ring of the parameter buffer if that entry is
        # kept for the whole trip, otherwise a copy.
        self._base: Floats = np.empty(0, dtype=np.float32)
        self._copy: Floats = np.empty(buffer.shape.size, dtype=np.float32)
        self._update = UpdateMaker(workload, buffer)
        self._raw: Raw = np.empty(0, dtype=np.uint8)
        self._memory, self._growth = limits.limit(), Growth()
        self._throttle, self._governor = limits.throttle, limits.governor
        step_s = workload.step_s(spec.peer)
        held = limits.governor is not None and workload.host_step_s > 0.0 and step_s > 0.0
        self._cost = Cost(workload.host_step_s * 1e9 / step_s) if held else None

    def run(self) -> None:
        """Run tasks until the server sends `Bye`."""
        self._server.serve(self._answer)

    def _answer(self, message: messages.FromServer, frames: Sequence[Frame]) -> None:
        received_ns = time.monotonic_ns()
        if not isinstance(message, messages.Tasks):
            return  # a `Withdraw` message that arrived after its task had ended
        (task,) = message.tasks
        self._witness.next_task()
        self._server.task = task.task
        try:
            self._server.attempt(task, lambda: self._trip(task, frames, received_ns))
        finally:
            self._server.task = None
            if self._mortal:
                signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _trip(self, task: messages.Task, frames: Sequence[Frame], received_ns: int) -> None:
        pacer = self._pacer
        base = self._base = self._model(task, frames)
        self._raw = self._transport.room(task)
        end = None if task.cut is None else task.cut.end
        plan = self._workload.plan(task.client, task.trip, end, task.condition)
        begins_ns = received_ns + round(task.wait_s * pacer.ns_per_emulated_s)
        if plan.dies_s < math.inf:
            _die_at(begins_ns + plan.dies_s * pacer.ns_per_emulated_s)
        pacer.begin(begins_ns)
        if task.wait_s:
            self._server.wait_until(begins_ns)  # also on a device whose pacer does not wait (`Spawn.as_is`)
        down = self._download(task, plan, base)
        result, compute, cpu_s = self._train(task, plan, base)
        if failpoints.armed():
            self._fail(task)
        up, checksum = self._upload(task, plan, base, frames)
        times = messages.TripTimes(
            work_s=compute.work,
            down=_spent(down),
            compute=_spent(compute),
            up=_spent(up),
            delay=messages.Spent(pacer.delay_declared_s, pacer.delay_s),
            lateness_s=up.lateness_s,
            process_grew_mib=self._growth.peak_mib(),
            busy_s=plan.busy_s,
            own_pace=self._own_pace,
        )
        finished = self._update.result(task, result, checksum, cpu_s, times)
        self._watch_memory()
        self._witness.done(task.task, checksum)
        self._server.report(messages.Trained([finished]))

    def _download(self, task: messages.Task, plan: TripPlan, base: Floats) -> PhaseTime:
        """Copy the base version into the model at the speed of the client's link."""
        vector = self._workload.flat.whole

        def load(start: int, stop: int) -> None:
            vector[start // 4 : stop // 4] = base[start // 4 : stop // 4]

        self._buffer.fetched[task.slot] = TripPhase.DOWN
        return move(self._pacer, plan.down, load)

    def _train(
        self, task: messages.Task, plan: TripPlan, base: Floats
    ) -> tuple[TrainResult, PhaseTime, float]:
        """Train at the speed of the device.

        Return the result, the time of the phase, and the CPU time in seconds.
        """
        self._buffer.fetched[task.slot] = TripPhase.COMPUTE
        paced = plan.compute(self._pacer)
        # A paced phase sleeps after each step; in a held phase, the governor process throttles this process.
        phase: Phase | HeldPhase = paced
        if self._governor is not None and self._cost is not None and plan.work_s:
            phase = HeldPhase(paced, plan.work_s, self._cost, self._governor, self._throttle)

        def done(step_s: float) -> None:
            self._watch_memory()
            phase.done(step_s)
            self._server.check()
            self._server.beat()

        cpu_started = time.thread_time()
        try:
            result = self._update.train(
                task.client, task.trip, task.version, base, done, task.cut, plan.steps
            )
        except BaseException:
            if isinstance(phase, HeldPhase):
                phase.release()  # stop throttling this process
            raise
        cpu_s = time.thread_time() - cpu_started
        compute = phase.end()
        if plan.tail_s:
            compute = compute.then(self._pacer.phase(math.inf, plan.tail_s).end())
        return result, compute, cpu_s

    def _upload(
        self, task: messages.Task, plan: TripPlan, base: Floats, frames: Sequence[Frame]
    ) -> tuple[PhaseTime, int]:
        """Send the update at the speed of the link.

        Return the time of the phase and the checksum of the update.
        """
        self._buffer.fetched[task.slot] = TripPhase.UP
        up = move(self._pacer, plan.up, lambda a, b: self._send_update(task, a, b))
        if base is not self._copy:
            self._transport.base(task.entry, task.version, frames)  # raises if the entry was overwritten
        checksum = self._update.checksum(self._raw)
        if failpoints.hit("alter", task.client, task.trip):
            self._raw[:1] = ~self._raw[:1]
            self._transport.send(task, 0, 1)
        self._transport.finish(task, checksum)
        return up, checksum

    def _model(self, task: messages.Task, frames: Sequence[Frame]) -> Floats:
        """Return the parameters of the version from which the trip starts.

        The array is a view of the ring of models in the parameter buffer, or a copy.
        """
        base = self._transport.base(task.entry, task.version, frames)
        if self._transport.keeps(task):
            return base
        np.copyto(self._copy, base)
        self._transport.base(task.entry, task.version, frames)  # raises if the entry changed during the copy
        return self._copy

    def _watch_memory(self) -> None:
        if self._memory is not None and self._memory.over():
            raise MemoryError(
                f"{self._memory.peak_mib:.0f} MiB are in use, but only {self._memory.limit_mib:g} are allowed"
            )

    def _fail(self, task: messages.Task) -> None:
        """Make this trip fail between training and upload, if a test has set a failpoint for the trip."""
        place = (task.client, task.trip)
        if failpoints.hit("die", *place):
            self._send_update(task, 0, self._raw.size // 8 * 4)
            failpoints.die("die")
        if failpoints.hit("hang", *place):
            os.kill(os.getpid(), signal.SIGSTOP)
        if failpoints.hit("rubbish", *place):
            self._server.send([b"\xc1rubbish"])
        if failpoints.hit("nan", *place):
            self._workload.flat.array[0] = np.nan
        if failpoints.hit("memory", *place):
            limit_mib = self._workload.device(task.client).app_limit_mib or 0.0
            self._hoard = [np.ones(1 << 20) for _ in range(int(2 * limit_mib / 8))]
        if failpoints.hit("leave", *place):
            raise SlotError("trip ended by a failpoint")

    def _send_update(self, task: messages.Task, start: int, stop: int) -> None:
        self._update.write(self._raw, task.client, task.task, self._base, start, stop, task.cohort)
        self._transport.send(task, start, stop)


def _spent(phase: PhaseTime) -> messages.Spent:
    return messages.Spent(phase.declared_s, phase.achieved_s)


def _die_at(instant_ns: float) -> None:
    """Schedule SIGKILL for this process at ``instant_ns``, a time of the monotonic clock in nanoseconds.

    If this time has already passed, the signal is sent immediately.
    """
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, max(1e-6, (instant_ns - time.monotonic_ns()) / 1e9))


WITNESS = "EDGEFL_WITNESS"
"""Environment variable with the path of the `Witness` log file."""


class Witness:
    """A client's log of the updates that it has sent and of those that the server has acknowledged.

    Tests compare the log with the record. It is written only if the environment variable `WITNESS` is set.
    The client appends a line before it sends `Trained`, and another when it receives its next task:

        done CLIENT TASK CHECKSUM
        acknowledged CLIENT TASK

    CHECKSUM is the checksum of the update in its slot, an unsigned 64-bit integer. Each line is written with
    one system call to a file that is open for appending, so a kill cannot truncate a line.
    """

    def __init__(self, client: int) -> None:
        self._client = client
        self._open: int | None = None
        path = os.environ.get(WITNESS)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600) if path else None

    def done(self, task: int, checksum: int) -> None:
        """Log that the client is about to send `Trained`."""
        if self._fd is not None:
            self._open = task
            os.write(self._fd, f"done {self._client} {task} {checksum}\n".encode())

    def next_task(self) -> None:
        """Log that the client has received its next task, which acknowledges the last update."""
        if self._fd is not None and self._open is not None:
            os.write(self._fd, f"acknowledged {self._client} {self._open}\n".encode())
            self._open = None
