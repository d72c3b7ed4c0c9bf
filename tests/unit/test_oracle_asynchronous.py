"""Asynchronous strategies against models worked out by hand, in float64.

Three clients always deliver the same Δ (1, 10, 100), so a model is the sum of what was applied; their trips
take 2, 3 and 7 s. With a buffer of 2 and an immediate restart this is what arrives (client τ):
2 s 0τ0 · 3 s 1τ0 → v1 · 4 s 0τ1 · 6 s 0τ0 → v2 · 6 s 1τ1 · 7 s 2τ2 → v3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Arrived, Sum
from edgefl.strategies import Strategy, Update, resolve
from edgefl.strategies.fedasync import FedAsync
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import MemoryRun, Vector, fleet, run_in_memory

DELTAS = (1.0, 10.0, 100.0)
DURATIONS = (2.0, 3.0, 7.0)
TWO, THREE = 2**-0.5, 3**-0.5


def run(
    strategy: Strategy, versions: int = 3, train: Any = None, durations: Sequence[float] = DURATIONS
) -> MemoryRun:
    core = Core(strategy, fleet(len(durations)), 0, experiment.Stop(versions=versions))

    def add(client: int, model: Vector, trip: int) -> Vector:
        return np.asarray(model + DELTAS[client])

    return run_in_memory(core, durations, train=train or add)


def numbers(result: MemoryRun) -> list[float]:
    return [float(model[0]) for model in result.models]


def arrivals(result: MemoryRun) -> list[tuple[int, int]]:
    return [(update.client, update.staleness) for _, updates in result.sums for update in updates]


def test_the_arrivals_are_those_of_the_picture_above() -> None:
    assert arrivals(run(FedBuff(buffer_size=2))) == [(0, 0), (1, 0), (0, 1), (0, 0), (1, 1), (2, 2)]


def test_fedbuff_divides_the_weighted_sum_by_k() -> None:
    first = (1 + 10) / 2
    second = first + (TWO * 1 + 1) / 2
    third = second + (TWO * 10 + THREE * 100) / 2
    assert numbers(run(FedBuff(buffer_size=2))) == pytest.approx([0, first, second, third], rel=1e-15)


def test_fedbuff_normalised_divides_by_the_weights() -> None:
    first = (1 + 10) / 2
    second = first + 1
    third = second + (TWO * 10 + THREE * 100) / (TWO + THREE)
    got = numbers(run(FedBuff(buffer_size=2, normalize=True)))
    assert got == pytest.approx([0, first, second, third], rel=1e-15)


def test_fedbuff_with_another_exponent_step_and_momentum() -> None:
    gradients = [(1 + 10) / 2, (1 / 2 + 1) / 2, (10 / 2 + 100 / 3) / 2]
    model, velocity, expected = 0.0, 0.0, [0.0]
    for gradient in gradients:
        velocity = 0.5 * velocity + gradient
        model += 0.1 * velocity
        expected.append(model)
    got = numbers(run(FedBuff(buffer_size=2, exponent=1.0, server_lr=0.1, momentum=0.5)))
    assert got == pytest.approx(expected, rel=1e-15)


def test_a_fresh_update_weighs_1_and_a_buffer_of_stale_ones_makes_a_smaller_step() -> None:
    """Not 1.41 for a fresh one, nor 1/(1 + √1): s(0) = 1, and the weights are not made to add up to 1."""
    result = run(FedBuff(buffer_size=2))
    assert result.sums[0][0].weights == (0.5, 0.5)
    assert sum(result.sums[2][0].weights) == pytest.approx((TWO + THREE) / 2)


def test_asysg_sums_and_defedavg_iid_averages() -> None:
    assert numbers(run(resolve({"name": "asysg", "buffer_size": 2}))) == [0.0, 11.0, 13.0, 123.0]
    assert numbers(run(resolve({"name": "defedavg-iid", "buffer_size": 2}))) == [0.0, 5.5, 6.5, 61.5]


def test_fedasync_mixes_the_clients_model_and_not_a_difference() -> None:
    """y is 10·(client + 1) whatever the client started from; arrivals: 1 s 0τ0 · 2 s 0τ0 · 2.5 s 1τ2."""

    def own(client: int, model: Vector, trip: int) -> Vector:
        return np.full_like(model, 10.0 * (client + 1))

    for scaling, late in (("constant", 0.5), ("polynomial", 0.5 * THREE), ("hinge", 0.5 / (10 * 1 + 1))):
        strategy = resolve({"name": "fedasync", "alpha": 0.5, "scaling": scaling, "h": 1.0})
        expected = [0.0, 5.0, 7.5, (1 - late) * 7.5 + late * 20]
        assert numbers(run(strategy, train=own, durations=(1.0, 2.5))) == pytest.approx(expected, rel=1e-14)


def test_fedasync_weights_add_up_to_1_with_the_models_own() -> None:
    result = run(FedAsync(alpha=0.9))
    assert all(
        order.base_scale + sum(order.weights) == pytest.approx(1.0, rel=1e-15) for order, _ in result.sums
    )


@pytest.mark.parametrize(("staleness", "weight"), [(0, 0.6), (4, 0.6), (5, 0.6 / 3), (9, 0.6 / 11)])
def test_fedasync_hinge(staleness: int, weight: float) -> None:
    assert FedAsync(scaling="hinge", a=2.0).mixing(staleness) == pytest.approx(weight)


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({}, (5 / 6, 1 / 6)),
        ({"form": "algorithm-1"}, (3 / 4, 1 / 4)),
        # running: the mean raw weight of the six arrivals is (1 + 1 + 1 + 1 + 5 + 1)/6 = 5/3
        ({"normalize": "running"}, (5 / (2 * 5 / 3), 1 / (2 * 5 / 3))),
        ({"normalize": "running", "max_step": 1.2}, (1.2 * 5 / 6, 1.2 * 1 / 6)),
    ],
)
def test_fedstaleweight(fields: dict[str, Any], last: tuple[float, float]) -> None:
    """A client waits for a new version: 0τ0, 1τ0 → v1 at 3 s · 0τ0, 1τ0 → v2 at 6 s · 2τ2, 0τ0 → v3."""
    result = run(FedStaleWeight(buffer_size=2, **fields))
    assert arrivals(result) == [(0, 0), (1, 0), (0, 0), (1, 0), (2, 2), (0, 0)]
    assert result.sums[0][0].weights == (0.5, 0.5)  # all fresh: the plain average, and not a lost buffer
    assert result.sums[2][0].weights == pytest.approx(last, rel=1e-14)
    expected = [0.0, 5.5, 11.0, 11.0 + last[0] * 100 + last[1] * 1]
    assert numbers(result) == pytest.approx(expected, rel=1e-14)


def weights_after(strategy: FedStaleWeight, observed: Sequence[Sequence[int]]) -> list[float]:
    """The weights of a buffer of one update of each client, the last of those that each was observed with."""
    devices = fleet(len(observed))
    core = Core(strategy, devices, 0, experiment.Stop())
    state = strategy.begin(devices)
    buffer = []
    for client, values in enumerate(observed):
        for staleness in values:
            update = Update(0, client, 0, staleness, 1, 1, 0.0, 0.0)
            strategy.arrive(state, update, core)
        buffer.append(update)
    return list(strategy.weights(state, buffer, core))


def test_the_window_drops_the_oldest_observation_and_keeps_the_newest() -> None:
    strategy = FedStaleWeight(buffer_size=2, window=3)
    assert weights_after(strategy, [[9, 0, 0], [0]]) == pytest.approx([7 / 8, 1 / 8])  # E = 3: 2·3 + 1
    assert weights_after(strategy, [[9, 0, 0, 0], [0]]) == pytest.approx([1 / 2, 1 / 2])
    assert weights_after(strategy, [[0, 0, 0, 9], [0]]) == pytest.approx([7 / 8, 1 / 8])


@pytest.mark.parametrize(
    ("average", "mean"),
    [("window", 5.0), ("cumulative", 4.0), ("exponential", 0.5 * (0.5 * 2 + 0.5 * 4) + 0.5 * 6)],
)
def test_each_moving_average(average: Any, mean: float) -> None:
    strategy = FedStaleWeight(buffer_size=2, average=average, window=2, decay=0.5)
    raw = 2 * mean + 1
    assert weights_after(strategy, [[2, 4, 6], [0]]) == pytest.approx([raw / (raw + 1), 1 / (raw + 1)])


def test_an_update_that_is_refused_is_not_observed() -> None:
    strategy = FedStaleWeight(buffer_size=2, max_staleness=3)
    assert weights_after(strategy, [[50], [0]]) == [0.5, 0.5]


def test_defedavg_niid_averages_the_newest_update_of_a_uniform_sample() -> None:
    strategy = resolve({"name": "defedavg-niid", "participants": 4})
    core = Core(strategy, fleet(6), 0, experiment.Stop(versions=3000))
    result = run_in_memory(
        core, [1.0, 1.0, 2.0, 3.0, 5.0, 8.0], train=lambda client, model, trip: model + 1.0
    )
    newest: dict[int, int] = {}
    steps = iter(result.sums)
    for event, actions in result.history:
        if isinstance(event, Arrived):
            newest[event.client] = event.task
        if any(isinstance(action, Sum) for action in actions):
            order, updates = next(steps)
            assert [newest[update.client] for update in updates] == list(order.tasks)
            multiples = np.array(order.weights) * 4
            assert multiples == pytest.approx(np.round(multiples))  # drawn twice counts twice
            assert sum(order.weights) == pytest.approx(1.0)
    assert numbers(result) == pytest.approx(np.arange(3001.0))
    share = core.applied_weight / core.applied_weight.sum()
    assert share == pytest.approx(np.full(6, 1 / 6), rel=0.05)  # however slow a client is
    assert core.discarded > 0  # send buffers that were overwritten


def test_defedavg_niid_paused_trains_only_what_is_taken() -> None:
    strategy = resolve({"name": "defedavg-niid", "participants": 4, "pause": True})
    core = Core(strategy, fleet(6), 0, experiment.Stop(versions=500))
    run_in_memory(core, [1.0, 1.0, 2.0, 3.0, 5.0, 8.0])
    assert core.discarded <= 6  # only what is held when the run ends
    assert core.applied_weight == pytest.approx(np.full(6, 500 / 6), rel=0.15)
