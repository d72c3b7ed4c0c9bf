"""The profiles that come with edgefl: every one right, and figures that follow from their sources."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

import numpy as np
import pytest

from edgefl import devices as emulation
from edgefl import toml
from edgefl.devices import check_file, profiles
from edgefl.devices.link import OPPORTUNITY_BYTES, Trace, trace_text

FOLDER = profiles.bundled_folder()
FILES = sorted(FOLDER.rglob("*.toml"))


def test_every_profile_is_right() -> None:
    assert [problem for path in FILES for problem in check_file(path)] == []


def test_there_are_enough_and_all_load() -> None:
    devices = [emulation.load_device(name) for name in emulation.device_names()]
    networks = [emulation.load_network(name) for name in emulation.network_names()]
    fleets = [emulation.load_fleet(name) for name in emulation.fleet_names()]
    assert len([d for d in devices if d.kind not in ("paper", "tier")]) >= 24
    assert len(networks) >= 12
    assert len(fleets) >= 8
    assert {d.year for d in devices if d.year} >= {*range(2015, 2022), 2023}
    assert {d.kind for d in devices} >= {"flagship", "mid-range", "budget", "board", "wearable", "tier"}
    assert len(devices) + len(networks) + len(fleets) == len(FILES)


@pytest.mark.parametrize("name", [name for name in emulation.device_names() if "paper" not in name])
def test_a_real_device_has_what_a_client_needs(name: str) -> None:
    device = emulation.load_device(name)
    assert device.cpu is not None
    assert device.app_limit_mib is not None
    assert device.network in emulation.network_names()
    assert device.uncertainty["cpu.rate_gflops.train"] >= 1
    if device.sources.get("cpu.rate_gflops.train", "").startswith("derived: 0.07 x gemm.nt"):
        rates = device.cpu.rate_gflops
        assert rates.gemm is not None
        assert rates.train == pytest.approx(0.07 * (rates.gemm.all or rates.gemm.one or 0.0), rel=5e-3)


def test_flash_training_rates_follow_from_its_measurements() -> None:
    mac = 28 * 28 * 32 * 25 + 14 * 14 * 64 * 800 + 3136 * 2048 + 2048 * 62
    batch_flop = 10 * 3 * 2 * mac
    assert mac == 17_211_904
    for name, batch_s in (("nexus-6", 1.642), ("redmi-note-8", 0.588), ("galaxy-note-10", 0.179)):
        assert emulation.load_device(name).train_flop_per_s == pytest.approx(batch_flop / batch_s, rel=5e-3)


NO_FACTOR = ("thermal.trips", "thermal.ambient_c", "availability", "delay_model")
"""Assumptions for which a factor means nothing."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_what_is_assumed_says_how_uncertain_it_is(path: Path) -> None:
    table = toml.read(path)
    assumed = [key for key, source in table.get("sources", {}).items() if source.startswith("assumed:")]
    stated = table.get("uncertainty", {})
    for key in assumed:
        assert key in stated or key.startswith(NO_FACTOR) or key.endswith(".trace"), key


def test_the_tiers_span_flashs_spread() -> None:
    slow, middle, fast = (
        emulation.load_device(f"tier-{rank}").train_flop_per_s for rank in ("p10", "p50", "p90")
    )
    assert fast / slow == pytest.approx(12.6, rel=5e-3)
    assert middle == emulation.load_device("redmi-note-8").train_flop_per_s
    assert middle == pytest.approx((fast * slow) ** 0.5, rel=5e-3)


HEATED = [name for name in emulation.device_names() if emulation.load_device(name).thermal is not None]


@pytest.mark.parametrize("name", HEATED)
def test_what_a_device_draws_and_sheds_is_plausible(name: str) -> None:
    device = emulation.load_device(name)
    thermal = device.thermal
    assert thermal is not None
    if thermal.busy_w is None or thermal.r_c_per_w is None or thermal.ambient_c is None:
        assert name == "nexus-6p"
        return
    assert device.cpu is not None
    if device.battery is not None:
        volts = device.battery.voltage_v or 0.0
        cores_w = sum(one.cores * (one.max_ma or 0) for one in device.cpu.clusters) * volts / 1e3
        assert thermal.busy_w == pytest.approx(cores_w, rel=2e-3)
    assert 2 < thermal.r_c_per_w < 40
    assert 60 <= (thermal.tau_s or 0) <= 900
    assert 30 < thermal.ambient_c + thermal.busy_w * thermal.r_c_per_w < 150


# ---- traces ------------------------------------------------------------------------------------


def synthetic(mean_mbps: float, cv: float, seconds: int, seed: int) -> Trace:
    """A trace whose 1 s windows have that mean rate and coefficient of variation, and no more of a real one.

    The windows' rates are the log-normal distribution's quantiles at (i + ½) / ``seconds``, with the σ that
    gives these very quantiles the ``cv``, in an order shuffled by ``seed``; packets are even within a window.
    """
    normal = [NormalDist().inv_cdf((at + 0.5) / seconds) for at in range(seconds)]
    low, high = 0.0, 10.0
    while high - low > 1e-12:
        sigma = (low + high) / 2
        rates = [math.exp(sigma * z) for z in normal]
        low, high = (sigma, high) if pstdev(rates) / fmean(rates) < cv else (low, sigma)
    scale = mean_mbps * 1e6 / (8 * OPPORTUNITY_BYTES) / fmean(rates)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(seconds)
    at_ms: list[int] = []
    owed = 0.0
    for second, which in enumerate(order):
        owed += rates[which] * scale
        packets, owed = int(owed), owed - int(owed)
        at_ms += [second * 1000 + math.ceil((number + 1) * 1000 / packets) for number in range(packets)]
    at_ms[-1] = seconds * 1000
    return Trace(at_ms, seconds * 1000)


def test_synthetic_traces_are_made_from_their_published_figures() -> None:
    traced = [
        network for name in emulation.network_names() if (network := emulation.load_network(name)).down.trace
    ]
    assert len(traced) >= 2
    for network in traced:
        for way, direction in (("down", network.down), ("up", network.up)):
            found = re.search(
                r"synthetic\((\S+), (\S+), (\d+), seed=(\d+)\)", network.sources[f"{way}.trace"]
            )
            assert found is not None
            mean, cv, seconds, seed = float(found[1]), float(found[2]), int(found[3]), int(found[4])
            made = synthetic(mean, cv, seconds, seed)
            assert direction.trace is not None
            assert Path(direction.trace).read_text() == trace_text(made)
            assert made.rate_mbps == pytest.approx(mean, rel=1e-3)
            packets = Counter((at_ms - 1) // 1000 for at_ms in made.at_ms)
            windows = [packets[second] for second in range(seconds)]
            assert pstdev(windows) / fmean(windows) == pytest.approx(cv, rel=1e-3)
