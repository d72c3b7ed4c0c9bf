"""A function's figures on one device: repeated until they are known, or found not to be believable."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from edgefl.devices.condition import energy_j
from edgefl.devices.schema import Device, Network, to_json
from edgefl.errors import NotMet, OutOfDeviceMemory
from edgefl.limits.capacity import StealMeter
from edgefl.limits.fidelity import STEAL_MAX
from edgefl.regression import inference
from edgefl.regression.orders import Ended, Order, Ready, Repeat, Repetition
from edgefl.regression.process import MeasuringProcess, alone

MIB = 1 << 20
PRECISE = 0.0125
"""Half the width of the 90% interval of the median time, as a share of it, at which measuring ends."""
NOISY = 0.03
"""The same, above which the figures are not believed."""
MOST_REPETITIONS = 60
WAITED_MAX = 0.6
"""Share of the time in which the function could have run and had no core."""
REFERENCE_CV_MAX = 0.30
"""Of the reference's CPU time from repetition to repetition: above it this is no host to measure on."""


class Plan(NamedTuple):
    """How a function is measured."""

    device: Device
    network: Network | None
    order: Order
    repetitions: int
    """At least; more where they vary."""
    time_scale: float
    """Wall seconds per emulated second in each repetition's first call; 0 does not wait."""


class Measurement:
    """The repetitions of one function on one device. All seconds are emulated unless they say ``host``."""

    def __init__(self, plan: Plan, ready: Ready, repetitions: list[Repetition], steal: float | None) -> None:
        self.plan = plan
        self.device = plan.device
        self.ready = ready
        self.repetitions = repetitions
        self.steal = steal

    @property
    def model_s(self) -> float:
        """Counted FLOP over the device's rate: the same for every repetition."""
        return self.ready.flop / self.device.train_flop_per_s

    @cached_property
    def cpu_s(self) -> list[float]:
        """The CPU clock, with what the function was blocked: what a change is looked for in.

        cpu_s = (CPU time of a call / CPU time of the reference) · reference's FLOP / device's rate + blocked

        Of each the least of the repetition's shots: interference only adds time, and seldom to all of them.
        """
        unit_s = self.ready.reference_flop / self.device.train_flop_per_s
        shots = self.ready.against.units / self.ready.against.calls
        return [
            min(one.cpu_s) / min(one.reference_cpu_s) * shots * unit_s + one.blocked_s
            for one in self.repetitions
        ]

    @cached_property
    def seconds(self) -> list[float]:
        """Device time: the larger of both clocks, and the transfers."""
        return [
            max(self.model_s + one.blocked_s, cpu_s) + one.radio_s
            for one, cpu_s in zip(self.repetitions, self.cpu_s, strict=True)
        ]

    @property
    def peak_mib(self) -> list[float]:
        return [one.peak_mib for one in self.repetitions]

    @property
    def sent_mib(self) -> list[float]:
        return [one.sent_bytes / MIB for one in self.repetitions]

    @cached_property
    def joules(self) -> list[float]:
        """What each repetition takes from the battery. ProfileError where the profile does not say."""
        bearer = self.plan.network.bearer if self.plan.network is not None else "mobile"
        return [
            energy_j(
                self.device,
                compute_s=seconds - one.radio_s - one.blocked_s,
                radio_s=one.radio_s,
                idle_s=one.blocked_s,
                bearer=bearer,
            )
            for one, seconds in zip(self.repetitions, self.seconds, strict=True)
        ]

    @property
    def host_cpu_s(self) -> list[float]:
        """CPU seconds of this host that a call takes."""
        return [min(one.cpu_s) / self.ready.against.calls for one in self.repetitions]

    @property
    def reference_cpu_s(self) -> list[float]:
        """CPU seconds of this host that a unit of the reference takes."""
        return [min(one.reference_cpu_s) / self.ready.against.units for one in self.repetitions]

    @property
    def pace(self) -> list[float]:
        """Achieved over declared time of the paced calls; empty where they were not paced."""
        if not self.plan.time_scale:
            return []
        return [one.achieved_s / one.declared_s for one in self.repetitions if one.declared_s > 0]

    def reasons(self) -> Iterator[str]:
        """Why the figures cannot be believed, if they cannot."""
        if self.steal is not None and self.steal > STEAL_MAX:
            yield f"the hypervisor stole {self.steal:.1%} of the time, at most {STEAL_MAX:.0%} is allowed"
        waited = statistics.median(one.waited for one in self.repetitions)
        if waited > WAITED_MAX:
            yield (
                f"the host is overloaded: the function waited for a core {waited:.0%} of the time, at most "
                f"{WAITED_MAX:.0%} is allowed"
            )
        reference = self.reference_cpu_s
        cv = statistics.stdev(reference) / statistics.fmean(reference)
        if cv > REFERENCE_CV_MAX:
            yield (
                f"the reference {self.ready.against.reference} varied by {cv:.0%}, at most "
                f"{REFERENCE_CV_MAX:.0%} is allowed"
            )
        noise = self.noise
        if noise > NOISY:
            yield (
                f"too noisy: the median time is known to ±{noise:.1%} after {len(self.repetitions)} "
                f"repetitions, ±{NOISY:.0%} is needed"
            )

    @property
    def noise(self) -> float:
        """Half the width of the 90% interval of the median CPU clock, as a share of the median."""
        return inference.median_interval(self.cpu_s).half_width


