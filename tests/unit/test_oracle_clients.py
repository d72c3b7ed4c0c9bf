"""Tests of algorithms whose clients keep vectors, against the papers' algorithms in NumPy (float64).

edgefl's algorithms run in memory, and with the computing parts of a real run: workload, trainer, parameter
buffer, updates, sums, core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgefl import Data, Experiment, Fleet, Model, Stop, Training, experiment
from edgefl.core import Core
from edgefl.core.events import Arrived, Joined, Release, Sum, Summed, Train
from edgefl.devices.fleet import fleet_of
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.run.aggregator import Aggregator
from edgefl.run.demands import shape_of
from edgefl.run.engine import is_kept
from edgefl.run.update import UpdateMaker
from edgefl.run.workload import Workload
from edgefl.seeds import stream
from edgefl.strategies import LocalTerms, Strategy, resolve
from edgefl.strategies.scaffold import Scaffold
from edgefl.testing import fleet, run_in_memory

Array = npt.NDArray[Any]
Gradient = Callable[..., Array]
N, STEPS, ROUNDS, LR = 6, 3, 7, 0.1
COHORTS = [
    pytest.param({"cohort": 3}, id="half of the clients"),
    pytest.param({"cohort": N, "server_lr": 0.5}, id="all clients, half a step"),
]
RATES = (0.5, 1.0, 2.0, 0.25, 1.5, 0.75)
"""Factors of the clients' learning rates in `OwnRates`."""


@dataclass(frozen=True, kw_only=True)
class OwnRates(Scaffold):
    def local_rule(self) -> LocalTerms:
        return replace(super().local_rule(), lr=RATES)


@pytest.fixture(autouse=True)
def this_file_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEFL_MODULES", __name__)


def scaffold(
    x: Array, cohorts: list[list[int]], gradient: Gradient, lr_g: float, rates: Sequence[float] = (1.0,) * N
) -> list[Array]:
    """SCAFFOLD (Karimireddy et al. 2020, Algorithm 1 with option II); η_l may differ between clients."""
    c, c_i, made, trips = np.zeros_like(x), np.zeros((N, len(x))), [x], [0] * N
    for cohort in cohorts:
        delta_y, delta_c = [], []
        for i in cohort:
            y = x.copy()
            for k in range(STEPS):
                y = y - LR * rates[i] * (gradient(i, y, trips[i], k) - c_i[i] + c)
            c_plus = c_i[i] - c + (x - y) / (STEPS * LR * rates[i])
            delta_y.append(y - x)
            delta_c.append(c_plus - c_i[i])
            c_i[i] = c_plus
            trips[i] += 1
        x = x + lr_g * np.mean(delta_y, axis=0)
        c = c + len(cohort) / N * np.mean(delta_c, axis=0)
        made.append(x)
    return made


ALPHA = 0.3


def feddyn(theta: Array, cohorts: list[list[int]], gradient: Gradient, lr_g: float) -> list[Array]:
    """FedDyn (Acar et al. 2021). Clients minimise with SGD, and ``lr_g`` scales the mean change of their
    models."""
    h, own, made, trips = np.zeros_like(theta), np.zeros((N, len(theta))), [theta], [0] * N
    for cohort in cohorts:
        models = []
        for k in cohort:
            y = theta.copy()
            for step in range(STEPS):
                y = y - LR * (gradient(k, y, trips[k], step) - own[k] + ALPHA * (y - theta))
            own[k] = own[k] - ALPHA * (y - theta)
            models.append(y)
            trips[k] += 1
        h = h - ALPHA / N * np.sum([y - theta for y in models], axis=0)
        theta = theta + lr_g * (np.mean(models, axis=0) - theta) - h / ALPHA
        made.append(theta)
    return made


ALGORITHMS = [
    pytest.param({"name": "scaffold"}, scaffold, id="scaffold"),
    pytest.param({"name": f"{__name__}:OwnRates"}, partial(scaffold, rates=RATES), id="own rates"),
    pytest.param({"name": "feddyn", "alpha": ALPHA}, feddyn, id="feddyn"),
]


