"""Tests of predicted times of training steps, in Python and on the command line."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import msgspec
import pytest
from shell import Shell
from tables import arrows
from torch import nn

from edgefl.devices import load_device, predict
from edgefl.devices.energy import draw_of
from edgefl.devices.time_model import FEMNIST_STEP
from edgefl.errors import ConfigError
from edgefl.learning import models
from edgefl.learning.models import MODELS, model_to_trace
from edgefl.learning.work import step_work


def test_a_predicted_time_is_that_of_the_steps_work() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    device = load_device("pi-4")
    model, work = device.time_model("torch"), step_work(network, (3, 8, 8), 8)
    found = predict(network, 8, device=device, input_shape=(3, 8, 8))
    assert found.seconds == pytest.approx(model.seconds(work))
    factor = model.error_factor_of(work)
    assert factor > 2 * model.error_factor  # no measured network is as small
    assert "calls" in found.unsure
    assert found.low_s * factor == pytest.approx(found.seconds)
    assert found.high_s == pytest.approx(found.seconds * factor)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_inference_is_faster_than_training_and_more_examples_take_longer() -> None:
    network = nn.Linear(1000, 1000)
    few, many, forward = (
        predict(network, batch, device="pi-4", input_shape=(1000,), inference=inference).seconds
        for batch, inference in ((1, False), (64, False), (1, True))
    )
    assert forward < few < many
    with pytest.raises(ConfigError, match=r"^batch: must be at least 1 example, got 0$"):
        predict(network, 0, device="pi-4", input_shape=(1000,))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_has_a_usual_input_shape(name: str, edgefl: Shell) -> None:
    inference = ["--inference"] * name.startswith("lstm")  # a training step on a text takes seconds to count
    said = json.loads(edgefl.shows("predict", name, "--device", "pi-4", "--json", *inference))
    (found,) = said["devices"]
    assert found["low_s"] <= found["seconds"] <= found["high_s"]
    assert (found["device"], found["runtime"], said["batch"]) == ("pi-4", "torch", 16)
    updated = sum(p.numel() for p in model_to_trace(name)[0].parameters())
    assert said["work"]["parameters"] == (0 if inference else updated)


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("devices", [["pi-4"], ["nexus-6", "pi-4", "galaxy-note-10", "pi-5"]])
def test_tables_fit_the_terminal(
    columns: int, devices: list[str], monkeypatch: pytest.MonkeyPatch, edgefl: Shell
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    asked = [word for name in devices for word in ("--device", name)]
    lines = edgefl.shows("predict", "cnn-femnist", *asked).splitlines()
    assert max(map(len, lines)) <= columns
    bars = [line.count("█") for line in lines if "█" in line]
    order = bars if len(devices) > 1 else bars[::-1]
    assert order[:-1] == sorted(order[:-1])


def test_devices_are_sorted_by_time_and_have_the_energy_of_their_currents(edgefl: Shell) -> None:
    command = shlex.split("predict cnn-femnist -d pixel-4 -d nexus-6 -d pi-4")
    devices = json.loads(edgefl.shows(*command, "--json"))["devices"]
    seconds = [found["seconds"] for found in devices]
    assert seconds == sorted(seconds)
    found = {each["device"]: each for each in devices}
    phone, board = found["pixel-4"], found["pi-4"]
    expected = draw_of(load_device("pixel-4")).energy(compute_s=phone["seconds"]).total_j
    assert (phone["energy_j"], board["energy_j"]) == (expected, None)  # a board has no battery
    assert phone["energy_low_j"] < expected / 1.5 < expected * 1.5 < phone["energy_high_j"]
    assert f"90% interval: pixel-4 {expected:.3g} J (" in edgefl.shows(*command)
    assert "e+" not in edgefl.shows(*command, "--batch", "4000")  # hundreds of joules have no exponent


def test_a_prediction_for_devices_with_a_slowdown_is_that_of_the_median_device() -> None:
    """The devices' relative speeds are uniform from 0.2 to 1, so the median is 0.6. The interval includes the
    differences between devices."""
    device = load_device("paper-defedavg")
    fastest = msgspec.structs.replace(device, slowdown=None)
    found, least = (predict(nn.Linear(9, 9), 4, device=each, input_shape=(9,)) for each in (device, fastest))
    assert found.seconds == pytest.approx(least.seconds / 0.6)
    assert found.high_s / found.seconds > 1.1 * least.high_s / least.seconds


def test_devices_of_papers_have_no_model_error() -> None:
    fitted = load_device("pi-4")
    assert fitted.model_error_factor(FEMNIST_STEP) == fitted.runtime["torch"].error_factor_of(FEMNIST_STEP)
    assert load_device("tier-p50").model_error_factor(FEMNIST_STEP) is not None
    assert load_device("paper-exponential").model_error_factor(FEMNIST_STEP) is None
    assert load_device("paper-fast-u1-2").model_error_factor(FEMNIST_STEP) is None


USERS_MODULE = """
from torch import nn
class Refuses(nn.Module):
    def forward(self, x):
        raise ValueError("no way")
def refuses(input_shape, classes):
    return Refuses()
def takes(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, classes))
def idle(input_shape, classes):
    return nn.Identity()
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(USERS_MODULE)
    monkeypatch.chdir(tmp_path)


REFUSALS = """
mlp -d pi4 -> device profile 'pi4' not found; did you mean 'pi-4'?
mlp -d pi-4 --runtime torhc -> runtime 'torhc' not found; did you mean 'torch'?
mpl -d pi-4 -> model 'mpl' not found; did you mean 'mlp'?
mlp -d paper-exponential -> no computing rates
mlp -d pi-4 --input 3,0 -> --input must be sizes such as 3,224,224 (got '3,0')
mine:refuses -d pi-4 --input 4 -> cannot train on inputs of shape (4,): ValueError: no way
mine:takes -d pi-4 -> mine:takes needs an input shape: give --input 3,32,32 or torch:mine:takes@
mine:takes -d pi-4 --input 13 -> cannot train on inputs of shape (13,)
mine:idle -d tier-p50 --input 4 --inference -> mine:idle: no time can be predicted on tier-p50: the network \
has no operations that the profile's single rate covers
"""


@pytest.mark.parametrize(("arguments", "said"), arrows(REFUSALS))
@pytest.mark.usefixtures("users_module")
def test_a_prediction_that_is_not_possible_is_refused(arguments: str, said: str, edgefl: Shell) -> None:
    assert said in edgefl.refuses(2, "predict", *shlex.split(arguments))


@pytest.mark.usefixtures("users_module")
def test_a_users_module_is_predicted(edgefl: Shell) -> None:
    out = edgefl.shows(*shlex.split("predict mine:takes -d pi-4 --input 3x2x2 --inference"))
    assert "mine:takes, inference on 16 of 3×2×2" in out


def test_without_timm_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    models.timm_module.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'edgefl\[timm\]'"):
        model_to_trace("timm:resnet18")


def test_networks_of_timm_are_built_on_the_meta_device() -> None:
    try:
        models.timm_input("resnet18")
    except ConfigError as error:
        pytest.skip(str(error))
    module, shape = model_to_trace("timm:resnet18")
    assert shape == (3, 224, 224)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert model_to_trace("timm:vit_tiny_patch16_224", (1, 96, 96))[1] == (1, 96, 96)
    with pytest.raises(ConfigError, match="did you mean 'resnet18'"):
        model_to_trace("timm:resnet19")