def measure(process: MeasuringProcess, plan: Plan) -> Measurement:
    """Repeat until the median time is known to ±1.25%, at most 60 times, while no other test measures here.

    If what was found cannot be believed, measure once more: what was in the way may have passed.
    `OutOfDeviceMemory` if the function needs more memory than the device gives it, `NotMet` if it raises.
    """
    __tracebackhide__ = True
    with alone():
        measured = _measured(process, plan)
        return _measured(process, plan) if any(measured.reasons()) else measured


def _measured(process: MeasuringProcess, plan: Plan) -> Measurement:
    __tracebackhide__ = True
    meter = StealMeter()
    ready = process.prepare(plan.order)
    if isinstance(ready, Ended):
        raise _failure(plan, ready)
    repetitions: list[Repetition] = []
    while True:
        found = process.repeat(Repeat(len(repetitions), plan.time_scale))
        if isinstance(found, Ended):
            raise _failure(plan, found)
        repetitions.append(found)
        if len(repetitions) < plan.repetitions:
            continue
        measured = Measurement(plan, ready, repetitions, None)
        if measured.noise <= PRECISE or len(repetitions) >= max(MOST_REPETITIONS, plan.repetitions):
            return Measurement(plan, ready, repetitions, meter.share())


def profile_sha256(device: Device, network: Network | None) -> str:
    """16 hex digits of all figures of the device and its network, wherever their files lie."""
    figures = [to_json(device), None if network is None else _figures(network)]
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()[:16]


def _figures(network: Network) -> dict[str, Any]:
    """With what is in its traces for where they are."""
    plain = to_json(network)
    for way in (plain["down"], plain["up"]):
        if "trace" in way:
            way["trace"] = hashlib.sha256(Path(way["trace"]).read_bytes()).hexdigest()
    return plain


def _failure(plan: Plan, ended: Ended) -> NotMet:
    name = plan.order.function.qualname
    match ended.kind:
        case "memory":
            limit_mib = plan.device.app_limit_mib
            return OutOfDeviceMemory(f"out of memory on {plan.device.id}: {limit_mib:g} MiB allowed")
        case "signal":
            return NotMet(f"{name} on {plan.device.id}: its process was ended by {ended.why}")
        case "late":
            return NotMet(
                f"{name} on {plan.device.id}: not done after {ended.why} s; limit_s= in the mark allows more"
            )
        case "raised":
            return NotMet(f"{name} failed on {plan.device.id}:\n{ended.why}")
