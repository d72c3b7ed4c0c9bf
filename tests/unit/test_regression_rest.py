"""The part of a function's CPU time outside torch, and the device's time for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from edgefl.devices import load_device
from edgefl.devices.code import clusters_of, throughput
from edgefl.learning.operations import StepWork
from edgefl.regression import repetition
from edgefl.regression.memory import TreeWatch
from edgefl.regression.process import ReferenceName, RepeatRequest, RestClass, ShotSizes
from edgefl.regression.repetition import DeviceCall, make_reference, prepared, rest_work, try_out

SQUARE = torch.ones(256, 256)
ON_PI_4 = DeviceCall(lambda: None, None, [], {}, load_device("pi-4"), None)


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceCall, "limit", lambda _: None)


def product() -> None:
    for _ in range(20):
        torch.mm(SQUARE, SQUARE)


def interpreted() -> None:
    make_reference("interpreted").run(20)


def both() -> None:
    product()
    interpreted()


def product_in_a_thread() -> None:
    thread = threading.Thread(target=product)
    thread.start()
    thread.join()


def shares(function: Callable[[], None]) -> tuple[float, float]:
    """Return the time model's seconds for torch, and the share of the CPU time that is used outside torch."""
    trial = try_out(ON_PI_4._replace(function=function), None)
    return trial.model_s, trial.rest


def test_the_rest_is_the_part_of_the_time_outside_torch() -> None:
    """The maximum of the two times would count only one half of a mixed function."""
    assert shares(interpreted) == (0.0, 1.0)
    model_s, share = shares(product)
    assert (model_s > 0.0, share) == (True, 0.0)
    assert shares(product_in_a_thread) == (model_s, 0.0)
    mixed_s, share = shares(both)
    assert mixed_s == pytest.approx(model_s)
    assert 0 < share < 1


@pytest.mark.parametrize(
    ("like", "reference", "apart"),
    [
        ("interpreter", "interpreted", False),
        ("interpreter", "train-small", True),
        ("integer", "interpreted", True),
    ],
)
def test_no_single_measurement_decides_the_pace_of_the_rest(
    like: RestClass, reference: ReferenceName, apart: bool
) -> None:
    """Each repetition times a program of the rest's class of code, unless the reference is such a program."""
    if like != "interpreter":
        pytest.importorskip("edgefl.host._code")
    call = ON_PI_4._replace(like=like, function=interpreted)
    trial = try_out(call, ShotSizes(reference=reference, units=1, calls=1))
    found = prepared(call, trial, TreeWatch())(RepeatRequest(index=0, time_scale=0.0))
    assert (trial.rest_s > 0, bool(found.rest_cpu_s)) == (apart, apart)


def test_the_error_is_that_of_the_larger_part() -> None:
    model = ON_PI_4.device.time_model()
    work = make_reference("train-large").work
    torch_only = repetition.error_factor(ON_PI_4, work, 1.0, 0.0)
    assert torch_only == pytest.approx(model.error_factor_of(work))
    python_only = repetition.error_factor(ON_PI_4, work, 0.0, 1.0)
    assert python_only == pytest.approx(throughput(clusters_of(ON_PI_4.device), "interpreter", 1).spread)
    both = repetition.error_factor(ON_PI_4, work, 1.0, 1.0)
    assert 1.0 < both < max(torch_only or 0.0, python_only or 0.0)
    unknown = ON_PI_4._replace(device=load_device("paper-uniform"))
    assert repetition.error_factor(unknown, work, 1.0, 1.0) is None


def test_a_device_interprets_at_the_pace_of_its_fastest_core() -> None:
    times = {}
    for name in ("pi-4", "pi-5", "pixel-4", "moto-g4"):
        device = load_device(name)
        times[name] = make_reference("interpreted").device_s(device)
        rate = throughput(clusters_of(device), "interpreter", 1).value
        assert times[name] * rate == pytest.approx(repetition.INTERPRETED_STEPS)
    assert times["pixel-4"] < times["pi-5"] < times["pi-4"] < times["moto-g4"]


def test_all_time_is_rest_on_a_device_without_a_time_model() -> None:
    unknown = type("Unknown", (), {"time_model": lambda _: None})()
    call = ON_PI_4._replace(device=unknown)
    assert repetition._rest(call, make_reference("train-small").work, product, 1.0) == 1.0
    assert repetition._rest(ON_PI_4, make_reference("train-large").work, product, 1.0) == 0.0


def test_the_rest_has_the_class_of_code_of_the_mark() -> None:
    """A Raspberry Pi 4 has no AES instructions, so encryption is slower than any other class."""
    pytest.importorskip("edgefl.host._code")
    slower = {
        like: rest_work(ON_PI_4._replace(like=like), "train-small").slowdown()  # type: ignore[union-attr]
        for like in ("interpreter", "integer", "memory", "crypto", "division", "float")
    }
    assert max(slower, key=slower.__getitem__) == "crypto"
    assert slower["crypto"] > 2 * slower["integer"] > 0
    crypto = repetition.error_factor(ON_PI_4._replace(like="crypto"), StepWork(), 0.0, 1.0)
    assert crypto == pytest.approx(throughput(clusters_of(ON_PI_4.device), "crypto", 1).spread)
