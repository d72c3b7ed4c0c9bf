"""The very device and link of each client, read once a process."""

from __future__ import annotations

import functools

from edgefl.emulation import Device, load_device, load_network
from edgefl.seeds import stream

network_of = functools.cache(load_network)
_profile = functools.cache(load_device)


def device_of(seed: int, client: int, profile: str) -> Device:
    """The device of one client: profiles whose devices differ draw theirs from the client's own stream."""
    return _profile(profile).individual(stream(seed, "device", client))
