"""Tests of differences between phones of one model: speed, variation between trips, first start."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from edgefl.devices import load_network
from edgefl.devices.fleet import Trips, first_tasks, fleet_of
from edgefl.devices.individuals import BLOCK, CORRELATION, TripScatter, unit_factor
from edgefl.devices.link import Link
from edgefl.devices.plan import WHOLE
from edgefl.experiment import Experiment, Fleet, Training
from edgefl.learning.operations import BatchWork, StepWork
from edgefl.seeds import stream
from edgefl.strategies.fedavg import FedAvg
from edgefl.strategies.fedbuff import FedBuff

WORK = BatchWork(fixed=StepWork(), per_example=StepWork(conv_flop=1e8))
CLIENTS = 400


def trips(seed: int = 1, devices: str = "pi-4", network: str = "none", **fleet: Any) -> Trips:
    """Make trips of ten steps. Each client's first task starts after a random fraction of its trip time."""
    wanted = Experiment(
        fleet=Fleet(devices={devices: CLIENTS}, network=network, **fleet),
        training=Training(steps=10, batch_size=4),
        seed=seed,
    )
    return Trips(wanted, fleet_of(wanted), [40] * CLIENTS, WORK, 10_000, 10_000, first_tasks=CLIENTS)


def test_the_speed_of_units_has_the_measured_distribution() -> None:
    step_s = np.array([trips(seed).full_step_s(client) for seed in (1, 2) for client in range(CLIENTS)])
    apart = np.exp(np.abs(np.log(step_s[:CLIENTS] / step_s[CLIENTS:])))
    median, p90 = np.quantile(apart, (0.5, 0.9))
    assert 1.04 < median < 1.06
    assert 1.2 < p90 < 1.4
    assert apart.max() <= 1.98**2
    profile_s = trips(units="identical").full_step_s(0)
    assert abs(np.median(np.log(step_s / profile_s))) < 0.01  # the profile is the median unit


def test_a_units_speed_depends_on_client_and_seed_alone() -> None:
    assert unit_factor(1, 3) == unit_factor(1, 3)
    assert len({unit_factor(seed, client) for seed in range(20) for client in range(20)}) == 400


def test_the_scatter_of_trips_has_the_measured_distribution() -> None:
    phones = [TripScatter(1, client) for client in range(CLIENTS)]
    factors = np.array([[phone.factor(trip, 10**9) for trip in range(BLOCK)] for phone in phones])
    sigma = np.log(factors).std(axis=1)
    assert 0.008 < np.median(sigma) < 0.010
    assert 0.025 < np.quantile(sigma, 0.9) < 0.035
    unit = np.log(factors) / sigma[:, None]
    lag = np.mean(unit[:, 1:] * unit[:, :-1])
    assert abs(lag - CORRELATION) < 0.03


def test_the_first_step_of_a_trip_costs_more_than_the_others() -> None:
    many = [TripScatter(1, client) for client in range(CLIENTS)]
    first = [one.factor(trip, 1) - one.factor(trip, 10**9) for one in many for trip in range(10)]
    median, p90 = np.quantile(first, (0.5, 0.9))
    assert 0.08 < median < 0.12
    assert 0.3 < p90 < 0.5


def test_the_scatter_changes_the_time_and_not_the_work() -> None:
    plan, exact = trips(units="identical").plan(0, 0), trips(units="identical", variation=0.0).plan(0, 0)
    assert plan.work_s == exact.work_s == exact.compute_s
    assert plan.compute_s != exact.compute_s
    assert (plan.down_s, plan.up_s) == (exact.down_s, exact.up_s)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_variation_scales_the_scatter(scale: float) -> None:
    def deviation(variation: float) -> float:
        made = trips(variation=variation)
        return float(np.std([np.log(made.plan(0, trip).compute_s) for trip in range(BLOCK)]))

    assert 0.7 < deviation(scale) / deviation(1.0) / scale < 1.4


@pytest.mark.parametrize("network", ["none", "lte"])
def test_one_key_turns_each_difference_off(network: str) -> None:
    made = trips(network=network, units="identical", variation=0.0)
    assert len({made.plan(client, trip) for client in range(20) for trip in range(5)}) == 1
    assert trips(variation=0.0).plan(0, 0) != trips(variation=0.0).plan(1, 0)
    assert trips(variation=0.0).plan(0, 0) == trips(variation=0.0).plan(0, 1)
    assert trips(units="identical").plan(0, 0) != trips(units="identical").plan(0, 1)


@pytest.mark.parametrize("profile", ["paper-defedavg", "paper-fast-u1-2", "paper-half-normal"])
def test_devices_of_papers_have_no_differences_and_no_errors(profile: str) -> None:
    free = trips(devices=profile, model_errors="drawn")
    exact = trips(devices=profile, units="identical", variation=0.0)
    assert [free.plan(0, trip) for trip in range(5)] == [exact.plan(0, trip) for trip in range(5)]
    assert free.wait_s(0, 0, 0) == 0.0


