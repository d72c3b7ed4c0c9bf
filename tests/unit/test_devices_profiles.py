"""Profile files: what is read of right ones, and what is said of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgefl import devices, toml
from edgefl.devices import check_file, profiles
from edgefl.errors import ConfigError, ProfileError

FOLDER = profiles.bundled_folder()
FILES = sorted(FOLDER.rglob("*.toml"))

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


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_all_is_plain_json() -> None:
    for name in devices.device_names():
        plain = devices.to_json(devices.load_device(name))
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        assert plain["id"] == name
    assert "rate_mbps" not in devices.to_json(devices.load_network("none"))["down"]
    assert devices.to_json(devices.load_fleet("pocket-8"))["devices"]["pixel-4"] == 2


def test_a_users_own_files_load_by_path(tmp_path: Path) -> None:
    path = write(tmp_path, DEVICE)
    assert devices.load_device(path).train_flop_per_s == 1.5e9
    assert devices.load_device(str(path)) == devices.load_device(path)
    assert devices.load_network(write(tmp_path, NETWORK)).up.rate_mbps == 1.0
    assert devices.load_fleet(write(tmp_path, FLEET)).clients == 2


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ProfileError, match="device profile 'pi5' not found; did you mean 'pi-5'"):
        devices.load_device("pi5")
    with pytest.raises(ProfileError, match="network profile '6g' not found"):
        devices.load_network("6g")
    with pytest.raises(ProfileError, match="fleet profile 'x' not found"):
        devices.load_fleet("x")
    assert issubclass(ProfileError, ConfigError)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"mine\.toml: no such file"):
        devices.load_device(tmp_path / "mine.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match="not UTF-8"):
        devices.load_device(tmp_path / "bytes.toml")
    with pytest.raises(ProfileError, match="line 1: Invalid value"):
        devices.load_device(write(tmp_path, "id = "))
    assert "line 1: Invalid value" in check_file(tmp_path / "mine.toml")[0]
    with pytest.raises(ProfileError, match="a folder"):
        devices.load_device(tmp_path)


@pytest.mark.parametrize(
    ("base", "old", "new", "said"),
    [
        (DEVICE, "train = 1.5", "train = 0", "cpu.rate_gflops.train: got 0; allowed: `float` > 0"),
        (DEVICE, "train = 1.5", "train = -1.5", "cpu.rate_gflops.train: got -1.5"),
        (DEVICE, "train = 1.5", "train = nan", "cpu.rate_gflops.train: got nan; allowed: a finite number"),
        (DEVICE, "train = 1.5", "train = inf", "cpu.rate_gflops.train: got inf"),
        (DEVICE, "train = 1.5", 'train = "fast"', "cpu.rate_gflops.train: got 'fast'; allowed: `float`"),
        (DEVICE, "train = 1.5", "trian = 1.5", "cpu.rate_gflops.trian: got 1.5; allowed: one of conv"),
        (DEVICE, "train = 1.5", "", "cpu.rate_gflops.train: got 'nothing'"),
        (DEVICE, "train = 1.5", "train = 1.5\ngemm = { 1t = 3, nt = 2 }", "cpu.rate_gflops.gemm.nt: got 2.0"),
        (DEVICE, '"budget"', '"cheap"', "class: got 'cheap'"),
        (DEVICE, 'id = "mine"', 'id = "Mine!"', "id: got 'Mine!'"),
        (DEVICE, 'id = "mine"', 'id = "other"', "id: got 'other'; allowed: the file's name, 'mine'"),
        (
            DEVICE,
            "app_limit_mib = 512",
            "app_limit_mib = 4096",
            "memory.app_limit_mib: got 4096.0; allowed: at most",
        ),
        (DEVICE, 'cpu = "measured"', "", "cpu.rate_gflops.train: got 'no source'"),
        (DEVICE, 'cpu = "measured"', 'cpu = ""', "sources.cpu: got ''; allowed: `str` of length >= 1"),
        (DEVICE, "[sources]", '[sources]\ngpu = "x"', "sources.gpu: got 'no such figure in the file'"),
        (DEVICE, "[sources]", "[uncertainty]\nmemory = 0.5\n[sources]", "uncertainty.memory: got 0.5"),
        (
            DEVICE,
            "[memory]",
            "[gpu]\nx = 1\n[memory]",
            "gpu: got {'x': 1}; allowed: one of availability, battery",
        ),
        (DEVICE, 'name = "Mine"', 'name = "Mine"\nnetwork = "6g"', "network: got '6g'; allowed: one of 3g"),
        (
            DEVICE,
            "[cpu.rate_gflops]\ntrain = 1.5",
            "",
            "cpu: got 'nothing'; allowed: a value, or a delay_model",
        ),
        (DEVICE, "train = 1.5", "train = 1.5\ngemm = {}", "cpu.rate_gflops.gemm: got {}; allowed: 1t, nt"),
        (DEVICE, "train = 1.5", "train = 1.5\nconv = 3", "cpu.rate_gflops.conv: got 3; allowed: `table`"),
        (DEVICE, 'id = "mine"', 'id = "mine"\nschema = 0', "schema: got 0; allowed: `int` >= 1"),
        (DEVICE, 'id = "mine"', 'id = "mine"\nschema = "1"', "schema: got '1'; allowed: `int`"),
        (DEVICE, 'id = "mine"', 'id = "mine"\nschema = 2', "schema: got 2; allowed: at most 1"),
        (FLEET, 'id = "mine"', 'id = "mine"\nschema = 2', "schema: got 2; allowed: at most 1"),
        (
            DEVICE,
            "[memory]",
            '[delay_model]\ndist = "uniform"\nlow_s = 3\nhigh_s = 1\n[memory]',
            "delay_model.high_s",
        ),
        (DEVICE, "[memory]", "[slowdown]\nlow = 3\nhigh = 1\n[memory]", "slowdown.high: got 1.0"),
        (DEVICE, "[memory]", "[thermal]\ntrips = []\n[memory]", "thermal.trips: got []"),
        (
            DEVICE,
            "[memory]",
            '[[cpu.clusters]]\nuarch = "A"\ncores = 1.5\nmax_mhz = 3\n[memory]',
            "cpu.clusters[0].cores: got 1.5; allowed: `int`",
        ),
        (NETWORK, "rate_mbps = 2.0", "rate_mbps = 0", "down.rate_mbps: got 0"),
        (NETWORK, "delay_ms = 10.0", "delay_ms = -1", "down.delay_ms: got -1"),
        (NETWORK, "delay_ms = 10.0", "jitter_ms = 1", "down.jitter_dist: got 'none'"),
        (
            NETWORK,
            "delay_ms = 10.0",
            'jitter_ms = 1\njitter_dist = "uniform"',
            "down.jitter_ms: got 1.0; allowed: at most delay_ms",
        ),
        (NETWORK, "delay_ms = 10.0", "loss_pct = 100", "down.loss_pct: got 100"),
        (
            NETWORK,
            'name = "Mine"',
            'name = "Mine"\nheader_bytes = 1500',
            "header_bytes: got 1500; allowed: below",
        ),
        (NETWORK, "rate_mbps = 2.0", 'rate_mbps = 2.0\ntrace = "x"', "down.trace: got 'x'; allowed: nothing"),
        (NETWORK, "rate_mbps = 2.0", "queue_kib = 64", "down.queue_kib: got 64; allowed: one of delay_ms"),
        (NETWORK, "rate_mbps = 2.0", 'on_loss = "stop"', "down.on_loss: got 'stop'"),
        (NETWORK, "[up]", "[upp]", "upp: got"),
        (FLEET, "pixel-4 = 2", "pixel-4 = 0", "devices.pixel-4: got 0; allowed: `int` >= 1"),
        (FLEET, '"lte"', "5", "network: got 5"),
        (DEVICE, "[cpu.rate_gflops]\ntrain = 1.5", "cpu = 3", "cpu: got 3; allowed: `table`"),
        (FLEET, "pixel-4 = 2", "", "devices: got {}"),
        (FLEET, "pixel-4", "pixel-99", "devices.pixel-99: got 'pixel-99'"),
        (FLEET, '"lte"', '"6g"', "network: got '6g'"),
        (FLEET, 'network = "lte"', 'network = { pi-4 = "lte" }', "network.pi-4: got 'pi-4'"),
        (FLEET, 'source = "a test"', "", "source: got 'nothing'"),
    ],
)
def test_a_wrong_file_says_file_key_got_and_allowed(
    tmp_path: Path, base: str, old: str, new: str, said: str
) -> None:
    assert old in base
    path = write(tmp_path, base.replace(old, new, 1))
    problems = check_file(path)
    assert any(said in problem for problem in problems), problems
    assert all(problem.startswith(f"{path}: ") for problem in problems)
    assert all("; allowed: " in problem and "\n" not in problem for problem in problems)
    load = {DEVICE: devices.load_device, NETWORK: devices.load_network, FLEET: devices.load_fleet}[base]
    with pytest.raises(ProfileError) as caught:
        load(path)
    assert str(caught.value) in problems


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("storage = { read_mbytes_per_s = 0 }", "storage.read_mbytes_per_s: got 0; allowed: `float` > 0"),
        ("battery = { capacity_mah = 1, min_soc = 1.5 }", "battery.min_soc: got 1.5; allowed: `float` <= 1"),
        ("battery = { capacity_mah = 1, idle_ma = -1 }", "battery.idle_ma: got -1"),
        ("cpu.clusters = [{ uarch = 'A', cores = 1, max_mhz = 9, freq_mhz = [5, 8] }]", "freq_mhz: got"),
        ("cpu.clusters = [{ uarch = 'A', cores = 1, max_mhz = 9, freq_mhz = [9, 9] }]", "freq_mhz: got"),
        ("cpu.clusters = [{ uarch = 'A', cores = 1, max_mhz = 9, power_ma = [9] }]", "power_ma: got [9.0]"),
        (
            "cpu.clusters = [{ uarch = 'A', cores = 1, max_mhz = 9, freq_mhz = [9], max_ma = 5,"
            " power_ma = [4] }]",
            "cpu.clusters[0].power_ma: got [4.0]; allowed: figures that end in max_ma = 5.0",
        ),
        (
            "thermal = { trips = [{ temp_c = 40, freq_scale = 0.5 }, { temp_c = 45, freq_scale = 0.6 }] }",
            "thermal.trips: got [0.5, 0.6]; allowed: freq_scale that does not rise",
        ),
        ("thermal = { trips = [{ temp_c = 40, freq_scale = 0.5 }], off_c = 39 }", "thermal.off_c: got 39.0"),
        ("thermal = { trips = [{ temp_c = 40, freq_scale = 0.5 }], tau_s = 9 }", "thermal.ambient_c: got"),
        (
            "thermal = { trips = [{ temp_c = 40, freq_scale = 0.5 }], ambient_c = 40, tau_s = 9,"
            " r_c_per_w = 5 }",
            "thermal.ambient_c: got 40.0; allowed: below the first trip's temp_c",
        ),
        ("availability = { intervals_s = [], period_s = 9 }", "availability.intervals_s: got []"),
        ("availability = { intervals_s = [[1, 2, 3]], period_s = 9 }", "intervals_s[0]: got [1, 2, 3]"),
        ("availability = { intervals_s = [[1, nan]], period_s = 9 }", "intervals_s[0]: got [1, nan]"),
        ("availability = { intervals_s = [[2, 1]], period_s = 9 }", "intervals_s[0]: got [2.0, 1.0]"),
        (
            "availability = { intervals_s = [[1, 4], [3, 5]], period_s = 9 }",
            "availability.intervals_s[1]: got [3.0, 5.0]; allowed: a start of at least 4, and an end",
        ),
        ("availability = { intervals_s = [[1, 4]], period_s = 3 }", "availability.period_s: got 3.0"),
    ],
)
def test_what_a_device_does_over_time_is_checked(tmp_path: Path, table: str, said: str) -> None:
    key = table.split(" ")[0].split(".")[0]
    known = "" if key == "cpu" else f'{key} = "a test"\n'
    problems = check_file(write(tmp_path, f"{table}\n{DEVICE}{known}"))
    assert any(said in problem for problem in problems), problems


def test_all_that_a_device_may_say_at_once(tmp_path: Path) -> None:
    text = DEVICE.replace("train = 1.5", "train = 1.5\ngemm = { 1t = 2, nt = 6 }\nelementwise = { 1t = 0.3 }")
    text += """
