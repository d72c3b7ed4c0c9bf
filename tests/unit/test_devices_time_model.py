"""Tests of time models: the time of each operation, intervals, and runtimes in profile files."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tables import arrows

from edgefl.devices import check_file, load_device, to_json
from edgefl.devices.schema import Slowdown
from edgefl.devices.time_model import COSTS, ERRORS, MAX_UNSURE, ONE_RATE_FACTOR, TERMS, TimeModel
from edgefl.errors import ProfileError
from edgefl.learning.operations import StepWork

RATES = {f"{kind}_gflops": 1.0 + at for at, kind in enumerate(("conv", "pointwise", "depthwise", "matmul"))}
MODEL = TimeModel(
    **RATES,
    depthwise_backward_gflops=8.0,
    recurrent_gflops=16.0,
    thin_gflops=32.0,
    conv_gbytes_per_s=2.0,
    norm_gbytes_per_s=4.0,
    depthwise_plane_us=3.0,
    call_us=5.0,
    parameter_ns=7.0,
    fixed_ms=9.0,
    error_factor=1.25,
)

PROFILE = """
schema = 2
id = "mine"
name = "Mine"
class = "board"

[cpu.rate_gflops]
train = 2.0

[runtime.torch]
conv_gflops = 20.0
thin_gflops = 10.0
pointwise_gflops = 10.0
depthwise_gflops = 0.5
depthwise_backward_gflops = 0.5
matmul_gflops = 30.0
recurrent_gflops = 15.0
error_factor = 1.3

[sources]
"cpu.rate_gflops" = "measured"
"runtime.torch" = "fitted"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (StepWork(), 0.0),
        (StepWork(conv_flop=3e9), 3.0),
        (StepWork(pointwise_flop=3e9), 1.5),
        (StepWork(depthwise_flop=3e9), 1.0),
        (StepWork(matmul_flop=2e9), 0.5),
        (StepWork(depthwise_backward_flop=4e9), 0.5),
        (StepWork(recurrent_flop=4e9), 0.25),
        (StepWork(thin_flop=8e9), 0.25),
        (StepWork(conv_bytes=3e9), 1.5),
        (StepWork(norm_bytes=3e9), 0.75),
        (StepWork(copy_bytes=3e9), 0.0),
        (StepWork(depthwise_planes=1e6), 3.0),
        (StepWork(calls=1e6), 5.0),
        (StepWork(parameters=1e9), 7.0),
    ],
)
def test_each_operation_has_its_own_time(work: StepWork, seconds: float) -> None:
    assert MODEL.seconds(work) == pytest.approx(seconds + 0.009, rel=1e-12)


def test_every_field_of_work_has_a_cost() -> None:
    assert set(COSTS) == set(StepWork.__struct_fields__)
    own = {name for name, _ in COSTS.values()} | {"fixed_ms", *ERRORS}
    assert own == set(TimeModel.__struct_fields__)


def test_a_prediction_has_an_interval_and_the_time_of_each_part() -> None:
    found = MODEL.predict(StepWork(conv_flop=1e9, norm_bytes=8e9))
    assert found.seconds == pytest.approx(3.009)
    assert (found.low_s, found.high_s) == (found.seconds / 1.25, found.seconds * 1.25)
    assert list(found.parts) == ["norm_bytes", "conv_flop", "fixed"]
    assert sum(found.parts.values()) == found.seconds


def test_a_slower_device_takes_longer_by_the_same_factor_for_all_operations() -> None:
    work = StepWork(**dict.fromkeys(StepWork.__struct_fields__, 1e6))
    assert MODEL.slowed(3.0).seconds(work) == pytest.approx(3 * MODEL.seconds(work), rel=1e-12)


def test_a_profile_has_runtimes(tmp_path: Path) -> None:
    device = load_device(written(tmp_path, PROFILE))
    model = device.time_model()
    assert model == device.time_model("torch")
    assert model.matmul_gflops == 30.0
    assert to_json(device)["runtime"]["torch"]["error_factor"] == 1.3
    with pytest.raises(ProfileError, match="device 'mine': runtime 'tosch' not found; did you mean 'torch'"):
        device.time_model("tosch")


def test_the_default_runtime_is_the_one_that_is_used(tmp_path: Path) -> None:
    tables, sources = PROFILE.split("[sources]")
    second = tables[tables.index("[runtime.torch]") :].replace("torch", "mnn").replace("30.0", "40.0")
    text = f'{tables}{second}[sources]\n"runtime.mnn" = "fitted"{sources}'
    path = written(tmp_path, text)
    assert check_file(path) == [f"{path}: default_runtime: missing; must be one of mnn, torch"]
    device = load_device(written(tmp_path, f'default_runtime = "mnn"{text}'))
    assert device.time_model().matmul_gflops == 40.0


REFUSALS = r"""
schema = 2 -> schema = 1 -> schema: must be 2 for a profile with a runtime, got 1
schema = 2 -> default_runtime = "mnn" -> default_runtime: runtime 'mnn' not found; available: torch
torch -> Torch -> runtime.Torch: must be a name of lower-case letters
conv_gflops = 20.0 -> -> runtime.torch.conv_gflops: missing; must be a finite number above 0
30.0 -> -1.0 -> runtime.torch.matmul_gflops: must be a finite number above 0, got -1
1.3 -> 0.9 -> runtime.torch.error_factor: must be a number from 1 to 100, got 0.9
error_factor -> call_ms = 1\nerror_factor -> unknown key 'runtime.torch.call_ms'
"runtime.torch" = "fitted" -> -> runtime.torch.conv_gflops: has no source
"""


