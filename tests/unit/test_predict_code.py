"""Tests of `edgefl predict --code`, `profiles cores` and `bench truth --boards` on the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from shell import Shell

from edgefl.cli import main
from edgefl.cli.predict_code import CLASSES, FIGURES, WORDS
from edgefl.devices import code
from edgefl.devices.boards import bundled_boards
from edgefl.devices.code import CodeCluster, rate, throughput
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import RunError
from edgefl.host import calibration
from tests.unit.test_code_operations import calibrated


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calibration by that of a host with a rate of 1000 for every class of code."""
    rates = dict.fromkeys(code.CLASSES, 1000.0)
    monkeypatch.setattr(calibration, "calibrate_code", lambda _: calibrated(**rates))


BIG_LITTLE = "--cores Cortex-A76@2400x4,cortexa55@1800x4"


def test_the_commands_classes_are_those_of_the_model() -> None:
    assert CLASSES == code.CLASSES
    assert FIGURES.keys() == set(CLASSES)
    assert {name for figures in FIGURES.values() for name in figures.values()} == WORDS.keys()


def predicted(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, object]:
    assert main(shlex.split(f"predict --code {arguments} --json")) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_integer_code_has_the_rates_of_7_zip_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, f"integer {BIG_LITTLE} --threads 6")
    clusters = [CodeCluster("Cortex-A76", 2400.0, 4), CodeCluster("Cortex-A55", 1800.0, 4)]
    for name, code_class in (("mips_decompress", "integer"), ("mips_compress", "memory")):
        expected = throughput(clusters, code_class, 6)  # type: ignore[arg-type]
        assert [found[f"{name}{end}"] for end in ("", "_low", "_high")] == pytest.approx(list(expected))
    assert (found["threads"], found["cores"]) == (6, ["Cortex-A76@2400x4", "Cortex-A55@1800x4"])


def test_the_speed_is_relative_to_a_thread_of_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(capsys, f"integer {BIG_LITTLE}")
    assert found["relative"] == pytest.approx(found["mips_decompress"] / 1000.0)  # type: ignore[operator]
    assert found["low"] < found["relative"] < found["high"]  # type: ignore[operator]


@pytest.mark.parametrize(("asked", "key"), [("crypto", "aes256cbc_mb_s"), ("copy", "memcpy_mb_s")])
def test_other_classes_have_their_own_figures(
    capsys: pytest.CaptureFixture[str], asked: str, key: str
) -> None:
    found = predicted(capsys, f"{asked} {BIG_LITTLE}")
    assert found[key] == pytest.approx(rate(CodeCluster("Cortex-A76", 2400.0), asked).value)  # type: ignore[arg-type]


def test_without_a_measurement_of_the_host_the_devices_rates_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: str) -> None:
        raise RunError("calibration refused: noisy")

    monkeypatch.setattr(calibration, "calibrate_code", refuse)
    assert main(shlex.split(f"predict --code integer {BIG_LITTLE} --json")) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["relative"] is None
    assert json.loads(captured.out)["mips_decompress"] > 1000
    assert captured.err == "edgefl: no comparison with this host: calibration refused: noisy\n"


@pytest.mark.parametrize(
    ("arguments", "device"), [("--device pi-4", "pi-4"), ("--cores Cortex-A72@1800x4 --without-aes", None)]
)
def test_cores_without_aes_instructions_encrypt_slowly(
    arguments: str, device: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = predicted(capsys, f"crypto {arguments}")
    assert found.get("device") == device
    assert found["aes256cbc_mb_s"] == pytest.approx(36.3, rel=0.1)  # ThomasKaiser/sbc-bench


def test_without_json_the_output_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("predict --code integer --device pi-5 --threads 4")) == 0
    out = capsys.readouterr().out
    assert "integer code, 4 threads on Cortex-A76@2400x4" in out
    assert "7-zip decompression, MIPS" in out
    assert "speed relative to one thread of this host" in out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--code intger --device pi-4", "code class 'intger' not found; did you mean 'integer'?"),
        ("--code integer --cores cortex-a777@1000", "did you mean 'Cortex-A7"),
        ("--code integer --cores a", "--cores 'a': must be CORE@MHZ or CORE@MHZxCORES"),
        (f"--code integer --cores Cortex-A76@{'9' * 400}x4", "with MHZ from 10 to 100000"),
        ("--code integer", "--code integer: give one --device NAME, or --cores"),
        ("--code integer --device pi-4 --device pi-5", "--code integer: give one --device NAME"),
        ("--code integer --device pi-4 --cores Cortex-A7@1", "--code integer: give one --device NAME"),
        ("--code integer mlp --device pi-4", "--code integer: cannot be combined with a MODEL (got 'mlp')"),
        ("--code integer --device tier-p50", "lists no cpu.clusters"),
        ("--device pi-4", "give a MODEL, or --code CLASS"),
        ("mlp", "give --device NAME, once or more"),
        ("mlp --device pi-4 --threads 2", "--threads: allowed only with --code"),
        ("mlp --device pi-4 --without-aes", "--without-aes: allowed only with --code"),
        ("--code crypto --device pi-4 --without-aes", "--without-aes: allowed only with --cores"),
        ("--code integer --device pi-4 --batch 8", "--batch: allowed only with a MODEL, not with --code"),
        ("--code integer --device pi-4 --input 3,8,8", "--input: allowed only with a MODEL"),
        ("--code integer --device pi-4 --inference", "--inference: allowed only with a MODEL"),
        ("--code integer --device pi-4 --runtime mnn", "--runtime: allowed only with a MODEL"),
        ("mlp --device pi-4 --cores Cortex-A7@1", "--cores: allowed only with --code"),
    ],
)
def test_invalid_arguments_are_one_line(edgefl: Shell, arguments: str, why: str) -> None:
    assert why in edgefl.refuses(2, "predict", *shlex.split(arguments))


def test_boards_are_judged_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = bundled_boards().read_text().splitlines(keepends=True)
    (tmp_path / "b.csv").write_text("".join(lines[:5]))
    file = tmp_path / "b.json"
    assert main(["bench", "truth", "--boards", str(tmp_path / "b.csv"), "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    keys = {"result", "board", "core", "mhz", "quantity", "measured", "predicted", "low", "high", "basis"}
    assert all(keys <= row.keys() for row in result["boards"])
    assert "7-zip decompression, one thread" in capsys.readouterr().out
    assert main(["bench", "truth", "--boards", str(tmp_path / "none.csv")]) == 2


def test_core_types_are_fitted_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "cores"]) == 0
    assert capsys.readouterr().out == (bundled_folder() / "cores.toml").read_text()
