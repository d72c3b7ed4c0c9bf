"""Computes a client's condition (temperature and battery charge) over time, with pure functions.

A condition depends only on an earlier condition and on the plan of the trip in between. The client's process,
the server (with the wall clock or the virtual clock) and a resumed run therefore compute exactly the same
conditions.

    P = idle + busy (while computing) + radio (while transferring)         E = Σ P · seconds

Currents are drawn at the nominal voltage of the battery: W = mA · V / 1000, J = mAh · V · 3.6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from edgefl.devices.energy import draw_of
from edgefl.devices.plan import TripPlan
from edgefl.devices.schema import Device, Network
from edgefl.devices.thermal import ThermalModel

Cause = Literal["battery", "heat"]


class Condition(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A client's temperature and battery charge at the time ``at_s``.

    The time is in emulated seconds since the start of the run.
    """

    at_s: float
    temp_c: float = 0.0
    charge_j: float = 0.0
    low: bool = False
    """True if the battery has fallen to its minimum charge; the client works again at full charge."""
    off: bool = False
    """True if the device has switched itself off because of heat; it works again once it has cooled to its
    first throttling temperature."""

    @property
    def fit(self) -> bool:
        """True if the client can work."""
        return not (self.low or self.off)


class ConditionModel(NamedTuple):
    """A client's heat model and power model.

    A model is None if the profile lacks its parameters or if the experiment disables it.

    >>> model = ConditionModel(None, Power(1.0, 4.0, 0.5, 0.5, capacity_j=100.0, least_j=20.0, charge_w=10.0))
    >>> model.after_rest(model.initial(), 30.0)
    Condition(at_s=30.0, temp_c=0.0, charge_j=70.0, low=False, off=False)
    >>> model.after_rest(model.initial(), 81.0)                # low after 80 s, then charged with 10 W
    Condition(at_s=81.0, temp_c=0.0, charge_j=30.0, low=True, off=False)
    """

    thermal: ThermalModel | None
    power: Power | None

    def initial(self, charge: float = 1.0) -> Condition:
        """Return the condition at the start of a run, at ambient temperature.

        ``charge`` is the charge of the battery as a fraction of its capacity.
        """
        temp_c = 0.0 if self.thermal is None else self.thermal.ambient_c
        if self.power is None:
            return Condition(0.0, temp_c)
        charge_j = charge * self.power.capacity_j
        return Condition(0.0, temp_c, charge_j, low=charge_j <= self.power.least_j)

    def after_rest(self, before: Condition, at_s: float) -> Condition:
        """Return an idle client's condition at ``at_s``.

        The battery is recharged whenever it is low.
        """
        while (turn_s := self._turn_s(before)) <= at_s:
            assert self.power is not None
            charge_j = self.power.capacity_j if before.low else self.power.least_j
            drifted = self._drifted(before, turn_s)
            before = msgspec.structs.replace(drifted, charge_j=charge_j, low=not before.low)
        return self._drifted(before, at_s)

    def unfit_at_s(self, now: Condition) -> float:
        """Return the first time at which an idle client can no longer work; infinite if it always can."""
        return self._turn_s(now) if now.fit else now.at_s

    def fit_at_s(self, now: Condition) -> float:
        """Return the earliest time from now on at which the client can work; infinite if it never can."""
        while not now.fit:
            at_s = max(self._turn_s(now) if now.low else now.at_s, self._cool_s(now))
            if at_s == math.inf:
                return at_s
            now = self.after_rest(now, at_s)
        return now.at_s

    def _turn_s(self, now: Condition) -> float:
        """Return the time at which an idle client's battery becomes low or, while it is charged, full."""
        power = self.power
        if power is None:
            return math.inf
        joules = power.capacity_j - now.charge_j if now.low else now.charge_j - power.least_j
        watts = power.charge_w if now.low else power.idle_w
        return now.at_s + max(0.0, joules) / watts if watts > 0 else math.inf

    def _cool_s(self, now: Condition) -> float:
        """Return the time at which a device that switched off because of heat is cool enough to work."""
        if not now.off or self.thermal is None:
            return now.at_s
        return now.at_s + self.thermal.cools_in_s(now.temp_c, self.thermal.step_c[0])

    def _drifted(self, before: Condition, at_s: float) -> Condition:
        """Return the condition after idling until ``at_s``.

        The battery must not become low or full before this time.
        """
        seconds = at_s - before.at_s
        temp_c, charge_j = before.temp_c, before.charge_j
        if self.thermal is not None:
            temp_c = self.thermal.after(temp_c, 0.0, seconds)
        if self.power is not None:
            watts = self.power.charge_w if before.low and self.power.charge_w else -self.power.idle_w
            charge_j = min(max(0.0, charge_j + watts * seconds), self.power.capacity_j)
        return Condition(at_s, temp_c, charge_j, before.low, before.off and at_s < self._cool_s(before))

    def after_trip(
        self, before: Condition, plan: TripPlan, elapsed_s: float, because: Cause | None = None
    ) -> Condition:
        """Return the condition ``elapsed_s`` after a trip's start, or at the trip's end if that is earlier.

        ``before`` is the condition at the start of the trip, and ``because`` is the cause of an interruption.
        """
        elapsed_s = min(elapsed_s, plan.total_s)
        temp_c, charge_j = before.temp_c, before.charge_j
        low = before.low or because == "battery"
        if self.thermal is not None:
            temp_c = self._temp_c(self.thermal, temp_c, plan, elapsed_s)
        if self.power is not None:
            left_s = elapsed_s
            for seconds, watts in self._draws(self.power, plan):
                charge_j -= watts * min(left_s, seconds)
                left_s -= min(left_s, seconds)
            charge_j = max(0.0, charge_j)
            low = low or charge_j <= self.power.least_j
        return Condition(before.at_s + elapsed_s, temp_c, charge_j, low, before.off or because == "heat")

    def interruption(self, before: Condition, plan: TripPlan) -> tuple[float, Cause] | None:
        """Return how many seconds into its trip the client must stop, and why; None if it can finish."""
        found: tuple[float, Cause] | None = None
        if plan.heat is not None and plan.heat.off_s < plan.heat.total_s:
            found = plan.down_s + plan.compute_lead_s + plan.heat.off_s, "heat"
        if self.power is not None:
            left_j, elapsed_s = before.charge_j - self.power.least_j, 0.0
            for seconds, watts in self._draws(self.power, plan):
                if watts > 0 and left_j <= watts * seconds:
                    low_s = elapsed_s + max(0.0, left_j) / watts
                    return found if found is not None and found[0] <= low_s else (low_s, "battery")
                left_j -= watts * seconds
                elapsed_s += seconds
        return found

    def _temp_c(self, thermal: ThermalModel, temp_c: float, plan: TripPlan, elapsed_s: float) -> float:
        computing_s = elapsed_s - plan.down_s - plan.compute_lead_s
        if plan.heat is None or computing_s <= 0:  # without plan.heat the power of computing is unknown
            return thermal.after(temp_c, 0.0, elapsed_s)
        busy_s = min(computing_s, plan.heat.total_s)
        return thermal.after(plan.heat.temp_c(busy_s), 0.0, computing_s - busy_s)

    def _draws(self, power: Power, plan: TripPlan) -> Iterator[tuple[float, float]]:
        """Yield the duration in s and the power in W of each part of a trip, in chronological order."""
        rest_s = plan.tail_s if plan.rests else 0.0
        yield plan.down_s, power.idle_w + power.down_w
        if plan.heat is None:
            yield plan.compute_s - rest_s, power.idle_w + power.busy_w
        else:
            yield plan.compute_lead_s, power.idle_w + power.busy_w
            for seconds, watts in plan.heat.powers():
                yield seconds, power.idle_w + watts
        if rest_s:
            yield rest_s, power.idle_w
        yield plan.up_s, power.idle_w + power.up_w


class Power(NamedTuple):
    """Power of a device in each state, in watts, and the energy in its battery, in joules.

    The power for computing and for transfers is in addition to ``idle_w``.
    """

    idle_w: float
    busy_w: float
    down_w: float
    up_w: float
    capacity_j: float
    least_j: float
    """Charge below which the device accepts no work."""
    charge_w: float
    """Net charging power in watts; 0 if the profile does not state it."""


def power_of(device: Device, network: Network | None = None) -> Power | None:
    """Return the power model of a device on ``network``; None if the device has no battery.

    If ``network`` is None, the device uses its mobile radio. Raises `ProfileError` if the profile does not
    state the power that computing takes.
    """
    battery, draw = device.battery, draw_of(device, network)
    if battery is None or draw is None:
        return None
    capacity_j = battery.capacity_mah * device.voltage_v * 3.6
    return Power(
        draw.idle_w,
        draw.compute_w,
        draw.download_w,
        draw.upload_w,
        capacity_j,
        (battery.min_soc or 0.0) * capacity_j,
        battery.charge_w or 0.0,
    )
