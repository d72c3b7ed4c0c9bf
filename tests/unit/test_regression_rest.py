"""Which part of a function's CPU time is not torch's, and what a device takes for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from edgefl.devices import load_device
from edgefl.devices.code import clusters_of, throughput
from edgefl.learning.operations import StepWork
from edgefl.regression import repetition
from edgefl.regression.repetition import DeviceCall, make_reference, try_out

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


def shares(function: Callable[[], None], device: str = "pi-4") -> tuple[float, float]:
    """Seconds by the time model, and the rest's CPU time as a share of all CPU time."""
    of = load_device(device)
    trial = try_out(DeviceCall(function, None, [], {}, of, None), None)
    unit_s = make_reference("interpreted").device_s(of)
    interpreted_s = min(repetition.used_s(lambda: make_reference("interpreted").run(1)) for _ in range(5))
    pace = (trial.reference_s / trial.unit_cpu_s) / (unit_s / interpreted_s)
    return trial.model_s, trial.rest * pace


def test_pure_python_is_all_rest_and_products_are_none() -> None:
    model_s, share = shares(interpreted)
    assert model_s == 0.0
    # Two measurements of one reference, on a host that may stall; the pace of training would be 8 times off.
    assert 0.25 < share < 4
    model_s, share = shares(product)
    assert (model_s > 0.0, share) == (True, 0.0)


def test_the_rest_of_a_mixed_function_is_a_part_of_its_time() -> None:
    """The larger of two clocks would count one of the halves only."""
    model_s, share = shares(both)
    assert model_s == pytest.approx(shares(product)[0])
    assert 0 < share < 4


def test_the_error_is_that_of_the_larger_part() -> None:
    of = load_device("pi-4")
    model = of.time_model()
    assert model is not None
    work = make_reference("train-large").work
    torch_only = repetition.error_factor(ON_PI_4, work, 1.0, 0.0)
    assert torch_only == pytest.approx(model.error_factor_of(work))
    python_only = repetition.error_factor(ON_PI_4, work, 0.0, 1.0)
    assert python_only == pytest.approx(throughput(clusters_of(of), "interpreter", 1).spread)
    both = repetition.error_factor(ON_PI_4, work, 1.0, 1.0)
    assert both is not None
    assert 1.0 < both < max(torch_only or 0.0, python_only or 0.0)
    assert (
        repetition.error_factor(ON_PI_4._replace(device=load_device("paper-uniform")), work, 1.0, 1.0) is None
    )


def test_a_device_interprets_at_the_pace_of_its_fastest_core() -> None:
    """The speed of a training library, which was used before, ranked a Pixel 4 behind a Pi 4."""
    times = {}
    for name in ("pi-4", "pi-5", "pixel-4", "moto-g4"):
        device = load_device(name)
        times[name] = make_reference("interpreted").device_s(device)
        rate = throughput(clusters_of(device), "interpreter", 1).value
        assert times[name] * rate == pytest.approx(repetition.INTERPRETED_STEPS)
    assert times["pixel-4"] < times["pi-5"] < times["pi-4"] < times["moto-g4"]


def test_a_device_without_a_time_model_goes_by_the_reference() -> None:
    unknown = type("Unknown", (), {"time_model": lambda _: None})()
    call = ON_PI_4._replace(device=unknown)
    assert repetition._rest(call, make_reference("train-small").work, product, 1.0) == 1.0
    assert repetition._rest(ON_PI_4, make_reference("train-large").work, product, 1.0) == 0.0


def test_the_rest_is_of_the_mark_s_class() -> None:
    """A Raspberry Pi 4, without AES instructions, is slower in encryption than in any other class."""
    pytest.importorskip("edgefl.host._code")
    slower = {
        like: repetition._times_slower(ON_PI_4.device, like)
        for like in ("interpreter", "integer", "memory", "crypto", "division", "float")
    }
    assert max(slower, key=slower.__getitem__) == "crypto"
    assert slower["crypto"] > 2 * slower["integer"] > 0
    crypto = repetition.error_factor(ON_PI_4._replace(like="crypto"), StepWork(), 0.0, 1.0)
    assert crypto == pytest.approx(throughput(clusters_of(ON_PI_4.device), "crypto", 1).spread)
