"""What the papers prove or claim of their weights, as properties of any run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl import experiment
from edgefl.core import Core
from edgefl.lab.theory import weight_bounds
from edgefl.strategies import Update
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import fleet


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
