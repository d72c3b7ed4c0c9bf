"""A function's figures on one device: repeated until they are known, or found not to be believable.

Resamples come from a seeded stream, so that the same samples always give the same bounds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl.devices.condition import energy_j
from edgefl.devices.schema import Device, Network, to_json
from edgefl.errors import Invalid, NotMet, OutOfDeviceMemory
from edgefl.limits.capacity import StealMeter
from edgefl.limits.fidelity import STEAL_MAX
from edgefl.regression.process import (
    Failure,
    MeasuringProcess,
    PrepareRequest,
    RepeatRequest,
    Repetition,
    Request,
    TrialRun,
    alone,
)
from edgefl.seeds import stream

MIB = 1 << 20
LEAST_REPETITIONS = 9
MOST_REPETITIONS = 60
PRECISE, NOISY = 0.0125, 0.03
"""Half the 90% interval of the median time, as a share of it: measuring ends, figures are not believed."""
WAITED_MAX = 0.6
"""Share of the time in which the function could have run and had no core."""
REFERENCE_CV_MAX = 0.30
"""Variation of the reference's CPU time between repetitions: above it this is no host to measure on."""
RESAMPLES = 2000


class Interval(NamedTuple):
    """A median and the bounds of its bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width as a share of the median; infinite where only the median is 0."""
        if self.high == self.low:
            return 0.0
        return round((self.high - self.low) / 2 / abs(self.median), 12) if self.median else math.inf


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the 90% bootstrap interval of the median (Efron 1979); its bounds are one-sided at 95%."""
    resamples = stream(0, "bootstrap", len(samples)).choice(samples, (RESAMPLES, len(samples)))
    low, high = np.quantile(np.median(resamples, axis=1), [0.05, 0.95])
    return Interval(statistics.median(samples), float(low), float(high))


class TimeLimit:
    """Wall seconds that one test's measurements may take together; waiting for other tests does not count."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._before_s, self._began_s = 0.0, math.nan

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time that passes."""
        self._began_s = time.monotonic()
        try:
            yield
        finally:
            self._before_s, self._began_s = self.spent_s, math.nan

    @property
    def spent_s(self) -> float:
        passed_s = time.monotonic() - self._began_s
        return self._before_s + (passed_s if passed_s == passed_s else 0.0)

    def allows(self, seconds: float) -> bool:
        """Returns True if as much time is left."""
        return self.spent_s + seconds <= self.seconds


class MeasurementPlan(NamedTuple):
    """The request and the extent of a measurement."""

    device: Device
    network: Network | None
    request: PrepareRequest
    repetitions: int
    """At least; more where they vary."""
    time_scale: float
    limit: TimeLimit = TimeLimit()
    tell: Callable[[str], None] = lambda _: None
    """Told of each repetition."""


class Measurement:
    """The repetitions of one function on one device. All seconds are emulated unless they say ``host``."""

    def __init__(
        self, plan: MeasurementPlan, trial: TrialRun, repetitions: list[Repetition], steal: float | None
    ) -> None:
        self.plan, self.device, self.trial = plan, plan.device, trial
        self.repetitions, self.steal = repetitions, steal
        shots = trial.shots
        # The least of a repetition's shots: interference only adds time, and seldom to all of them.
        self.host_cpu_s = [min(one.cpu_s) / shots.calls for one in repetitions]
        self.reference_cpu_s = [min(one.reference_cpu_s) / shots.units for one in repetitions]
        """CPU seconds of this host that a call, and a unit of the reference, takes."""
        units_s = trial.reference_s * shots.units / shots.calls
        self.cpu_s = [
            min(one.cpu_s) / min(one.reference_cpu_s) * units_s + one.blocked_s for one in repetitions
        ]
        """CPU time of a call / CPU time of the reference · the reference's time on the device + blocked."""
        self.seconds = [
            max(trial.model_s + one.blocked_s, cpu_s) + one.radio_s
            for one, cpu_s in zip(repetitions, self.cpu_s, strict=True)
        ]
        """Device time: the larger of both clocks, and the transfers."""
        self.peak_mib = [one.peak_mib for one in repetitions]
        self.sent_mib = [one.sent_bytes / MIB for one in repetitions]
        self.waited = statistics.median(one.waited for one in repetitions)
        """Median share of the time in which the function could have run and had no core."""

    @property
    def joules(self) -> list[float]:
        """Energy that each repetition takes from the battery. ProfileError where the profile does not say."""
        bearer = self.plan.network.bearer if self.plan.network is not None else "mobile"
        cost = partial(energy_j, self.device, bearer=bearer)
        return [
            cost(compute_s=s - one.radio_s - one.blocked_s, radio_s=one.radio_s, idle_s=one.blocked_s)
            for one, s in zip(self.repetitions, self.seconds, strict=True)
        ]

    @property
    def pace(self) -> list[float]:
        """Achieved over declared time of the paced calls; empty where they were not paced."""
        paced = self.repetitions if self.plan.time_scale else []
        return [one.achieved_s / one.declared_s for one in paced if one.declared_s > 0]

    @cached_property
    def noise(self) -> float:
        """Half the width of the 90% interval of the median CPU clock, as a share of the median."""
        return median_interval(self.cpu_s).half_width

    def reasons(self) -> Iterator[str]:
        """Yield the reasons why the figures cannot be believed."""
        if self.steal is not None and self.steal > STEAL_MAX:
            yield f"the hypervisor stole {self.steal:.1%} of the time, at most {STEAL_MAX:.0%} is allowed"
        if self.waited > WAITED_MAX:
            yield (
                f"the host is overloaded: the function waited for a core {self.waited:.0%} of the time, at "
                f"most {WAITED_MAX:.0%} is allowed"
            )
        cv = statistics.stdev(self.reference_cpu_s) / statistics.fmean(self.reference_cpu_s)
        if cv > REFERENCE_CV_MAX:
            yield (
                f"the reference {self.trial.shots.reference} varied by {cv:.0%}, at most "
                f"{REFERENCE_CV_MAX:.0%} is allowed"
            )
        if self.noise > NOISY:
            yield (
                f"too noisy: the median time is known to ±{self.noise:.1%} after {len(self.repetitions)} "
                f"repetitions, ±{NOISY:.0%} is needed"
            )


