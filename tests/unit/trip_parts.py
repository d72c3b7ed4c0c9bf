"""Links, devices and trips for the tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.devices import load_device
from edgefl.devices.link import Link
from edgefl.devices.plan import TripPlan, plan_trip
from edgefl.devices.schema import Device, Direction, Network

SOURCES = {"all": "a test"}


def network(header_bytes: int = 0, **way: Any) -> Network:
    direction = Direction(**way)
    return Network(id="t", name="t", down=direction, up=direction, header_bytes=header_bytes, sources=SOURCES)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def device(**fields: Any) -> Device:
    import msgspec

    return msgspec.structs.replace(load_device("pixel-3a"), **fields)


def plan(of: Device, net: Network, generator: np.random.Generator, flops: float = 3.5e9) -> TripPlan:
    return plan_trip(of, Link(net, generator), generator, 1_000_000, flops, 500_000)
