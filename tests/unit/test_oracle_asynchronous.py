"""Weights of asynchronous strategies: by hand where they remember, and what the papers prove of any run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl import experiment
from edgefl.core import Core
from edgefl.core.events import Arrived, Sum
from edgefl.lab.theory import weight_bounds
from edgefl.strategies import Update, resolve
from edgefl.strategies.fedasync import FedAsync
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import fleet, run_in_memory


@pytest.mark.parametrize(("staleness", "weight"), [(0, 0.6), (4, 0.6), (5, 0.6 / 3), (9, 0.6 / 11)])
def test_fedasync_hinge(staleness: int, weight: float) -> None:
    assert FedAsync(scaling="hinge", a=2.0).mixing(staleness) == pytest.approx(weight)


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
    assert [float(model[0]) for model in result.models] == pytest.approx(np.arange(3001.0))
    share = core.applied_weight / core.applied_weight.sum()
    assert share == pytest.approx(np.full(6, 1 / 6), rel=0.05)  # however slow a client is
    assert core.discarded > 0  # send buffers that were overwritten


def test_defedavg_niid_paused_trains_only_what_is_taken() -> None:
    strategy = resolve({"name": "defedavg-niid", "participants": 4, "pause": True})
    core = Core(strategy, fleet(6), 0, experiment.Stop(versions=500))
    run_in_memory(core, [1.0, 1.0, 2.0, 3.0, 5.0, 8.0])
    assert core.discarded <= 6  # only what is held when the run ends
    assert core.applied_weight == pytest.approx(np.full(6, 500 / 6), rel=0.15)


BUFFERS = st.lists(st.integers(0, 10_000), min_size=2, max_size=40)


def weights_of(strategy: FedStaleWeight, staleness: Sequence[int]) -> list[float]:
    """The weights of one buffer in which client i was observed once, with the i-th staleness."""
    return weights_after(strategy, [[tau] for tau in staleness])


@given(staleness=BUFFERS)
def test_fedstaleweights_weights_add_up_to_1_within_theorem_1s_bounds(staleness: list[int]) -> None:
    b, largest = len(staleness), max(staleness)
    weights = weights_of(FedStaleWeight(buffer_size=b), staleness)
    assert sum(weights) == pytest.approx(1.0, rel=1e-12)
    low, high = weight_bounds(b, largest)
    assert all(low * (1 - 1e-12) <= weight <= high * (1 + 1e-12) for weight in weights)


@given(b=st.integers(2, 40), largest=st.integers(1, 10_000))
def test_theorem_1s_bounds_are_reached(b: int, largest: int) -> None:
    """The lower by one fresh update among the stalest, the upper by the stalest among fresh ones."""
    one_fresh = weights_of(FedStaleWeight(buffer_size=b), [0] + [largest] * (b - 1))
    one_stale = weights_of(FedStaleWeight(buffer_size=b), [largest] + [0] * (b - 1))
    low, high = 1 / ((b - 1) * (b * largest + 1) + 1), (b * largest + 1) / (b * (largest + 1))
    assert one_fresh[0] == pytest.approx(low, rel=1e-12)
    assert one_stale[0] == pytest.approx(high, rel=1e-12)
    assert weight_bounds(b, largest) == pytest.approx((low, high), rel=1e-15)


@given(staleness=BUFFERS, form=st.sampled_from(["derivation", "algorithm-1"]))
def test_the_stale_weigh_more_in_fedstaleweight_and_less_in_fedbuff(staleness: list[int], form: Any) -> None:
    stale = weights_of(FedStaleWeight(buffer_size=len(staleness), form=form), staleness)
    updates = [Update(i, i, 0, tau, 1, 1, 0.0, 0.0) for i, tau in enumerate(staleness)]
    core = Core(FedBuff(), fleet(len(staleness)), 0, experiment.Stop())
    buff = FedBuff().weights(None, updates, core)
    order = np.argsort(staleness, kind="stable")
    assert (np.diff(np.array(stale)[order]) >= 0).all()
    assert (np.diff(np.array(buff)[order]) <= 0).all()
    assert all(0 < weight <= 1 / len(staleness) for weight in buff)


@given(staleness=BUFFERS, most=st.floats(0.5, 3.0))
def test_a_running_step_is_bounded(staleness: list[int], most: float) -> None:
    strategy = FedStaleWeight(buffer_size=len(staleness), normalize="running", max_step=most)
    assert sum(weights_of(strategy, staleness)) <= most * (1 + 1e-12)


@pytest.mark.parametrize("size", [1, 2, 5, 40])
@pytest.mark.parametrize("fields", [{}, {"form": "algorithm-1"}, {"normalize": "running"}])
def test_fresh_updates_are_averaged(size: int, fields: dict[str, Any]) -> None:
    assert weights_of(FedStaleWeight(buffer_size=size, **fields), [0] * size) == pytest.approx(
        [1 / size] * size
    )
