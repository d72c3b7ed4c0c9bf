"""The very device and link of each client, read once a process, and the trips that they make."""

from __future__ import annotations

import functools

from edgefl.control import ClientInfo
from edgefl.emulation import Device, load_device, load_network
from edgefl.emulation.link import Link
from edgefl.emulation.plan import TripPlan, plan_trip
from edgefl.seeds import stream

network_of = functools.cache(load_network)
_profile = functools.cache(load_device)


def device_of(seed: int, client: int, profile: str) -> Device:
    """The device of one client: profiles whose devices differ draw theirs from the client's own stream."""
    return _profile(profile).individual(stream(seed, "device", client))


def trip_of(seed: int, info: ClientInfo, trip: int, down_bytes: int, flops: float, up_bytes: int) -> TripPlan:
    """One trip of a client, in emulated seconds; the same whichever process asks, and how often."""
    rng = stream(seed, "trip", info.client, trip)
    link = Link(network_of(info.network), rng)
    return plan_trip(device_of(seed, info.client, info.profile), link, rng, down_bytes, flops, up_bytes)
