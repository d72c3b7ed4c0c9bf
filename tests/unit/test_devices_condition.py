"""Battery and heat of one model: arithmetic by hand, and the same condition whichever way time is cut up."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from edgefl.devices.condition import Condition, ConditionModel, Power, energy_j, power_of
from edgefl.devices.link import Link
from edgefl.devices.plan import TripPlan, plan_trip
from edgefl.devices.profiles import load_device
from edgefl.devices.schema import NOMINAL_V, Battery, Device, Direction, Network
from edgefl.devices.thermal import ThermalModel
from edgefl.errors import ProfileError

POWER = Power(idle_w=0.5, busy_w=4.0, radio_w=1.0, capacity_j=1000.0, least_j=200.0, charge_w=10.0)
HEAT = ThermalModel(25.0, 10.0, 60.0, 4.0, step_c=(45.0,), speeds=(1.0, 0.5))
MODEL = ConditionModel(HEAT, POWER)
CORES_A = (223.89 + 3 * 302.04 + 4 * 85.05) / 1e3
"""All cores of a Pixel 4 at their highest frequencies."""


def device(**battery: float) -> Device:
    given = Battery(**{"capacity_mah": 1000.0, "voltage_v": 4.0, **battery})
    return msgspec.structs.replace(load_device("pixel-4"), battery=given, thermal=None)


def trip(work_s: float = 20.0, temp_c: float = 25.0, model: ConditionModel = MODEL) -> TripPlan:
    """2 s down, some training, 1 s up."""
    way = Direction(rate_mbps=8.0)
    link = Network(id="t", name="t", down=way, up=way, header_bytes=0, sources={})
    rng = np.random.default_rng(0)
    of = load_device("pixel-3a")
    thermal = None if model.thermal is None else (model.thermal, temp_c)
    return plan_trip(of, Link(link, rng), rng, 2_000_000, of.train_flop_per_s * work_s, 1_000_000, thermal)


def test_a_battery_holds_its_milliamperehours() -> None:
    power = power_of(device(idle_ma=50.0, radio_ma=200.0, wifi_ma=100.0, min_soc=0.2))
    assert power is not None
    assert power.capacity_j == pytest.approx(1.0 * 3600 * 4.0)
    assert power.least_j == pytest.approx(0.2 * 14400)
    assert (power.idle_w, power.radio_w, power.charge_w) == (0.2, 0.8, 0.0)
    assert power.busy_w == pytest.approx(CORES_A * 4.0)
    of = device(radio_ma=200.0, wifi_ma=100.0)
    watts = [found.radio_w for bearer in ("mobile", "wifi", "wired") if (found := power_of(of, bearer))]
    assert watts == [0.8, 0.4, 0.0]
    unstated = power_of(device(voltage_v=None))  # type: ignore[arg-type]
    assert unstated is not None
    assert unstated.capacity_j == pytest.approx(3600 * NOMINAL_V)


def test_energy_is_power_times_time() -> None:
    of = device(idle_ma=50.0, radio_ma=200.0, wifi_ma=100.0)
    assert energy_j(of, compute_s=10, radio_s=5, idle_s=85) == pytest.approx(
        0.2 * 100 + 4 * CORES_A * 10 + 0.8 * 5
    )
    assert energy_j(of, compute_s=0, radio_s=5, bearer="wifi") == pytest.approx(0.2 * 5 + 0.4 * 5)


def test_what_is_not_known_is_not_made_up() -> None:
    assert load_device("board-qrb2210").busy_w is None
    assert power_of(load_device("board-qrb2210")) is None
    with pytest.raises(ProfileError, match=r"no \[battery\]"):
        energy_j(load_device("board-qrb2210"), compute_s=1.0)
    bare = msgspec.structs.replace(load_device("board-qrb2210"), battery=Battery(capacity_mah=100))
    with pytest.raises(ProfileError, match=r"thermal\.busy_w"):
        power_of(bare)


def test_a_trip_drains_by_its_phases() -> None:
    cool = ConditionModel(None, POWER)
    plan, before = trip(20.0, model=cool), Condition(5.0, charge_j=900.0)
    after = cool.after_trip(before, plan, plan.total_s)
    assert after.at_s == pytest.approx(5 + 2 + 20 + 1)
    assert after.charge_j == pytest.approx(900 - 0.5 * 23 - 4 * 20 - 1 * 3)
    half = cool.after_trip(before, plan, 12.0)
    assert half.charge_j == pytest.approx(900 - 0.5 * 12 - 4 * 10 - 1 * 2)


def test_a_throttled_model_draws_less() -> None:
    plan = trip(60.0)
    assert plan.heat is not None
    hot = plan.heat.stretches[1]
    assert hot.power_w == pytest.approx(2.0)  # what keeps it at 45 °C
    after = MODEL.after_trip(Condition(0.0, 25.0, 1000.0), plan, plan.total_s)
    drawn = 4 * hot.at_s + 2 * (plan.heat.total_s - hot.at_s)
    assert after.charge_j == pytest.approx(1000 - 0.5 * plan.total_s - 1 * 3 - drawn)
    assert after.temp_c == pytest.approx(25 + 20 * math.exp(-1 / 60))


def test_a_battery_that_gets_low_ends_the_trip_there() -> None:
    plan, before = trip(20.0, model=ConditionModel(None, POWER)), Condition(0.0, charge_j=230.0)
    found = ConditionModel(None, POWER).interruption(before, plan)
    assert found == (pytest.approx(2 + (30 - 1.5 * 2) / 4.5), "battery")
    after = ConditionModel(None, POWER).after_trip(before, plan, found[0], "battery")
    assert (after.fit, after.low, after.charge_j) == (False, True, pytest.approx(200.0))
    assert ConditionModel(None, POWER).interruption(Condition(0.0, charge_j=400.0), plan) is None


def test_heat_that_switches_it_off_ends_the_trip_there() -> None:
    fragile = ConditionModel(HEAT._replace(speeds=(1.0, 0.9), off_c=50.0), None)
    plan, before = trip(1000.0, model=fragile), Condition(0.0, 25.0)
    found = fragile.interruption(before, plan)
    assert plan.heat is not None
    assert found == (plan.down_s + plan.heat.off_s, "heat")
    after = fragile.after_trip(before, plan, found[0], "heat")
    assert (after.off, after.temp_c) == (True, pytest.approx(50.0))
    assert fragile.fit_at_s(after) == pytest.approx(after.at_s + 60 * math.log(25 / 20))
    assert fragile.after_rest(after, fragile.fit_at_s(after)).fit
    assert not fragile.after_rest(after, fragile.fit_at_s(after) - 1e-6).fit


def test_idling_drains_and_charging_fills() -> None:
    full = MODEL.initial()
    low_s = MODEL.unfit_at_s(full)
    assert low_s == 800 / 0.5
    low = MODEL.after_rest(full, low_s)
    assert (low.low, low.charge_j, MODEL.unfit_at_s(low)) == (True, 200.0, low_s)
    assert MODEL.fit_at_s(low) == low_s + 80.0
    again = MODEL.after_rest(full, low_s + 80.0)
    assert (again.fit, again.charge_j) == (True, 1000.0)
    assert (MODEL.initial(0.2).low, MODEL.fit_at_s(MODEL.initial(0.2))) == (True, 80.0)


def test_without_a_charger_low_is_for_good() -> None:
    model = ConditionModel(None, POWER._replace(charge_w=0.0))
    low = model.after_rest(model.initial(), 2000.0)
    assert (low.low, model.fit_at_s(low)) == (True, math.inf)
    assert model.after_rest(low, 1e9).charge_j == 0.0


def test_a_model_with_neither_never_tires() -> None:
    model = ConditionModel(None, None)
    now = model.after_rest(model.initial(), 1e9)
    assert now.fit
    assert model.unfit_at_s(now) == math.inf
    assert model.interruption(now, trip(model=model)) is None


def test_rest_is_the_same_however_it_is_cut_up() -> None:
    whole = MODEL.after_rest(Condition(0.0, 60.0, 700.0), 5000.0)
    step = Condition(0.0, 60.0, 700.0)
    for at_s in np.sort(np.random.default_rng(1).uniform(0, 5000, 50)):
        step = MODEL.after_rest(step, float(at_s))
    step = MODEL.after_rest(step, 5000.0)
    assert step.charge_j == pytest.approx(whole.charge_j)
    assert step.temp_c == pytest.approx(whole.temp_c)
    assert step.low == whole.low
