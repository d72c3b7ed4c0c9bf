"""An in-memory simulation for tests of the engine: clients and evaluator are scheduled function calls."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np

from edgefl import experiment, kernels
from edgefl.core import Core
from edgefl.core.events import Failed, Joined, Ticked
from edgefl.kernels.steps import start
from edgefl.parameters.buffer import ParameterBuffer, Shape
from edgefl.results.store import Store
from edgefl.results.tail import Tail
from edgefl.run import messages, resume
from edgefl.run.aggregator import Aggregator
from edgefl.run.engine import Engine, WriteAhead
from edgefl.run.progress import Stopwatch
from edgefl.run.timeline import Delivery
from edgefl.seeds import stream
from edgefl.strategies.base import Strategy
from edgefl.testing import fleet
from tests.wire_samples import DONE, TIMES

SEED = 5
SIZE = 64
CLIENTS = 10


class CountingStore(Store):
    """Keeps every fate that a task gets; the record itself keeps only the last."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ends: dict[int, list[str]] = {}

    def released(self, task: int, fate: str, reason: str = "") -> None:
        self.ends.setdefault(task, []).append(fate)
        super().released(task, fate, reason)


@dataclass
class Faults:
    """For each kind of failure, the trips that have it, as (client, trip)."""

    nan: frozenset[tuple[int, int]] = frozenset()
    altered: frozenset[tuple[int, int]] = frozenset()
    given_back: frozenset[tuple[int, int]] = frozenset()
    slow_to_read: frozenset[tuple[int, int]] = frozenset()
    """Trips that read their model only after other clients have filled a buffer or two."""


def assessed(
    version: int,
    loss: float,
    accuracy: float = math.nan,
    correct: list[int] | None = None,
    total: list[int] | None = None,
    metrics: dict[str, float] | None = None,
    clients: messages.ClientScores = messages.NO_SCORES,
    problem: str = "",
) -> messages.Assessed:
    """Return an evaluator's message about a version."""
    return messages.Assessed(
        version, loss, accuracy, correct or [], total or [], metrics or {}, clients, problem
    )


