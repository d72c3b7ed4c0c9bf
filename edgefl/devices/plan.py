"""A client's whole trip, decided before it starts: the same numbers drive both clocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from edgefl.devices.link import Link, Transfer
from edgefl.devices.schema import Device
from edgefl.devices.thermal import Computation, ThermalModel
from edgefl.limits.pacing import Pacer, Phase


class End(NamedTuple):
    """The end of a trip's training, where it is another than the experiment's ``[training]`` has."""

    budget_s: float = math.inf
    """Emulated seconds from the receipt of the task after which the client sends what it has."""
    steps: int | None = None


WHOLE = End()
"""Training as the experiment has it."""


class TripPlan(NamedTuple):
    """One download, one local training and one upload. All seconds are emulated."""

    down: Transfer
    work_s: float
    """Training at the device's full speed, as its time model has it."""
    compute_lead_s: float
    """Before computing starts; above 0 only where there is no work to stretch a delay over."""
    compute_rate_per_s: float
    """Seconds of ``work_s`` done in an emulated second: 1 unless the time is drawn; ``inf`` is unpaced."""
    up: Transfer
    steps: int | None = None
    """Training steps, where they are others than the experiment asks for."""
    tail_s: float = 0.0
    """After the last of these steps, until the trip's budget is over: see ``rests``."""
    heat: Computation | None = None
    """The training of a device that gets hot and slow; ``compute_rate_per_s`` is then its full speed."""
    dies_s: float = math.inf
    """Seconds into the trip until the client's process is killed."""
    rests: bool = False
    """It made every step and idles for ``tail_s``; else it computes a step that it does not finish in it."""

    @property
    def down_s(self) -> float:
        return self.down.declared_s

    @property
    def compute_s(self) -> float:
        return self.compute_lead_s + self._takes_s(self.work_s) + self.tail_s

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
        """Seconds into the trip until the link is lost, and the task with it; infinite if it holds."""
        if self.down.breaks_after is not None:
            return self.down.breaks_s
        if self.up.breaks_after is None:
            return math.inf
        return self.down_s + self.compute_s + self.up.breaks_s

    @property
    def broken(self) -> str:
        """A line that says how far the message gets at which the link is lost."""
        return (self.down if self.down.breaks_after is not None else self.up).broken

    def compute(self, pacer: Pacer) -> Phase:
        """The pacer's phase for this trip's steps; `tail_s` is another, without work."""
        takes = None if self.heat is None else self._takes_s
        return pacer.phase(self.compute_rate_per_s, self.compute_lead_s, takes)

    def scattered(self, scatter: float) -> TripPlan:
        """This trip with a training that takes ``scatter`` times as long.

        For a plan whose training has work, no heat, and no upload over a trace.
        """
        return self._replace(compute_rate_per_s=self.compute_rate_per_s / scatter)

    def within(self, budget_s: float, steps_s: Iterable[float]) -> TripPlan:
        """This trip for a device that uploads what it has ``budget_s`` after it was given the task.

        It makes the steps, of ``steps_s`` at full speed each, that it finishes by then; a download is not cut
        short.

        >>> from edgefl.devices import load_device, load_network
        >>> rng = np.random.default_rng(0)
        >>> whole = plan_trip(load_device("pi-4"), Link(load_network("none"), rng), rng, 0, 50.0, 0)
        >>> short = whole.within(whole.compute_s * 0.5, [10.0] * 5)
        >>> short.steps, short.work_s, round(short.total_s / whole.total_s, 9)
        (2, 20.0, 0.5)
        """
        room_s = budget_s - self.down_s - self.compute_lead_s
        # A step that ends with the budget counts, whatever the rounding of its sums.
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
        # `plan_trip` leaves the upload after a training that never ends where the trip begins.
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
    """Plan one trip: training of ``work_s`` at the device's full speed between messages of so many bytes.

    ``link`` and ``rng`` should draw from a stream named by the client *and* its trip, so that every process
    plans the same. Draws are made in this order: download, upload, delay model. One with ``mode = "replace"``
    sets the whole trip's time, for a client with so many ``examples``: transfers take none, and the training
    is stretched to the draw; ``mode = "add"`` lengthens the training. ``thermal`` is the device's thermal
    model and its temperature, °C, when the trip starts: it cools during the download, and training takes
    longer the hotter it gets. ``scatter`` multiplies the time of the training, where no draw replaces it.

    >>> from edgefl.devices import load_device, load_network
    >>> rng = np.random.default_rng(0)
    >>> device = load_device("paper-exponential")
    >>> link = Link(load_network("defedavg-400"), rng)
    >>> plan = plan_trip(device, link, rng, down_bytes=2_200_000, work_s=1.0, up_bytes=2_200_000)
    >>> plan.down_s, plan.compute_s == plan.total_s  # its delay is the whole trip's
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
