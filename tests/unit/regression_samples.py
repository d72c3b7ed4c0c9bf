"""Makes measurements and baselines from figures that a test chooses."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import numpy as np

from edgefl.devices import Device, load_device, load_network
from edgefl.regression import baseline
from edgefl.regression.baseline import BaselineEntry
from edgefl.regression.counts import CountedRun, Counts
from edgefl.regression.device import DeviceResult
from edgefl.regression.measurement import Measurement, MeasurementPlan
from edgefl.regression.process import FunctionLocation, PrepareRequest, Repetition, ShotSizes, TrialRun

REQUEST = PrepareRequest(
    function=FunctionLocation("steps", "/a/steps.py", "step"), setup=None, args=[], kwargs={}, path=[],
    device="pixel-3a", network="lte", shots=None, limit_s=60.0,
)  # fmt: skip
TRIAL = TrialRun(
    shots=ShotSizes(reference="train-small", units=5, calls=1), reference_flop=1e6, reference_s=1 / 1750,
    flop=4e6, model_s=0.0, rest=1.0, rest_s=0.0, pace=3.0, error_factor=1.3,
    pairs=4, imported=[],
)  # fmt: skip
"""Trial run of a function that does not use torch. The device needs 1/1750 s per unit of the reference."""


def counted(executed: int | None = 100, **figures: int) -> CountedRun:
    """Return a run with these counts. ``executed`` is None if there were too many instructions to count."""
    one = Counts(figures=figures, instructions=None if executed is None else {"steps.step": executed})
    return CountedRun(first=one, second=one, model_s=0.01, python_s=0.001, error_factor=1.3, processes=False)


def repetition(cpu_s: float = 0.001, reference_cpu_s: float = 0.001, **changes: object) -> Repetition:
    one = Repetition(
        cpu_s=[cpu_s] * 4, reference_cpu_s=[reference_cpu_s] * 5, rest_cpu_s=[], blocked_s=0.0,
        peak_mib=10.0, sent_bytes=0,
        radio_s=0.0, declared_s=0.01, achieved_s=0.01, waited=0.0,
    )  # fmt: skip
    return msgspec.structs.replace(one, **changes)


_device, _network = functools.cache(load_device), functools.cache(load_network)


def measured(
    repetitions: Sequence[Repetition] | None = None,
    *,
    device: str | Device = "pixel-3a",
    network: str | None = "lte",
    trial: TrialRun = TRIAL,
    steal: float | None = 0.0,
    time_scale: float = 1.0,
) -> Measurement:
    link = None if network is None else _network(network)
    profile = _device(device) if isinstance(device, str) else device
    plan = MeasurementPlan(profile, link, REQUEST, 9, time_scale)
    return Measurement(plan, trial, list(repetitions or [repetition()] * 9), steal)


def result_of(one: Measurement) -> DeviceResult:
    """Return the result of a function that was measured like this."""
    result = DeviceResult("step", one.plan.device.id, lambda precise: one)
    assert result.measured is one
    return result


def noisy(
    factor: float = 1.0,
    spread: float = 0.02,
    count: int = 15,
    seed: int = 0,
    load: float = 1.0,
    **changes: object,
) -> list[Repetition]:
    """Return repetitions with log-normal CPU times around ``factor`` ms. ``load`` is the factor by which the
    host is slower."""
    draws = np.random.default_rng(seed).lognormal(0.0, spread, count)
    return [repetition(factor * load * 0.001 * float(draw), load * 0.001, **changes) for draw in draws]


def draws(purpose: int, spread: float = 0.05) -> list[float]:
    """Return 15 random factors around 1; the same ``purpose`` always gives the same factors."""
    return [float(x) for x in np.random.default_rng((7, purpose)).lognormal(0.0, spread, 15)]


def entry(
    repetitions: Sequence[Repetition] | None = None,
    test: str = "test_step[pixel-3a]",
    function: str = "step",
    **options: object,
) -> BaselineEntry:
    return baseline.entry(test, function, measured(repetitions or noisy(), **options))  # type: ignore[arg-type]