def measure(process: MeasuringProcess, plan: MeasurementPlan) -> Measurement:
    """Repeat until the median time is known to ±1.25%, at most 60 times, while no other test measures here.

    If the figures cannot be believed, measure once more: whatever was in the way may have passed. Past the
    plan's limit nothing is begun that is not needed.
    `OutOfDeviceMemory` if the function needs more memory than the device gives it, `NotMet` if it raises,
    `Invalid` where the limit came before there were nine repetitions.
    """
    __tracebackhide__ = True
    with alone(), plan.limit.counted():
        before_s = plan.limit.spent_s
        measured = _measured(process, plan)
        once_more = any(measured.reasons()) and plan.limit.allows(plan.limit.spent_s - before_s)
        return _measured(process, plan) if once_more else measured


def _measured(process: MeasuringProcess, plan: MeasurementPlan) -> Measurement:
    __tracebackhide__ = True
    meter = StealMeter()
    trial = _ask(process, plan, plan.request)
    assert isinstance(trial, TrialRun)
    repetitions: list[Repetition] = []
    most = max(MOST_REPETITIONS, plan.repetitions)
    for index in range(most):
        before_s = plan.limit.spent_s
        about = f"repetition {index + 1} of {plan.repetitions}"
        plan.tell(about if index < plan.repetitions else f"{about}, up to {most} until the time is known")
        found = _ask(process, plan, RepeatRequest(index, plan.time_scale))
        assert isinstance(found, Repetition)
        repetitions.append(found)
        enough = index + 1 >= plan.repetitions
        if enough and Measurement(plan, trial, repetitions, None).noise <= PRECISE:
            break
        if not plan.limit.allows(plan.limit.spent_s - before_s):
            _require_enough(plan, index + 1)
            break
    return Measurement(plan, trial, repetitions, meter.share())


def _require_enough(plan: MeasurementPlan, made: int) -> None:
    __tracebackhide__ = True
    if made < LEAST_REPETITIONS:
        raise Invalid(
            f"{plan.request.function.qualname} on {plan.device.id}: {made} repetitions in the "
            f"{plan.limit.seconds:g} s that --edgefl-limit allows, at least {LEAST_REPETITIONS} are needed"
        )


def _ask(process: MeasuringProcess, plan: MeasurementPlan, request: Request) -> TrialRun | Repetition:
    __tracebackhide__ = True
    answer = process.ask(request)
    if not isinstance(answer, Failure):
        return answer
    device, name, why = plan.device.id, plan.request.function.qualname, answer.why
    match answer.kind:
        case "memory":
            raise OutOfDeviceMemory(f"out of memory on {device}: {plan.device.app_limit_mib:g} MiB allowed")
        case "signal":
            raise NotMet(f"{name} on {device}: its process was ended by {why}")
        case "late":
            raise NotMet(f"{name} on {device}: not done after {why} s; limit_s= in the mark allows more")
        case _:
            raise NotMet(f"{name} failed on {device}:\n{why}")


def profile_sha256(device: Device, network: Network | None) -> str:
    """Return 16 hex digits of all figures of the device and its network, wherever their files lie."""
    plain = None if network is None else to_json(network)
    for way in (plain["down"], plain["up"]) if plain else ():
        if "trace" in way:
            way["trace"] = hashlib.sha256(Path(way["trace"]).read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps([to_json(device), plain], sort_keys=True).encode()).hexdigest()[:16]
