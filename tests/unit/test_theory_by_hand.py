"""Tests of the expectations of `edgefl reproduce theory` against figures worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from theory_mutants import MUTANTS

from benchmarks import phones, strategic
from edgefl import experiment
from edgefl.core import Core
from edgefl.devices.profiles import load_device
from edgefl.lab import delays, incentive, short_batches, stragglers
from edgefl.strategies import Client
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import run_in_memory


def test_expected_times_of_equal_clients_and_of_two_clients_are_correct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trips of equal clients take λ·n on average. So the first C of M clients in a round need the time
    λ·n·(1/M + … + 1/(M − C + 1)), and FedBuff gets an update every λ·n/M."""
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
    """On b of the B = 8 examples, η·L·b/B is 0.2·b/8. The second gradient contains the first step's noise."""
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
    """The two other clients have rates 1 and 2. They send the other two of three updates in a buffer, so the
    rates of these are (1, 1), (1, 2), (2, 1) or (2, 2) with replacement."""
    groups = [(1.0, 1), (2.0, 1)]
    both = 0.5 / (1.5 * 0.25 + (3 + 2 / 1 + 1 / 2) * 0.5 + 3.0)  # C = 1 + 1/2, D = 2/1 + 1/2, A = 3
    assert incentive.utility(0.5, groups, 3, again=False)[0] == pytest.approx(both)
    ones = 0.5 / (2.0 * 0.25 + (3 + 2 / 1 + 2 / 1) * 0.5 + 3.0)
    twos = 0.5 / (1.0 * 0.25 + (3 + 1 / 2 + 1 / 2) * 0.5 + 3.0)
    mean = (ones + 4 * both + 4 * twos) / 9
    assert incentive.utility(0.5, groups, 3, again=True)[0] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("mutant", "share"),
    [("steps_in_full", 1.0), ("steps_by_the_root", math.sqrt(0.5)), ("steps_by_the_square", 0.25)],
)
def test_the_mutants_of_learning_rate_normalisation_make_the_steps_that_they_name(
    mutant: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both batches have 4 of B = 8 examples. The model starts at a distance of 4 from the optimum, and a full
    step multiplies the distance by 0.8."""
    assert short_batches.measured([4, 4], 1).descent == pytest.approx(64 * (1 + 0.9**2) / 2, rel=1e-5)
    MUTANTS[mutant](monkeypatch)
    wrong = short_batches.measured([4, 4], 1).descent
    assert wrong == pytest.approx(64 * (1 + (1 - 0.2 * share) ** 2) / 2, rel=1e-5)


def test_the_step_limits_and_the_bound_on_delays_of_defedavg_are_those_of_its_paper() -> None:
    """The limits are from condition (11) with L = K = 1, the bound from Assumption 4 with 10 of 100 clients
    per version."""
    assert delays.step_limit(2, 1.0, 1.0) == pytest.approx((2 + 1) / (8 * 2 + 4 * 4))
    assert delays.step_limit(2, 0.5, 4.0) == pytest.approx((1 + 4) / (8 * 0.5 * 2 + 4 * 4 * 4))
    assert delays.step_limit(3, 1.0, 0.0) == pytest.approx(1 / 12)  # both terms are 1/(4λ)
    assert delays.chance() == pytest.approx(1 - 0.99**10)
    assert delays.bound_of_delays(1_000, 0.01) == pytest.approx((1 + math.log(1e7)) / (1 - 0.99**10))


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_the_largest_step_under_a_fixed_delay_is_that_of_control_theory(delay: int) -> None:
    """e_{t+1} = e_t − a·e_{t−τ} is stable below a = 2·sin(π/(2(2τ + 1))) (Levin and May 1976)."""
    shares = np.array([0.0] * delay + [1.0])
    limit = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert delays.Response(shares, 0.1).largest_step() == pytest.approx(limit)
    below, above = (np.abs(delays.Response(shares, part * limit).path(400, 1.0)) for part in (0.9, 1.1))
    assert below[-20:].max() < 0.1
    assert above[-20:].max() > 10.0


def test_half_the_speed_saves_half_of_what_is_not_idle_power() -> None:
    found = strategic.half_speed()
    assert found.idle == pytest.approx(0.0214, abs=5e-4)  # as in docs/findings.md
    assert found.saved == pytest.approx(0.489, abs=1e-3)


def test_only_the_slowest_third_of_the_phones_holds_the_first_classes() -> None:
    profiles = ["pixel-4", "moto-g4", "pixel-4", "nexus-6", "pixel-4", "pixel-4"]
    labels = np.repeat(np.arange(10), 30)
    parts = phones.slow_hold(labels, profiles, np.random.default_rng(1))
    assert sorted(np.concatenate(parts).tolist()) == list(range(300))
    rates = [load_device(name).cpu.rate_gflops.train for name in profiles]
    slow = sorted(range(6), key=rates.__getitem__)[:2]
    for client, part in enumerate(parts):
        assert set(labels[part]) == ({0, 1, 2} if client in slow else set(range(3, 10)))
        assert len(part) == pytest.approx(45 if client in slow else 210 / 4, abs=1)
