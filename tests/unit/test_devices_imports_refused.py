"""Broken and hostile files of other projects: one clear line, exit code 2, nothing runs or is written."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from edgefl.cli import main
from edgefl.devices.formats import FORMATS, read, write
from edgefl.devices.imports import ImportOptions
from edgefl.errors import ProfileError

SAMPLES = Path(__file__).parent / "import_samples"
SAMPLE = {
    "bouquetfl": "cpus.toml",
    "devtools": "devtools.json",
    "fedscale": "client_device_capacity",
    "mahimahi": "down.trace",
    "power-profile": "power_profile.xml",
    "webpagetest": "connectivity.ini",
}


def refused(format_name: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says of it, after all that must hold of a refusal."""
    before = sorted(path.parent.iterdir())
    base = ["--base", "pi-4"] if format_name == "power-profile" else []
    code = main(["profiles", "import", format_name, str(path), *base, "--out", str(path.parent)])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("edgefl: ")
    assert "Traceback" not in err
    assert len(err) < 600
    assert sorted(path.parent.iterdir()) == before
    return err


def entity_bomb() -> str:
    lines = ["<!DOCTYPE device [", '<!ENTITY a "0123456789">']
    lines += [
        f'<!ENTITY {after} "{f"&{name};" * 10}">' for name, after in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    return "\n".join(
        [*lines, "]>", '<device name="Android"><item name="battery.capacity">&i;</item></device>']
    )


class Calls:
    def __init__(self, what: Any, *arguments: Any) -> None:
        self.call = (what, arguments)

    def __reduce__(self) -> Any:
        return self.call


def capacities(**entry: Any) -> bytes:
    return pickle.dumps({1: {"computation": 30.0, "communication": 5000.0} | entry})


def behaviour(**entry: Any) -> bytes:
    right = {"active": [0, 50], "inactive": [10, 60], "finish_time": 100, "duration": 1, "model": "x"}
    return pickle.dumps({4: {key: value for key, value in (right | entry).items() if value is not None}})


XML = '<device name="Android">{}</device>'
CAPACITY = '<item name="battery.capacity">3000</item>'


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
        ("bouquetfl", "[[locations]]\nname = 'x'\ndownload_mbps = inf", "x: download_mbps: must be a"),
        ("bouquetfl", "[[cpus]]\nname = 'x", "line 2"),
        ("bouquetfl", "a = " + "[" * 5000, "nested too deep"),
        ("devtools", "", "not JSON"),
        ("devtools", "{", "not JSON"),
        ("devtools", "[]", "no preset"),
        ("devtools", "3", "no preset"),
        ("devtools", "[" * 100_000, "not JSON"),
        ("devtools", '{"a":' * 50 + "1" + "}" * 50, "no preset"),
        ("devtools", '{"title":"t","download":"x","upload":1,"latency":1}', "t: download: must be a number"),
        ("devtools", '{"title":"t","download":1e300,"upload":1,"latency":1}', "t: download: must be a"),
        ("devtools", '{"title":"t","download":1,"upload":1,"latency":-1}', "t: latency: must be a number"),
        ("devtools", '{"title":"t","download":1,"upload":1}', "t: latency: missing; must be a number of at"),
        ("devtools", '{"download":1,"upload":1,"latency":NaN}', "not JSON"),
        (
            "devtools",
            '{"offline":true,"latency":0,"downloadThroughput":0,"uploadThroughput":0}',
            "devtools: offline: must",
        ),
        ("fedscale", b"", "not a whole pickle"),
        ("fedscale", b"\x80\x04N.", "got a NoneType; allowed: a dictionary of clients"),
        ("fedscale", pickle.dumps({}), "got a dict; allowed: a dictionary of clients"),
        ("fedscale", pickle.dumps([1]), "got a list; allowed: a dictionary of clients"),
        ("fedscale", pickle.dumps({1: 2}), "client 1: must have computation and communication, or active,"),
        ("fedscale", capacities(computation="fast"), "client 1: computation: must be a number above 0 and"),
        ("fedscale", capacities(computation=0), "client 1: computation: must be a number above 0 and below"),
        ("fedscale", capacities(communication=float("nan")), "client 1: communication: must be a number"),
        ("fedscale", capacities(communication=float("inf")), "client 1: communication: must be a number"),
        ("fedscale", capacities(communication=None), "client 1: communication: must be a number above 0"),
        ("fedscale", capacities(communication=True), "client 1: communication: must be a number above 0"),
        ("fedscale", capacities(communication=10**400), "client 1: communication: must be a number above 0"),
        ("fedscale", behaviour(finish_time=10**400), "client 4: finish_time: must be a number above 0 and"),
        ("fedscale", behaviour(finish_time=0), "client 4: finish_time: must be a number above 0 and below"),
        ("fedscale", behaviour(finish_time=None), "client 4: finish_time: missing; must be a number above"),
        ("fedscale", behaviour(active=3), "client 4: active: must be an array, got 3"),
        ("fedscale", behaviour(active=["x", 1]), "client 4: active[0]: must be a number of at least 0 and"),
        ("fedscale", behaviour(active=[-1, 1]), "client 4: active[0]: must be a number of at least 0 and"),
        ("fedscale", behaviour(inactive=[1]), "client 4: inactive: must be as many as active"),
        ("fedscale", behaviour(active=[10, 60]), "no client is ever active"),
        ("fedscale", pickle.dumps(Calls(os.system, "true")), "not plain data: it names"),
        ("mahimahi", "", "got 0 lines in 0 bytes; allowed: at least one"),
        ("mahimahi", b"\xff\xfe", "not text"),
        ("power-profile", "", "not XML"),
        ("power-profile", "<device>", "not XML"),
        ("power-profile", "<html/>", "<html> without items; allowed: <device> with items and arrays"),
        ("power-profile", "<device><item><b/></item></device>", ": got ''; allowed: a number of at least 0"),
        ("power-profile", "<device></device>", "<device> without items; allowed: <device> with items and"),
        ("power-profile", XML.format('<array name="battery.capacity"/>'), "battery.capacity: got nothing"),
        ("power-profile", "<?xml version='1.0' encoding='rot13'?><html/>", "<html> without items; allowed:"),
        ("power-profile", XML.format('<item name="x">fast</item>'), "x: got 'fast'; allowed: a number"),
        ("power-profile", XML.format('<item name="x">nan</item>'), "x: got 'nan'"),
        ("power-profile", XML.format('<item name="x">-3</item>'), "x: got '-3'"),
        ("power-profile", XML.format('<item name="x">1</item>'), "battery.capacity: got nothing; allowed:"),
        (
            "power-profile",
            XML.format(
                CAPACITY + '<array name="cpu.speeds"><value>1</value><value>2</value></array>'
                '<array name="cpu.active"><value>1</value></array>'
            ),
            "cpu.speeds: got 2 speeds",
        ),
        (
            "power-profile",
            XML.format(CAPACITY + '<item name="wifi.active">0.1</item><item name="radio.active">0.1</item>'),
            "a placeholder file,",
        ),
        ("power-profile", entity_bomb(), "a document type, which no power profile has"),
        (
            "power-profile",
            '<!DOCTYPE device [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
            '<device><item name="x">&x;</item></device>',
            "a document type",
        ),
        ("power-profile", '<!DOCTYPE device SYSTEM "http://localhost/x.dtd"><device/>', "a document type"),
        ("power-profile", "<device>" * 3, "not XML: no element found: line 1, column 24"),
        ("webpagetest", "", "got no section with bwIn"),
        ("webpagetest", "bwIn=3", "not WebPageTest's INI: File contains no section headers"),
        ("webpagetest", "[a]\nbwIn=1\n[a]\nbwIn=2\n", "section 'a' already exists"),
        ("webpagetest", "[a]\nlabel=x\n", "got no section with bwIn, bwOut and latency"),
        ("webpagetest", "[a]\nbwIn=1\nbwOut=1\n", "[a]: latency: missing; must be a number of at least 0"),
        ("webpagetest", "[a]\nbwIn=fast\nbwOut=1\nlatency=1\n", "[a]: bwin: must be a number of at least 0"),
        ("webpagetest", "[a]\nbwIn=nan\nbwOut=1\nlatency=1\n", "[a]: bwin: must be a number of at least 0"),
        ("webpagetest", "[a]\nbwIn=1\nbwOut=1\nlatency=1\nplr=100\n", "[a]: plr: must be a number of at"),
        ("webpagetest", b"[a]\nlabel=\xff\n", "line 2: not UTF-8: byte 0xff"),
    ],
)
def test_a_broken_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format_name: str, content: str | bytes, said: str
) -> None:
    path = tmp_path / SAMPLE[format_name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    err = refused(format_name, path, capsys)
    assert said in err
    assert SAMPLE[format_name] in err


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_truncated_or_altered_sample_never_raises_anything_else(tmp_path: Path, format_name: str) -> None:
    whole = (SAMPLES / SAMPLE[format_name]).read_bytes()
    path, refusals = tmp_path / SAMPLE[format_name], 0
    for at in range(0, len(whole), max(1, len(whole) // 60)):
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
def test_files_of_another_format_and_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format_name: str
) -> None:
    refused(format_name, tmp_path / "nothing", capsys)
    refused(format_name, tmp_path, capsys)
    for other, sample in SAMPLE.items():
        if other != format_name:
            path = tmp_path / sample
            path.write_bytes((SAMPLES / sample).read_bytes())
            refused(format_name, path, capsys)


@pytest.mark.parametrize("format_name", sorted(set(FORMATS) - {"mahimahi"}))
def test_files_that_are_too_long_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], format_name: str
) -> None:
    from edgefl.devices import fedscale

    monkeypatch.setattr(fedscale, "LIMIT_MIB", 1)
    path = tmp_path / SAMPLE[format_name]
    path.write_bytes(b" " * ((1 << 20) + 1))
    assert "longer than 1" in refused(format_name, path, capsys)


def test_a_power_profile_needs_a_base(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(SAMPLES / "power_profile.xml")
    assert main(["profiles", "import", "power-profile", file]) == 2
    assert "name the device profile that it completes: --base" in capsys.readouterr().err
    assert main(["profiles", "import", "power-profile", file, "--base", "pixel3"]) == 2
    assert "did you mean 'pixel-3'" in capsys.readouterr().err
    assert main(["profiles", "import", "power-profile", file, "--base", "paper-half-normal"]) == 0


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
        read(format_name, tmp_path / "unread", ImportOptions(**{option: given}))
    assert str(refused.value) == f"--{option}: {format_name} has no use for it; allowed: {allowed}"


def test_one_way_is_asked_of_traces_alone() -> None:
    with pytest.raises(ProfileError, match="--way: devtools has no use for it"):
        write("3g", "devtools", "up")
