"""Heating and throttling of a device that computes.

The model has one thermal resistance, one time constant, and throttling steps.

The temperature T follows a lumped model (one resistance R, one capacity τ/R)

    dT/dt = (T_ambient + P·R − T) / τ

with P = busy_w · speed² while the device computes and 0 otherwise. At a step's ``temp_c`` and above, the
device runs at the step's ``freq_scale``, so the speed is piecewise constant and T piecewise exponential; the
solution is exact. If a step's speed would cool the device and the previous step's speed would heat it, T
stays at the step, and the device alternates between both speeds so that its power keeps T there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from edgefl.devices.schema import Device

POWER_EXPONENT = 2.0
"""The power of computing is proportional to the speed raised to this exponent. The exponent would be 3 if the
voltage were proportional to the frequency. For frequencies above a third of the highest frequency, the
currents in Android's power profiles of Snapdragon 835 and 855 phones give exponents of 1.4 to 2.1."""


class Stretch(NamedTuple):
    """A part of a computation at constant speed."""

    at_s: float
    work_s: float
    """Work done before this stretch, in seconds at full speed."""
    temp_c: float
    speed: float
    power_w: float


class Computation(NamedTuple):
    """The course of a computation without pauses, as stretches of constant speed."""

    model: ThermalModel
    stretches: tuple[Stretch, ...]
    total_s: float
    """Emulated seconds that the work takes; infinite if the device switches off before the work is done."""
    off_s: float
    """Emulated seconds until the device switches off; infinite if it does not."""

    def seconds(self, work_s: float) -> float:
        """Return the emulated seconds until the first ``work_s`` of the work is done.

        Work is measured in seconds at full speed.
        """
        stretch = self.stretches[bisect_right(self.stretches, work_s, lo=1, key=lambda one: one.work_s) - 1]
        seconds = stretch.at_s + (work_s - stretch.work_s) / stretch.speed
        return seconds if seconds <= self.off_s else math.inf

    def speed(self, at_s: float) -> float:
        """Return the fraction of full speed at time ``at_s``."""
        return self._stretch(at_s).speed

    def temp_c(self, at_s: float) -> float:
        """Return the temperature at time ``at_s``."""
        stretch = self._stretch(at_s)
        return self.model.after(stretch.temp_c, stretch.power_w, at_s - stretch.at_s)

    def powers(self) -> list[tuple[float, float]]:
        """Return each stretch's duration in s and power in W, up to the end of the work or the switch-off."""
        last_s = min(self.total_s, self.off_s)
        ends_s = [*(min(stretch.at_s, last_s) for stretch in self.stretches[1:]), last_s]
        pairs = zip(self.stretches, ends_s, strict=True)
        return [(max(0.0, end_s - stretch.at_s), stretch.power_w) for stretch, end_s in pairs]

    def _stretch(self, at_s: float) -> Stretch:
        return next(stretch for stretch in reversed(self.stretches) if stretch.at_s <= max(0.0, at_s))


