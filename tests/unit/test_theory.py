"""What the papers claim of arrivals alone: fairness, strategy-proofness, staleness. No learning is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl import experiment
from edgefl.core import Core
from edgefl.devices.schema import Delay
from edgefl.lab.theorems import (
    FEDSTALEWEIGHT,
    Outcome,
    expected_staleness,
    fair_weight,
    gain_of_slowing,
    influence,
    simulate,
    staleness_by_buffer,
)
from edgefl.strategies import Strategy, names, resolve
from edgefl.strategies.fedbuff import FedBuff
from edgefl.strategies.fedstaleweight import FedStaleWeight
from edgefl.testing import fleet, run_in_memory

FAST, SLOW = slice(10), slice(10, 15)
RATES = np.array([1 / 1.5] * 10 + [1 / 10] * 5)
SETTING: dict[str, Any] = {"buffer_size": 5, "restart": "new-version"}


def outcome(strategy: Strategy, versions: int = 1000, seed: int = 7) -> Outcome:
    return simulate(strategy, FEDSTALEWEIGHT, versions, seed)


# ---- staleness ---------------------------------------------------------------------------------


@settings(max_examples=30)
@given(times=st.lists(st.integers(1, 50), min_size=3, max_size=8), size=st.integers(2, 8))
def test_staleness_shrinks_by_the_buffer(times: list[int], size: int) -> None:
    """τ_K ≤ ⌈τ_1/K⌉ trip by trip, and so the largest and the mean (FedBuff, appendix A)."""
    size = min(size, len(times))
    delays = [Delay(dist="list", values_s=(float(time), time + 0.5)) for time in times]
    found = staleness_by_buffer(delays, [1, size], trips=20 * len(times))
    assert len(found[1]) == len(found[size]) > 10 * len(times)
    assert (found[size] <= -(-found[1] // size)).all()


def test_staleness_halves_when_the_buffer_doubles() -> None:
    delays = [Delay(dist="half-normal", scale_s=1.0)] * 200
    found = staleness_by_buffer(delays, [1, 10, 20, 40], trips=8000)
    mean = {size: values.mean() for size, values in found.items()}
    assert mean[1] == pytest.approx(199, rel=0.03)  # everybody else arrives once meanwhile
    assert mean[10] / mean[20] == pytest.approx(2.0, rel=0.05)
    assert mean[20] / mean[40] == pytest.approx(2.0, rel=0.1)


def test_expected_staleness_is_what_equation_6_says() -> None:
    found = simulate(FedStaleWeight(**SETTING), FEDSTALEWEIGHT, 2000, skip=200).staleness
    assert found == pytest.approx(expected_staleness(RATES.tolist(), 5), rel=0.12)


# ---- fairness ----------------------------------------------------------------------------------


@given(rates=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20), size=st.integers(1, 20))
def test_the_derived_weight_makes_up_for_the_rate_exactly(rates: list[float], size: int) -> None:
    """Eqs. 6 to 8: p_i = r_i/Σ r, and α_i · p_i = 1/n."""
    staleness = expected_staleness(rates, size)
    assert influence(staleness, size) == pytest.approx(np.array(rates) / sum(rates), rel=1e-9)
    assert fair_weight(staleness, size) * influence(staleness, size) == pytest.approx(
        1 / len(rates), rel=1e-9
    )


def test_fairness_on_the_same_arrivals_is_what_the_paper_is_about() -> None:
    """Share of all applied weight · n: 1 is fair (eq. 3). FedBuff goes by rate; FedStaleWeight halves it."""
    plain = outcome(FedBuff(exponent=0.0, **SETTING))
    buff = outcome(FedBuff(**SETTING))
    stale = outcome(FedStaleWeight(**SETTING))
    running = outcome(FedStaleWeight(normalize="running", **SETTING))
    assert len({found.emulated_s for found in (plain, buff, stale, running)}) == 1  # the very same arrivals
    assert plain.share == pytest.approx(RATES / RATES.sum() * 15, rel=0.08)
    for share, fast, slow in (
        (plain.share, 1.40, 0.21),
        (stale.share, 1.20, 0.60),
        (running.share, 1.01, 0.98),
    ):
        assert share[FAST].mean() == pytest.approx(fast, abs=0.03)
        assert share[SLOW].mean() == pytest.approx(slow, abs=0.03)
    unfairness = [np.abs(found.share - 1).mean() for found in (buff, plain, stale, running)]
    assert unfairness == sorted(unfairness, reverse=True)
    assert unfairness[2] < 0.52 * unfairness[1]
    assert unfairness[3] < 0.1 * unfairness[1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_running_form_gives_each_client_1_in_n(seed: int) -> None:
    """Every single client within 5% of its fair share, at the paper's 4,000 versions."""
    found = outcome(FedStaleWeight(normalize="running", **SETTING), versions=4000, seed=seed)
    assert np.abs(found.share - 1.0).max() < 0.05


@pytest.mark.parametrize("normalize", ["buffer", "running"])
def test_the_mean_step_is_that_of_an_average(normalize: Any) -> None:
    assert outcome(FedStaleWeight(normalize=normalize, **SETTING)).step == pytest.approx(1.0, abs=0.02)


# ---- strategy-proofness ------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_a_fast_client_that_slows_down_gains_no_weight_in_a_running_fedstaleweight(factor: float) -> None:
    """Section 4.2.1."""
    strategy = FedStaleWeight(normalize="running", **SETTING)
    assert gain_of_slowing(strategy, FEDSTALEWEIGHT, 0, factor, versions=1000, seed=7) <= 1.03


def test_in_fedbuff_slowing_down_costs_what_it_saves() -> None:
    gain = gain_of_slowing(FedBuff(exponent=0.0, **SETTING), FEDSTALEWEIGHT, 0, 2.0, versions=2000)
    assert gain == pytest.approx(0.5, abs=0.04)


# ---- the simulation itself ---------------------------------------------------------------------


def test_shares_are_those_of_the_core_and_the_same_every_time() -> None:
    first, again = (outcome(FedStaleWeight(**SETTING), versions=50) for _ in range(2))
    assert first.share.tolist() == again.share.tolist()
    assert first.share.sum() == pytest.approx(15.0)


@pytest.mark.parametrize("name", [name for name in names() if name not in ("defedavg-niid", "favano")])
def test_every_built_in_applies_each_arrival_at_most_once(name: str) -> None:
    core = Core(resolve({"name": name}), fleet(15), 0, experiment.Stop(versions=50))
    result = run_in_memory(core, [1.0 + 0.1 * client for client in range(15)])
    used = [task for order, _ in result.sums for task in order.tasks]
    assert len(set(used)) == len(used) == core.applied
