"""Functions that make networks, devices, trip plans and pacers for tests."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from edgefl.devices import load_device
from edgefl.devices.link import Link
from edgefl.devices.plan import TripPlan, plan_trip
from edgefl.devices.schema import Device, Direction, Network
from edgefl.host.pacing import Pacer

SOURCES = {"all": "a test"}


def network(header_bytes: int = 0, **way: Any) -> Network:
    direction = Direction(**way)
    return Network(id="t", name="t", down=direction, up=direction, header_bytes=header_bytes, sources=SOURCES)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def device(**fields: Any) -> Device:
    return msgspec.structs.replace(load_device("pixel-3a"), **fields)


def plan(of: Device, net: Network, generator: np.random.Generator, work_s: float = 2.0) -> TripPlan:
    return plan_trip(of, Link(net, generator), generator, 1_000_000, work_s, 500_000)


def paced(time_scale: float = 1.0) -> tuple[Pacer, list[int]]:
    """Return a pacer at the start of a trip, and a list with its clock's time in nanoseconds."""
    now = [0]

    def wait(deadline_ns: int) -> None:
        now[0] = max(now[0], deadline_ns)

    pacer = Pacer(time_scale=time_scale, wait=wait, clock=lambda: now[0])
    pacer.begin(0)
    return pacer, now