class ThermalModel(NamedTuple):
    """The thermal parameters of a device.

    >>> model = ThermalModel(25.0, 10.0, 60.0, 4.0, step_c=(45.0,), speeds=(1.0, 0.5))
    >>> round(model.after(25.0, 4.0, 60.0), 2)                   # 63% of the way from 25 to 65 °C
    50.28
    >>> work = model.compute(25.0, 100.0)
    >>> [(round(s.at_s, 2), round(s.temp_c, 2), round(s.speed, 4)) for s in work.stretches]
    [(0.0, 25.0, 1.0), (41.59, 45.0, 0.6667)]
    >>> round(work.total_s, 2)                                   # 41.59 + 58.41 / 0.6667
    129.21
    """

    ambient_c: float
    r_c_per_w: float
    tau_s: float
    busy_w: float
    step_c: tuple[float, ...]
    speeds: tuple[float, ...]
    """Fractions of full speed: 1.0 below the first throttling step, then the fraction at each step and
    above. The fractions never increase."""
    off_c: float = math.inf

    def power_w(self, speed: float) -> float:
        """Return the power of computing at this fraction of full speed, in watts."""
        return self.busy_w * float(speed**POWER_EXPONENT)

    def after(self, temp_c: float, power_w: float, seconds: float) -> float:
        """Return the temperature after ``seconds`` at constant power, starting from ``temp_c``."""
        settles_c = self.ambient_c + power_w * self.r_c_per_w
        return settles_c + (temp_c - settles_c) * math.exp(-seconds / self.tau_s)

    def cools_in_s(self, temp_c: float, to_c: float) -> float:
        """Return how many seconds the device must idle to cool from ``temp_c`` to ``to_c``.

        The result is infinite if the device never cools that far.
        """
        return 0.0 if temp_c <= to_c else self._reaches_s(temp_c, 0.0, to_c)

    def compute(self, temp_c: float, work_s: float) -> Computation:
        """Predict how a device at ``temp_c`` slows down during work of ``work_s`` seconds at full speed."""
        stretches: list[Stretch] = []
        at_s = done_s = 0.0
        while True:
            speed, power_w, edge_c = self._regime(temp_c)
            stretches.append(Stretch(at_s, done_s, temp_c, speed, power_w))
            lasts_s = self._reaches_s(temp_c, power_w, edge_c)
            left_s = (work_s - done_s) / speed
            if left_s <= lasts_s:
                return Computation(self, tuple(stretches), at_s + left_s, math.inf)
            at_s += lasts_s
            done_s += lasts_s * speed
            temp_c = edge_c
            if edge_c >= self.off_c:
                return Computation(self, tuple(stretches), math.inf, at_s)

    def _regime(self, temp_c: float) -> tuple[float, float, float]:
        """Return the speed and power at a temperature, and the temperature at which they change next."""
        step = bisect_right(self.step_c, temp_c)
        settles_c = self._settles_c(step)
        if settles_c >= temp_c:
            edge_c = self.step_c[step] if step < len(self.step_c) else math.inf
            return self.speeds[step], self.power_w(self.speeds[step]), min(edge_c, self.off_c)
        if step and temp_c == self.step_c[step - 1]:
            step -= 1
            if self._settles_c(step) > temp_c:  # the device alternates between the two speeds
                slow, fast = self.speeds[step + 1], self.speeds[step]
                power_w = (temp_c - self.ambient_c) / self.r_c_per_w
                slow_w, fast_w = self.power_w(slow), self.power_w(fast)
                share = (power_w - slow_w) / (fast_w - slow_w)
                return slow + share * (fast - slow), power_w, temp_c
        edge_c = self.step_c[step - 1] if step else -math.inf
        return self.speeds[step], self.power_w(self.speeds[step]), edge_c

    def _settles_c(self, step: int) -> float:
        return self.ambient_c + self.power_w(self.speeds[step]) * self.r_c_per_w

    def _reaches_s(self, temp_c: float, power_w: float, edge_c: float) -> float:
        """Return how many seconds at constant power it takes to get from ``temp_c`` to ``edge_c``.

        The result is infinite if the temperature never reaches ``edge_c``.
        """
        settles_c = self.ambient_c + power_w * self.r_c_per_w
        between = min(temp_c, settles_c) < edge_c < max(temp_c, settles_c)
        if not between:
            return math.inf
        return self.tau_s * math.log((settles_c - temp_c) / (settles_c - edge_c))


def thermal_model(device: Device) -> ThermalModel | None:
    """Return the device's thermal model; None if its profile lacks one of the parameters."""
    thermal, watts = device.thermal, device.busy_w
    if thermal is None or thermal.ambient_c is None or thermal.r_c_per_w is None:
        return None
    if thermal.tau_s is None or watts is None:
        return None
    return ThermalModel(
        thermal.ambient_c,
        thermal.r_c_per_w,
        thermal.tau_s,
        watts,
        tuple(trip.temp_c for trip in thermal.trips),
        (1.0, *(trip.freq_scale for trip in thermal.trips)),
        math.inf if thermal.off_c is None else thermal.off_c,
    )
