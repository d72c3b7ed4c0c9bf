"""Workloads for benchmarks, which replace `edgefl.run.workload.Workload` in the process that forks clients.

`IdleWorkload` computes nothing and takes no time, so that the cost of a trip is edgefl's overhead.
`ExerciseWorkload` multiplies matrices, whose cost in operations is known. Neither workload needs torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from edgefl.devices import Device
from edgefl.devices.fleet import ClientInfo, Trips, device_of
from edgefl.devices.link import Transfer
from edgefl.devices.plan import TripPlan
from edgefl.experiment import Experiment
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.run.control import FirstTrip, Prepared
from edgefl.run.messages import NO_SCORES, ClientScores

Done = Callable[[float], None] | None
IDLE = "edgefl.lab.workloads:IdleWorkload"
NOMINAL_S = 1.0
"""Declared duration, in seconds, of trips that take no time, because a duration of 0 cannot be emulated."""
DELTA = 2.0**-20
"""Client i adds i + 1 times this value to its first parameter, so that checksums differ between clients."""


class IdleResult(NamedTuple):
    """The result of training or evaluation in `IdleWorkload`, which computes nothing."""

    steps: int = 1
    examples: int = 1
    loss: float = 0.0
    accuracy: float = 0.0
    metrics: Mapping[str, float] = {}
    counted: int | None = None
    failed: str = ""
    correct: tuple[int, ...] = (0,)
    total: tuple[int, ...] = (1,)
    problem: str = ""


class IdleWorkload:
    """A workload with a model of ``model.args.parameters`` zeros and one example per client.

    Trips take no time.
    """

    upload = "delta"
    needs_inputs = False
    vectors = client_vectors = ()
    host_step_s = 0.0
    rules = None
    phones_secret = b""
    work = BatchWork(fixed=StepWork(), per_example=StepWork())

    def __init__(self, experiment: Experiment, clients: Sequence[ClientInfo], base: Path) -> None:
        self.experiment = experiment
        self._clients = clients
        size = int(experiment.model.args["parameters"])
        zeros = np.zeros(size, dtype=np.float32)
        self.flat = SimpleNamespace(size=size, array=zeros, whole=zeros)
        nbytes = 4 * size
        instant = Transfer(nbytes, nbytes, 0, 0.0, math.inf, nbytes)
        plan = TripPlan(instant, 0.0, 0.0, math.inf, instant)
        self.plan: Callable[..., TripPlan] = lambda *_: plan

    def device(self, client: int) -> Device:
        return device_of(self.experiment, client, self._clients[client].profile)

    def examples(self, client: int) -> int:
        return 1

    def peak_mib(self, client: int) -> float:
        return 0.0  # no training

    def step_s(self, client: int) -> float:
        return 0.0

    def train(
        self, client: int, trip: int, done: Done, steps: int | None = None, given: None = None
    ) -> IdleResult:
        self.flat.array[0] += DELTA * (client + 1)
        return IdleResult()

    def assess(self, version: int, beat: Callable[[], None]) -> tuple[IdleResult, ClientScores]:
        return IdleResult(), NO_SCORES

    protects = False

    def finish_update(self, *_: object) -> str:
        """Do nothing, because no client attacks the run or adds noise to its update."""
        return ""

    def settle(self) -> None:
        """Do nothing, because the model is not moved to another compute device."""

    def prepared(self) -> Prepared:
        counts = np.fromiter(map(self.examples, range(len(self._clients))), np.int64)
        ones = np.ones(len(counts), np.int64)
        return Prepared(
            size=self.flat.size,
            layout=[("parameters", [self.flat.size], 0)],
            examples=counts.tobytes(),
            held_out=(ones - 1).tobytes(),
            classes=ones.tobytes(),
            labels=(ones - 1).tobytes(),
            first_trips=self._first_trips(),
            work=self.work,
            host_step_s=self.host_step_s,
            test_examples=1,
            dataset="none",
        )

    def _first_trips(self) -> list[FirstTrip]:
        if self.experiment.clock.kind == "virtual":
            return []
        clients = range(len(self._clients))
        plans = ((self.examples(client), self.plan(client, 0)) for client in clients)
        return [FirstTrip(steps, one.down_s, one.compute_s, one.total_s or NOMINAL_S) for steps, one in plans]


EXERCISE = "edgefl.lab.workloads:ExerciseWorkload"
N = 128
PRODUCT_FLOP = 2.0 * N**3
MEASURED = 50


class ExerciseArgs(NamedTuple):
    """The arguments ``model.args`` that `ExerciseWorkload` accepts."""

    parameters: int
    """Number of float32 parameters that a trip transfers in each direction."""
    compute_s: float
    """Approximate duration of the training in a trip, in emulated seconds."""
    real: float = 1.0
    """Share of the declared operations that is actually computed; a value below 1 saves time on the host."""


class ExerciseWorkload(IdleWorkload):
    """A workload with a model of zeros, whose training consists of matrix products."""

    def __init__(self, experiment: Experiment, clients: Sequence[ClientInfo], base: Path) -> None:
        super().__init__(experiment, clients, base)
        asked = ExerciseArgs(**experiment.model.args)
        product = StepWork(matmul_flop=PRODUCT_FLOP / asked.real)
        self.work = BatchWork(fixed=StepWork(), per_example=product)
        models = [self.device(info.client).time_model() for info in clients]
        seconds = [model.seconds(product) for model in models if model is not None]
        self._products = [max(1, round(asked.compute_s / each)) for each in seconds]
        nbytes = 4 * asked.parameters
        self._trips = Trips(experiment, clients, self._products, self.work, nbytes, nbytes)
        self.plan = self._trips.plan
        self._a = np.full((N, N), 1.0 / N, np.float32)
        self._b, self._out = self._a.copy(), self._a.copy()
        costs = []
        for _ in range(1 + MEASURED):
            started = time.thread_time()
            np.matmul(self._a, self._b, out=self._out)
            costs.append(time.thread_time() - started)
        self.host_step_s = float(np.median(costs[1:]))

    def step_s(self, client: int) -> float:
        return self._trips.step_s(client, 1)

    def examples(self, client: int) -> int:
        return self._products[client]

    def train(
        self, client: int, trip: int, done: Done, steps: int | None = None, given: None = None
    ) -> IdleResult:
        products = self._products[client] if steps is None else steps
        for _ in range(products):
            np.matmul(self._a, self._b, out=self._out)
            if done is not None:
                done(self.step_s(client))
        return IdleResult(steps=products, examples=products)