storage = "a"
battery = "b"
thermal = "t"
availability = "v"

[[cpu.clusters]]
uarch = "A"
cores = 4
max_mhz = 2000
freq_mhz = [500, 2000]
power_ma = [20, 200]
max_ma = 200
[storage]
read_mbytes_per_s = 200
write_mbytes_per_s = 100
[battery]
capacity_mah = 3000
voltage_v = 3.85
idle_ma = 10
wifi_ma = 50
radio_ma = 0
min_soc = 0.2
[thermal]
ambient_c = 25
r_c_per_w = 6
tau_s = 120
busy_w = 4
off_c = 60
trips = [{ temp_c = 40, freq_scale = 0.8 }, { temp_c = 45, freq_scale = 0.5 }]
[availability]
intervals_s = [[0, 3600], [7200.5, 86400]]
period_s = 86400
"""
    path = write(tmp_path, f"schema = 1\n{text}")
    assert check_file(path) == []
    device = devices.load_device(path)
    assert device.availability is not None
    assert device.availability.intervals_s == ((0, 3600), (7200.5, 86400))
    assert device.cpu is not None
    assert device.cpu.rate_gflops.known() == {"train": 1.5, "gemm": 6.0, "elementwise": 0.3}
    plain = devices.to_json(device)
    assert plain["cpu"]["rate_gflops"]["gemm"] == {"1t": 2.0, "nt": 6.0}
    assert devices.load_device(write(tmp_path, toml.write(plain))) == device


def test_a_newer_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, DEVICE.replace("[memory]", "[quantum]\nqubits = 3\n[memory]") + "\n[tpu]\nx = 1")
    assert len(check_file(path)) == 2
    path.write_text(f"schema = 2\n{path.read_text()}")
    assert check_file(path) == [
        f"{path}: schema: got 2; allowed: at most 1, the newest that this edgefl reads; upgrade edgefl"
    ]


def test_paths_in_a_profile_are_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(DEVICE.replace('"mine"', '"own"'))
    fleet = FLEET.replace("pixel-4 = 2", '"./own.toml" = 2\npixel-4 = 1')
    found = devices.load_fleet(write(tmp_path, fleet))
    assert found.devices == {str(tmp_path / "own.toml"): 2, "pixel-4": 1}
    network = NETWORK.replace("rate_mbps = 2.0", 'trace = "down.trace"')
    assert devices.load_network(write(tmp_path, network)).down.trace == str(tmp_path / "down.trace")


def test_a_trace_that_is_missing_or_broken_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, NETWORK.replace("rate_mbps = 2.0", 'trace = "down.trace"'))
    (found,) = check_file(path)
    assert found.startswith(f"{path}: down.trace: trace ")
    assert "cannot be read" in found
    (tmp_path / "down.trace").write_text("1\n2\nx\n")
    assert "line 3: got 'x'" in check_file(path)[0]
    (tmp_path / "good.trace").write_text("1\n2\n3\n")
    assert check_file(write(tmp_path, NETWORK.replace("rate_mbps = 2.0", 'trace = "good.trace"'))) == []


def test_check_file_reports_everything_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, DEVICE.replace("train = 1.5", "trian = 1.5").replace("ram_mib", "ram"))
    assert len(check_file(path)) == 4


def test_the_base_files_are_right(tmp_path: Path) -> None:
    for text in (DEVICE, NETWORK, FLEET):
        assert check_file(write(tmp_path, text)) == []


def test_profiles_are_found_installed_and_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "edgefl"
    (package / "emulation").mkdir(parents=True)
    monkeypatch.setattr(profiles, "__file__", str(package / "emulation" / "profiles.py"))
    find = profiles.bundled_folder.__wrapped__
    with pytest.raises(ProfileError, match="install edgefl again"):
        find()
    (tmp_path / "profiles" / "devices").mkdir(parents=True)
    assert find() == tmp_path / "profiles"
    (package / "_profiles" / "devices").mkdir(parents=True)
    assert find() == package / "_profiles"