@pytest.mark.parametrize(("old", "new", "said"), arrows(REFUSALS))
def test_an_invalid_runtime_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = written(tmp_path, PROFILE.replace(old, new))
    assert any(problem.startswith(f"{path}: {said}") for problem in check_file(path)), check_file(path)


def test_a_profile_without_runtimes_has_one_rate_for_all_operations(tmp_path: Path) -> None:
    start, end = PROFILE.index("[runtime.torch]"), PROFILE.index("[sources]")
    text = (PROFILE[:start] + PROFILE[end:]).replace('"runtime.torch" = "fitted"\n', "")
    device = load_device(written(tmp_path, text.replace("schema = 2", "schema = 1")))
    assert device.time_model() == TimeModel.of_rate(2.0, ONE_RATE_FACTOR)
    known = load_device(written(tmp_path, f'{text}[uncertainty]\n"cpu.rate_gflops.train" = 3.0\n'))
    assert known.time_model() == TimeModel.of_rate(2.0, 3.0)


def test_a_slowdown_applies_to_every_runtime(tmp_path: Path) -> None:
    text = PROFILE.replace("[sources]", '[slowdown]\nlow = 2.0\nhigh = 2.0\n[sources]\nslowdown = "assumed"')
    device = load_device(written(tmp_path, text))
    assert device.slowdown == Slowdown(low=2.0, high=2.0)
    assert device.individual(np.random.default_rng(0)).time_model().conv_gflops == 10.0


def unsure(**errors: tuple[float, ...]) -> TimeModel:
    """Return `MODEL` with these ``cost_errors``, keyed by field of `StepWork`. The last number of a tuple is
    the cost's own error; the numbers before it are errors that it shares with the preceding terms."""
    rows = [[0.0] * (at + 1) for at in range(len(TERMS) + 1)]
    for name, said in errors.items():
        at = next(at for at, term in enumerate((*TERMS, ("fixed",))) if name in term)
        rows[at][-len(said) :] = said
    return msgspec.structs.replace(MODEL, fixed_ms=0.0, cost_errors=tuple(map(tuple, rows)))


def test_a_steps_uncertainty_follows_the_share_of_uncertain_costs() -> None:
    model = unsure(recurrent_flop=(1.5,))
    known, half, all_of_it = (
        model.predict(StepWork(matmul_flop=4e9 * (1 - share), recurrent_flop=16e9 * share))
        for share in (0.0, 0.5, 1.0)
    )
    assert known.high_s == known.seconds * 1.25
    assert half.high_s / half.seconds == pytest.approx(math.exp(math.hypot(math.log(1.25), 0.75)))
    assert half.seconds / half.low_s == pytest.approx(half.high_s / half.seconds)
    assert (known.unsure, half.unsure, all_of_it.unsure) == ((), ("recurrent_flop",), ("recurrent_flop",))


def test_correlated_errors_of_costs_can_cancel() -> None:
    errors = (-1.0,), (1.0, 0.1)  # of pointwise convolutions and, next in order, depthwise ones
    model = unsure(pointwise_flop=errors[0], depthwise_flop=errors[1])
    alone, both = StepWork(pointwise_flop=2e9), StepWork(pointwise_flop=2e9, depthwise_flop=3e9)
    assert model.error_factor_of(alone) == pytest.approx(math.exp(math.hypot(math.log(1.25), 1.0)))
    assert model.error_factor_of(both) == pytest.approx(math.exp(math.hypot(math.log(1.25), 0.05)))


def test_the_uncertainty_of_an_unmeasured_cost_is_the_maximum() -> None:
    factor = unsure(calls=(9.0,)).error_factor_of(StepWork(calls=1e6))
    assert factor == pytest.approx(math.exp(math.hypot(math.log(1.25), math.log(MAX_UNSURE))))
    assert unsure(calls=(9.0,)).error_factor_of(StepWork()) == pytest.approx(1.25)


def test_a_steps_interval_follows_the_share_of_costs_that_vary_between_networks() -> None:
    varied = [0.0] * (len(TERMS) + 1)
    varied[TERMS.index(("recurrent_flop",))] = 0.8
    model = msgspec.structs.replace(MODEL, fixed_ms=0.0, cost_variations=tuple(varied))
    for share in (0.0, 0.5, 1.0):
        found = model.predict(StepWork(matmul_flop=4e9 * (1 - share), recurrent_flop=16e9 * share))
        assert found.high_s / found.seconds == pytest.approx(
            math.exp(math.hypot(math.log(1.25), 0.8 * share))
        )
        assert found.unsure == ()  # a cost that varies was measured


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cost_errors", "[[0.1], [0.2]]", "rows of 1 to 14 numbers, got [1, 1]"),
        ("cost_variations", "[0.1, 0.2]", "14 numbers, got [0.1, 0.2]"),
    ],
)
def test_errors_for_another_number_of_costs_are_refused(
    tmp_path: Path, key: str, value: str, said: str
) -> None:
    path = written(tmp_path, PROFILE.replace("error_factor = 1.3", f"error_factor = 1.3\n{key} = {value}"))
    assert check_file(path) == [f"{path}: runtime.torch.{key}: must be {said}"]
