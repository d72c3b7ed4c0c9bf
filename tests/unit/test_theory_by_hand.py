"""Tests of the expectations of `edgefl reproduce theory` against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from edgefl import experiment
from edgefl.core import Core
from edgefl.lab import incentive, short_batches, stragglers
from edgefl.strategies import Client
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import run_in_memory


def test_expected_times_of_equal_clients_and_of_two_clients_are_correct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round of equal clients takes λ·n·(1/M + … + 1/(M − C + 1)), and an update of FedBuff λ·n/M."""
    monkeypatch.setattr(stragglers, "CLIENTS", 20)
    monkeypatch.setattr(stragglers, "SIZES", ((3, 20),))
    found = stragglers.rounds(4, 6)
    assert found.seconds * 4 == pytest.approx(3.0 * (1 / 6 + 1 / 5 + 1 / 4 + 1 / 3), rel=1e-3)
    assert found.examples == 3.0
    assert stragglers.buffered(6).seconds == pytest.approx(3.0 / 6)
    monkeypatch.setattr(stragglers, "CLIENTS", 2)
    monkeypatch.setattr(stragglers, "SIZES", ((1, 1), (4, 1)))
    first = stragglers.rounds(1, 2)  # either client, at a rate of 1 + 1/4; the small one in 4 of 5 cases
    assert first.seconds == pytest.approx(0.8, rel=1e-3)
    assert first.examples == pytest.approx(0.8 * 1 + 0.2 * 4, rel=1e-3)
    alone = stragglers.buffered(1)  # either client, with equal chances
    assert (alone.seconds, alone.examples) == pytest.approx((2.5, 2.5))


def test_the_expectation_for_short_batches_is_that_of_two_steps() -> None:
    """η·L·b/B is 0.2·b/8, and the second gradient contains the noise of the first step."""
    made = short_batches.expected([8, 4])
    assert made.descent == pytest.approx((1.0 * 64 + 0.5 * 64 * 0.8**2) / 1.5)
    assert made.noise == pytest.approx(0.5 * 4 * 0.1**2 * 3.0 / 8 / 1.5)
    assert short_batches.bound([8, 4]) == pytest.approx(2 * 16 / 0.15 + 0.1 * 2 * 3 / 8)


@pytest.mark.parametrize("normalize", ["buffer", "running", "credit"])
def test_clients_without_examples_have_weight_0_if_importance_is_by_examples(normalize: Any) -> None:
    strategy = FedStaleWeight(buffer_size=2, importance_by="examples", normalize=normalize)
    devices = [Client(0, "a", 0), Client(1, "a", 10), Client(2, "a", 0)]
    run = run_in_memory(Core(strategy, devices, 0, experiment.Stop(versions=4)), [1.0, 1.7, 1.0])
    weights = [
        (update.client, weight)
        for order, updates in run.sums
        for update, weight in zip(updates, order.weights, strict=True)
    ]
    assert [client for client, _ in weights[:2]] == [0, 2]  # all updates of version 1 are without examples
    assert {weight > 0.0 for client, weight in weights if client == 1} == {True}
    assert {weight for client, weight in weights if client != 1} == {0.0}


@pytest.mark.parametrize(
    "given", [[1.0], [0.5, 0.6], [1.5, -0.5], [float("nan"), 1.0], {0: 0.5, 1: 0.5}], ids=str
)
def test_an_importance_that_is_not_a_distribution_over_clients_is_refused(given: Any) -> None:
    class Mine(FedStaleWeight):
        def importance(self, devices: Sequence[Client]) -> Any:
            return given

    why = r"^importance must return 2 numbers, one per client, at least 0 and "
    with pytest.raises(ValueError, match=why):
        Mine().begin([Client(0, "a", 1), Client(1, "a", 1)])


def test_equation_9_without_replacement_excludes_clients_that_are_in_the_buffer() -> None:
    """Others have rates 1 and 2; in a buffer of three, their pairs with replacement are 11, 12, 21 and 22."""
    groups = [(1.0, 1), (2.0, 1)]
    both = 0.5 / (1.5 * 0.25 + (3 + 2 / 1 + 1 / 2) * 0.5 + 3.0)  # C = 1 + 1/2, D = 2/1 + 1/2, A = 3
    assert incentive.utility(0.5, groups, 3, again=False)[0] == pytest.approx(both)
    ones = 0.5 / (2.0 * 0.25 + (3 + 2 / 1 + 2 / 1) * 0.5 + 3.0)
    twos = 0.5 / (1.0 * 0.25 + (3 + 1 / 2 + 1 / 2) * 0.5 + 3.0)
    mean = (ones + 4 * both + 4 * twos) / 9
    assert incentive.utility(0.5, groups, 3, again=True)[0] == pytest.approx(mean)
