"""Tests of the warning that phones are in phase: fleets in lockstep cause it, independent phones do not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgefl.devices.fleet import in_phase
from edgefl.experiment import Experiment, Fleet, Secure, Server, Stop
from edgefl.results.phase import MIN_UPDATES, Phase, phase_of
from edgefl.strategies import resolve

Arrays = dict[str, npt.NDArray[Any]]


def made(arrives_s: npt.NDArray[np.float64], sent_s: npt.NDArray[np.float64], buffer: int) -> Arrays:
    """Return the columns of trips in a run whose versions are made from ``buffer`` arrivals each."""
    order = np.argsort(arrives_s, kind="stable")
    version = np.empty(len(order), np.int64)
    version[order] = np.arange(len(order)) // buffer + 1
    begun = np.searchsorted(np.sort(arrives_s)[buffer - 1 :: buffer], sent_s, side="right")
    return {
        "sent_s": sent_s,
        "trip_declared_s": arrives_s - sent_s,
        "applied_version": version,
        "staleness": version - 1 - begun,
    }


def fleet(rng: np.random.Generator, *, units: float, scatter: float, phase: bool) -> tuple[Arrays, Any]:
    """Simulate three profiles with four phones each, which never pause; return trips and their profiles."""
    trip_s = np.repeat([1.0, 1.3, 3.1], 4) * np.exp(units * rng.standard_normal(12))
    laps = trip_s * np.exp(scatter * rng.standard_normal((100, 12)))
    start = rng.random(12) * trip_s if phase else np.zeros(12)
    ends = start + np.cumsum(laps, axis=0)
    model = np.broadcast_to(np.repeat(["a", "b", "c"], 4), ends.shape)
    all_train = ends <= ends[-1].min()
    return made(ends[all_train], (ends - laps)[all_train], 4), model[all_train]


def test_clones_in_lockstep_are_a_warning_unless_the_strategy_causes_it() -> None:
    clones = fleet(np.random.default_rng(1), units=0.0, scatter=0.0, phase=False)
    found = phase_of(*clones)  # type: ignore[arg-type]
    assert found.one_profile.share > 0.5 > found.one_profile.high
    assert found.coincident.share > 0.9
    assert "in phase" in found.warning
    by_design = phase_of(*clones, "the strategy starts its clients together")  # type: ignore[arg-type]
    assert by_design.coincident.in_phase
    assert by_design.figures()["by_design"] == "the strategy starts its clients together"
    assert by_design.warning == ""


@pytest.mark.parametrize(
    ("strategy", "secure", "why"),
    [
        ({}, None, ""),
        ({"max_staleness": 1}, None, "a new version cancels all tasks above strategy.max_staleness"),
        ({}, Secure(kind="masks"), "no client starts while a sum is unmasked"),
        ({}, Secure(kind="trusted"), ""),
        ({"restart": "new-version"}, None, "the strategy starts its clients together"),
    ],
)
def test_a_strategy_that_delays_starts_is_the_reason_for_phones_in_phase(
    strategy: dict[str, Any], secure: Secure | None, why: str
) -> None:
    wanted = Experiment(
        fleet=Fleet(devices={"pixel-3a": 3, "moto-g4": 3}),
        server=Server(secure=secure),
        stop=Stop(versions=1),
        strategy={"name": "fedbuff", "buffer_size": 2, **strategy},
    )
    found = in_phase(wanted, resolve(wanted.strategy))
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_independent_phones_are_no_warning() -> None:
    rng = np.random.default_rng(2)
    runs = [phase_of(*fleet(rng, units=0.1, scatter=0.02, phase=True)) for _ in range(20)]  # type: ignore[arg-type]
    assert sum(run.warning != "" for run in runs) <= 1


def test_a_fleet_that_changes_over_time_causes_no_warning() -> None:
    """The phones of one model die early. No phones act in phase, but most later buffers hold updates of the
    other model only."""
    rng = np.random.default_rng(5)
    sent_s, arrives_s, profiles = [], [], []
    for phone in range(60):
        profile, trip_s, life_s = (("a", 1.0, 15.0), ("b", 2.5, 80.0))[phone % 2]
        at_s, dies_s = trip_s * rng.random(), min(200.0, life_s * rng.exponential())
        while at_s < dies_s:
            sent_s.append(at_s)
            at_s += trip_s * math.exp(0.1 * rng.standard_normal())
            arrives_s.append(at_s)
            profiles.append(profile)
    found = phase_of(made(np.array(arrives_s), np.array(sent_s), 5), np.array(profiles))  # type: ignore[arg-type]
    assert found.one_profile.low < found.one_profile.share
    assert found.one_profile.expected > 0.3
    assert found.warning == ""


def test_phones_in_phase_are_a_warning_even_if_some_trips_last_much_longer_than_the_arrivals() -> None:
    """In a large fleet, the examined updates may all arrive during one trip of a slow phone."""
    rng = np.random.default_rng(1)
    waves_s, trip_s = (
        np.repeat([1010.0, 1020.0, 1025.0, 1030.0], 250),
        np.repeat([10.0, 10.0, 200.0, 10.0], 250),
    )
    arrives_s = waves_s + 0.3 * rng.standard_normal(1000)
    found = phase_of(made(arrives_s, arrives_s - trip_s, 10), np.where(trip_s > 10.0, "b", "a"))  # type: ignore[arg-type]
    assert found.one_profile.in_phase
    assert found.coincident.in_phase
    assert found.one_profile.expected < 0.2 < found.one_profile.share


def test_the_expected_share_of_buffers_of_one_profile_is_that_of_a_random_order() -> None:
    trips, profiles = fleet(np.random.default_rng(3), units=0.1, scatter=0.0, phase=True)
    found = phase_of(trips, profiles).one_profile  # type: ignore[arg-type]
    updates = np.unique(profiles, return_counts=True)[1].tolist()
    exact = sum(math.comb(count, 4) for count in updates) / math.comb(sum(updates), 4)
    assert found.expected == pytest.approx(exact, abs=0.006)  # five standard errors of 400 simulated runs
    assert found.low < exact < found.high


def test_rounds_are_in_phase_without_a_warning() -> None:
    rng = np.random.default_rng(4)
    sent_s = np.repeat(np.arange(20.0) * 5.0, 5)
    found = phase_of(made(sent_s + 1.0, sent_s, 5), rng.choice(["a", "b"], 100))  # type: ignore[arg-type]
    assert found.by_design == "no update was stale, so the strategy has rounds"
    assert found.coincident.in_phase
    assert found.warning == ""


def test_few_updates_or_a_single_profile_are_not_judged() -> None:
    few = np.arange(float(MIN_UPDATES - 1))
    assert phase_of(made(few + 1.0, few, 2), np.full(len(few), "a")) == Phase(None, None)  # type: ignore[arg-type]
    many = np.arange(100.0)
    found = phase_of(made(many + 1.0, many, 2), np.full(100, "a"))  # type: ignore[arg-type]
    assert found.one_profile is None
    assert found.coincident is not None
