"""Tests of profile files: reading, errors in invalid files, and the bundled profiles."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from statistics import NormalDist, fmean, pstdev

import numpy as np
import pytest
from tables import arrows
from test_devices_time_model import written

from edgefl import devices, toml
from edgefl.devices import check_file, profiles
from edgefl.devices.link import OPPORTUNITY_BYTES, Trace, trace_text
from edgefl.errors import ProfileError
from edgefl.experiment import Fleet

DEVICE = """
id = "mine"
name = "Mine"
class = "budget"

[cpu.rate_gflops]
train = 1.5

[memory]
ram_mib = 2048
app_limit_mib = 512

[sources]
cpu = "measured"
memory = "its box"
"""
NETWORK = """
id = "mine"
name = "Mine"

[down]
rate_mbps = 2.0
delay_ms = 10.0

[up]
rate_mbps = 1.0

[sources]
down = "measured"
up = "measured"
"""
FLEET = """
id = "mine"
name = "Mine"
source = "a test"
network = "lte"

[devices]
pixel-4 = 2
"""


def test_every_profile_can_be_written_as_json() -> None:
    for name in devices.device_names():
        plain = devices.to_json(devices.load_device(name))
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        assert plain["id"] == name
    assert "rate_mbps" not in devices.to_json(devices.load_network("none"))["down"]
    assert devices.to_json(devices.load_fleet("pocket-8"))["devices"]["pixel-4"] == 2


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "half.toml").write_text("id = ")
    for name, said in (
        ("mine.toml", r"mine\.toml: no such file"),
        ("bytes.toml", "not UTF-8"),
        ("half.toml", "line 1: Invalid value"),
        (".", "a folder"),
    ):
        with pytest.raises(ProfileError, match=said):
            devices.load_device(tmp_path / name)
    assert "line 1: Invalid value" in check_file(tmp_path / "half.toml")[0]


WRONG_DEVICES = r"""
train = 1.5 -> train = 0 -> cpu.rate_gflops.train: must be a finite number above 0, got 0
train = 1.5 -> trian = 1.5 -> unknown key 'cpu.rate_gflops.trian'; did you mean 'cpu.rate_gflops.train'?
train = 1.5 -> -> cpu.rate_gflops.train: missing
train = 1.5 -> train = 1.5\ngemm = { 1t = 3, nt = 2 } -> cpu.rate_gflops.gemm.nt: must be at least 1t = 3.0
train = 1.5 -> train = 1.5\ngemm = {} -> cpu.rate_gflops.gemm: must be a table with 1t, nt, or both
train = 1.5 -> train = 1.5\nconv = 3 -> cpu.rate_gflops.conv: must be a table, got 3
"budget" -> "cheap" -> class: must be one of 'board', 'budget',
id = "mine" -> id = "Mine!" -> id: must be a name of lower-case letters, digits, dots and dashes, got 'Mine!'
id = "mine" -> id = "other" -> id: must be the file's name, 'mine', got 'other'
id = "mine" -> id = "mine"\nschema = 0 -> schema: must be a whole number from 1 to 2, got 0
id = "mine" -> id = "mine"\nschema = 3 -> schema: must be at most 2 (upgrade edgefl to read newer schemas)
name = "Mine" -> name = "Mine"\nnetwork = "6g" -> network: network profile '6g' not found; available: 3g,
app_limit_mib = 512 -> app_limit_mib = 4096 -> memory.app_limit_mib: must be at most ram_mib = 2048.0, got
cpu = "measured" -> -> cpu.rate_gflops.train: has no source; add one to [sources] for it or for a
cpu = "measured" -> cpu = "" -> sources.cpu: must be a string that is not empty, got ''
[sources] -> [sources]\ngpu = "x" -> sources.gpu: is not a figure in this file; available: cpu.rate_gflops
[sources] -> [uncertainty]\nmemory = 0.5\n[sources] -> uncertainty.memory: must be a finite number of at least
[memory] -> [gpu]\nx = 1\n[memory] -> unknown key 'gpu'; did you mean 'cpu'? allowed at the top level: availab
[cpu.rate_gflops]\ntrain = 1.5 -> -> cpu: missing; give it, or a delay_model with mode = "replace"
[memory] -> [slowdown]\nlow = 3\nhigh = 1\n[memory] -> slowdown.high: must be at least low = 3.0, got 1.0
[memory] -> [slowdown]\nlow=1\nhigh=2\n[delay_model]\ndist="list"\nvalues_s=[1]\n[memory] -> slowdown: has
"""
WRONG_NETWORKS = r"""
rate_mbps = 2.0 -> rate_mbps = 0 -> down.rate_mbps: must be a finite number above 0, got 0
delay_ms = 10.0 -> delay_ms = -1 -> down.delay_ms: must be a finite number of at least 0, got -1
delay_ms = 10.0 -> jitter_ms = 1 -> down.jitter_dist: must be a distribution if jitter_ms is above 0
delay_ms = 10.0 -> jitter_ms = 1\njitter_dist = "uniform" -> down.jitter_ms: must be at most delay_ms = 0.0
delay_ms = 10.0 -> loss_pct = 100 -> down.loss_pct: must be a number of at least 0 and below 100, got 100
name = "Mine" -> name = "Mine"\nheader_bytes = 1500 -> header_bytes: must be below mtu_bytes = 1500, got 1500
rate_mbps = 2.0 -> rate_mbps = 2.0\ntrace = "x" -> down.trace: must be left out with rate_mbps (only one
rate_mbps = 2.0 -> trace = "x"\nrate_cv = 0.5 -> down.rate_cv: must be left out without rate_mbps, which
rate_mbps = 2.0 -> rate_cv = 0.5 -> down.rate_cv: must be left out without rate_mbps, which it varies
rate_mbps = 2.0 -> queue_kib = 64 -> unknown key 'down.queue_kib'; allowed in [down]: delay_ms, jitter_dist,
rate_mbps = 2.0 -> on_loss = "stop" -> down.on_loss: must be 'disconnect' or 'retransmit', got 'stop'
"Mine" -> "Mine"\nradio = "6g" -> radio: must be
"Mine" -> "Mine"\nradio = "5g-mmwave"\nbearer = "wifi" -> bearer: must be 'mobile' if a metered radio
[down]\nrate_mbps = 2.0 -> radio = "5g-mmwave"\n[down] -> radio: needs down.rate_mbps
[up] -> [upp] -> unknown key 'upp'; did you mean 'up'?
"""
WRONG_FLEETS = r"""
id = "mine" -> id = "mine"\nschema = 3 -> schema: must be at most 2 (upgrade edgefl to read newer schemas)
pixel-4 = 2 -> pixel-4 = 0 -> devices.pixel-4: must be a whole number of at least 1, got 0
pixel-4 = 2 -> -> devices: must be a table of PROFILE = COUNT, got {}
pixel-4 -> pixel-99 -> devices.pixel-99: device profile 'pixel-99' not found; did you mean 'pixel-5'?
"lte" -> 5 -> network: must be a string or a table that is not empty, got 5
"lte" -> "6g" -> network: network profile '6g' not found; available: 3g,
network = "lte" -> network = { pi-4 = "lte" } -> network.pi-4: device in the fleet 'pi-4' not found
network = "lte" -> network = { pi-4 = "lte" } -> network: has no entry for pixel-4; give one for each device
source = "a test" -> -> source: missing; must be a string that is not empty
"""
WRONG_TABLES = r"""
storage = { read_mbytes_per_s = 0 } -> storage.read_mbytes_per_s: must be a finite number above 0, got 0
battery = { capacity_mah = 1, min_soc = 1 } -> battery.min_soc: must be a number from 0 to 0.99, got 1
battery = { capacity_mah = 1, idle_ma = -1 } -> battery.idle_ma: must be a finite number of at least 0
cpu.clusters = [{ uarch = "A", cores = 1, max_mhz = 2.4 }] -> max_mhz: must be a finite number of at least 10
cpu.clusters = [{ CORE, cores = 1.5 }] -> cpu.clusters[0].cores: must be a whole number of at least 1, got 1.5
cpu.clusters = [{ CORE, cores = 1, freq_mhz = [5, 8] }] -> cpu.clusters[0].freq_mhz: must be ascending and
cpu.clusters = [{ CORE, cores = 1, freq_mhz = [9, 9] }] -> freq_mhz: must be ascending and end with max_mhz =
cpu.clusters = [{ CORE, cores = 1, power_ma = [9] }] -> power_ma: must be one value for each of the 0 in
cpu.clusters = [{ CORE, cores = 1, freq_mhz = [90], max_ma = 5, power_ma = [4] }] -> must be values that end
thermal = { trips = [] } -> thermal.trips: must be an array that is not empty, got []
thermal = { trips = [STEP, { temp_c = 45, freq_scale = 0.6 }] } -> thermal.trips: must be steps whose
thermal = { trips = [STEP, STEP] } -> thermal.trips: must be in ascending order of temp_c, got [40.0, 40.0]
thermal = { trips = [STEP], off_c = 39 } -> thermal.off_c: must be at least 40.0, the temp_c of the last step
thermal = { trips = [STEP], off_c = 40 } -> thermal.off_c: must be above 40.0, the temp_c of the only step
thermal = { trips = [STEP], tau_s = 9 } -> thermal.ambient_c: missing; ambient_c and r_c_per_w and tau_s only
thermal = { trips = [STEP], ambient_c = 40, tau_s = 9, r_c_per_w = 5 } -> ambient_c: must be below 40.0, the
availability = { intervals_s = [], period_s = 9 } -> availability.intervals_s: must be an array that is not
availability = { intervals_s = [[1, 2, 3]], period_s = 9 } -> intervals_s[0]: must be an array of 2, got [1,
availability = { intervals_s = [[2, 1]], period_s = 9 } -> intervals_s[0]: must be [start, end] with a start
availability = { intervals_s = [[1, 4], [3, 5]], period_s = 9 } -> with a start of at least 4 and an end after
availability = { intervals_s = [[1, 4]], period_s = 3 } -> period_s: must be at least the last interval's end,
delay_model = { dist = "uniform", low_s = 2, high_s = 1 } -> delay_model.high_s: must be above low_s = 2.0,
delay_model = { dist = "uniform", low_s = 1 } -> delay_model.high_s: missing; needed for dist = 'uniform',
delay_model = { dist = "exponential", mean_s = 0 } -> delay_model.mean_s: must be a number above 0 and at most
delay_model = { dist = "exponential", mean_s = 1e308, per = "example" } -> mean_s: must be a number above 0
delay_model = { dist = "exponential", mean_s = 1, sigma = 2 } -> delay_model.sigma: must be left out with dist
delay_model = { dist = "list", values_s = [] } -> delay_model.values_s: must be an array that is not empty
delay_model = { dist = "list", values_s = [1, 2e9] } -> values_s[1]: must be a number from 0 to 1e+09, got
delay_model = { dist = "list", values_s = [0, 0] } -> delay_model.values_s: must be a list with at
delay_model = { dist = "log-normal", median_s = 1, sigma = 10.1 } -> sigma: must be a number above 0 and at
delay_model = { dist = "pareto", min_s = 1, alpha = 0.09 } -> delay_model.alpha: must be a finite number of at
"""


CHANGES = [
    (base, *line)
    for base, text in ((DEVICE, WRONG_DEVICES), (NETWORK, WRONG_NETWORKS), (FLEET, WRONG_FLEETS))
    for line in arrows(text)
]


@pytest.mark.parametrize(("base", "old", "new", "said"), CHANGES, ids=lambda part: part[:40])
def test_an_error_names_file_key_and_values(tmp_path: Path, base: str, old: str, new: str, said: str) -> None:
    assert old in base
    path = written(tmp_path, base.replace(old, new, 1))
    problems = check_file(path)
    assert any(problem.startswith(f"{path}: {said}") for problem in problems), problems
    assert all(problem.startswith(f"{path}: ") and "\n" not in problem for problem in problems)
    load = {DEVICE: devices.load_device, NETWORK: devices.load_network, FLEET: devices.load_fleet}[base]
    with pytest.raises(ProfileError) as caught:
        load(path)
    assert str(caught.value) in problems


@pytest.mark.parametrize(("table", "said"), arrows(WRONG_TABLES))
def test_figures_that_describe_changes_over_time_are_checked(tmp_path: Path, table: str, said: str) -> None:
    table = table.replace("CORE", 'uarch = "A", max_mhz = 90')
    table = table.replace("STEP", "{ temp_c = 40, freq_scale = 0.5 }")
    key = table.split(" ")[0].split(".")[0]
    known = "" if key == "cpu" else f'{key} = "a test"\n'
    (problem,) = check_file(written(tmp_path, f"{table}\n{DEVICE}{known}"))
    assert said in problem


DYNAMIC = """
storage = { read_mbytes_per_s = 200, write_mbytes_per_s = 100 }
availability = { intervals_s = [[0, 3600], [7200.5, 86400]], period_s = 86400 }
battery = { capacity_mah = 3000, voltage_v = 3.85, idle_ma = 10, wifi_ma = 50, radio_ma = 0, min_soc = 0.2 }
thermal = { ambient_c = 25, r_c_per_w = 6, tau_s = 120, busy_w = 4, off_c = 60, trips = [
  { temp_c = 40, freq_scale = 0.8 }, { temp_c = 45, freq_scale = 0.5 } ] }
cpu.clusters = [
  { uarch = "A", cores = 4, max_mhz = 2000, freq_mhz = [500, 2000], power_ma = [20, 200], max_ma = 200 } ]
"""


def test_a_device_with_all_tables_is_valid(tmp_path: Path) -> None:
    text = DEVICE.replace("train = 1.5", "train = 1.5\ngemm = { 1t = 2, nt = 6 }\nelementwise = { 1t = 0.3 }")
    known = "".join(f'{table} = "a test"\n' for table in ("storage", "battery", "thermal", "availability"))
    path = written(tmp_path, f"schema = 1\n{DYNAMIC}{text}{known}")
    assert check_file(path) == []
    device = devices.load_device(path)
    assert device.availability.intervals_s == ((0, 3600), (7200.5, 86400))
    assert (device.cpu.rate_gflops.train, device.cpu.rate_gflops.conv) == (1.5, None)
    plain = devices.to_json(device)
    assert plain["cpu"]["rate_gflops"]["gemm"] == {"1t": 2.0, "nt": 6.0}
    assert devices.load_device(written(tmp_path, toml.write(plain))) == device


def test_check_file_reports_all_problems_but_only_the_version_of_a_newer_file(tmp_path: Path) -> None:
    for text in (DEVICE, NETWORK, FLEET):
        assert check_file(written(tmp_path, text)) == []
    text = DEVICE.replace("train = 1.5", "trian = 1.5").replace("ram_mib", "ram")
    assert len(check_file(written(tmp_path, text))) == 4
    path = written(tmp_path, f"schema = 3\n{text}\n[tpu]\nx = 1")
    (problem,) = check_file(path)
    assert problem.startswith(f"{path}: schema: must be at most 2 (upgrade edgefl to read newer schemas)")


def test_paths_in_a_profile_are_relative_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(DEVICE.replace('"mine"', '"own"'))
    fleet = FLEET.replace("pixel-4 = 2", '"./own.toml" = 2\npixel-4 = 1')
    found = devices.load_fleet(written(tmp_path, fleet))
    assert found.devices == {str(tmp_path / "own.toml"): 2, "pixel-4": 1}
    path = written(tmp_path, fleet.replace("own.toml", "no.toml").replace('"lte"', '"./net.toml"'))
    said = [f"{path}: devices: no.toml: no such file", f"{path}: network: net.toml: no such file"]
    assert check_file(path) == said
    assert check_file(written(tmp_path, fleet)) == []
    network = NETWORK.replace("rate_mbps = 2.0", 'trace = "down.trace"')
    assert devices.load_network(written(tmp_path, network)).down.trace == str(tmp_path / "down.trace")


def test_a_missing_or_invalid_trace_is_reported(tmp_path: Path) -> None:
    path = written(tmp_path, NETWORK.replace("rate_mbps = 2.0", 'trace = "down.trace"'))
    (found,) = check_file(path)
    assert found.startswith(f"{path}: down.trace: trace ")
    assert "cannot be read" in found
    (tmp_path / "down.trace").write_text("1\n2\nx\n")
    assert "line 3: got 'x'" in check_file(path)[0]
    (tmp_path / "down.trace").write_text("1\n2\n3\n")
    assert check_file(path) == []


def test_the_folder_of_profiles_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "edgefl"
    (package / "emulation").mkdir(parents=True)
    monkeypatch.setattr(profiles, "__file__", str(package / "emulation" / "profiles.py"))
    find = profiles.bundled_folder.__wrapped__
    with pytest.raises(ProfileError, match="reinstall edgefl"):
        find()
    (tmp_path / "profiles" / "devices").mkdir(parents=True)
    assert find() == tmp_path / "profiles"
    (package / "_profiles" / "devices").mkdir(parents=True)
    assert find() == package / "_profiles"


FOLDER = profiles.bundled_folder()
FILES = sorted(path for kind in profiles.TYPES for path in (FOLDER / kind).glob("*.toml"))


def test_every_bundled_profile_is_valid() -> None:
    assert [problem for path in FILES for problem in check_file(path)] == []


def test_there_are_enough_bundled_profiles_and_all_load() -> None:
    found = [devices.load_device(name) for name in devices.device_names()]
    networks = [devices.load_network(name) for name in devices.network_names()]
    fleets = [devices.load_fleet(name) for name in devices.fleet_names()]
    assert len([d for d in found if d.kind not in ("paper", "tier")]) >= 24
    assert len(networks) >= 12
    assert len(fleets) >= 8
    assert {d.year for d in found if d.year} >= {*range(2015, 2022), 2023}
    assert {d.kind for d in found} >= {"flagship", "mid-range", "budget", "board", "wearable", "tier"}
    of_table = set(profiles.phone_names()) - {path.stem for path in FILES}
    assert len(found) + len(networks) + len(fleets) == len(FILES) + len(of_table)
    assert len(of_table) >= 50


def test_every_real_device_has_the_figures_that_a_client_needs() -> None:
    for name in (name for name in devices.device_names() if "paper" not in name):
        device = devices.load_device(name)
        assert device.cpu is not None, name
        unpublished = name == "redmi-note-6-pro"  # the RAM of the measured unit
        assert (device.app_limit_mib is None) == unpublished, name
        assert device.network in devices.network_names(), name
        assert device.uncertainty["cpu.rate_gflops.train"] >= 1, name
        if device.sources.get("cpu.rate_gflops.train", "").startswith("derived: 0.07 x gemm.nt"):
            rates = device.cpu.rate_gflops
            of_gemm = 0.07 * (rates.gemm.all or rates.gemm.one)
            assert rates.train == pytest.approx(of_gemm, rel=5e-3), name


def rate(name: str) -> float:
    return devices.load_device(name).train_flop_per_s


def test_training_rates_of_flash_are_derived_from_its_measurements() -> None:
    mac = 28 * 28 * 32 * 25 + 14 * 14 * 64 * 800 + 3136 * 2048 + 2048 * 62
    assert mac == 17_211_904
    for name, batch_s in (("nexus-6", 1.642), ("redmi-note-8", 0.588), ("galaxy-note-10", 0.179)):
        assert rate(name) == pytest.approx(10 * 3 * 2 * mac / batch_s, rel=5e-3)


def test_the_tiers_have_the_spread_of_flash() -> None:
    slow, middle, fast = (rate(f"tier-{rank}") for rank in ("p10", "p50", "p90"))
    assert fast / slow == pytest.approx(12.6, rel=5e-3)
    assert middle == rate("redmi-note-8")
    assert middle == pytest.approx((fast * slow) ** 0.5, rel=5e-3)


NO_FACTOR = ("thermal.trips", "thermal.ambient_c", "availability", "delay_model")
"""Prefixes of the keys whose assumed values need no entry in ``uncertainty``."""


def test_every_assumed_figure_has_an_uncertainty() -> None:
    for path in FILES:
        table = toml.read(path)
        assumed = [key for key, source in table.get("sources", {}).items() if source.startswith("assumed:")]
        stated = table.get("uncertainty", {})
        for key in assumed:
            known = key in stated or key.startswith(NO_FACTOR) or key.endswith(".trace")
            assert known, f"{path.name}: {key}"


HEATED = [name for name in devices.device_names() if devices.load_device(name).thermal is not None]


@pytest.mark.parametrize("name", HEATED)
def test_power_and_heat_of_a_device_are_plausible(name: str) -> None:
    device = devices.load_device(name)
    thermal = device.thermal
    if None in (thermal.busy_w, thermal.r_c_per_w, thermal.ambient_c):
        assert name == "nexus-6p"
        return
    if device.battery is not None:
        volts = device.battery.voltage_v or 0.0
        cores_w = sum(one.cores * (one.max_ma or 0) for one in device.cpu.clusters) * volts / 1e3
        assert thermal.busy_w == pytest.approx(cores_w, rel=2e-3)
    assert 2 < thermal.r_c_per_w < 40
    assert 60 <= thermal.tau_s <= 900
    assert 30 < thermal.ambient_c + thermal.busy_w * thermal.r_c_per_w < 150


def synthetic(mean_mbps: float, cv: float, seconds: int, seed: int) -> Trace:
    """Make a trace whose 1 s windows have this mean rate and coefficient of variation.

    The windows' rates are the quantiles of a log-normal distribution at (i + ½) / ``seconds``, in an order
    shuffled by ``seed``. Its σ is chosen so that the rates have exactly the coefficient ``cv``. Packets are
    evenly spaced within each window.
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


def test_synthetic_traces_have_their_published_figures() -> None:
    networks = [devices.load_network(name) for name in devices.network_names()]
    traced = [network for network in networks if network.down.trace]
    assert len(traced) >= 2
    for network, way in itertools.product(traced, ("down", "up")):
        said = r"synthetic\((\S+), (\S+), (\d+), seed=(\d+)\)"
        found = re.search(said, network.sources[f"{way}.trace"])
        mean, cv, seconds, seed = float(found[1]), float(found[2]), int(found[3]), int(found[4])
        made = synthetic(mean, cv, seconds, seed)
        assert Path(getattr(network, way).trace).read_text() == trace_text(made)
        assert made.rate_mbps == pytest.approx(mean, rel=1e-3)
        packets = Counter((at_ms - 1) // 1000 for at_ms in made.at_ms)
        windows = [packets[second] for second in range(seconds)]
        assert pstdev(windows) / fmean(windows) == pytest.approx(cv, rel=1e-3)


def test_a_node_may_lack_the_networks_that_only_the_server_reads(tmp_path: Path) -> None:
    """Regression: nodes without this file were rejected, although workers under the virtual clock only
    train."""
    fleet = Fleet(devices={"pi-4": 2}, network=str(tmp_path / "absent.toml"))
    assert profiles.own_files(fleet) == [fleet.network]
