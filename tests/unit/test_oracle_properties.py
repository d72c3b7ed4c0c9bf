"""What the papers prove or claim of their weights, as properties of any run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl import experiment
from edgefl.core import Core
from edgefl.strategies import Strategy, Update, resolve
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import MemoryRun, fleet, run_in_memory

FAST, SLOW = range(10), range(10, 15)


def weights_of(strategy: FedStaleWeight, staleness: Sequence[int]) -> list[float]:
    """The weights of one buffer in which client i was observed once, with the i-th staleness."""
    devices = fleet(len(staleness))
    core, state = Core(strategy, devices, 0, experiment.Stop()), strategy.begin(devices)
    buffer = [Update(i, i, 0, tau, 1, 1, 0.0, 0.0) for i, tau in enumerate(staleness)]
    for update in buffer:
        strategy.arrive(state, update, core)
    return list(strategy.weights(state, buffer, core))


BUFFERS = st.lists(st.integers(0, 10_000), min_size=2, max_size=40)


@given(staleness=BUFFERS)
def test_fedstaleweights_weights_add_up_to_1_within_theorem_1s_bounds(staleness: list[int]) -> None:
    b, largest = len(staleness), max(staleness)
    weights = weights_of(FedStaleWeight(buffer_size=b), staleness)
    assert sum(weights) == pytest.approx(1.0, rel=1e-12)
    low = 1 / ((b - 1) * (b * largest + 1) + 1)
    high = (b * largest + 1) / (b * (largest + 1))
    assert all(low * (1 - 1e-12) <= weight <= high * (1 + 1e-12) for weight in weights)


@given(b=st.integers(2, 40), largest=st.integers(1, 10_000))
def test_theorem_1s_bounds_are_reached(b: int, largest: int) -> None:
    """The lower by one fresh update among the stalest, the upper by the stalest among fresh ones."""
    one_fresh = weights_of(FedStaleWeight(buffer_size=b), [0] + [largest] * (b - 1))
    one_stale = weights_of(FedStaleWeight(buffer_size=b), [largest] + [0] * (b - 1))
    assert one_fresh[0] == pytest.approx(1 / ((b - 1) * (b * largest + 1) + 1), rel=1e-12)
    assert one_stale[0] == pytest.approx((b * largest + 1) / (b * (largest + 1)), rel=1e-12)


@given(staleness=BUFFERS, form=st.sampled_from(["derivation", "algorithm-1"]))
def test_staler_clients_weigh_more_in_fedstaleweight_and_less_in_fedbuff(
    staleness: list[int], form: Any
) -> None:
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


@settings(max_examples=30)
@given(durations=st.lists(st.integers(1, 50), min_size=3, max_size=8), size=st.integers(2, 8))
def test_staleness_shrinks_by_the_buffer(durations: list[int], size: int) -> None:
    """τ_K ≤ ⌈τ_1/K⌉ trip by trip, and so the largest and the mean (FedBuff, appendix A)."""
    size = min(size, len(durations))

    def staleness(buffer_size: int) -> dict[tuple[int, int], int]:
        seen: dict[tuple[int, int], int] = {}

        class Watching(FedBuff):
            def arrive(self, state: Any, update: Update, view: Any) -> Sequence[Update]:
                trip = sum(client == update.client for client, _ in seen)
                seen[update.client, trip] = update.staleness
                return ()

        stop = experiment.Stop(trips=20 * len(durations))
        core = Core(Watching(buffer_size=buffer_size), fleet(len(durations)), 0, stop)
        run_in_memory(core, [float(duration) for duration in durations])
        return seen

    one, many = staleness(1), staleness(size)
    assert one.keys() == many.keys()
    assert all(many[trip] <= math.ceil(one[trip] / size) for trip in one)
    assert max(many.values()) <= math.ceil(max(one.values()) / size)


def phones(strategy: Strategy, versions: int = 1000, slowed: float = 1.0) -> tuple[MemoryRun, Any]:
    """FedStaleWeight, section 6.2: ten clients of U(1, 2) s, five of U(8, 12) s. Also gives share · n."""
    rng = np.random.default_rng(7)
    draws = rng.random((15, 40 * versions))

    def duration(client: int, trip: int) -> float:
        low, high = (1.0, 2.0) if client in FAST else (8.0, 12.0)
        return float(low + (high - low) * draws[client, trip]) * (slowed if client == 0 else 1.0)

    core = Core(strategy, fleet(15), 0, experiment.Stop(versions=versions), 10**9)
    result = run_in_memory(core, duration)
    return result, core.applied_weight / core.applied_weight.sum() * 15


SETTING: dict[str, Any] = {"buffer_size": 5, "restart": "new-version"}


def test_fairness_on_the_same_arrivals_is_what_the_paper_is_about() -> None:
    """Share of all applied weight · n: 1 is fair (eq. 3). FedBuff goes by rate; FedStaleWeight halves it."""
    plain, plain_share = phones(FedBuff(exponent=0.0, **SETTING))
    buff, buff_share = phones(FedBuff(**SETTING))
    stale, stale_share = phones(FedStaleWeight(**SETTING))
    running, running_share = phones(FedStaleWeight(normalize="running", **SETTING))
    assert plain.events == buff.events == stale.events == running.events  # the very same arrivals

    rates = np.array([1 / 1.5] * 10 + [1 / 10] * 5)
    assert plain_share == pytest.approx(rates / rates.sum() * 15, rel=0.08)
    for share, fast, slow in (
        (plain_share, 1.40, 0.21),
        (stale_share, 1.20, 0.60),
        (running_share, 1.01, 0.98),
    ):
        assert share[FAST].mean() == pytest.approx(fast, abs=0.03)
        assert share[SLOW].mean() == pytest.approx(slow, abs=0.03)
    unfairness = [np.abs(share - 1).mean() for share in (buff_share, plain_share, stale_share, running_share)]
    assert unfairness == sorted(unfairness, reverse=True)
    assert unfairness[2] < 0.52 * unfairness[1]
    assert unfairness[3] < 0.1 * unfairness[1]


@pytest.mark.parametrize("normalize", ["buffer", "running"])
def test_the_mean_step_is_that_of_an_average(normalize: Any) -> None:
    result, _ = phones(FedStaleWeight(normalize=normalize, **SETTING))
    assert np.mean([sum(order.weights) for order, _ in result.sums]) == pytest.approx(1.0, abs=0.02)


def test_expected_staleness_is_what_equation_6_says() -> None:
    result, _ = phones(FedStaleWeight(**SETTING), versions=2000)
    observed: dict[int, list[int]] = {client: [] for client in range(15)}
    for _, updates in result.sums[200:]:
        for update in updates:
            observed[update.client].append(update.staleness)
    rates = np.array([1 / 1.5] * 10 + [1 / 10] * 5)
    expected = (rates.sum() / rates - 1) / 5
    got = np.array([np.mean(observed[client]) for client in range(15)])
    assert got == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("slowed", [1.5, 2.0, 4.0])
def test_a_fast_client_that_slows_down_gains_no_weight_in_a_running_fedstaleweight(slowed: float) -> None:
    """Strategy-proofness (section 4.2.1)."""
    strategy = FedStaleWeight(normalize="running", **SETTING)
    _, honest = phones(strategy)
    _, slow = phones(strategy, slowed=slowed)
    assert slow[0] <= honest[0] * 1.03


def test_every_built_in_applies_each_arrival_at_most_once() -> None:
    for name in ("fedbuff", "fedstaleweight", "fedasync", "fedavg", "defedavg-iid"):
        result, _ = phones(resolve({"name": name}), versions=50)
        used = [task for order, _ in result.sums for task in order.tasks]
        assert len(set(used)) == len(used)
