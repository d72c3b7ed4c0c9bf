"""Other projects' files: each sample is read as it means, and what is written is read back."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from edgefl import devices as emulation
from edgefl.devices import check_file
from edgefl.devices.formats import FORMATS, write
from edgefl.devices.imports import ImportOptions, ImportResult
from edgefl.devices.link import read_trace
from edgefl.devices.schema import Availability, Device, Network
from edgefl.errors import ProfileError

SAMPLES = Path(__file__).parent / "import_samples"


def read(format_name: str, sample: str, **asked: Any) -> ImportResult:
    return FORMATS[format_name].read(SAMPLES / sample, ImportOptions(**asked))


def written(made: ImportResult, folder: Path) -> Path:
    for name, text in made.files.items():
        (folder / name).write_text(text)
    return folder


def networks(made: ImportResult, folder: Path) -> dict[str, Network]:
    written(made, folder)
    return {Path(name).stem: emulation.load_network(folder / name) for name in made.files if "toml" in name}


def devices(made: ImportResult, folder: Path) -> dict[str, Device]:
    written(made, folder)
    return {Path(name).stem: emulation.load_device(folder / name) for name in made.files}


def test_webpagetest(tmp_path: Path) -> None:
    found = networks(read("webpagetest", "connectivity.ini"), tmp_path)
    assert list(found) == ["village", "hill", "native"]
    village, hill, native = found.values()
    assert (village.down.rate_mbps, village.up.rate_mbps) == (3.0, 0.512)
    assert village.down.delay_ms + village.up.delay_ms == 45
    assert village.name == "Village DSL (3 Mbps/512 Kbps 45ms RTT)"
    assert hill.down.loss_pct == hill.up.loss_pct == 2
    assert native.down.rate_mbps is native.up.rate_mbps is None
    assert list(read("webpagetest", "connectivity.ini", only=("Hill",)).files) == ["hill.toml"]


def test_devtools_custom_profiles(tmp_path: Path) -> None:
    tunnel, roof = networks(read("devtools", "devtools.json"), tmp_path).values()
    assert (tunnel.name, tunnel.down.rate_mbps, tunnel.up.rate_mbps) == ("Tunnel", 0.5, 0.2)
    assert tunnel.down.delay_ms == tunnel.up.delay_ms == 240
    assert roof.down.rate_mbps == pytest.approx(20)
    assert (roof.up.rate_mbps, roof.down.loss_pct) == (None, 1.5)


def test_the_devtools_protocol(tmp_path: Path) -> None:
    (found,) = networks(read("devtools", "conditions.json"), tmp_path).values()
    assert (found.down.rate_mbps, found.up.rate_mbps, found.down.delay_ms) == (2.0, 1.0, 45.0)


def test_lighthouse_without_its_fudge_factors(tmp_path: Path) -> None:
    (found,) = networks(read("devtools", "lighthouse.json"), tmp_path).values()
    assert found.down.rate_mbps == pytest.approx(2000 * 1024 / 1e6)
    assert found.up.rate_mbps == pytest.approx(800 * 1024 / 1e6)
    assert found.down.delay_ms == found.up.delay_ms == 60


def test_mahimahi(tmp_path: Path) -> None:
    made = read("mahimahi", "down.trace", name="mine", up=SAMPLES / "up.trace")
    (found,) = networks(made, tmp_path).values()
    assert found.down.trace == str(tmp_path / "mine-down.trace")
    assert found.down.rate_mbps is None
    assert (tmp_path / "mine-down.trace").read_text() == (SAMPLES / "down.trace").read_text()
    assert (tmp_path / "mine-up.trace").read_text() == (SAMPLES / "up.trace").read_text()
    (same,) = networks(read("mahimahi", "down.trace"), tmp_path).values()
    assert same.up.trace == same.down.trace
    assert same.sources["up"].startswith("assumed: as the download")


def test_a_power_profile_completes_a_device(tmp_path: Path) -> None:
    made = read("power-profile", "power_profile.xml", base="pixel-3", name="my-pixel-3")
    assert made.notes == ()
    (found,) = devices(made, tmp_path).values()
    before = emulation.load_device("pixel-3")
    assert found.battery is not None
    assert found.cpu is not None
    assert before.cpu is not None
    assert (found.battery.capacity_mah, found.battery.idle_ma) == (3000, 7.5)
    assert (found.battery.wifi_ma, found.battery.radio_ma) == (200, 150)
    big, little = found.cpu.clusters
    assert (big.max_mhz, big.max_ma, big.power_ma) == (2803.2, 410.5, (70.1, 165, 410.5))
    assert little.freq_mhz == (300, 900, 1766.4)
    assert found.cpu.rate_gflops == before.cpu.rate_gflops
    assert found.id == "my-pixel-3"


def test_an_older_power_profile(tmp_path: Path) -> None:
    (found,) = devices(read("power-profile", "power_profile_old.xml", base="moto-g4"), tmp_path).values()
    assert found.cpu is not None
    assert found.battery is not None
    (cluster,) = found.cpu.clusters
    assert (cluster.cores, cluster.max_ma, cluster.freq_mhz) == (4, 166, (200, 800, 1209.6))
    assert (found.battery.wifi_ma, found.battery.radio_ma) == (96, 60)


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    text = (SAMPLES / "power_profile_old.xml").read_text()
    text = (
        text.replace('<item name="battery.capacity">2810</item>', "")
        .replace(">36<", ">166<")
        .replace(">78<", ">166<")
    )
    (tmp_path / "p.xml").write_text(text)
    made = FORMATS["power-profile"].read(tmp_path / "p.xml", ImportOptions(base="moto-g4", name="mine"))
    assert made.notes == ("left out: the cores' currents, 166 mA at every frequency",)
    (found,) = devices(made, tmp_path).values()
    before = emulation.load_device("moto-g4")
    assert found.battery is not None
    assert before.battery is not None
    assert (found.battery.capacity_mah, found.battery.wifi_ma) == (before.battery.capacity_mah, 96)
    assert found.cpu == before.cpu


def test_clusters_that_the_device_has_not_are_named(tmp_path: Path) -> None:
    made = read("power-profile", "power_profile.xml", base="pi-4")
    assert [note.split(",")[0] for note in made.notes] == [
        "left out: 4 cores of 1766.4 MHz",
        "left out: 4 cores of 2803.2 MHz",
    ]
    (found,) = devices(made, tmp_path).values()
    assert found.cpu == emulation.load_device("pi-4").cpu


def test_bouquetfl(tmp_path: Path) -> None:
    five, duo = devices(read("bouquetfl", "cpus.toml"), tmp_path).values()
    assert five.cpu is not None
    assert five.cpu.rate_gflops.train == pytest.approx(0.07 * 32 * 6 * 4.25)
    assert (five.cpu.clusters[0].cores, five.cpu.clusters[0].max_mhz) == (6, 4250)
    assert duo.train_flop_per_s == pytest.approx(0.07 * 32 * 2 * 3e9)
    (card,) = devices(read("bouquetfl", "gpus.toml"), tmp_path).values()
    assert card.train_flop_per_s == pytest.approx(0.07 * 2 * 1920 * 1.5e9)
    assert card.app_limit_mib == 8192
    first, second = networks(read("bouquetfl", "locations.toml"), tmp_path).values()
    assert (first.down.rate_mbps, second.up.rate_mbps) == (80, 1.25)


def test_fedscale_capacities_are_a_fleet(tmp_path: Path) -> None:
    made = read("fedscale", "client_device_capacity", name="volunteers")
    written(made, tmp_path)
    fleet = emulation.load_fleet(tmp_path / "volunteers.toml")
    assert fleet.clients == 10
    assert isinstance(fleet.network, dict)
    found = {}
    for name, network in fleet.network.items():
        device, link = emulation.load_device(name), emulation.load_network(network)
        found[device.id] = (device.train_flop_per_s, link.down.rate_mbps, link.up.rate_mbps)
    assert len(found) == 10
    train, down, up = found["volunteers-5"]
    assert train == pytest.approx(0.6e9 / 0.162)
    assert down == up == pytest.approx(77.0)
    assert found["volunteers-4"][1] == pytest.approx(5.648109619499134)


def test_of_many_clients_an_even_spread_is_taken() -> None:
    made = read("fedscale", "client_device_capacity", name="few", clients=2)
    names = ("few-3-link", "few-3", "few-8-link", "few-8", "few")
    assert sorted(made.files) == [f"{name}.toml" for name in names]


def test_fedscale_behaviour_is_an_availability_file() -> None:
    made = read("fedscale", "client_behave_trace")
    (text,) = made.files.values()
    found = msgspec.json.decode(text, type=tuple[Availability, ...])
    assert [one.intervals_s for one in found] == [
        ((3600, 7200), (43200, 50400), (165600, 172800)),
        ((0, 86400),),
        ((100, 700), (3900, 4000)),
    ]
    assert [one.period_s for one in found] == [259200, 86400, 4000]
    assert made.notes == ("3 of 4 clients; 1 never active",)


def test_webpagetest_and_devtools_come_back(tmp_path: Path) -> None:
    for format_name, file in (("webpagetest", "c.ini"), ("devtools", "c.json")):
        for name in ("3g", "edge-lossy", "none"):
            content = write(name, format_name)
            (tmp_path / file).write_bytes(content.content)
            (found,) = networks(
                FORMATS[format_name].read(tmp_path / file, ImportOptions()), tmp_path
            ).values()
            network = emulation.load_network(name)
            for way, own in ((found.down, network.down), (found.up, network.up)):
                assert (
                    way.rate_mbps == pytest.approx(own.rate_mbps) if own.rate_mbps else way.rate_mbps is None
                )
                assert way.delay_ms == own.delay_ms
                assert way.loss_pct == own.loss_pct or "loss" in content.left_out
    written = json.loads(write("fast-4g", "devtools").content)
    figures = {"download": 1_125_000, "upload": 187_500, "latency": 60}
    assert written == {"title": "Fast 4G as Chrome DevTools sets it", **figures}


@pytest.mark.parametrize("name", ["3g", "lte", "5g", "edge", "fios"])
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_trace_of_a_constant_rate_has_that_rate(
    tmp_path: Path, name: str, way: Literal["down", "up"]
) -> None:
    content = write(name, "mahimahi", way)
    (tmp_path / "c.trace").write_bytes(content.content)
    rate = getattr(emulation.load_network(name), way).rate_mbps
    assert read_trace(str(tmp_path / "c.trace")).rate_mbps == pytest.approx(rate, rel=1e-4)
    assert "delay" in content.left_out


def test_a_replayed_trace_is_written_as_it_is(tmp_path: Path) -> None:
    written(read("mahimahi", "down.trace", name="mine"), tmp_path)
    content = write(str(tmp_path / "mine.toml"), "mahimahi", "up").content
    assert content.decode() == (SAMPLES / "down.trace").read_text()
    with pytest.raises(ProfileError, match="replays a trace, which webpagetest cannot say"):
        write(str(tmp_path / "mine.toml"), "webpagetest")


def test_a_fleet_is_written_for_fedscale_and_read_back(tmp_path: Path) -> None:
    content = write("mixed-24", "fedscale").content
    clients = pickle.loads(content)
    assert list(clients) == list(range(24))
    phone = emulation.load_device("pixel-4")
    assert clients[2]["computation"] == pytest.approx(0.6 / (phone.train_flop_per_s / 1e12))
    assert clients[2]["communication"] == pytest.approx(30_000)
    (tmp_path / "caps").write_bytes(content)
    made = FORMATS["fedscale"].read(tmp_path / "caps", ImportOptions())
    written(made, tmp_path)
    assert emulation.load_fleet(tmp_path / "caps.toml").clients == 24
    with pytest.raises(ProfileError, match="has no cpu; FedScale states one speed"):
        write("paper-fedbuff-1000", "fedscale")
    with pytest.raises(ProfileError, match="has a slowdown that is drawn"):
        write("paper-defedavg-100", "fedscale")


def test_everything_made_is_a_right_profile(tmp_path: Path) -> None:
    for name, sample, asked in (
        ("bouquetfl", "cpus.toml", {}),
        ("bouquetfl", "gpus.toml", {}),
        ("bouquetfl", "locations.toml", {}),
        ("devtools", "devtools.json", {}),
        ("fedscale", "client_device_capacity", {}),
        ("mahimahi", "down.trace", {}),
        ("power-profile", "power_profile.xml", {"base": "pixel-3"}),
        ("webpagetest", "connectivity.ini", {}),
    ):
        made = read(name, sample, **asked)
        folder = tmp_path / sample
        folder.mkdir()
        written(made, folder)
        for file in folder.glob("*.toml"):
            assert check_file(file) == []


def test_a_format_that_does_not_exist() -> None:
    with pytest.raises(ProfileError, match="format 'webpage' not found; did you mean 'webpagetest'"):
        write("3g", "webpage")
    with pytest.raises(ProfileError, match="'bouquetfl' is only read; written are: devtools, fedscale"):
        write("3g", "bouquetfl")
    with pytest.raises(ProfileError, match="network profile 'nothing' not found"):
        write("nothing", "devtools")
    with pytest.raises(ProfileError, match="'none' is unlimited this way"):
        write("none", "mahimahi")


def test_labels_that_break_the_format_are_mended(tmp_path: Path) -> None:
    text = (SAMPLES / "connectivity.ini").read_text().replace("Hill, 2% lost", "Hill 'so' [x]")
    (tmp_path / "c.ini").write_text(text)
    made = FORMATS["webpagetest"].read(tmp_path / "c.ini", ImportOptions(only=("Hill",)))
    (found,) = networks(made, tmp_path).values()
    assert found.name == "Hill 'so' [x]"
    (tmp_path / "quoted.toml").write_text(
        made.files["hill.toml"].replace('id = "hill"', 'id = "quoted"').replace("Hill 'so'", 'A \\"b\\"')
    )
    line = write(str(tmp_path / "quoted.toml"), "webpagetest").content.decode().splitlines()[1]
    assert line == "label=\"A 'b' [x]\""
