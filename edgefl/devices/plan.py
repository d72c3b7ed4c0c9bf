"""Plans a client's whole trip before it starts, so that both clocks (wall and virtual) use the same times."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from edgefl.devices.link import Link, Transfer
from edgefl.devices.schema import Device
from edgefl.devices.thermal import Computation, ThermalModel
from edgefl.host.pacing import Pacer, Phase


class End(NamedTuple):
    """Limits on the training in a trip, which replace the limits in the experiment's ``[training]``."""

    budget_s: float = math.inf
    """Emulated seconds from the receipt of the task until the client stops training and starts its upload."""
    steps: int | None = None


WHOLE = End()
"""No limits other than those in the experiment."""


class TripPlan(NamedTuple):
    """One download, one local training and one upload. All seconds are emulated."""

    down: Transfer
    work_s: float
    """Training time at the device's full speed, according to its time model."""
    compute_lead_s: float
    """Time before the training: masking time plus, on a trip without training, the delay model's draw."""
    compute_rate_per_s: float
    """Seconds of ``work_s`` that are done per emulated second. The value is 1 unless random scatter or a
    delay model changes the training time, and ``inf`` if the training takes no time."""
    up: Transfer
    steps: int | None = None
    """Number of training steps if it differs from the experiment's number; otherwise None."""
    tail_s: float = 0.0
    """Time from the end of the last step until the time budget of the trip is used up; see ``rests``."""
    heat: Computation | None = None
    """Course of the training if the device heats up and throttles, else None. For such a device,
    ``compute_rate_per_s`` is the speed without throttling."""
    dies_s: float = math.inf
    """Seconds from the start of the trip until the client's process is killed; infinite if it never is."""
    rests: bool = False
    """True if all steps are done and the client idles during ``tail_s``; False if it then computes a step
    that it cannot finish."""

    @property
    def down_s(self) -> float:
        return self.down.declared_s

    @property
    def compute_s(self) -> float:
        return self.compute_lead_s + self._takes_s(self.work_s) + self.tail_s

    @property
    def busy_s(self) -> float:
        """Seconds of computing at full power that use as much energy as this trip's computing.

        A throttled device draws less power. A device that rests after its last step draws no power for
        computing.
        """
        if self.heat is not None:
            joules = sum(seconds * watts for seconds, watts in self.heat.powers())
            return self.compute_lead_s + joules / self.heat.model.busy_w
        return self.compute_lead_s + self._takes_s(self.work_s) if self.rests else self.compute_s

    def _takes_s(self, work_s: float) -> float:
        cool_s = work_s / self.compute_rate_per_s
        return cool_s if self.heat is None else self.heat.seconds(cool_s)

    @property
    def up_s(self) -> float:
        return self.up.declared_s

    @property
    def total_s(self) -> float:
        return self.down_s + self.compute_s + self.up_s

    @property
    def breaks_s(self) -> float:
        """Seconds from the start of the trip until the link is lost, which also ends the task.

        The value is infinite if the link is not lost.
        """
        if self.down.breaks_after is not None:
            return self.down.breaks_s
        if self.up.breaks_after is None:
            return math.inf
        return self.down_s + self.compute_s + self.up.breaks_s

    def over_s(self, *, private: bool) -> float:
        """Return the seconds from the start of the trip until the server considers it over.

        Unless it is cancelled or the client dies, a trip is over when its update arrives or its link breaks.
        If ``private`` (in a run with ``[privacy]``), a trip that fails for any reason is over when its update
        would have arrived.
        """
        return self.total_s if private else min(self.total_s, self.breaks_s)

    @property
    def broken(self) -> str:
        """Description of how much of the message is transferred before the link is lost."""
        return (self.down if self.down.breaks_after is not None else self.up).broken

    def compute(self, pacer: Pacer) -> Phase:
        """Return the pacer's phase for the training steps of this trip.

        `tail_s` is a separate phase without work.
        """
        takes = None if self.heat is None else self._takes_s
        return pacer.phase(self.compute_rate_per_s, self.compute_lead_s, takes)

    def scattered(self, scatter: float) -> TripPlan:
        """Return this trip with its training time multiplied by ``scatter``.

        The plan must include training. It must not have a heat model, and its upload must not replay a trace.
        """
        return self._replace(compute_rate_per_s=self.compute_rate_per_s / scatter)

    def delayed(self, seconds: float) -> TripPlan:
        """Return this trip with ``seconds`` of additional computation before the training."""
        up = self.up if self.up.trace is None else self.up._replace(flows_at_s=self.up.flows_at_s + seconds)
        return self._replace(compute_lead_s=self.compute_lead_s + seconds, up=up)

    def within(self, budget_s: float, steps_s: Iterable[float]) -> TripPlan:
        """Return this trip with shortened training: its upload starts ``budget_s`` after the task's receipt.

        The device completes only the steps that it can finish by then; ``steps_s`` are the durations of all
        steps at full speed. The download is not shortened.

        >>> from edgefl.devices import load_device, load_network
        >>> rng = np.random.default_rng(0)
        >>> whole = plan_trip(load_device("pi-4"), Link(load_network("none"), rng), rng, 0, 50.0, 0)
        >>> short = whole.within(whole.compute_s * 0.5, [10.0] * 5)
        >>> short.steps, short.work_s, round(short.total_s / whole.total_s, 9)
        (2, 20.0, 0.5)
        """
        room_s = budget_s - self.down_s - self.compute_lead_s
        # Rounding must not exclude a step that ends exactly when the budget does.
        last_s = room_s + 1e-9 * max(1.0, abs(budget_s))
        steps, work_s, rests = 0, 0.0, True
        for step_s in steps_s:
            if self._takes_s(work_s + step_s) > last_s:
                rests = False
                break
            steps, work_s = steps + 1, work_s + step_s
        busy_s = self._takes_s(work_s)
        tail_s = max(0.0, room_s - busy_s)
        lead_s = max(0.0, min(self.compute_lead_s, budget_s - self.down_s))
        heat = None if self.heat is None else self.heat._replace(total_s=busy_s + (0.0 if rests else tail_s))
        cut = self._replace(
            work_s=work_s, compute_lead_s=lead_s, steps=steps, tail_s=tail_s, heat=heat, rests=rests
        )
        if self.up.trace is None:
            return cut
        # If training never ends, `plan_trip` schedules the upload at the start of the trip.
        later_s = cut.compute_s - self.compute_s if self.compute_s < math.inf else self.down_s + cut.compute_s
        return cut._replace(up=self.up._replace(flows_at_s=self.up.flows_at_s + later_s))


