"""Tests of `edgefl profiles fit`, which makes a device profile from measured steps."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from edgefl.cli.profiles import app
from edgefl.devices import check_file, device_names, load_device, measurements
from edgefl.devices.fitted import Recipe
from edgefl.devices.profiles import bundled_folder
from edgefl.devices.time_model import joined
from edgefl.errors import ConfigError
from edgefl.lab import truth
from edgefl.learning.operations import StepWork

HEAD = "device,profile,runtime,layer,inputs,outputs,batch,steps,measured_s,source\n"


def layers(folder: Path, profile: str, *more: str) -> Path:
    lines = [
        f'Mine,{profile},"DL4J, training",lstm,{n},50,5,2,{n / 1000},page 3\n' for n in (50, 100, 200, 300)
    ]
    path = folder / "rows.csv"
    path.write_text(HEAD + "".join(lines) + "".join(more))
    return path


def run(*args: object) -> str:
    result = CliRunner().invoke(app, ["fit", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", ["nexus-6", "oneplus-7t"])  # a file, and an entry of the table of phones
def test_measured_layers_become_a_runtime_of_the_profile_that_they_name(tmp_path: Path, name: str) -> None:
    out = tmp_path / "mine.toml"
    told = run(layers(tmp_path, name), "--out", out)
    assert "4 steps, each predicted by a fit without it: median error" in told
    assert check_file(out) == []
    device, known = load_device(out), load_device(name)
    assert device.memory == known.memory
    assert "page 3" in device.sources["runtime.dl4j"]
    assert device.time_model("dl4j") != known.runtime.get("dl4j")


MEASURED = bundled_folder() / "measured"
SLOW = pytest.mark.slow
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        ("pi-4", "torch"),
        ("pi-5", "torch"),
        ("pixel-4", "mnn"),
        pytest.param("redmi-note-8", "dl4j", marks=SLOW),
        pytest.param("nexus-6", "dl4j", marks=SLOW),
        pytest.param("galaxy-note-10", "dl4j", marks=SLOW),
    ],
)
def test_the_command_in_a_profiles_source_reproduces_the_profile(
    name: str, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runtime == "torch" and find_spec("timm") is None:
        pytest.skip("needs edgefl[timm]")
    source = load_device(name).sources[f"runtime.{runtime}"]
    recipe = Recipe.of(source)
    assert source.startswith(f"fitted: {recipe.command} on ")
    monkeypatch.chdir(MEASURED)
    out = tmp_path / f"{name}.toml"
    run(*shlex.split(recipe.command.removeprefix("edgefl profiles fit ")), "--out", out)
    made, known = out.read_text(), (MEASURED.parent / "devices" / out.name).read_text()
    assert NUMBER.sub("#", made) == NUMBER.sub("#", known)
    numbers = ([float(one) for one in NUMBER.findall(text)] for text in (made, known))
    assert next(numbers) == pytest.approx(next(numbers), rel=1e-3)  # the last digit depends on the processor


def test_every_fitted_profile_has_its_command() -> None:
    sources = [text for name in device_names() for text in load_device(name).sources.values()]
    fitted = [Recipe.of(text) for text in sources if text.startswith("fitted")]
    assert None not in fitted
    assert len(fitted) == 6
    assert Recipe.of("derived: by hand") is None


def test_the_command_in_a_source_is_read_with_the_names_of_any_files() -> None:
    recipe = Recipe(files=("a b--2.csv", "c.csv"), runtime="DL4J, training", prior="./x y.toml", apart=2.0)
    assert Recipe.of(f"fitted: {recipe.command} on 4 steps of Mine: page 3") == recipe


def test_the_json_of_the_measurement_kit_becomes_a_new_profile(tmp_path: Path) -> None:
    parts = {f"p{n}": {"wall_s": n / 2, "cpu_s": n, "work": {"conv_flop": n * 1e9}} for n in (1, 2, 3)}
    kit = {"kit": 1, "device": "My board", "runtime": "c", "threads": 4, "cores": 4, "parts": parts}
    path, out = tmp_path / "kit.json", tmp_path / "my-board.toml"
    path.write_text(json.dumps({**kit, "celsius": 40}))
    nameless = path.with_stem("nameless")
    nameless.write_text(json.dumps({**kit, "device": ""}))
    run(nameless, "--out", out.with_stem("nameless"))
    assert load_device(out.with_stem("nameless")).name == "nameless"
    run(path, "--out", out, "--prior", "pi-4", "--spread", 1.3)
    assert check_file(out) == []
    device = load_device(out)
    assert device.train_flop_per_s == pytest.approx(2e9)
    model = device.time_model("c")
    other = out.with_stem("other")
    run(path, "--out", other, "--prior", "pi-4", "--spread", 1.3, "--apart", 2)
    wider = float(f"{joined(model.error_factor, 2):.4g}")
    assert load_device(other).time_model("c") == msgspec.structs.replace(model, error_factor=wider)


def test_a_fit_needs_the_rows_of_one_device(tmp_path: Path) -> None:
    path = layers(tmp_path, "nexus-6", 'Other,pi-4,"DL4J, training",lstm,50,50,5,2,1.0,page 4\n')
    said = "choose one with --profile and --runtime; available: nexus-6/dl4j, pi-4/dl4j"
    with pytest.raises(ConfigError, match=said):
        run(path, "--out", tmp_path / "mine.toml")


def test_a_fit_needs_the_kits_results_of_one_device(tmp_path: Path) -> None:
    parts = {"p": {"wall_s": 1, "cpu_s": 1, "work": {"conv_flop": 1e9}}}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        kit = {"kit": 1, "device": file.stem, "runtime": "c", "threads": 4, "cores": 4, "parts": parts}
        file.write_text(json.dumps(kit))
    with pytest.raises(ConfigError, match="measured on several devices: a, b; fit a profile to each"):
        run(*files, "--out", tmp_path / "mine.toml")


def test_steps_in_tflite_are_refused(tmp_path: Path) -> None:
    """Mutant: the steps are fitted, although `edgefl predict` counts the work of TFLite differently."""
    path = layers(tmp_path, "nexus-6")
    path.write_text(path.read_text().replace("DL4J", "TFLite"))
    with pytest.raises(ConfigError, match="line 2: runtime: must not be 'tflite'"):
        run(path, "--out", tmp_path / "mine.toml")


def test_an_inference_of_a_workload_has_no_backward_pass(tmp_path: Path) -> None:
    def works(*kinds: str) -> list[StepWork]:
        lines = "".join(f"Mine,mine,mnn,,LEAF FEMNIST CNN,{kind},10,1,page 3\n" for kind in kinds)
        path = tmp_path / "rows.csv"
        path.write_text(f"device,profile,runtime,network,workload,kind,batch,measured_s,source\n{lines}")
        return [step.row.work for step in measurements.read(path)]

    train, inference = works("train", "inference")
    assert inference.parameters == 0 < train.parameters
    assert 0 < 2 * inference.flop < train.flop
    with pytest.raises(ConfigError, match="kind of a workload must be 'train' or 'inference', got"):
        works("finetune")


def test_a_profile_that_was_fitted_to_a_users_file_is_compared_with_steps(tmp_path: Path) -> None:
    """Mutant: the user's file, which the profile names as its source, is looked up among edgefl's own
    measurements."""
    out = tmp_path / "mine.toml"
    rows = layers(tmp_path, str(out))
    run(rows, "--out", out)
    steps = truth.compared(measurements.read(rows))
    assert len(steps) == 4
    assert not any(step.fitted or step.unseen for step in steps)
    assert {step.runtime for step in steps} == {"dl4j"}