@pytest.mark.parametrize("fields", COHORTS)
@pytest.mark.parametrize(("named", "oracle"), ALGORITHMS)
def test_in_memory_the_models_are_those_of_the_paper(named: Any, oracle: Any, fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    curves, targets = rng.uniform(0.5, 2.0, (N, 4)), rng.normal(size=(N, 4))

    def gradient(client: int, y: Array, trip: int, step: int) -> Array:
        return np.asarray(curves[client] * (y - targets[client]))

    core = Core(resolve({**named, **fields}), fleet(N), 3, experiment.Stop(versions=ROUNDS))

    def train(client: int, y: Array, trip: int) -> Array:
        return np.asarray(y - LR * gradient(client, y, trip, 0))

    durations = [1.0 + client for client in range(N)]
    run = run_in_memory(core, durations, model=np.zeros(4), train=train, steps=STEPS, lr=LR)
    cohorts = [[update.client for update in updates] for _, updates in run.sums]
    expected = oracle(np.zeros(4), cohorts, gradient, fields.get("server_lr", 1.0))
    np.testing.assert_allclose(run.models, expected, rtol=0, atol=1e-12)


BATCH = 16
CLASSES, PIXELS = 10, 64


class RealParts:
    """The computing parts of a run, in one process; updates arrive in the order of their tasks."""

    def __init__(self, named: dict[str, Any]) -> None:
        self.wanted = Experiment(
            fleet=Fleet(devices={"pixel-4": N}),
            data=Data(name="digits"),
            model=Model(name="linear_model:make"),
            training=Training(steps=STEPS, batch_size=BATCH, lr=LR),
            strategy=named,
            stop=Stop(versions=ROUNDS),
        )

    def run(self, folder: Path) -> tuple[list[Array], list[list[int]], Workload]:
        (folder / "linear_model.py").write_text(
            "from torch import nn\n"
            "def make(input_shape, classes):\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
        )
        wanted, clients = self.wanted, fleet_of(self.wanted)
        strategy: Strategy = resolve(wanted.strategy)
        workload = Workload(wanted, clients, folder)
        size = workload.flat.size
        core = Core(strategy, workload.known, wanted.seed, wanted.stop)
        with closing(ParameterBuffer.create(shape_of(wanted, strategy, size, N))) as buffer:
            buffer.model(0)[:] = workload.flat.whole
            buffer.publish(version=0, entry=0)
            aggregator = Aggregator.of(wanted, strategy, buffer, size)
            aggregator.begin()
            maker, models, cohorts = UpdateMaker(workload, buffer), [workload.flat.array.copy()], []
            queue: list[Any] = [Joined(client, 0.0) for client in range(N)]
            arriving: list[Any] = []
            while core.stopped is None:
                event = queue.pop(0) if queue else arriving.pop(0)
                actions = core.handle(event)
                if isinstance(event, Arrived) and is_kept(event.task, actions):
                    buffer.accepted(event.client, event.task)
                for action in actions:
                    match action:
                        case Train(client=client, task=task, version=version, trip=trip):
                            lease = aggregator.lease(task=task, client=client, version=version)
                            aggregator.fetched(lease.slot)
                            base = buffer.model(lease.entry)
                            np.copyto(workload.flat.whole, base)
                            maker.train(client, trip, version, base, None)
                            raw = buffer.raw(lease.slot)
                            maker.write(raw, client, 0, base)
                            buffer.written(lease.slot, task=task, checksum=maker.checksum(raw))
                            arriving.append(Arrived(client, task, version, 100, STEPS, 0.0, 1.0))
                        case Sum(version=version, tasks=tasks):
                            entry = aggregator.free_entry()
                            assert entry is not None
                            cohorts.append([core.update(task).client for task in tasks])
                            bad = aggregator.sum(action, entry).bad
                            assert bad == ()
                            models.append(buffer.model(entry)[:size].copy())
                            queue.append(Summed(version, 1.0, bad))
                        case Release(task=task):
                            aggregator.release(task)
            return models, cohorts, workload


def softmax_gradient(workload: Workload) -> Callable[..., Array]:
    """Return a function that computes, in float64, the gradient of a linear model's mean cross-entropy on the
    batch of a client's step."""
    data, rows = workload.data, workload._rows
    x = np.asarray(data.train_x[np.arange(len(data.train_y))], np.float64).reshape(-1, PIXELS)

    def gradient(client: int, y: Array, trip: int, step: int) -> Array:
        rng = stream(workload.experiment.seed, "batches", client, trip)
        rng.integers(2**63)  # torch's seed
        batch = rng.permutation(rows[client])[step * BATCH : (step + 1) * BATCH]
        weight, bias = y[: CLASSES * PIXELS].reshape(CLASSES, PIXELS), y[CLASSES * PIXELS :]
        logits = x[batch] @ weight.T + bias
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        shares[np.arange(len(batch)), data.train_y[batch]] -= 1.0
        shares /= len(batch)
        return np.concatenate([(shares.T @ x[batch]).reshape(-1), shares.sum(axis=0)])

    return gradient


@pytest.mark.parametrize("fields", COHORTS)
@pytest.mark.parametrize(("named", "oracle"), ALGORITHMS)
def test_in_a_run_the_models_are_those_of_the_paper(
    named: dict[str, Any], oracle: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    models, cohorts, workload = RealParts({**named, **fields}).run(tmp_path)
    start = np.asarray(models[0], np.float64)
    expected = oracle(start, cohorts, softmax_gradient(workload), fields.get("server_lr", 1.0))
    assert len(models) == ROUNDS + 1
    assert np.abs(np.asarray(expected[-1]) - expected[0]).max() > 0.01
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-6)