def plan_trip(
    device: Device,
    link: Link,
    rng: np.random.Generator,
    down_bytes: int,
    work_s: float,
    up_bytes: int,
    thermal: tuple[ThermalModel, float] | None = None,
    examples: int = 1,
    scatter: float = 1.0,
) -> TripPlan:
    """Plan one trip: a download, training that takes ``work_s`` at the device's full speed, and an upload.

    ``link`` and ``rng`` should draw from a stream that is named after the client *and* its trip, so that
    every process makes the same plan. The order of draws is: download, upload, delay model. A delay model
    draws a time, given ``examples``, the client's number of examples. With ``mode = "replace"``, this is the
    time of the whole trip: the transfers take no time, and the training is stretched to the drawn time. With
    ``mode = "add"``, the drawn time is added to the training time.

    ``thermal`` is the device's thermal model and its temperature in °C at the start of the trip. The device
    cools during the download, and may throttle as it heats up during training. ``scatter`` multiplies the
    training time, unless a delay model replaces it.

    >>> from edgefl.devices import load_device, load_network
    >>> rng = np.random.default_rng(0)
    >>> device = load_device("paper-exponential")
    >>> link = Link(load_network("defedavg-400"), rng)
    >>> plan = plan_trip(device, link, rng, down_bytes=2_200_000, work_s=1.0, up_bytes=2_200_000)
    >>> plan.down_s, plan.compute_s == plan.total_s  # the delay is that of the whole trip
    (0.0, True)
    """
    if not (work_s >= 0 and math.isfinite(work_s)):
        raise ValueError(f"work_s must be finite and at least 0 (got {work_s})")
    compute_s, model, replaced = work_s * scatter, device.delay_model, device.timed_by_draw
    if not replaced or link.network.draws:
        down, up = link.down(down_bytes), link.up(up_bytes)
    if model is not None:
        drawn_s = model.draw(rng, examples)
        compute_s = drawn_s if replaced else compute_s + drawn_s
    if replaced:
        down, up = (Transfer(size, 0, 0, 0.0, math.inf, max(1, size)) for size in (down_bytes, up_bytes))
    if work_s > 0 and compute_s > 0:
        heat = None
        if thermal is not None and (model is None or model.mode == "add"):
            body, temp_c = thermal
            heat = body.compute(body.after(temp_c, 0.0, down.declared_s), compute_s)
        plan = TripPlan(down, work_s, 0.0, work_s / compute_s, up, heat=heat)
    else:
        plan = TripPlan(down, work_s, compute_s, math.inf, up)
    if up.trace is None or plan.compute_s == math.inf:
        return plan
    return plan._replace(up=up._replace(flows_at_s=up.flows_at_s + plan.down_s + plan.compute_s))
