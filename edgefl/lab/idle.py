"""A workload that computes nothing and takes no time: what remains of a trip is what the system costs.

The zygote takes it in place of `edgefl.run.workload.Workload`, whose interface it has, by its name on the
command line. It needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from edgefl.devices import Device
from edgefl.devices.condition import Condition
from edgefl.devices.fleet import ClientInfo, device_of
from edgefl.devices.link import Transfer
from edgefl.devices.plan import TripPlan
from edgefl.experiment import Experiment
from edgefl.run.control import Prepared

NAME = "edgefl.lab.idle:IdleWorkload"
DELTA = 2.0**-20
"""Client i changes its first parameter by (i + 1) times this, so that each client's checksum is its own."""


class Idled(NamedTuple):
    """What training and evaluating report, with nothing done."""

    steps: int = 1
    examples: int = 1
    loss: float = 0.0
    accuracy: float = 0.0
    correct: tuple[int, ...] = (0,)
    total: tuple[int, ...] = (1,)


class IdleWorkload:
    """``model.args.parameters`` zeros, one example a client, transfers and training that take no time."""

    upload = "delta"

    def __init__(self, experiment: Experiment, clients: list[ClientInfo], base: Path) -> None:
        self.experiment = experiment
        self._clients = clients
        size = int(experiment.model.args["parameters"])
        self.flat = SimpleNamespace(size=size, array=np.zeros(size, dtype=np.float32))
        nbytes = 4 * size
        instant = Transfer(nbytes, nbytes, 0, 0.0, math.inf, nbytes)
        self._plan = TripPlan(instant, 0.0, 0.0, math.inf, instant)

    def device(self, client: int) -> Device:
        return device_of(self.experiment.seed, client, self._clients[client].profile)

    def examples(self, client: int) -> int:
        return 1

    def plan(
        self, client: int, trip: int, budget_s: float | None = None, condition: Condition | None = None
    ) -> TripPlan:
        return self._plan

    def share(self, client: int, way: str) -> None:
        """Nobody shares a link."""

    def gone(self, client: int) -> None:
        """Nobody waits for it."""

    def train(
        self, client: int, trip: int, done: Callable[[float], None] | None, steps: int | None = None
    ) -> Idled:
        self.flat.array[0] += DELTA * (client + 1)
        return Idled()

    def evaluate(self) -> Idled:
        return Idled()

    def settle(self) -> None:
        """Nothing is computed anywhere."""

    def prepared(self) -> Prepared:
        count = len(self._clients)
        return Prepared(
            size=self.flat.size,
            layout=[("parameters", [self.flat.size], 0)],
            classes=1,
            examples=[1] * count,
            labels=[[0]] * count,
            flops_per_example=0.0,
            flops=[0.0] * count,
            steps=[1] * count,
            host_step_s=0.0,
            emulated_trip_s=[0.0] * count,
            emulated_down_s=[0.0] * count,
            emulated_compute_s=[0.0] * count,
            test_examples=1,
            dataset="none",
        )