class World:
    """Replaces the engine's timeline and evaluation: simulates tasks and evaluations in emulated time."""

    def __init__(
        self,
        folder: Path,
        strategy: Strategy,
        stop: experiment.Stop,
        *,
        ring: int = 4,
        faults: Faults | None = None,
        resuming: bool = False,
        wall: bool = False,
        left: ParameterBuffer | None = None,
    ) -> None:
        """If ``wall``, write ahead, as under the wall clock. ``left`` is the buffer of a killed server."""
        self.faults = faults or Faults()
        self.now = 0.0
        self.clock = SimpleNamespace(now_s=lambda: self.now, wall_s=lambda: self.now * 2)
        self.tasks: dict[int, messages.Task] = {}
        self.assessed: list[int] = []
        self.unsent: set[int] = set()
        """Tasks that a real timeline would hold until its next flush."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        slots = strategy.slots(CLIENTS)
        optimizer = strategy.optimizer()
        keeps = (CLIENTS, 2, 4096) if wall else ()
        self.buffer = left or ParameterBuffer.create(
            Shape(SIZE, ring, slots, optimizer.vectors, "float32", *keeps, statistics=1)
        )
        self.core = Core(strategy, fleet(CLIENTS), SEED, stop, evaluate_every=5)
        self.store = CountingStore(folder)
        self.aggregator = Aggregator(self.buffer, optimizer, statistics=1)
        if self.buffer.shape.tail:
            self.store.follow(Tail(self.buffer.tail))
        parts, restored = (folder, self.core, self.aggregator, self.store), None
        if left is not None:
            restored = resume.recover(*parts)
        elif resuming:
            restored = resume.restore(*parts)
        if restored is not None:
            self.now = restored.emulated_s
        else:
            self.buffer.model(0)[:] = stream(SEED, "model").normal(size=SIZE)
            start(optimizer, self.buffer.vectors(0))
            self.buffer.publish(version=0, entry=0)
        watch = Stopwatch("test")
        self.ahead = WriteAhead(self.store, self.aggregator, watch) if wall else None
        self.engine = Engine(
            self.core,
            self.aggregator,
            self.store,
            self,
            self,
            watch,
            restored=self.aggregator.leases,
            running={} if restored is None else restored.tasks,
            write_ahead=self.ahead,
        )

    def assign(self, task: messages.Task) -> None:
        assert task.task not in self.tasks
        self.tasks[task.task] = task
        self.unsent.add(task.task)
        place = (task.client, task.trip)
        draw = stream(SEED, "trip", *place)
        read_s = 40.0 if place in self.faults.slow_to_read else float(draw.uniform(0.1, 0.3))
        self._at(self.now + read_s, lambda: self._fetch(task, draw))

    def flush(self) -> None:
        if self.ahead is not None and self.unsent:
            self.ahead.secure()
        self.unsent.clear()

    def cancel(self, client: int, task: int) -> None:
        """Leave the trip as it is: it ends by itself."""

    def request(self, version: int, entry: int) -> list[int]:
        assert self.buffer.entry_version[entry] == version
        self.assessed.append(version)
        counts = [min(version, 10), 0], [10, 0]
        answer = assessed(
            version, 1.0 / (1 + version), min(version, 10) / 10, *counts, {"mae": -float(version)}
        )
        self._at(self.now + 0.5, lambda: self.engine.assessed(answer))
        return []

    def wake(self, at_s: float) -> None:
        self._at(at_s, lambda: self.engine.handle(Ticked(self.now)))

    def _fetch(self, task: messages.Task, draw: np.random.Generator) -> None:
        model = np.empty(SIZE, np.float32)
        self.buffer.read_model(task.entry, task.version, model)  # fails if it is no longer in the ring
        self.buffer.fetched[task.slot] = 1
        seconds = float(draw.uniform(0.5, 2.0)) * (1 + task.client % 3)
        self._at(self.now + seconds, lambda: self._finish(task, model, draw))

    def _finish(self, task: messages.Task, model: np.ndarray, draw: np.random.Generator) -> None:
        place = (task.client, task.trip)
        if place in self.faults.given_back:
            self.engine.handle(Failed(task.client, task.task, self.now, "given back"))
            return
        update = (-0.1 * model + draw.normal(scale=0.01, size=SIZE)).astype(np.float32)
        if place in self.faults.nan:
            update[7] = math.nan
        slot = self.buffer.slot(task.slot)
        slot[:] = update
        checksum = kernels.checksum(slot)
        if place in self.faults.altered:
            slot[3] += 1.0
        self.buffer.written(task.slot, task=task.task, checksum=checksum)
        self.engine.handle(self.arrival(task, checksum))

    def arrival(self, task: messages.Task, checksum: int) -> Delivery:
        result = msgspec.structs.replace(
            DONE, task=task.task, trained_version=task.version, checksum=checksum
        )
        return Delivery(task.client, result, TIMES, 60 + task.client, self.now)

    def join(self) -> World:
        for client in range(CLIENTS):
            self.engine.handle(Joined(client, self.now))
        return self

    def turn(self) -> bool:
        """Make the next scheduled call; return False if there is none."""
        if not self._heap:
            return False
        self.now, _, call = heapq.heappop(self._heap)
        call()
        self.engine.retry_sum()
        return True

    def finish(self) -> World:
        """Make all scheduled calls, including those after the core has stopped."""
        while self.turn():
            pass
        return self

    def close(self, *, commit: bool = True) -> None:
        self.store.close(commit=commit)
        self.buffer.close()

    def model(self) -> bytes:
        return self.buffer.model(self.buffer.latest[1]).tobytes()

    def _at(self, at_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), call))
