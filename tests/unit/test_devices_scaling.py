"""Tests of profiles scaled from a similar measured device, and of the bundled measurements."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
from test_devices_time_model import written
from typer.testing import CliRunner

from edgefl import devices, toml
from edgefl.cli.profiles import app
from edgefl.devices import load_device, measurements, profiles
from edgefl.devices.scaling import base_of, scaled, scaled_file
from edgefl.devices.schema import Device
from edgefl.errors import ConfigError

MEASURED = profiles.bundled_folder() / "measured"
ALL = [load_device(name) for name in devices.device_names()]
REAL = [device for device in ALL if device.kind not in ("paper", "tier")]
SCALED = [
    (device, runtime)
    for device in REAL
    for runtime in device.runtime
    if device.sources[f"runtime.{runtime}"].startswith("derived: edgefl profiles scale")
]


def test_every_device_has_a_time_model_with_an_error_or_a_delay() -> None:
    for device in ALL:
        model = device.time_model()
        if model is None:
            assert device.delay_model is not None, device.id
            assert device.delay_model.mode == "replace", device.id
            continue
        assert model.error_factor >= 1, device.id
        assert bool(device.runtime) == (device in REAL), device.id  # papers and tiers keep their one rate
        for name, known in device.runtime.items():
            assert known.error_factor > 1, device.id
            assert re.match("fitted|derived", device.sources[f"runtime.{name}"]), device.id


@pytest.mark.parametrize(("device", "runtime"), SCALED, ids=lambda value: getattr(value, "id", value))
def test_the_scale_command_reproduces_a_scaled_profile(device: Device, runtime: str) -> None:
    path = profiles.bundled_folder() / "devices" / f"{device.id}.toml"
    assert scaled_file(device.id, runtime=runtime) == path.read_text()


def test_every_suitable_profile_is_scaled_and_a_measured_runtime_is_the_default() -> None:
    assert len(SCALED) >= 26
    of_files = [d for d in REAL if not d.units]  # the others are phones of the table, trained in MNN
    assert {d.id for d in of_files if "torch" not in d.runtime} == {"nexus-6"}
    assert {d.default_runtime for d in REAL if d.units} == {"mnn"}
    both = {d.id: d.default_runtime for d in of_files if len(d.runtime) > 1}
    assert both == {"pixel-4": "mnn", "redmi-note-8": "dl4j", "galaxy-note-10": "dl4j"}
    for device, runtime in SCALED:
        base = load_device(re.search(r"of (pi-\d)", device.sources[f"runtime.{runtime}"])[1])
        assert device.runtime[runtime].error_factor > 1.2 * base.runtime[runtime].error_factor


def test_rates_are_scaled_by_gemm_and_bandwidth() -> None:
    pi, nano, phone = (load_device(name) for name in ("pi-4", "jetson-nano", "redmi-note-7"))
    at = pi.runtime["torch"]
    fast = scaled(nano, pi).model
    assert fast.conv_gflops / at.conv_gflops == pytest.approx(27 / 18.6, rel=1e-3)
    assert fast.copy_gbytes_per_s / at.copy_gbytes_per_s == pytest.approx(3.9 / 2.5, rel=1e-3)
    assert at.call_us / fast.call_us == pytest.approx(27 / 18.6, rel=1e-3)
    blind = scaled(phone, pi).model  # of unknown bandwidth
    assert blind.copy_gbytes_per_s / at.copy_gbytes_per_s == pytest.approx(35 / 18.6, rel=1e-3)
    assert blind.error_factor > fast.error_factor > at.error_factor


PHONE = """
id = "mine"
name = "Mine"
class = "budget"

[cpu.rate_gflops]
train = 1.5  # measured by hand
gemm = { nt = 37.2 }

[[cpu.clusters]]
uarch = "Cortex-A73"
cores = 4
max_mhz = 2000

