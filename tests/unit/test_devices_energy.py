"""Tests of energy: power draw by activity, measured power of radios, and totals."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from test_devices_thermal import CORES_A, device

from edgefl.devices import load_device, load_network
from edgefl.devices.condition import ConditionModel, power_of
from edgefl.devices.energy import METERED, PowerDraw, draw_of
from edgefl.devices.link import Link
from edgefl.devices.plan import plan_trip
from edgefl.devices.schema import Radio
from edgefl.devices.thermal import thermal_model

MEASURED = Path(os.environ.get("EDGEFL_DATA", "/")) / "devices" / "radio-power.csv"
RADIOS: dict[str, Radio] = {"5G low band": "5g-low-band", "5G mmWave": "5g-mmwave"}


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("budget_s", [math.inf, 200.0, 5000.0])
def test_a_trip_uses_the_energy_that_its_battery_loses(hot: bool, budget_s: float) -> None:
    """Fails if throttled computing is counted at full power, or if the rest after the last step is counted as
    computing."""
    phone, network = load_device("pixel-2"), load_network("lte")
    heat, rng = thermal_model(phone), np.random.default_rng(0)
    trip = plan_trip(
        phone, Link(network, rng), rng, 400_000, 3600.0, 400_000, (heat, heat.ambient_c) if hot else None
    )
    if budget_s < math.inf:
        trip = trip.within(budget_s, [30.0] * 120)
    model = ConditionModel(heat if hot else None, power_of(phone, network))
    before = model.initial()
    lost_j = before.charge_j - model.after_trip(before, trip, trip.total_s).charge_j
    power = draw_of(phone, network)
    found = power.energy(
        compute_s=trip.busy_s,
        download_s=trip.down_s,
        upload_s=trip.up_s,
        idle_s=trip.compute_s - trip.busy_s,
    )
    assert 0.0 < lost_j == pytest.approx(found.total_j)
    throttled = hot and budget_s > 200.0
    assert (trip.busy_s < 0.99 * trip.compute_s) is (throttled or budget_s == 5000.0)
    masked = trip.delayed(7.0)  # masking an update computes, too
    assert masked.busy_s == pytest.approx(trip.busy_s + 7.0)
    left_j = model.after_trip(before, masked, masked.total_s).charge_j
    assert before.charge_j - left_j == pytest.approx(lost_j + 7.0 * (power.idle_w + power.compute_w))


def draw(**watts: float) -> PowerDraw:
    return PowerDraw(**{"idle_w": 0.5, "compute_w": 4.0, "download_w": 1.0, "upload_w": 2.0, **watts})


def test_energy_is_power_times_time() -> None:
    power = draw_of(device(idle_ma=50.0, radio_ma=200.0, wifi_ma=100.0))
    found = power.energy(compute_s=10, download_s=2, upload_s=3, idle_s=85)
    assert found[:4] == pytest.approx((0.2 * 100, 4 * CORES_A * 10, 0.8 * 2, 0.8 * 3))
    assert found.total_j == sum(found[:4])
    assert draw_of(load_device("board-qrb2210")) is None


@pytest.mark.parametrize(("bearer", "watts"), [("mobile", 0.8), ("wifi", 0.4), ("wired", 0.0)])
def test_the_bearer_selects_the_current(bearer: str, watts: float) -> None:
    network = msgspec.structs.replace(load_network("lte"), bearer=bearer)
    found = draw_of(device(radio_ma=200.0, wifi_ma=100.0), network)
    assert (found.download_w, found.upload_w) == (watts, watts)


def test_the_power_of_a_metered_radio_replaces_the_current_and_grows_with_the_rate() -> None:
    way = load_network("lte")
    slow, fast = (
        draw_of(
            device(radio_ma=200.0),
            msgspec.structs.replace(
                way, radio="5g-mmwave", down=msgspec.structs.replace(way.down, rate_mbps=rate)
            ),
        )
        for rate in (20.0, 2000.0)
    )
    assert 3.0 < slow.download_w < 4.0 < 7.0 < fast.download_w < 8.5
    assert slow.upload_w == fast.upload_w == METERED["5g-mmwave"].up_w


def test_the_interval_is_that_of_the_most_uncertain_use() -> None:
    sure, unsure = (draw(compute_factor=factor).energy(compute_s=10.0) for factor in (1.1, 2.0))
    assert sure.high_j < unsure.high_j == pytest.approx(unsure.total_j + math.hypot(40.0, 5.0))
    assert unsure.low_j == pytest.approx(unsure.total_j - math.hypot(20.0, 2.5))
    timed = draw(compute_factor=1.1).energy(compute_s=10.0, time_factor=3.0)
    assert timed.high_j > unsure.high_j


Reading = tuple[str, str, bool, float, float]
"""Radio; phone and network, which stand for the location; True for an upload; median rate in Mbit/s; median
power in W."""


def readings() -> list[Reading]:
    if not MEASURED.is_file():
        pytest.skip("no metered radio power: EDGEFL_DATA has no devices/radio-power.csv")
    with open(MEASURED, newline="") as file:
        return [
            (row["radio"], row["phone_and_network"], row["direction"] == "uplink",
             float(row["mbps_median"]), float(row["radio_mw_median"]) / 1e3)
            for row in csv.DictReader(file)
        ]  # fmt: skip


def fitted(rows: list[Reading]) -> list[float]:
    """Fit ``down_w``, ``down_growth`` and ``up_w`` to the logarithm of the power by least squares."""
    known = [[not up, math.sqrt(mbps) * (not up), up] for *_, up, mbps, _ in rows]
    watts = np.log([row[-1] for row in rows])
    down, growth, up = np.linalg.lstsq(np.array(known, float), watts, rcond=None)[0]
    return [math.exp(down), float(growth), math.exp(up)]


def errors(rows: list[Reading], down_w: float, growth: float, up_w: float) -> list[float]:
    return [
        abs((up_w if up else down_w * math.exp(growth * math.sqrt(mbps))) / watts - 1)
        for *_, up, mbps, watts in rows
    ]


@pytest.mark.parametrize("radio", RADIOS)
def test_the_figures_of_a_radio_are_the_fit_to_its_measurements(radio: str) -> None:
    rows = [row for row in readings() if row[0] == radio]
    assert METERED[RADIOS[radio]][:3] == pytest.approx(fitted(rows), rel=2e-3)


def test_power_at_an_unseen_location_is_predicted_within_the_interval() -> None:
    rows = [row for row in readings() if row[0] == "5G mmWave"]
    left_out = [
        error
        for place in {row[1] for row in rows}
        for error in errors(
            [row for row in rows if row[1] == place], *fitted([row for row in rows if row[1] != place])
        )
    ]
    assert np.median(left_out) <= 0.12
    held = np.mean([error <= METERED["5g-mmwave"].factor - 1 for error in left_out])
    assert held >= 0.85


def test_the_uncertainty_of_a_table_applies_to_figures_without_their_own() -> None:
    phone = device(idle_ma=50.0, radio_ma=200.0)
    stated = {"battery": 1.5, "battery.radio_ma": 1.2, "cpu.clusters": 1.4, "cpu.rate_gflops": 3.0}
    phone = msgspec.structs.replace(phone, uncertainty=stated, runtime={}, default_runtime=None)
    power = draw_of(phone)
    assert (power.idle_factor, power.radio_factor, power.compute_factor) == (1.5, 1.2, 1.4)
    assert phone.time_model().error_factor == 3.0
