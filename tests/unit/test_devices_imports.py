"""Tests of other projects' file formats: import, export and one-line errors for invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from shell import Shell

from edgefl import devices as emulation
from edgefl import toml
from edgefl.cli import main
from edgefl.devices import check_file, fedscale, formats
from edgefl.devices.formats import FORMATS, write
from edgefl.devices.imports import ImportOptions, ImportResult
from edgefl.devices.link import read_trace
from edgefl.devices.schema import Availability, Device, Network
from edgefl.errors import ProfileError
from edgefl.learning.benchmark_networks import mobilenet_v2
from edgefl.learning.work import step_work

SAMPLES = Path(__file__).parent / "import_samples"


def read(format_name: str, sample: str, **asked: Any) -> ImportResult:
    return FORMATS[format_name].read(SAMPLES / sample, ImportOptions(**asked))


def imported(format_name: str, content: str | bytes, folder: Path, **asked: Any) -> ImportResult:
    path = folder / "caps"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return FORMATS[format_name].read(path, ImportOptions(**asked))


def written(made: ImportResult, folder: Path) -> None:
    for name, text in made.files.items():
        (folder / name).write_text(text)
    assert [problem for path in folder.glob("*.toml") for problem in check_file(path)] == []


def networks(made: ImportResult, folder: Path) -> dict[str, Network]:
    written(made, folder)
    return {Path(name).stem: emulation.load_network(folder / name) for name in made.files if "toml" in name}


def devices(made: ImportResult, folder: Path) -> dict[str, Device]:
    written(made, folder)
    return {Path(name).stem: emulation.load_device(folder / name) for name in made.files}


def test_import_from_webpagetest(tmp_path: Path) -> None:
    found = networks(read("webpagetest", "connectivity.ini"), tmp_path)
    assert list(found) == ["village", "hill", "native"]
    village, hill, native = found.values()
    assert (village.down.rate_mbps, village.up.rate_mbps) == (3.0, 0.512)
    assert village.down.delay_ms + village.up.delay_ms == 45
    assert village.name == "Village DSL (3 Mbps/512 Kbps 45ms RTT)"
    assert hill.down.loss_pct == hill.up.loss_pct == 2
    assert native.down.rate_mbps is native.up.rate_mbps is None
    assert list(read("webpagetest", "connectivity.ini", only=("Hill",)).files) == ["hill.toml"]


def test_import_from_devtools(tmp_path: Path) -> None:
    tunnel, roof = networks(read("devtools", "devtools.json"), tmp_path).values()
    assert (tunnel.name, tunnel.down.rate_mbps, tunnel.up.rate_mbps) == ("Tunnel", 0.5, 0.2)
    assert tunnel.down.delay_ms == tunnel.up.delay_ms == 240
    assert roof.down.rate_mbps == pytest.approx(20)
    assert (roof.up.rate_mbps, roof.down.loss_pct) == (None, 1.5)
    (protocol,) = networks(read("devtools", "conditions.json"), tmp_path).values()
    assert (protocol.down.rate_mbps, protocol.up.rate_mbps, protocol.down.delay_ms) == (2.0, 1.0, 45.0)
    (lighthouse,) = networks(read("devtools", "lighthouse.json"), tmp_path).values()
    assert lighthouse.down.rate_mbps == pytest.approx(2000 * 1024 / 1e6)  # without its fudge factors
    assert lighthouse.up.rate_mbps == pytest.approx(800 * 1024 / 1e6)
    assert lighthouse.down.delay_ms == lighthouse.up.delay_ms == 60
    chosen = networks(read("devtools", "devtools.json", only=("Roof",), name="mine"), tmp_path)
    assert [(name, network.name) for name, network in chosen.items()] == [("mine", "Roof")]


def test_import_from_mahimahi(tmp_path: Path) -> None:
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
    battery, (big, little) = found.battery, found.cpu.clusters
    assert (battery.capacity_mah, battery.idle_ma) == (3000, 7.5)
    assert (battery.wifi_ma, battery.radio_ma) == (200, 150)
    assert (big.max_mhz, big.max_ma, big.power_ma) == (2803.2, 410.5, (70.1, 165, 410.5))
    assert little.freq_mhz == (300, 900, 1766.4)
    assert found.cpu.rate_gflops == emulation.load_device("pixel-3").cpu.rate_gflops
    assert found.id == "my-pixel-3"


def test_the_notes_count_intervals_that_end_before_they_start(tmp_path: Path) -> None:
    content = '{"1": {"finish_time": 100, "active": [50, 10], "inactive": [10, 20]}}'
    (note,) = imported("fedscale", content, tmp_path).notes
    assert note == "1 of 1 clients; 0 never active; intervals left out, because they end before they start: 1"


def test_new_currents_change_the_power_that_is_derived_from_them(tmp_path: Path) -> None:
    clusters = enumerate((1785600, 2419200, 2841600))
    arrays = "".join(
        f'<array name="cpu.core_speeds.cluster{at}"><value>300000</value><value>{khz}</value></array>'
        f'<array name="cpu.core_power.cluster{at}"><value>10</value><value>100</value></array>'
        for at, khz in clusters
    )
    cores = "".join(f"<value>{count}</value>" for count in (4, 3, 1))
    text = f'<device><array name="cpu.clusters.cores">{cores}</array>{arrays}</device>'
    made = imported("power-profile", text, tmp_path, base="pixel-4", name="mine")
    (found,) = devices(made, tmp_path).values()
    assert found.thermal.busy_w == round(8 * 0.1 * found.voltage_v, 2)


def test_the_modem_of_a_newer_power_profile_is_skipped(tmp_path: Path) -> None:
    text = (SAMPLES / "power_profile.xml").read_text()
    modem = '<modem><sleep>1</sleep><active rat="DEFAULT"><receive>9</receive></active></modem>'
    newer = text.replace("</device>", f"{modem}</device>")
    old, new = (
        imported("power-profile", one, tmp_path, base="pixel-3", name="mine") for one in (text, newer)
    )
    assert new == old


def test_an_older_power_profile_is_read(tmp_path: Path) -> None:
    (found,) = devices(read("power-profile", "power_profile_old.xml", base="moto-g4"), tmp_path).values()
    (cluster,) = found.cpu.clusters
    assert (cluster.cores, cluster.max_ma, cluster.freq_mhz) == (4, 166, (200, 800, 1209.6))
    assert (found.battery.wifi_ma, found.battery.radio_ma) == (96, 60)


def test_placeholder_currents_are_left_out(tmp_path: Path) -> None:
    text = (SAMPLES / "power_profile_old.xml").read_text()
    text = text.replace('<item name="battery.capacity">2810</item>', "")
    text = text.replace(">36<", ">166<").replace(">78<", ">166<")
    made = imported("power-profile", text, tmp_path, base="moto-g4", name="mine")
    assert made.notes == ("left out: the cores' currents, which are equal at every frequency (166 mA)",)
    (found,) = devices(made, tmp_path).values()
    before = emulation.load_device("moto-g4")
    assert (found.battery.capacity_mah, found.battery.wifi_ma) == (before.battery.capacity_mah, 96)
    assert found.cpu == before.cpu


def test_the_notes_name_clusters_that_the_device_lacks(tmp_path: Path) -> None:
    made = read("power-profile", "power_profile.xml", base="pi-4")
    left_out = [f"left out: 4 cores of {mhz} MHz" for mhz in (1766.4, 2803.2)]
    assert [note.split(",")[0] for note in made.notes] == left_out
    (found,) = devices(made, tmp_path).values()
    assert found.cpu == emulation.load_device("pi-4").cpu


def test_import_from_bouquetfl(tmp_path: Path) -> None:
    five, duo = devices(read("bouquetfl", "cpus.toml"), tmp_path).values()
    assert five.cpu.rate_gflops.train == pytest.approx(0.07 * 32 * 6 * 4.25)
    assert (five.cpu.clusters[0].cores, five.cpu.clusters[0].max_mhz) == (6, 4250)
    assert duo.train_flop_per_s == pytest.approx(0.07 * 32 * 2 * 3e9)
    (card,) = devices(read("bouquetfl", "gpus.toml"), tmp_path).values()
    assert card.train_flop_per_s == pytest.approx(0.07 * 2 * 1920 * 1.5e9)
    assert card.app_limit_mib == 8192
    first, second = networks(read("bouquetfl", "locations.toml"), tmp_path).values()
    assert (first.down.rate_mbps, second.up.rate_mbps) == (80, 1.25)


def test_fedscale_capacities_become_a_fleet(tmp_path: Path) -> None:
    written(read("fedscale", "client_device_capacity.json", name="volunteers"), tmp_path)
    fleet = emulation.load_fleet(tmp_path / "volunteers.toml")
    assert fleet.clients == 10
    found = {}
    for name, network in fleet.network.items():
        device, link = emulation.load_device(name), emulation.load_network(network)
        found[device.id] = (device.train_flop_per_s, link.down.rate_mbps, link.up.rate_mbps)
    assert len(found) == 10
    assert found["volunteers-5"] == (pytest.approx(0.6e9 / 0.162), *[pytest.approx(77.0)] * 2)
    assert found["volunteers-4"][1] == pytest.approx(5.648109619499134)
    few = read("fedscale", "client_device_capacity.json", name="few", clients=2)  # evenly spaced clients
    names = ("few-3-link", "few-3", "few-8-link", "few-8", "few")
    assert sorted(few.files) == [f"{name}.toml" for name in names]


def test_names_of_fedscale_clients_do_not_collide_with_names_of_links_and_the_fleet(tmp_path: Path) -> None:
    rates = {"1": 100, "1-link": 200, "": 300}
    clients = {name: {"computation": 9, "communication": rate * 1e3} for name, rate in rates.items()}
    written(imported("fedscale", json.dumps(clients), tmp_path), tmp_path)
    fleet = emulation.load_fleet(tmp_path / "caps.toml")
    found = {
        emulation.load_device(name).name: emulation.load_network(network).down.rate_mbps
        for name, network in fleet.network.items()
    }
    assert found == {f"FedScale client {name}": rate for name, rate in rates.items()}


def test_fedscale_behaviour_becomes_an_availability_file() -> None:
    made = read("fedscale", "client_behave_trace.json")
    (text,) = made.files.values()
    found = msgspec.json.decode(text, type=tuple[Availability, ...])
    assert [one.intervals_s for one in found] == [
        ((3600, 7200), (43200, 50400), (165600, 172800)),
        ((0, 86400),),
        ((100, 700), (3900, 4000)),
    ]
    assert [one.period_s for one in found] == [259200, 86400, 4000]
    assert made.notes == ("3 of 4 clients; 1 never active",)


@pytest.mark.parametrize("name", ["3g", "edge-lossy", "none"])
@pytest.mark.parametrize("format_name", ["webpagetest", "devtools"])
def test_an_exported_network_is_imported_unchanged(tmp_path: Path, format_name: str, name: str) -> None:
    content = write(name, format_name).content
    (found,) = networks(imported(format_name, content, tmp_path), tmp_path).values()
    network = emulation.load_network(name)
    for way, own in ((found.down, network.down), (found.up, network.up)):
        assert way.rate_mbps == (own.rate_mbps and pytest.approx(own.rate_mbps))
        assert way.delay_ms == own.delay_ms
        assert way.loss_pct == own.loss_pct


@pytest.mark.parametrize("format_name", ["webpagetest", "devtools", "mahimahi"])
def test_an_export_lists_the_figures_that_the_format_cannot_express(tmp_path: Path, format_name: str) -> None:
    assert "variation of the rate" in write("lte", format_name).left_out
    plain, rich = tmp_path / "plain.toml", tmp_path / "rich.toml"
    rates = {"down": {"rate_mbps": 1.0}, "up": {"rate_mbps": 1.0}}
    tables = {"id": "plain", "name": "a", **rates, "sources": {"down": "a", "up": "a"}}
    plain.write_text(toml.write(tables))
    assert write(str(plain), format_name).left_out == ()
    way = {"rate_mbps": 1.0, "rate_cv": 0.5, "jitter_ms": 5.0, "jitter_dist": "normal", "delay_ms": 9.0}
    more = {"id": "rich", "down": way, "header_bytes": 0, "bearer": "wifi"}
    more["sources"] = tables["sources"] | {"header_bytes": "a"}
    rich.write_text(toml.write(tables | more))
    assert check_file(rich) == []
    assert write("5g", "webpagetest").left_out == ("radio",)
    missing = {"jitter", "variation of the rate", "packet and header size", "bearer"}
    assert missing <= {*write(str(rich), format_name).left_out}


@pytest.mark.parametrize("format_name", ["webpagetest", "devtools"])
def test_an_export_of_unequal_directions_names_what_it_merges(tmp_path: Path, format_name: str) -> None:
    """The network's name contains a line break, which must not add a line to the INI file."""
    file = tmp_path / "own.toml"
    down, up = ({"rate_mbps": 1.0, "delay_ms": ms, "loss_pct": pct} for ms, pct in ((0.25, 1.5), (20.5, 0.5)))
    sources = {"down": "a", "up": "a"}
    file.write_text(toml.write({"id": "own", "name": "a\nplr=9", "down": down, "up": up, "sources": sources}))
    content = write(str(file), format_name)
    merged = {f"separate {what} for download and upload" for what in ("loss", "delay")}
    rounded = {"fractions of a millisecond of delay"} if format_name == "webpagetest" else set()
    assert {*content.left_out} == merged | rounded
    (found,) = networks(imported(format_name, content.content, tmp_path), tmp_path).values()
    assert found.up.loss_pct == found.down.loss_pct == 1.5
    assert found.up.delay_ms == pytest.approx(10.375, abs=0.25)