[sources]
cpu = "its box"
"""


def scale(*arguments: object) -> str:
    return CliRunner().invoke(app, ["scale", *map(str, arguments)], catch_exceptions=False).output


def test_scaling_keeps_the_rest_of_a_users_file(tmp_path: Path) -> None:
    path, out = written(tmp_path, PHONE), tmp_path / "new" / "mine.toml"
    assert scale(path, "--out", out) == f"wrote {out}\n"
    assert devices.check_file(out) == []
    mine, known = (load_device(name).runtime["torch"] for name in (out, "pi-4"))
    assert mine.conv_gflops == 2 * known.conv_gflops
    assert "# measured by hand" in out.read_text()
    assert scaled_file(str(out)) == out.read_text()
    again = toml.read(out)
    del again["runtime"], again["sources"]["runtime.torch"]
    assert again == toml.parse(PHONE, "mine")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[sources]\n", "[ sources ]  # mine\n"),
        ("[sources]\n", "[runtime.torch]\n# old\n\n{rates}\n[sources]\n'runtime.torch' = 'mine'\n"),
        ("[sources]\n", "[runtime.mine]\n{rates}\n[sources]\nruntime = 'mine'\n"),
        ("name = ", "name  =  "),
    ],
    ids=["spaces", "quotes and comments", "another runtime", "no spaces"],
)
def test_a_file_of_any_layout_can_be_scaled_to_a_new_name(tmp_path: Path, old: str, new: str) -> None:
    classes = ("conv", "thin", "pointwise", "depthwise", "depthwise_backward", "matmul", "recurrent")
    rates = "".join(f"{name}_gflops = 1.0\n" for name in classes) + "error_factor = 2.0\n"
    text, out = PHONE.replace(old, new.replace("{rates}", rates), 1), tmp_path / "timed.toml"
    scale(written(tmp_path, text), "--out", out)
    assert devices.check_file(out) == []
    assert load_device(out).id == "timed"
    assert load_device(out).runtime["torch"].conv_gflops > 1.0


def test_the_fastest_cores_of_the_list_select_the_measured_device(tmp_path: Path) -> None:
    first = '[[cpu.clusters]]\nuarch = "Cortex-A53"\ncores = 4\nmax_mhz = 1400\n\n[[cpu.clusters]]'
    path = written(tmp_path, PHONE.replace("[[cpu.clusters]]", first, 1).replace("Cortex-A73", "Cortex-A76"))
    assert base_of(load_device(path)) == "pi-5"


def test_rates_of_the_same_number_of_threads_are_compared(tmp_path: Path) -> None:
    found = [
        scale(written(tmp_path, PHONE.replace("nt = 37.2", rates)))
        for rates in ("nt = 37.2", "1t = 9.2", "1t = 9.2, nt = 37.2")
    ]
    assert "x 2 (gemm 37.2 / 18.6 GFLOPS)" in found[0]
    assert "x 1 (gemm of one thread 9.2 / 9.2 GFLOPS)" in found[1]
    assert "x 2 (gemm 37.2 / 18.6 GFLOPS)" in found[2]


@pytest.mark.parametrize(
    ("old", "new", "options", "said"),
    [
        ("nt = 37.2", "1t = 9.2", ("--like", "pi-5"), "mine: cpu.rate_gflops.gemm needs nt, the only rate"),
        ("gemm = { nt = 37.2 }", "", (), "no cpu.rate_gflops.gemm to scale by"),
        ("Cortex-A73", "Z80", (), "no measured device has cores like 'Z80'"),
        ("", "", ("--out", "Phone_1.toml"), "--out: must be a name of lower-case letters"),
        ("", "", ("--out", "phone\n.toml"), "--out: must be a name of lower-case letters"),
        ("", "", ("--runtime", "mnn"), "device 'pi-4': runtime 'mnn' not found"),
        ("", "", ("--like", "pi-6"), "device profile 'pi-6' not found"),
        ("", "", ("--out", "."), "exists; remove it"),
    ],
)
def test_impossible_scaling_is_refused(tmp_path: Path, old: str, new: str, options: Any, said: str) -> None:
    path = written(tmp_path, PHONE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=re.escape(said)):
        scale(path, *options)


def test_a_profile_without_cores_needs_the_name_of_the_measured_device(tmp_path: Path) -> None:
    before, _, after = PHONE.partition("[[cpu.clusters]]")
    path = str(written(tmp_path, before + after[after.index("[sources]") :]))
    for name in ("tier-p10", path):
        with pytest.raises(ConfigError, match=r"no cpu\.clusters"):
            scaled_file(name)
    assert "x 2 (gemm 37.2 / 18.6 GFLOPS)" in scaled_file(path, "pi-4")


def test_the_case_of_a_cores_name_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    path = written(tmp_path, PHONE.replace("Cortex-A73", "cortex-a53"))
    plain = scaled_file(str(path))
    assert "1.5 for cores unlike any measured" in plain
    path.write_text(f"\ufeff{path.read_text()}", encoding="utf-8")
    assert scaled_file(str(path)) == plain


def lines(file: str) -> list[dict[str, str]]:
    with (MEASURED / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_every_measurement_has_a_source_and_a_profile_with_its_runtime() -> None:
    networks, layers = lines("networks.csv"), lines("layers.csv")
    assert (len(networks), len(layers)) == (84, 1200)
    for line in networks + layers:
        assert re.fullmatch(r"[\w-]+/[\w-]+ \S+ @[0-9a-f]{7}", line["source"])
        assert 0 < float(line["measured_s"]) < math.inf
    for profile, runtime in {(line["profile"], line["runtime"]) for line in networks + layers}:
        assert runtime.split()[0].lower() in load_device(profile).runtime


def sample(folder: Path, file: str, profile: str, every: int) -> tuple[measurements.MeasuredStep, ...]:
    chosen = [line for line in lines(file) if line["profile"] == profile][::every]
    path = folder / file
    with path.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(chosen[0]))
        writer.writeheader()
        writer.writerows(chosen)
    return measurements.read(path)


@pytest.mark.parametrize(
    ("base", "device", "file"),
    [
        ("redmi-note-8", "galaxy-note-10", "layers.csv"),
        ("galaxy-note-10", "redmi-note-8", "layers.csv"),
        ("pi-4", "pi-5", "networks.csv"),
    ],
)
def test_intervals_hold_for_a_measured_device(tmp_path: Path, base: str, device: str, file: str) -> None:
    if file == "networks.csv":
        pytest.importorskip("timm", reason="needs edgefl[timm]", exc_type=Exception)
    steps = sample(tmp_path, file, device, 1 if file == "networks.csv" else 16)
    model = scaled(load_device(device), load_device(base), steps[0].runtime).model
    told = [model.predict(step.row.work) for step in steps]
    held = [p.low_s <= s.row.seconds <= p.high_s for p, s in zip(told, steps, strict=True)]
    assert sum(held) >= 0.85 * len(held)
