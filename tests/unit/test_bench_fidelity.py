"""``bench fidelity``: its limits at their edges, and figures measured under doubtful conditions."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.devices.thermal import ThermalModel
from edgefl.host.verdict import Conditions
from edgefl.lab import fidelity
from edgefl.lab.fidelity import JITTER, TripTimes, stepped
from edgefl.results.summary import ACHIEVED


def played(factors: list[float], **conditions: float) -> TripTimes:
    """Return the times of one client's trips, each of which should take 1 s and took ``factors`` seconds."""
    achieved = np.array(factors)
    columns = {}
    for part, found in ACHIEVED.items():
        columns[f"{part}_declared_s"], columns[found] = np.ones(len(factors)), achieved
    client = np.zeros(len(factors), dtype=np.int64)
    return TripTimes(columns, client, [("pi-4", "home")], 1.0, Conditions(**conditions))


def test_errors_within_the_limits_pass_and_larger_ones_fail() -> None:
    assert fidelity.rate("paced", played([1.0] * 100)).verdict == "PASS"
    late = fidelity.rate("paced", played([1.0] * 90 + [1.05] * 10))
    assert (late.verdict, late.why) == ("FAIL", "the limit is missed")
    assert late.figures["p95"] == pytest.approx(1 - 1 / 1.05)
    assert fidelity.trip("paced", played([1.031] * 9)).verdict == "FAIL"
    assert fidelity.transfer(400.0, "home", played([1.04] * 9)).verdict == "PASS"
    assert fidelity.transfer(100.0, "home", played([1.04] * 9)).verdict == "FAIL"
    assert fidelity.delay(10.0, "home", played([1.0009] * 9)).verdict == "PASS"
    assert fidelity.delay(10.0, "home", played([1.0011] * 9)).verdict == "FAIL"
    assert fidelity.thermal(60.0, np.array([1.0, 1.0]), played([1.0, 1.1])).verdict == "FAIL"


def test_figures_measured_under_doubtful_conditions_are_invalid() -> None:
    doubtful = fidelity.rate("paced", played([1.0] * 9, steal=0.5))
    assert doubtful.verdict == "INVALID"
    assert doubtful.why.startswith("time stolen by the hypervisor 50.0%")
    assert fidelity.rate("paced", played([1.0] * 9, others=0.9)).verdict == "PASS"
    crowded = fidelity.rate("paced", played([1.5] * 9, others=0.9))
    assert (crowded.verdict, crowded.why) == ("INVALID", "other processes used 90% of the host")
    assert fidelity.transfer(1.0, "elsewhere", played([1.0])).verdict != "PASS"


def test_a_share_of_lost_packets_passes_within_its_99_percent_interval() -> None:
    # 75 to 127 is the narrowest central interval with 99% of Binomial(10,000, 0.01).
    verdicts = [fidelity.loss(1.0, lost, 10_000, played([1.0])).verdict for lost in (74, 75, 127, 128)]
    assert verdicts == ["FAIL", "PASS", "PASS", "FAIL"]
    assert fidelity.loss(1.0, 0, 0, played([])).verdict == "INVALID"


def test_achieved_rates_have_the_order_of_the_declared_ones() -> None:
    def found(*factors: float) -> str:
        run = played(list(factors))._replace(client=np.arange(4), clients=[(name, "home") for name in "abcd"])
        return fidelity.ranks(run, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}).verdict

    assert (found(1.0, 1.0, 1.0, 1.0), found(1.0, 3.0, 1.0, 1.0)) == ("PASS", "FAIL")


def test_a_client_slowed_by_its_neighbours_fails() -> None:
    alone = played([1.0] * 9)
    assert fidelity.isolation("paced", alone, played([1.019] * 9), "pi-4").verdict == "PASS"
    assert fidelity.isolation("paced", alone, played([1.021] * 9), "pi-4").verdict == "FAIL"


@pytest.mark.parametrize("kind", JITTER)
def test_jitter_of_the_declared_distribution_passes_and_a_shifted_one_fails(kind: str) -> None:
    rng = np.random.default_rng(11)
    delay, spread, _ = JITTER[kind]
    draws_ms = {
        "normal": lambda: rng.normal(delay, spread, 2000),
        "uniform": lambda: rng.uniform(delay - spread, delay + spread, 2000),
        "exponential": lambda: delay + rng.exponential(spread, 2000),
    }[kind]()
    verdicts = [
        fidelity.jitter(kind, "home", played((found_ms / 1e3).tolist())).verdict
        for found_ms in (draws_ms, draws_ms + spread / 5)
    ]
    assert verdicts == ["PASS", "FAIL"]
    assert fidelity.jitter(kind, "home", played([])).verdict == "INVALID"


def test_the_simulated_temperature_matches_the_closed_form() -> None:
    model = ThermalModel(25.0, 8.0, 100.0, 5.0, step_c=(43.0, 45.0, 47.0), speeds=(1.0, 0.75, 0.635, 0.493))
    took_s, hot_c = stepped(model, 25.0, 0.0, 150.0)
    assert took_s == pytest.approx(model.compute(25.0, 150.0).total_s, rel=5e-3)
    assert stepped(model, hot_c, 60.0, 0.0)[1] == pytest.approx(model.after(hot_c, 0.0, 60.0), abs=0.05)