def test_an_export_to_devtools_has_its_units() -> None:
    figures = {"download": 1_125_000, "upload": 187_500, "latency": 60}
    title = {"title": "Fast 4G as Chrome DevTools sets it"}
    assert json.loads(write("fast-4g", "devtools").content) == title | figures


@pytest.mark.parametrize("name", ["3g", "lte", "5g", "edge", "fios"])
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_trace_of_a_constant_rate_has_that_rate(tmp_path: Path, name: str, way: Any) -> None:
    content = write(name, "mahimahi", way)
    (tmp_path / "c.trace").write_bytes(content.content)
    rate = getattr(emulation.load_network(name), way).rate_mbps
    assert read_trace(str(tmp_path / "c.trace")).rate_mbps == pytest.approx(rate, rel=1e-4)
    assert "delay" in content.left_out


def test_a_trace_is_exported_unchanged(tmp_path: Path) -> None:
    written(read("mahimahi", "down.trace", name="mine"), tmp_path)
    content = write(str(tmp_path / "mine.toml"), "mahimahi", "up").content
    assert content.decode() == (SAMPLES / "down.trace").read_text()
    with pytest.raises(ProfileError, match="replays a trace, which webpagetest cannot hold"):
        write(str(tmp_path / "mine.toml"), "webpagetest")


