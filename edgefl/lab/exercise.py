"""A workload of real arithmetic whose amount is known: products of matrices in place of training.

The zygote takes it in place of `edgefl.run.workload.Workload`, whose interface it has. Each device
computes for about ``compute_s`` emulated seconds a trip: as many products as its declared rate makes of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edgefl.devices.condition import Condition
from edgefl.devices.fleet import ClientInfo, Trips
from edgefl.devices.plan import TripPlan
from edgefl.experiment import Experiment
from edgefl.lab.idle import Idled, IdleWorkload
from edgefl.run.control import Prepared

NAME = "edgefl.lab.exercise:ExerciseWorkload"
N = 128
PRODUCT_FLOP = 2.0 * N**3
MEASURED = 50


class Exercise(NamedTuple):
    """What ``model.args`` of such an experiment say."""

    parameters: int
    """Of the model, float32: what a trip moves each way."""
    compute_s: float
    """Emulated seconds of computing on a trip, about."""
    real: float = 1.0
    """Share of the declared operations that is really computed: below 1 for what would take too long."""


class ExerciseWorkload(IdleWorkload):
    """Zeros for a model, and products of matrices for training it."""

    def __init__(self, experiment: Experiment, clients: list[ClientInfo], base: Path) -> None:
        super().__init__(experiment, clients, base)
        asked = Exercise(**experiment.model.args)
        self.flops_per_product = PRODUCT_FLOP / asked.real
        rates = [self.device(info.client).train_flop_per_s for info in clients]
        self._products = [max(1, round(rate * asked.compute_s / self.flops_per_product)) for rate in rates]
        nbytes = 4 * asked.parameters
        self._trips = Trips(experiment, clients, self._products, self.flops_per_product, nbytes, nbytes)
        self.ns_per_flop = 0.0
        self._a = np.full((N, N), 1.0 / N, np.float32)
        self._b, self._out = self._a.copy(), self._a.copy()

    def examples(self, client: int) -> int:
        return self._products[client]

    def plan(
        self, client: int, trip: int, budget_s: float | None = None, condition: Condition | None = None
    ) -> TripPlan:
        return self._trips.plan(client, trip, budget_s, condition)

    def train(
        self, client: int, trip: int, done: Callable[[float], None] | None, steps: int | None = None
    ) -> Idled:
        products = self._products[client] if steps is None else steps
        for _ in range(products):
            np.matmul(self._a, self._b, out=self._out)
            if done is not None:
                done(self.flops_per_product)
        return Idled(steps=products, examples=products)

    def prepared(self) -> Prepared:
        plans = [self.plan(info.client, 0) for info in self._clients]
        product_s = self._measure_product_s()
        self.ns_per_flop = product_s * 1e9 / self.flops_per_product
        return msgspec.structs.replace(
            super().prepared(),
            examples=self._products,
            flops_per_example=self.flops_per_product,
            flops=[plan.flops for plan in plans],
            steps=self._products,
            host_step_s=product_s,
            emulated_trip_s=[plan.total_s for plan in plans],
            emulated_down_s=[plan.down_s for plan in plans],
            emulated_compute_s=[plan.compute_s for plan in plans],
        )

    def _measure_product_s(self) -> float:
        """Median CPU seconds of one product."""
        costs = []
        for _ in range(1 + MEASURED):
            started = time.thread_time()
            np.matmul(self._a, self._b, out=self._out)
            costs.append(time.thread_time() - started)
        return float(np.median(costs[1:]))
