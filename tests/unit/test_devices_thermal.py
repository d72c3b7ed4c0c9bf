"""Tests of heat and battery, with values computed by hand and by the Euler method."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from trip_parts import network, paced

from edgefl.devices.condition import Condition, ConditionModel, Power, power_of
from edgefl.devices.link import Link
from edgefl.devices.plan import TripPlan, plan_trip
from edgefl.devices.profiles import load_device, load_network
from edgefl.devices.schema import NOMINAL_V, Battery, Device, Thermal, ThrottlingStep
from edgefl.devices.thermal import POWER_EXPONENT, Computation, ThermalModel, thermal_model
from edgefl.errors import ProfileError
from edgefl.host.pacing import Pacer

STEPS_C, SPEEDS = (43.0, 45.0, 47.0, 49.0, 51.0), (1.0, 0.75, 0.635, 0.493, 0.372, 0.291)
PIXEL_4 = ThermalModel(25.0, 8.0, 100.0, 5.0, step_c=STEPS_C, speeds=SPEEDS)
FRAGILE = ThermalModel(25.0, 10.0, 60.0, 4.0, step_c=(45.0,), speeds=(1.0, 0.9), off_c=50.0)


def euler(model: ThermalModel, temp_c: float, work_s: float) -> tuple[float, float]:
    """Return the duration of the work in s and the final temperature in °C, by the Euler method."""
    done, at_s, step_s = 0.0, 0.0, work_s / 20_000
    while done < work_s:
        step = sum(temp_c >= edge for edge in model.step_c)
        speed = model.speeds[step]
        power_w = model.busy_w * speed**POWER_EXPONENT
        temp_c += step_s * (model.ambient_c + power_w * model.r_c_per_w - temp_c) / model.tau_s
        done += step_s * speed
        at_s += step_s
    return at_s, temp_c


@pytest.mark.parametrize("start_c", [25.0, 44.0, 50.0, 60.0])
@pytest.mark.parametrize("work_s", [3.0, 60.0, 150.0])
def test_the_closed_form_solves_the_differential_equation(start_c: float, work_s: float) -> None:
    work = PIXEL_4.compute(start_c, work_s)
    seconds, temp_c = euler(PIXEL_4, start_c, work_s)
    assert work.total_s == pytest.approx(seconds, rel=2e-3)
    assert work.temp_c(work.total_s) == pytest.approx(temp_c, abs=0.02)


def test_the_temperature_settles_at_the_step_between_heating_and_cooling() -> None:
    # At 45 °C the device loses 2.5 W. It heats up at 5 · 0.75² = 2.81 W and cools at 5 · 0.635² = 2.02 W.
    work = PIXEL_4.compute(25.0, 1000.0)
    last = work.stretches[-1]
    assert last.temp_c == 45.0
    assert last.power_w == pytest.approx((45.0 - 25.0) / 8.0)
    share = (2.5 - 5 * 0.635**2) / (5 * 0.75**2 - 5 * 0.635**2)
    assert last.speed == pytest.approx(0.635 + share * (0.75 - 0.635))
    assert work.temp_c(1e6) == pytest.approx(45.0)


def test_a_device_that_settles_below_its_first_step_never_slows_down() -> None:
    cool = PIXEL_4._replace(r_c_per_w=3.0)
    work = cool.compute(25.0, 1e5)
    assert (work.total_s, len(work.stretches)) == (1e5, 1)
    exact = cool._replace(r_c_per_w=(43.0 - 25.0) / 5.0)  # it reaches the step after infinite time
    assert exact.compute(25.0, 1e5).total_s == 1e5


def test_a_device_that_gets_too_hot_switches_off_and_never_finishes() -> None:
    work = FRAGILE.compute(25.0, 1000.0)
    hot_w = 4 * 0.9**2
    reached_s = 60 * math.log(40 / 20) + 60 * math.log((25 + 10 * hot_w - 45) / (25 + 10 * hot_w - 50))
    assert work.total_s == math.inf
    assert work.off_s == pytest.approx(reached_s)
    assert work.seconds(40.0) == 40.0
    assert work.seconds(1000.0) == math.inf
    assert sum(seconds for seconds, _ in work.powers()) == pytest.approx(reached_s)
    assert FRAGILE.compute(25.0, 40.0).off_s == math.inf


def test_a_resting_device_cools_exponentially() -> None:
    assert PIXEL_4.after(65.0, 0.0, 100.0) == pytest.approx(25 + 40 / math.e)
    assert PIXEL_4.cools_in_s(65.0, 45.0) == pytest.approx(100 * math.log(2))
    assert PIXEL_4.cools_in_s(30.0, 45.0) == 0.0
    assert PIXEL_4.cools_in_s(30.0, 25.0) == math.inf


def test_time_is_the_inverse_of_work_for_all_models() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        steps = np.cumsum(rng.uniform(1.0, 8.0, rng.integers(1, 6))) + 30.0
        speeds = np.sort(rng.uniform(0.1, 1.0, steps.size))[::-1]
        model = ThermalModel(
            25.0, rng.uniform(1, 20), rng.uniform(1, 300), rng.uniform(0.5, 10), tuple(steps), (1.0, *speeds)
        )
        work = model.compute(rng.uniform(20.0, 80.0), 500.0)
        assert_consistent(work)


def assert_consistent(work: Computation) -> None:
    at_s = [stretch.at_s for stretch in work.stretches]
    assert at_s == sorted(at_s)
    grid = np.linspace(0.0, 500.0, 200)
    seconds = np.array([work.seconds(x) for x in grid])
    assert (np.diff(seconds) > 0).all()
    assert seconds[-1] == pytest.approx(work.total_s)
    # The integral of the speed (midpoint rule) is the work. No second does more than one second of work.
    middles = (seconds[1:] + seconds[:-1]) / 2
    rates = np.array([work.speed(t) for t in middles])
    done = (rates * np.diff(seconds)).sum()
    assert done == pytest.approx(500.0, rel=0.03)
    assert (np.diff(grid) <= np.diff(seconds) * (1 + 1e-9)).all()
    # The temperature is continuous from one stretch to the next.
    for before, after in zip(work.stretches, work.stretches[1:], strict=False):
        arrives = work.model.after(before.temp_c, before.power_w, after.at_s - before.at_s)
        assert arrives == pytest.approx(after.temp_c, abs=1e-6)


def hot_device(**thermal: object) -> Device:
    figures = {"ambient_c": 25.0, "r_c_per_w": 10.0, "tau_s": 2.0, "busy_w": 4.0, **thermal}
    given = Thermal(trips=(ThrottlingStep(temp_c=45.0, freq_scale=0.5),), **figures)
    return msgspec.structs.replace(load_device("pixel-3a"), thermal=given)


def hot_trip(temp_c: float, work_s: float = 8.0) -> TripPlan:
    device, rng = hot_device(), np.random.default_rng(0)
    heat = thermal_model(device), temp_c
    return plan_trip(device, Link(load_network("none"), rng), rng, 1000, work_s, 1000, heat)


def test_a_trip_of_a_warm_device_takes_longer() -> None:
    cold, warm = hot_trip(25.0), hot_trip(45.0)
    reaches_s = 2 * math.log(2)
    assert cold.compute_s == pytest.approx(reaches_s + (8 - reaches_s) * 1.5)
    assert warm.compute_s == pytest.approx(8 * 1.5)
    assert cold.total_s == cold.compute_s


def test_a_paced_client_follows_the_throttling_curve() -> None:
    pacer, now = paced(2.0)
    trip = hot_trip(25.0)
    training, errors = trip.compute(pacer), []
    for step in range(1, 81):
        training.done(trip.work_s / 80)
        errors.append(now[0] / 2e9 - trip.heat.seconds(step / 10))
    assert max(errors) < 1e-6
    assert min(errors) > -0.051 / 2 - 1e-6  # work may be 50 wall milliseconds early
    spent = training.end()
    assert spent.achieved_s == pytest.approx(trip.compute_s) == spent.declared_s


def test_work_that_never_ends_waits_until_it_is_cancelled() -> None:
    class Cancelled(Exception):
        pass

    def wait(deadline_ns: int) -> None:
        assert deadline_ns > 2**60
        raise Cancelled

    pacer = Pacer(time_scale=1.0, wait=wait, clock=lambda: 0)
    pacer.begin(0)
    phase = pacer.phase(1.0, 0.0, lambda work: math.inf)
    with pytest.raises(Cancelled):
        phase.done(1.0)


def test_a_profile_without_all_figures_has_no_thermal_model() -> None:
    assert thermal_model(hot_device(tau_s=None)) is None
    assert thermal_model(load_device("board-qrb2210")) is None
    given = hot_device(busy_w=None).thermal  # the power of all cores then
    model = thermal_model(msgspec.structs.replace(load_device("pixel-4"), thermal=given, battery=None))
    assert model.busy_w == pytest.approx(CORES_A * 3.85)


def test_a_hot_trip_cut_short_makes_the_steps_that_throttling_permits() -> None:
    whole, reaches_s = hot_trip(25.0), 2 * math.log(2)
    cut = whole.within(5.0, [whole.work_s / 80] * 80)  # 80 steps of 0.1 s at full speed
    done_s = reaches_s + (5.0 - reaches_s) / 1.5
    assert cut.steps == int(done_s * 10)
    assert cut.total_s == pytest.approx(5.0)
    # The device computes until the budget ends, although it does not finish its last step.
    assert sum(seconds for seconds, _ in cut.heat.powers()) == pytest.approx(5.0)
    cool = hot_trip(25.0, work_s=1.0)
    assert cool.within(9.0, [1.0]).total_s == pytest.approx(9.0)


def test_a_trip_cut_short_before_the_device_gets_too_hot_is_not_lost() -> None:
    device, rng = hot_device(), np.random.default_rng(0)
    link = Link(load_network("none"), rng)
    whole = plan_trip(device, link, rng, 1000, 1000.0, 1000, (FRAGILE, 25.0))
    phone, before = ConditionModel(FRAGILE, None), Condition(0.0, 25.0)
    assert whole.total_s == math.inf
    assert phone.interruption(before, whole) == (whole.heat.off_s, "heat")
    cut = whole.within(30.0, [1.0] * 1000)
    assert (cut.steps, cut.total_s, phone.interruption(before, cut)) == (30, pytest.approx(30.0), None)
    assert phone.after_trip(before, cut, 30.0).temp_c == pytest.approx(65 - 40 * math.exp(-0.5))


def test_an_upload_after_shortened_training_starts_in_the_trace_where_training_ends(tmp_path: Path) -> None:
    (tmp_path / "t.trace").write_text("10\n20\n1000\n")
    net = network(trace=str(tmp_path / "t.trace"), delay_ms=100.0)
    uploads = []
    for work_s in (50.0, 5000.0):  # with the latter the device would get too hot
        rng = np.random.default_rng(0)
        link = Link(net, rng, at_s=7.0, shift=0.25)
        whole = plan_trip(hot_device(), link, rng, 3000, work_s, 6000, (FRAGILE, 25.0))
        assert (whole.compute_s == math.inf) == (work_s == 5000.0)
        cut = whole.within(30.0, [1.0] * int(work_s))
        assert cut.up.flows_at_s == pytest.approx(7.0 + 0.25 + 30.0 + 0.1)
        uploads.append(cut.up_s)
    # The upload starts 0.35 s into the period and uses the third opportunity and all of the next period.
    assert uploads == pytest.approx([0.1 + 1.65] * 2)


POWER = Power(idle_w=0.5, busy_w=4.0, down_w=1.0, up_w=1.0, capacity_j=1000.0, least_j=200.0, charge_w=10.0)
HEAT = ThermalModel(25.0, 10.0, 60.0, 4.0, step_c=(45.0,), speeds=(1.0, 0.5))
MODEL = ConditionModel(HEAT, POWER)
CORES_A = (223.89 + 3 * 302.04 + 4 * 85.05) / 1e3
"""Total current of all cores of a Pixel 4 at their maximum frequencies, in A."""
COOL = ConditionModel(None, POWER)


def device(**battery: float) -> Device:
    given = Battery(**{"capacity_mah": 1000.0, "voltage_v": 4.0, **battery})
    return msgspec.structs.replace(load_device("pixel-4"), battery=given, thermal=None)


def trip(work_s: float = 20.0, temp_c: float = 25.0, model: ConditionModel = MODEL) -> TripPlan:
    """Plan a trip with 2 s of download, ``work_s`` of training at full speed and 1 s of upload."""
    rng = np.random.default_rng(0)
    thermal = None if model.thermal is None else (model.thermal, temp_c)
    link = Link(network(rate_mbps=8.0), rng)
    return plan_trip(load_device("pixel-3a"), link, rng, 2_000_000, work_s, 1_000_000, thermal)


def test_energy_and_power_follow_from_charge_current_and_voltage() -> None:
    power = power_of(device(idle_ma=50.0, radio_ma=200.0, wifi_ma=100.0, min_soc=0.2))
    assert power.capacity_j == pytest.approx(1.0 * 3600 * 4.0)
    assert power.least_j == pytest.approx(0.2 * 14400)
    assert (power.idle_w, power.down_w, power.up_w, power.charge_w) == (0.2, 0.8, 0.8, 0.0)
    assert power.busy_w == pytest.approx(CORES_A * 4.0)
    unstated = power_of(device(voltage_v=None))
    assert unstated.capacity_j == pytest.approx(3600 * NOMINAL_V)


def test_a_device_without_figures_has_no_power() -> None:
    assert load_device("board-qrb2210").busy_w is None
    assert power_of(load_device("board-qrb2210")) is None
    bare = msgspec.structs.replace(load_device("board-qrb2210"), battery=Battery(capacity_mah=100))
    with pytest.raises(ProfileError, match=r"thermal\.busy_w"):
        power_of(bare)


def test_a_trip_uses_the_power_of_each_phase() -> None:
    plan, before = trip(20.0, model=COOL), Condition(5.0, charge_j=900.0)
    after = COOL.after_trip(before, plan, plan.total_s)
    assert after.at_s == pytest.approx(5 + 2 + 20 + 1)
    assert after.charge_j == pytest.approx(900 - 0.5 * 23 - 4 * 20 - 1 * 3)
    dear = ConditionModel(None, POWER._replace(up_w=1.5)).after_trip(before, plan, plan.total_s)
    assert dear.charge_j == pytest.approx(after.charge_j - 0.5 * plan.up_s)
    half = COOL.after_trip(before, plan, 12.0)
    assert half.charge_j == pytest.approx(900 - 0.5 * 12 - 4 * 10 - 1 * 2)


def test_a_throttled_device_uses_less_power() -> None:
    plan = trip(60.0)
    hot = plan.heat.stretches[1]
    assert hot.power_w == pytest.approx(2.0)  # the power that keeps the device at 45 °C
    after = MODEL.after_trip(Condition(0.0, 25.0, 1000.0), plan, plan.total_s)
    drawn = 4 * hot.at_s + 2 * (plan.heat.total_s - hot.at_s)
    assert after.charge_j == pytest.approx(1000 - 0.5 * plan.total_s - 1 * 3 - drawn)
    assert after.temp_c == pytest.approx(25 + 20 * math.exp(-1 / 60))


@pytest.mark.parametrize("model", [MODEL, COOL], ids=["heat", "no heat"])
def test_a_client_that_made_every_step_rests_until_its_budget_ends(model: ConditionModel) -> None:
    whole, before = trip(60.0, model=model), Condition(0.0, 25.0, 1000.0)
    cut = whole.within(whole.down_s + whole.compute_s + 300.0, [6.0] * 10)
    assert (cut.steps, cut.rests, cut.tail_s) == (10, True, pytest.approx(300.0))
    trained = model.after_trip(before, whole, whole.down_s + whole.compute_s)
    rested = model.after_rest(trained, trained.at_s + 300.0)
    found = model.after_trip(before, cut, cut.total_s - cut.up_s)
    for name in ("at_s", "temp_c", "charge_j"):
        assert getattr(found, name) == pytest.approx(getattr(rested, name))
    sent = model.after_trip(before, cut, cut.total_s)
    assert sent.charge_j == pytest.approx(rested.charge_j - (0.5 + 1.0) * cut.up_s)
    # with this charge the battery is low 20 s before the end of the rest
    enough_j = before.charge_j - rested.charge_j + POWER.least_j - 20 * POWER.idle_w
    stops_s = pytest.approx(trained.at_s + 280.0)
    assert model.interruption(Condition(0.0, 25.0, enough_j), cut) == (stops_s, "battery")


def test_a_client_with_an_unfinished_step_computes_until_its_budget_ends() -> None:
    cut, before = trip(60.0, model=COOL).within(2.0 + 33.0, [6.0] * 10), Condition(0.0, charge_j=900.0)
    assert (cut.steps, cut.rests, cut.tail_s) == (5, False, pytest.approx(3.0))
    found = COOL.after_trip(before, cut, cut.total_s)
    assert found.charge_j == pytest.approx(900 - 0.5 * 36 - 4 * 33 - 1 * 3)


def test_a_low_battery_ends_the_trip() -> None:
    plan, before = trip(20.0, model=COOL), Condition(0.0, charge_j=230.0)
    found = COOL.interruption(before, plan)
    assert found == (pytest.approx(2 + (30 - 1.5 * 2) / 4.5), "battery")
    after = COOL.after_trip(before, plan, found[0], "battery")
    assert (after.fit, after.low, after.charge_j) == (False, True, pytest.approx(200.0))
    assert COOL.interruption(Condition(0.0, charge_j=400.0), plan) is None


def test_a_device_that_switches_off_because_of_heat_ends_the_trip() -> None:
    fragile = ConditionModel(FRAGILE, None)
    plan, before = trip(1000.0, model=fragile), Condition(0.0, 25.0)
    found = fragile.interruption(before, plan)
    assert found == (plan.down_s + plan.heat.off_s, "heat")
    after = fragile.after_trip(before, plan, found[0], "heat")
    assert (after.off, after.temp_c) == (True, pytest.approx(50.0))
    assert fragile.fit_at_s(after) == pytest.approx(after.at_s + 60 * math.log(25 / 20))
    assert fragile.after_rest(after, fragile.fit_at_s(after)).fit
    assert not fragile.after_rest(after, fragile.fit_at_s(after) - 1e-6).fit


def test_idling_discharges_and_charging_fills_the_battery() -> None:
    full = MODEL.initial()
    low_s = MODEL.unfit_at_s(full)
    assert low_s == 800 / 0.5
    low = MODEL.after_rest(full, low_s)
    assert (low.low, low.charge_j, MODEL.unfit_at_s(low)) == (True, 200.0, low_s)
    assert MODEL.fit_at_s(low) == low_s + 80.0
    again = MODEL.after_rest(full, low_s + 80.0)
    assert (again.fit, again.charge_j) == (True, 1000.0)
    assert (MODEL.initial(0.2).low, MODEL.fit_at_s(MODEL.initial(0.2))) == (True, 80.0)


def test_a_low_battery_without_a_charger_stays_low_and_no_battery_is_never_low() -> None:
    model = ConditionModel(None, POWER._replace(charge_w=0.0))
    low = model.after_rest(model.initial(), 2000.0)
    assert (low.low, model.fit_at_s(low)) == (True, math.inf)
    assert model.after_rest(low, 1e9).charge_j == 0.0
    neither = ConditionModel(None, None)
    now = neither.after_rest(neither.initial(), 1e9)
    assert (now.fit, neither.unfit_at_s(now)) == (True, math.inf)
    assert neither.interruption(now, trip(model=neither)) is None


def test_a_rest_in_parts_gives_the_same_condition() -> None:
    step = start = Condition(0.0, 60.0, 700.0)
    for at_s in [*np.sort(np.random.default_rng(1).uniform(0, 5000, 50)).tolist(), 5000.0]:
        step = MODEL.after_rest(step, at_s)
    whole = MODEL.after_rest(start, 5000.0)
    assert (step.charge_j, step.temp_c) == pytest.approx((whole.charge_j, whole.temp_c))
    assert step.low == whole.low