def test_a_phone_waits_for_a_random_part_of_its_trip_at_the_start_only() -> None:
    made = trips(network="lte")
    parts = np.array(
        [made.wait_s(client, client, 0) / made.plan(client, 0).total_s for client in range(CLIENTS)]
    )
    assert 0.0 <= parts.min() < 0.02
    assert 0.98 < parts.max() < 1.0
    assert abs(parts.mean() - 0.5) < 4 / np.sqrt(12 * CLIENTS)
    assert made.wait_s(0, CLIENTS, 0) == made.wait_s(0, 0, 1) == 0.0


def test_phones_of_a_resumed_run_start_in_a_new_random_phase() -> None:
    made = trips(network="lte")
    total_s = np.array([made.plan(client, 0).total_s for client in range(CLIENTS)])
    started = [made.wait_s(client, client, 0) for client in range(CLIENTS)] / total_s
    first, second = (
        [made.returns_after_s(client, at) for client in range(CLIENTS)] / total_s for at in (7, 99)
    )
    for parts in (first, second):
        assert 0.0 <= parts.min() < parts.max() < 1.0
        assert abs(parts.mean() - 0.5) < 4 / np.sqrt(12 * CLIENTS)
    assert max(abs(np.corrcoef([first, second, started])[np.triu_indices(3, 1)])) < 4 / np.sqrt(CLIENTS)
    assert trips(devices="paper-half-normal").returns_after_s(0, 7) == 0.0


def test_rounds_aligned_fleets_and_clients_that_join_late_have_no_phase() -> None:
    wanted = Experiment(fleet=Fleet(devices={"pi-4": 9}))
    assert first_tasks(wanted, FedBuff(buffer_size=2), 9) == 9
    assert first_tasks(wanted, FedBuff(buffer_size=2, concurrency=3), 9) == 3
    assert first_tasks(wanted, FedAvg(cohort=3), 9) == 0
    assert first_tasks(wanted, FedBuff(buffer_size=2, restart="after-step"), 9) == 9
    for fleet in (Fleet(devices={"pi-4": 9}, phase="aligned"), Fleet(devices={"pi-4": 9}, join_spread_s=1.0)):
        assert first_tasks(Experiment(fleet=fleet), FedBuff(buffer_size=2), 9) == 0


def test_the_rate_of_a_link_has_the_measured_variation() -> None:
    network = load_network("lte")
    assert (network.down.rate_cv, network.up.rate_cv) == (0.59, 0.6)
    size = 2_100_000  # about a second at the mean rate
    down = [Link(network, stream(1, "trip", 0, trip)).down(size) for trip in range(2000)]
    rates = np.array([one.rate_bytes_per_s for one in down])
    assert abs(rates.std() / rates.mean() - 0.59) < 0.06
    assert abs(rates.mean() * 8 / 16.8e6 * down[0].wire_bytes / size - 1.0) < 0.06
    long = [Link(network, stream(1, "trip", 0, trip)).down(25 * size).rate_bytes_per_s for trip in range(500)]
    assert np.std(long) / np.mean(long) < 0.16  # a fifth of 0.59, over 25 windows


@pytest.mark.parametrize("network", ["lte", "lte-verizon", "edge-lossy", "hsdpa-lossy"])
def test_a_kept_plan_has_the_same_bits_as_a_new_one(network: str) -> None:
    """A plan is kept, but computed again if it is requested with `WHOLE` or from a new `Trips` object."""
    places = [(client, trip) for client in range(4) for trip in (0, 1, BLOCK - 1, BLOCK, 200)]
    one = trips(network=network)
    found = {place: one.plan(*place) for place in places}
    assert {place: one.plan(*place) for place in reversed(places)} == found
    assert [trips(network=network).plan(*place) for place in places] == list(found.values())
    assert [one.plan(*place, WHOLE) for place in places] == list(found.values())


def test_random_numbers_of_a_trip_are_those_of_earlier_versions() -> None:
    one = trips(network="lte")
    plans = [one.plan(3, trip) for trip in (5, 200)]
    assert [plan.down_s for plan in plans] == pytest.approx([0.041084752025576154, 0.04403403661264938])
    assert [plan.compute_s for plan in plans] == pytest.approx([0.16001041009414063, 0.16278238900548847])
    assert [plan.up_s for plan in plans] == pytest.approx([0.03893370201265977, 0.046396106202861206])
    assert stream(1, "trip", 3, 4).random() == 0.9096225320782091


def test_the_scatter_has_the_same_bits_on_every_processor() -> None:
    """Mutant: NumPy's exp is used, whose last bits differ on a processor with AVX-512."""
    scatter = TripScatter(1, 0)
    factors = np.array([scatter.factor(trip, 10) for trip in range(4 * BLOCK)])
    assert hashlib.sha256(factors.astype("<f8").tobytes()).hexdigest()[:16] == "ed789a290c5474dc"
