"""The virtual clock's run over a transport that drops, repeats, delays and reorders: see `faulty_run`.

Workers and evaluator are the real ones, each a thread that goes on only when it is its turn. Clients keep
numbers from trip to trip, on which their updates depend: a task that was done twice, or with what another
trip left, shows in the model.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from faulty_run import Broken, FaultyRun, Line, faulty_run
from run_parts import SIZE
from test_run_virtual import FixedTrips

from edgefl.core.events import Sum
from edgefl.experiment import Experiment
from edgefl.learning.evaluate import EvalResult
from edgefl.learning.train import TrainResult
from edgefl.run import control, messages
from edgefl.run.clock import VirtualClock
from edgefl.run.engine import Engine
from edgefl.run.evaluation import EvaluationQueue
from edgefl.run.timeline import Timeline
from edgefl.run.virtual import VirtualTimeline
from edgefl.run.worker import VirtualWorker, run_evaluator
from edgefl.strategies.base import TripInputs
from edgefl.zeromq.sockets import Frame

WORKERS, EVERY, MOST_STEPS = 3, 5, 4


class Killed(BaseException):
    """The process is dead."""


class Process:
    """A life in a thread of its own, which runs until its next `rest` when it is its turn."""

    running: Process
    now_s = 0.0

    def __init__(self, life: Callable[[], None]) -> None:
        self._turn, self._rested = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._rested.acquire()
        self._killed = False
        self._error: BaseException | None = None
        self._inbox: list[Any] | None = None
        self._until_s = 0.0
        self._thread = threading.Thread(target=self._live, args=(life,))
        self._thread.start()

    def _live(self, life: Callable[[], None]) -> None:
        self._turn.acquire()
        try:
            if not self._killed:
                life()
                self._error = Broken("it left")
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        self._rested.release()

    def turn(self, now_s: float) -> None:
        """Let it go on until it rests, unless it waits for what has not come yet."""
        if self._inbox == [] and now_s < self._until_s:
            return
        Process.running, Process.now_s = self, now_s
        self._turn.release()
        self._rested.acquire()
        if self._error is not None:
            raise self._error

    def rest(self, inbox: list[Any] | None = None, timeout_s: float = 0.0) -> None:
        """Called in its thread: wait for the next turn, or so long for something in its ``inbox``."""
        self._inbox, self._until_s = inbox, Process.now_s + timeout_s
        self._rested.release()
        self._turn.acquire()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        self._killed = True
        self._turn.release()
        self._thread.join()


class PatientLine(Line):
    """Waits where its owner does."""

    def receive(self, timeout_ms: int = 0) -> Sequence[Frame] | None:
        if timeout_ms and not self.inbox:
            Process.running.rest(self.inbox, timeout_ms / 1000)
        return super().receive()

    def close(self) -> None: ...


class Training:
    """What workers and evaluator compute, in the place of `edgefl.run.workload.Workload`."""

    upload, vectors, client_vectors, needs_given = "delta", (), ("count",), True

    def __init__(self, experiment: Experiment, steps: Callable[[], int]) -> None:
        self.experiment, self._steps = experiment, steps
        model = np.zeros(SIZE, np.float32)
        self.flat = SimpleNamespace(whole=model, array=model, size=SIZE)

    def train(
        self, client: int, trip: int, done: Callable[[float], None], _: int | None, given: TripInputs
    ) -> TrainResult:
        """An update of the model that it starts from, the client and the number of its trips; takes turns."""
        for _ in range(self._steps()):
            Process.running.rest()
            done(0.0)
        given.kept["count"][:] += 1
        count = given.kept["count"]
        self.flat.whole[:] += 0.1 * (client - given.start) + 0.001 * count + 1e-4 * (trip % 7)
        return TrainResult(steps=2, examples=60, loss=float(count[0]))

    def peak_mib(self, client: int) -> float:
        return 1.0

    def assess(self, version: int, beat: Callable[[], None]) -> tuple[EvalResult, messages.ClientScores]:
        for _ in range(self._steps()):
            Process.running.rest()
            beat()
        return EvalResult(float(self.flat.whole.sum()), math.nan), messages.NO_SCORES


class FaultyVirtualRun(FaultyRun):
    """A run under the virtual clock."""

    line = PatientLine

    def __init__(self, folder: Path, **given: Any) -> None:
        super().__init__(folder, kept=SIZE, every=EVERY, **given)
        self.network.very_late = 0.2
        self.models: list[bytes] = []
        self.measured: list[tuple[int, float]] = []

    def served(self, wanted: Experiment) -> tuple[Timeline, Engine]:
        self.wanted = wanted
        self.evaluation = EvaluationQueue(self.aggregator, self.gate, self.peers, keep_all=True)
        parts = (self.core, None, self.aggregator, self.evaluation, self.peers, self.gate, self.store)
        trips: Any = FixedTrips([1.0 + 0.37 * (client % 5) for client in range(len(self.core.devices))])
        clock = VirtualClock(emulated_s=0.0, wall_s=0.0)
        timeline = VirtualTimeline(wanted, clock, *parts, trips, WORKERS)
        engine = Engine(self.core, self.aggregator, self.store, timeline, self.evaluation, self.watch)
        self._assessed, engine.assessed = engine.assessed, self._note  # type: ignore[method-assign]
        return timeline, engine

    def _note(self, answer: messages.Assessed) -> None:
        self.measured.append((answer.version, answer.loss))
        self._assessed(answer)

    def summed(self, action: Sum, entry: int) -> None:
        self.models.append(self.buffer.model(entry).tobytes())

    def begin(self) -> None:
        self.peers.expect(control.EVALUATOR, 0)
        super().begin()

    def started(self, spec: control.Spawn) -> Process:
        training: Any = Training(self.wanted, lambda: self._draw.randrange(MOST_STEPS))
        if spec.role == control.EVALUATOR:
            return Process(lambda: run_evaluator(spec, training, self.buffer, -1))
        return Process(
            lambda: VirtualWorker(spec, training, self.buffer, -1, memoryview(array("q", [-1]))).run()
        )

    def killed(self, process: Process) -> None:
        process.kill()

    def act(self, client: Process) -> None:
        client.turn(self.hand.at)


class Outcome(NamedTuple):
    """What a run came to."""

    models: list[bytes]
    """By version."""
    measured: list[tuple[int, float]]
    ends: dict[int, list[str]]
    """By task, what each of its ends was called: it has one."""
    said: str

    @classmethod
    def of(cls, folder: Path, over: Callable[[FaultyRun], bool], **network: Any) -> Outcome:
        """Run until it is ``over``."""
        folder.mkdir()
        with faulty_run(folder, kind=FaultyVirtualRun, **network) as run:
            for turn in itertools.count():
                if over(run):
                    break
                run.turn()
                if turn % 1000 == 0:
                    run.store.commit()
            said = f"{run.network.sent} messages, {dict(run.network.faults)}"
            return cls(
                run.models, run.measured, run.store.ends, f"{said}, incidents {dict(run.roster.incidents)}"
            )


def compared(folder: Path, wanted: int, transport: str, seed: int) -> str:
    """Send so many messages, and go as far over a perfect transport: the bits must be the same."""
    began, over = time.monotonic(), {"transport": transport, "seed": seed}
    found = Outcome.of(folder / "faulty", lambda run: run.network.sent >= wanted, **over)
    versions = len(found.models)
    calm = Outcome.of(folder / "calm", lambda run: run.core.version >= versions, fault=0.0, **over)
    for version, (model, same) in enumerate(zip(found.models, calm.models, strict=False), 1):
        if model != same:
            raise Broken(f"version {version} of {versions} has other bits")
    for measured, same in zip(found.measured, calm.measured, strict=False):  # the last may be on their way
        if measured != same:
            raise Broken(f"measured {measured}, is {same}")
    for task, ends in found.ends.items():
        if ends != calm.ends.get(task, ends[:1]):
            raise Broken(f"task {task} ended as {ends}")
    return (
        f"virtual, {transport}: {found.said}; {versions} versions with the bits of a perfect transport, "
        f"{len(found.measured)} of them measured, {len(found.ends)} trips; {time.monotonic() - began:.1f} s"
    )
