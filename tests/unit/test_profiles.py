"""The profiles that come with edgefl, and what is said of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgefl import emulation
from edgefl.emulation import profiles as profile_files
from edgefl.emulation.profiles import check_file
from edgefl.errors import ConfigError, ProfileError

FOLDER = profile_files._folder()
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


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_profile_is_right(path: Path) -> None:
    assert check_file(path) == []


def test_there_are_enough_and_all_load() -> None:
    devices = [emulation.load_device(name) for name in emulation.device_names()]
    networks = [emulation.load_network(name) for name in emulation.network_names()]
    fleets = [emulation.load_fleet(name) for name in emulation.fleet_names()]
    assert len([d for d in devices if d.kind != "paper"]) >= 14
    assert len(networks) >= 10
    assert len(fleets) >= 3
    assert len(devices) + len(networks) + len(fleets) == len(FILES)


@pytest.mark.parametrize("name", emulation.device_names())
def test_a_real_device_has_what_a_client_needs(name: str) -> None:
    device = emulation.load_device(name)
    if device.kind == "paper":
        return
    assert device.cpu is not None
    assert device.app_limit_mib is not None
    assert device.network in emulation.network_names()
    assert device.uncertainty["cpu.rate_gflops.train"] >= 1


@pytest.mark.parametrize("name", emulation.device_names())
def test_derived_training_rates_follow_the_rule(name: str) -> None:
    device = emulation.load_device(name)
    if not device.sources.get("cpu.rate_gflops.train", "").startswith("derived: 0.07 x gemm_nt"):
        return
    assert device.cpu is not None
    assert device.cpu.rate_gflops.gemm_nt is not None
    assert device.cpu.rate_gflops.train == pytest.approx(0.07 * device.cpu.rate_gflops.gemm_nt, rel=5e-3)


def test_flash_training_rates_follow_from_its_measurements() -> None:
    mac = 28 * 28 * 32 * 25 + 14 * 14 * 64 * 800 + 3136 * 2048 + 2048 * 62
    batch_flop = 10 * 3 * 2 * mac
    assert mac == 17_211_904
    for name, batch_s in (("nexus-6", 1.642), ("redmi-note-8", 0.588), ("galaxy-note-10", 0.179)):
        assert emulation.load_device(name).train_flop_per_s == pytest.approx(batch_flop / batch_s, rel=5e-3)


def test_all_is_plain_json() -> None:
    for name in emulation.device_names():
        plain = emulation.to_json(emulation.load_device(name))
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        assert plain["id"] == name
    assert "rate_mbps" not in emulation.to_json(emulation.load_network("none"))["down"]
    assert emulation.to_json(emulation.load_fleet("pocket-8"))["devices"]["pixel-4"] == 2


def test_a_users_own_files_load_by_path(tmp_path: Path) -> None:
    path = write(tmp_path, DEVICE)
    assert emulation.load_device(path).train_flop_per_s == 1.5e9
    assert emulation.load_device(str(path)) == emulation.load_device(path)
    assert emulation.load_network(write(tmp_path, NETWORK)).up.rate_mbps == 1.0
    assert emulation.load_fleet(write(tmp_path, FLEET)).clients == 2


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ProfileError, match="device profile 'pi5' not found; did you mean 'pi-5'"):
        emulation.load_device("pi5")
    with pytest.raises(ProfileError, match="network profile '6g' not found"):
        emulation.load_network("6g")
    with pytest.raises(ProfileError, match="fleet profile 'x' not found"):
        emulation.load_fleet("x")
    assert issubclass(ProfileError, ConfigError)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="not found"):
        emulation.load_device(tmp_path / "mine.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match="cannot be read"):
        emulation.load_device(tmp_path / "bytes.toml")
    with pytest.raises(ProfileError, match="not TOML"):
        emulation.load_device(write(tmp_path, "id = "))
    assert "not TOML" in check_file(tmp_path / "mine.toml")[0]
    with pytest.raises(ProfileError, match="cannot be read"):
        emulation.load_device(tmp_path)


@pytest.mark.parametrize(
    ("base", "old", "new", "said"),
    [
        (DEVICE, "train = 1.5", "train = 0", "cpu.rate_gflops.train: got 0; allowed: `float` > 0"),
        (DEVICE, "train = 1.5", "train = -1.5", "cpu.rate_gflops.train: got -1.5"),
        (DEVICE, "train = 1.5", "train = nan", "cpu.rate_gflops.train: got nan; allowed: a finite number"),
        (DEVICE, "train = 1.5", "train = inf", "cpu.rate_gflops.train: got inf"),
        (DEVICE, "train = 1.5", 'train = "fast"', "cpu.rate_gflops.train: got 'fast'; allowed: `float`"),
        (DEVICE, "train = 1.5", "trian = 1.5", "cpu.rate_gflops.trian: got 1.5; allowed: one of gemm_1t"),
        (DEVICE, "train = 1.5", "", "cpu.rate_gflops.train: got 'nothing'"),
        (DEVICE, "train = 1.5", "train = 1.5\ngemm_1t = 3\ngemm_nt = 2", "cpu.rate_gflops.gemm_nt: got 2.0"),
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
        (DEVICE, "[memory]", "[gpu]\nx = 1\n[memory]", "gpu: got {'x': 1}; allowed: one of battery, class"),
        (DEVICE, 'name = "Mine"', 'name = "Mine"\nnetwork = "6g"', "network: got '6g'; allowed: one of 3g"),
        (
            DEVICE,
            "[cpu.rate_gflops]\ntrain = 1.5",
            "",
            "cpu: got 'nothing'; allowed: a value, or a delay_model",
        ),
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
    load = {DEVICE: emulation.load_device, NETWORK: emulation.load_network, FLEET: emulation.load_fleet}[base]
    with pytest.raises(ProfileError) as caught:
        load(path)
    assert str(caught.value) in problems


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
    monkeypatch.setattr(profile_files, "__file__", str(package / "emulation" / "profiles.py"))
    find = profile_files._folder.__wrapped__
    with pytest.raises(ProfileError, match="install edgefl again"):
        find()
    (tmp_path / "profiles" / "devices").mkdir(parents=True)
    assert find() == tmp_path / "profiles"
    (package / "_profiles" / "devices").mkdir(parents=True)
    assert find() == package / "_profiles"
