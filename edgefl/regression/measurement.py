"""A function's metrics on one device, computed from its repetitions.

Bootstrap resamples are drawn from a random stream with a fixed seed, so that the same samples always give the
same bounds.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl.devices.energy import draw_of
from edgefl.devices.schema import Device, Network, to_json
from edgefl.errors import ProfileError
from edgefl.host.verdict import STEAL_MAX, STOLEN, exceeded
from edgefl.regression.process import PrepareRequest, Repetition, TrialRun
from edgefl.seeds import stream

MIB = 1 << 20
MIN_REPETITIONS = 9
NOISY = 0.03
"""A measurement is unreliable if half the width of the 90% interval of the median time exceeds this share of
the median."""
WAITED_MAX = 0.6
"""Maximum share of the time that the function may spend runnable but without a core."""
REFERENCE_CV_MAX = 0.30
"""Maximum coefficient of variation of the reference's CPU time between repetitions."""
RESAMPLES = 2000


class Interval(NamedTuple):
    """A median and the bounds of its bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width divided by the median; infinite if only the median is 0."""
        if self.high == self.low:
            return 0.0
        return round((self.high - self.low) / 2 / abs(self.median), 12) if self.median else math.inf


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the 90% bootstrap interval of the median (Efron 1979). Each bound is a one-sided 95% bound."""
    resamples = stream(0, "bootstrap", len(samples)).choice(samples, (RESAMPLES, len(samples)))
    low, high = np.quantile(np.median(resamples, axis=1), [0.05, 0.95])
    return Interval(statistics.median(samples), float(low), float(high))


class MeasurementPlan(NamedTuple):
    """The plan of a measurement: the device and its network, the request, and the number of repetitions."""

    device: Device
    network: Network | None
    request: PrepareRequest
    repetitions: int
    """Minimum number of repetitions; more are run if the times vary."""
    time_scale: float
    precise: bool = True
    """False if no precise time is needed: no repetitions are then added if times vary or are unreliable."""


@dataclass(frozen=True)
class Measurement:
    """The repetitions of one function on one device. Times are in emulated seconds, except for the CPU times
    of this host."""

    plan: MeasurementPlan
    trial: TrialRun
    repetitions: Sequence[Repetition]
    steal: float | None

    # Each repetition is represented by its fastest shot (a few calls that are timed together), because
    # interference adds time, but rarely to all shots.

    @cached_property
    def host_cpu_s(self) -> list[float]:
        """CPU time of a call on this host in seconds, for each repetition."""
        return [min(one.cpu_s) / self.trial.shots.calls for one in self.repetitions]

    @cached_property
    def reference_cpu_s(self) -> list[float]:
        """CPU seconds that a unit of the reference's work took on this host, for each repetition."""
        return [min(one.reference_cpu_s) / self.trial.shots.units for one in self.repetitions]

    @cached_property
    def cpu_s(self) -> list[float]:
        """Time of a call on the device for each repetition, if all its code is scaled like the reference.

        This is t_call / t_unit · d_unit + blocked time, where t_call and t_unit are the CPU times of a call
        and of a unit of the reference on this host, and d_unit is the unit's time on the device.
        """
        units_s = self.trial.reference_s * self.trial.shots.units / self.trial.shots.calls
        return [
            min(one.cpu_s) / min(one.reference_cpu_s) * units_s + one.blocked_s for one in self.repetitions
        ]

    @cached_property
    def seconds(self) -> list[float]:
        """Time of a call on the device, including blocked time and transfers.

        The time model gives the time of torch's work; the time of other code is measured.
        """
        return [
            self.trial.model_s + rest_s + one.blocked_s + one.radio_s
            for one, rest_s in zip(self.repetitions, self._rest_s, strict=True)
        ]

    @cached_property
    def _rest_s(self) -> list[float]:
        """Time on the device of a call's code outside torch, in seconds, for each repetition."""
        return [
            self._rest(one) * (cpu_s - one.blocked_s)
            for one, cpu_s in zip(self.repetitions, self.cpu_s, strict=True)
        ]

    def _rest(self, one: Repetition) -> float:
        """Return the time on the device of the code outside torch, divided by the time of the whole call if
        all its code is scaled like the reference (without blocked time)."""
        if not one.rest_cpu_s:
            return self.trial.rest
        reference_s = self.trial.reference_s * self.trial.shots.units
        slower = self.trial.rest_s / min(one.rest_cpu_s) * min(one.reference_cpu_s) / reference_s
        return self.trial.rest * slower

    @cached_property
    def peak_mib(self) -> list[float]:
        return [one.peak_mib for one in self.repetitions]

    @cached_property
    def sent_mib(self) -> list[float]:
        return [one.sent_bytes / MIB for one in self.repetitions]

    @cached_property
    def waited(self) -> float:
        """Median share of the time that the function spent runnable but without a core."""
        return statistics.median(one.waited for one in self.repetitions)

    @property
    def joules(self) -> list[float]:
        """Energy of each repetition, in joules. Raises ProfileError if the device's power is not known.

        Torch's operations are assumed to draw the power of all cores, and other code only the power of the
        fastest core.
        """
        device = self.plan.device
        if (draw := draw_of(device, self.plan.network)) is None:
            raise ProfileError(f"device {device.id!r} has no [battery], so its power is unknown")
        of_one_core = (device.fastest_core_w or 0.0) / draw.compute_w if draw.compute_w else 1.0
        joules = []
        for one, rest_s in zip(self.repetitions, self._rest_s, strict=True):
            energy = draw.energy(
                compute_s=self.trial.model_s + rest_s * of_one_core,
                upload_s=one.radio_s,
                idle_s=one.blocked_s + rest_s * (1 - of_one_core),
            )
            joules.append(energy.total_j)
        return joules

    def median(self, metric: str) -> float | None:
        """Return the median of a metric over the repetitions; None if the device's power is not known."""
        try:
            samples: list[float] = getattr(self, metric)
        except ProfileError:
            return None
        return statistics.median(samples)

    @property
    def pace(self) -> list[float]:
        """Ratio of the achieved to the declared time of each paced call; empty if pacing is off."""
        paced = self.repetitions if self.plan.time_scale else []
        return [one.achieved_s / one.declared_s for one in paced if one.declared_s > 0]

    @cached_property
    def noise(self) -> float:
        """Half the width of the 90% interval of the median CPU time, divided by the median."""
        return median_interval(self.cpu_s).half_width

    @cached_property
    def doubts(self) -> list[str]:
        """Reasons why the measurements are unreliable; empty if they are reliable."""
        cv = statistics.stdev(self.reference_cpu_s) / statistics.fmean(self.reference_cpu_s)
        after = f"after {len(self.repetitions)} repetitions"
        return [
            *exceeded(STOLEN, self.steal, STEAL_MAX),
            *exceeded("time that the function waited for a core", self.waited, WAITED_MAX),
            *exceeded(f"variation of the reference {self.trial.shots.reference}", cv, REFERENCE_CV_MAX),
            *exceeded(f"uncertainty of the median time {after}", self.noise, NOISY),
        ]


def profile_sha256(device: Device, network: Network | None) -> str:
    """Return a digest of the profiles of the median device and its network, as 16 hexadecimal digits."""
    plain = None if network is None else to_json(network)
    for way in (plain["down"], plain["up"]) if plain else ():
        if "trace" in way:
            way["trace"] = hashlib.sha256(Path(way["trace"]).read_bytes()).hexdigest()
    text = json.dumps([to_json(device.median()), plain], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
