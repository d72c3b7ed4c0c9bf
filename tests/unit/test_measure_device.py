"""Tests of the measuring kit in C: computed values, counted work, and the fitted profile."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import nn

from edgefl.cli import main
from edgefl.devices import check_file, load_device
from edgefl.devices.kit_result import KitResult
from edgefl.learning.operations import StepWork
from edgefl.learning.work import step_work

ROOT = Path(__file__).parents[2]
EDGE = {28: 128 * 6, 7: 512 * 6, 112: 16 * 6, 224: 3 * 6}
"""Number of terms in the sum of a 3 × 3 convolution at the upper edge of the image, keyed by image size. Each
term is 0.5."""


def measured(folder: Path, compiler: str, emulators: tuple[str, ...] = (), flags: str = "") -> str:
    """Build the program with a compiler, run it and return its output."""
    program = folder / "measure-device"
    emulator = next(filter(None, map(shutil.which, emulators)), None)
    if not shutil.which(compiler) or not shutil.which("make"):
        pytest.skip(f"no {compiler} or no make here")
    if emulators and emulator is None:
        pytest.skip(f"no {emulators[0]} here")
    variables = [f"CC={compiler}", f"CFLAGS={flags}", f"MEASURE_DEVICE={program}"]
    subprocess.run(["make", "-s", "measure-device", *variables], cwd=ROOT, check=True, capture_output=True)
    command = [*filter(None, [emulator]), str(program), "--quick"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return measured(tmp_path_factory.mktemp("c"), "cc")


def check_values(parts: dict[str, Any]) -> None:
    assert len({name.split("/")[0] for name in parts}) == 8
    for name, part in parts.items():
        assert part["wall_s"] > 0, name
        assert part["cpu_s"] > 0, name
    values = {name: part["value"] for name, part in parts.items()}
    for name, size in {"conv/28": 28, "conv/7": 7, "conv/narrow": 112, "conv/stem": 224}.items():
        assert values[name] == EDGE[size] * 0.5, name
    assert values["pointwise/56"] == 64 * 0.5
    assert values["depthwise/112"] == values["depthwise/112 backward"] == 6 * 0.5
    assert values["depthwise/14"] == values["depthwise/14 backward"] == 28 * 0.5
    assert values["matmul/wide"] == 384 * 0.5
    assert values["matmul/one row"] == 1024 * 0.5
    assert values["recurrent/lstm"] == (64 + 256) * 0.5


def test_every_part_has_its_computed_value(printed: str) -> None:
    check_values(json.loads(printed)["parts"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "emulators", "flags"),
    [
        ("aarch64-linux-gnu-gcc", ("qemu-aarch64", "qemu-aarch64-static"), ""),
        ("arm-linux-gnueabihf-gcc", ("qemu-arm", "qemu-arm-static"), "-mfpu=neon"),
    ],
    ids=["aarch64", "armv7"],
)
def test_other_architectures_compute_and_count_the_same(
    printed: str, tmp_path: Path, compiler: str, emulators: tuple[str, ...], flags: str
) -> None:
    result = json.loads(measured(tmp_path, compiler, emulators, flags))
    check_values(result["parts"])
    here = json.loads(printed)
    work = [{name: part["work"] for name, part in one["parts"].items()} for one in (result, here)]
    assert work[0] == work[1]
    assert msgspec.convert(result, KitResult).runtime_name in ("c", "c-1")


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv/28": (nn.Conv2d(128, 128, 3, padding=1, bias=False), (128, 28, 28)),
    "conv/stem": (nn.Conv2d(3, 48, 3, 2, 1, bias=False), (3, 224, 224)),
    "pointwise/narrow": (nn.Conv2d(16, 96, 1, bias=False), (16, 112, 112)),
    "depthwise/14": (nn.Conv2d(384, 384, 7, padding=3, groups=384, bias=False), (384, 14, 14)),
    "matmul/wide": (nn.Linear(384, 1536, bias=False), (197, 384)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_work_of_a_part_is_that_of_torchs_layer(printed: str, name: str) -> None:
    layer, shape = LAYERS[name]
    found = StepWork(**json.loads(printed)["parts"][name]["work"])
    assert found == step_work(layer, shape, 1, inference=True)


def test_a_backward_pass_has_twice_the_work_of_a_forward_pass(printed: str) -> None:
    parts = json.loads(printed)["parts"]
    forward, backward = (StepWork(**parts[f"depthwise/14{way}"]["work"]) for way in ("", " backward"))
    assert backward.depthwise_backward_flop == 2 * forward.depthwise_flop
    assert backward.depthwise_planes == 2 * forward.depthwise_planes


def test_the_result_becomes_a_profile(printed: str, tmp_path: Path) -> None:
    result, out = tmp_path / "phone.json", tmp_path / "phone.toml"
    result.write_text(printed)
    assert main(["profiles", "fit", str(result), "--out", str(out)]) == 0
    assert check_file(out) == []
    device = load_device(out)
    assert device.runtime_name in ("c", "c-1")
    assert device.time_model() is not None