def test_a_fleet_is_written_for_fedscale_and_read_back(tmp_path: Path) -> None:
    content, left_out = write("mixed-24", "fedscale")
    assert left_out == ("all but each client's speed and bandwidth",)
    clients = json.loads(content)
    assert list(clients) == [str(client) for client in range(24)]
    phone = emulation.load_device("pixel-4")
    work = step_work(mobilenet_v2(), (3, 224, 224), 16)
    assert clients["2"]["computation"] == pytest.approx(phone.time_model().seconds(work) / (3 * 16) * 1e3)
    assert clients["2"]["communication"] == pytest.approx(30_000 * 1460 / 1500)  # without packet headers
    written(imported("fedscale", content, tmp_path), tmp_path)
    assert emulation.load_fleet(tmp_path / "caps.toml").clients == 24
    slow = json.loads(write("tiers-30", "fedscale").content)["0"]["computation"]
    assert slow == pytest.approx(0.6 / (emulation.load_device("tier-p10").train_flop_per_s / 1e12))
    drawn, left_out = write("phones-2020", "fedscale")
    assert (len(json.loads(drawn)), left_out[1:]) == (100, ("the fleets that other seeds than 0 draw",))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("3g", "webpage"), "format 'webpage' not found; did you mean 'webpagetest'"),
        (("3g", "bouquetfl"), "'bouquetfl' is read-only; writable formats: devtools, fedscale"),
        (("nothing", "devtools"), "network profile 'nothing' not found"),
        (("none", "mahimahi"), "'none' has no rate limit in this direction"),
        (("3g", "devtools", "up"), "--way is not used by devtools"),
        (("paper-fedbuff-1000", "fedscale"), "has no cpu; FedScale has one speed"),
        (("paper-defedavg-100", "fedscale"), "has a drawn slowdown"),
    ],
)
def test_exports_that_are_not_possible_are_refused(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        write(*arguments)


def test_labels_that_would_break_the_format_are_changed(tmp_path: Path) -> None:
    text = (SAMPLES / "connectivity.ini").read_text().replace("Hill, 2% lost", "Hill 'so' [x]")
    made = imported("webpagetest", text, tmp_path, only=("Hill",))
    (found,) = networks(made, tmp_path).values()
    assert found.name == "Hill 'so' [x]"
    (tmp_path / "quoted.toml").write_text(
        made.files["hill.toml"].replace('id = "hill"', 'id = "quoted"').replace("Hill 'so'", 'A \\"b\\"')
    )
    line = write(str(tmp_path / "quoted.toml"), "webpagetest").content.decode().splitlines()[1]
    assert line == "label=\"A 'b' [x]\""


SAMPLE = {
    "bouquetfl": "cpus.toml",
    "devtools": "devtools.json",
    "fedscale": "client_device_capacity.json",
    "mahimahi": "down.trace",
    "power-profile": "power_profile.xml",
    "webpagetest": "connectivity.ini",
}


def refused(format_name: str, path: Path, edgefl: Shell) -> str:
    """Import the file; return the one-line error. The import must not write any file."""
    before = sorted(path.parent.iterdir())
    base = ["--base", "pi-4"] if format_name == "power-profile" else []
    command = ["profiles", "import", format_name, str(path), *base, "--out", str(path.parent)]
    error = edgefl.refuses(2, *command)
    assert len(error) < 600
    assert sorted(path.parent.iterdir()) == before
    return error


def entity_bomb() -> str:
    pairs = zip("abcdefgh", "bcdefghi", strict=True)
    lines = "\n".join(f'<!ENTITY {after} "{f"&{name};" * 10}">' for name, after in pairs)
    bomb = '<device name="Android"><item name="battery.capacity">&i;</item></device>'
    return f'<!DOCTYPE device [\n<!ENTITY a "0123456789">\n{lines}\n]>{bomb}'


def capacities(**entry: Any) -> str:
    return json.dumps({1: {"computation": 30.0, "communication": 5000.0} | entry})


def behaviour(**entry: Any) -> str:
    right = {"active": [0, 50], "inactive": [10, 60], "finish_time": 100, "duration": 1, "model": "x"}
    return json.dumps({4: {key: value for key, value in (right | entry).items() if value is not None}})


DEEP = "[" * 600 + "]" * 600
OFFLINE = '{"offline":true,"latency":0,"downloadThroughput":0,"uploadThroughput":0}'
XML = '<device name="Android">{}</device>'
CAPACITY = '<item name="battery.capacity">3000</item>'
SPEEDS = """<array name="cpu.speeds"><value>1</value><value>2</value></array>
<array name="cpu.active"><value>1</value></array>"""
PLACEHOLDER = '<item name="wifi.active">0.1</item><item name="radio.active">0.1</item>'
PASSWORDS = """<!DOCTYPE device [<!ENTITY x SYSTEM "file:///etc/passwd">]>
<device><item name="x">&x;</item></device>"""


@pytest.mark.parametrize(
    ("format_name", "content", "said"),
    [
        ("bouquetfl", "", "no entries; allowed: cpus, gpus or locations"),
        ("bouquetfl", "schema_version = 2\n[[cpus]]\nname = 'x'", "schema_version: must be 1, got 2"),
        ("bouquetfl", "cpus = 3", "cpus: must be an array, got 3"),
        ("bouquetfl", "cpus = [1]", "cpus[0]: must be a table, got 1"),
        ("bouquetfl", "[[cpus]]\ncores = '2'", "?: name: missing; must be a string"),
        ("bouquetfl", "[[cpus]]\nname = 'x'\ncores = 2", "x: cores: must be 'cores' or 'cores / threads',"),
        ("bouquetfl", "[[cpus]]\nname = 'x'\ncores = '2'", "x: core_clock: missing; must be a clock such"),
        ("bouquetfl", "[[cpus]]\nname = 'x'\ncores = '0'", "x: cores: must be 'cores' or 'cores"),
        ("bouquetfl", "[[cpus]]\nname = 'x'\ncores = '2'\ncore_clock = 'fast'", "x: core_clock: must be a"),
        ("bouquetfl", "[[gpus]]\nname = 'x'\ncuda_cores = nan\nclock_speed = 1", "x: cuda_cores: must be a"),
        ("bouquetfl", "[[gpus]]\nname = 'x'\ncuda_cores = 1\nclock_speed = true", "x: clock_speed: must be"),
        ("bouquetfl", "[[locations]]\nname = 'x'\ndownload_mbps = -1", "x: download_mbps: must be a number"),
        ("bouquetfl", "[[cpus]]\nname = 'x", "line 2"),
        ("bouquetfl", "a = " + "[" * 5000, "nested too deeply"),
        ("devtools", "", "not JSON"),
        ("devtools", "[]", "no preset"),
        ("devtools", "[" * 100_000, "not JSON"),
        ("devtools", '{"a":' * 50 + "1" + "}" * 50, "no preset"),
        ("devtools", '{"title":"t","download":"x","upload":1,"latency":1}', "t: download: must be a number"),
        ("devtools", '{"title":"t","download":1e300,"upload":1,"latency":1}', "t: download: must be a"),
        ("devtools", '{"title":"t","download":1,"upload":1,"latency":-1}', "t: latency: must be a number"),
        ("devtools", '{"title":"t","download":1,"upload":1}', "t: latency: missing; must be a number of at"),
        ("devtools", '{"download":1,"upload":1,"latency":NaN}', "not JSON"),
        ("devtools", f'{{"title":"t","download":{DEEP},"upload":1,"latency":1}}', "t: download: must be a"),
        ("devtools", OFFLINE, "devtools: offline: must"),
        ("devtools", '{"title":"t","download":0,"upload":0,"latency":0}', "t: download, upload and"),
        ("fedscale", "", "not JSON"),
        ("fedscale", b"\x80\x04N.", "not JSON"),  # a pickle
        ("fedscale", "{}", "must be an object with an entry for each client"),
        ("fedscale", "[1]", "must be an object with an entry for each client"),
        ("fedscale", '{"1": 2}', "client '1': must have computation and communication, or active,"),
        ("fedscale", capacities(computation="fast"), "client '1': computation: must be a number above 0 and"),
        ("fedscale", capacities(communication=float("nan")), "not JSON"),
        ("fedscale", capacities(communication=None), "client '1': communication: must be a number above 0"),
        ("fedscale", capacities(communication=10**400), "client '1': communication: must be a number above"),
        ("fedscale", behaviour(finish_time=0), "client '4': finish_time: must be a number above 0 and below"),
        ("fedscale", behaviour(finish_time=None), "client '4': finish_time: missing; must be a number above"),
        ("fedscale", behaviour(active=3), "client '4': active: must be an array, got 3"),
        ("fedscale", behaviour(active=["x", 1]), "client '4': active[0]: must be a number of at least 0 and"),
        ("fedscale", behaviour(inactive=[1]), "client '4': inactive: must have as many entries as active"),
        ("fedscale", behaviour(active=[10, 60]), "no client is ever active"),
        ("fedscale", capacities().replace("30.0", DEEP), "client '1': computation: must be a number above 0"),
        ("mahimahi", "", "must have at least one line"),
        ("mahimahi", b"\xff\xfe", "not text"),
        ("power-profile", "", "not XML"),
        ("power-profile", "<html/>", "<html> has no items; allowed: <device> with items and arrays"),
        ("power-profile", "<device><item><b/></item></device>", ": got ''; allowed: a number of at least 0"),
        ("power-profile", "<device></device>", "<device> has no items; allowed: <device> with items and"),
        ("power-profile", XML.format('<array name="battery.capacity"/>'), "battery.capacity: missing"),
        ("power-profile", "<?xml version='1.0' encoding='rot13'?><html/>", "<html> has no items; allowed:"),
        ("power-profile", XML.format('<item name="x">fast</item>'), "x: got 'fast'; allowed: a number"),
        ("power-profile", XML.format('<item name="x">nan</item>'), "x: got 'nan'"),
        ("power-profile", XML.format('<item name="x">1</item>'), "battery.capacity: missing; allowed:"),
        ("power-profile", XML.format(CAPACITY + SPEEDS), "cpu.speeds: got 2 speeds"),
        ("power-profile", XML.format(CAPACITY + PLACEHOLDER), "is a placeholder file"),
        ("power-profile", entity_bomb(), "has a document type; power profiles have none"),
        ("power-profile", PASSWORDS, "a document type"),
        ("power-profile", '<!DOCTYPE device SYSTEM "http://localhost/x.dtd"><device/>', "a document type"),
        ("power-profile", "<device>" * 3, "not XML: no element found: line 1, column 24"),
        ("webpagetest", "", "must have at least one section with bwIn"),
        ("webpagetest", "bwIn=3", "is not a valid connectivity.ini: File contains no section headers"),
        ("webpagetest", "[a]\nbwIn=1\n[a]\nbwIn=2\n", "section 'a' already exists"),
        ("webpagetest", "[a]\nlabel=x\n", "must have at least one section with bwIn, bwOut and latency"),
        ("webpagetest", "[a]\nbwIn=1\nbwOut=1\n", "[a]: latency: missing; must be a number of at least 0"),
        ("webpagetest", "[a]\nbwIn=fast\nbwOut=1\nlatency=1\n", "[a]: bwin: must be a number of at least 0"),
        ("webpagetest", "[a]\nbwIn=1\nbwOut=1\nlatency=1\nplr=100\n", "[a]: plr: must be a number of at"),
        ("webpagetest", b"[a]\nlabel=\xff\n", "line 2: not UTF-8: byte 0xff"),
    ],
)
def test_an_invalid_file_gives_a_one_line_error(
    tmp_path: Path, edgefl: Shell, format_name: str, content: str | bytes, said: str
) -> None:
    path = tmp_path / SAMPLE[format_name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = refused(format_name, path, edgefl)
    assert said in error
    assert SAMPLE[format_name] in error


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_truncated_or_altered_sample_raises_only_profile_errors(tmp_path: Path, format_name: str) -> None:
    whole = (SAMPLES / SAMPLE[format_name]).read_bytes()
    path, refusals = tmp_path / SAMPLE[format_name], 0
    for at in range(0, len(whole), max(1, len(whole) // 20)):
        altered = (whole[:at] + bytes([byte]) + whole[at + 1 :] for byte in (0x00, 0x2D, whole[at] ^ 0x01))
        for content in (whole[:at], *altered):
            path.write_bytes(content)
            try:
                FORMATS[format_name].read(path, ImportOptions(base="pixel-3"))
            except ProfileError as wrong:
                refusals += 1
                assert "\n" not in str(wrong)
    assert refusals > 0


@pytest.mark.parametrize("format_name", FORMATS)
def test_other_and_missing_files_are_refused(tmp_path: Path, edgefl: Shell, format_name: str) -> None:
    refused(format_name, tmp_path / "nothing", edgefl)
    refused(format_name, tmp_path, edgefl)
    for other, sample in SAMPLE.items():
        if other != format_name:
            path = tmp_path / sample
            path.write_bytes((SAMPLES / sample).read_bytes())
            refused(format_name, path, edgefl)


@pytest.mark.parametrize("format_name", sorted(set(FORMATS) - {"mahimahi"}))
def test_files_that_are_too_long_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edgefl: Shell, format_name: str
) -> None:
    monkeypatch.setattr(fedscale, "LIMIT_MIB", 1)
    path = tmp_path / SAMPLE[format_name]
    path.write_bytes(b" " * ((1 << 20) + 1))
    assert "longer than 1" in refused(format_name, path, edgefl)


def test_a_power_profile_needs_a_base(edgefl: Shell) -> None:
    command = ["profiles", "import", "power-profile", str(SAMPLES / "power_profile.xml")]
    assert "profile to complete: --base PROFILE" in edgefl.refuses(2, *command)
    assert "did you mean 'pixel-3'" in edgefl.refuses(2, *command, "--base", "pixel3")
    assert main([*command, "--base", "paper-half-normal"]) == 0


@pytest.mark.parametrize(
    ("format_name", "option", "given", "allowed"),
    [
        ("webpagetest", "base", "pixel-3", "--only"),
        ("mahimahi", "clients", 100, "--name, --up"),
        ("bouquetfl", "name", "mine", "--only"),
        ("power-profile", "only", ("a",), "--name, --base"),
    ],
)
def test_options_of_another_format_are_refused(
    format_name: str, option: str, given: Any, allowed: str, tmp_path: Path
) -> None:
    with pytest.raises(ProfileError) as refused:
        formats.read(format_name, tmp_path / "unread", ImportOptions(**{option: given}))
    assert str(refused.value) == f"--{option} is not used by {format_name}; allowed: {allowed}"
