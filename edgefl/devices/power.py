"""What a device draws while it computes, transfers and idles, and what its battery holds.

    P = idle + busy (while computing) + radio (while transferring)         E = Σ P · seconds

Currents are at the battery's nominal voltage: W = mA · V / 1000, J = mAh · V · 3.6.
"""

from __future__ import annotations

from typing import NamedTuple

from edgefl.devices.schema import Bearer, Device
from edgefl.errors import ProfileError

NOMINAL_V = 3.85
"""Of a phone's lithium-ion cell, where the profile states no ``battery.voltage_v``."""


class Power(NamedTuple):
    """Watts, each on top of ``idle_w``, and joules."""

    idle_w: float
    busy_w: float
    """At full speed."""
    radio_w: float
    capacity_j: float
    least_j: float
    """The charge below which the device takes no work."""
    charge_w: float
    """Of its charger, net; 0 where the profile states none."""


def busy_w(device: Device) -> float | None:
    """Watts of computing at full speed, above idle; None where the profile does not say.

    ``thermal.busy_w``, else the currents of all cores at their highest frequency.

    >>> from edgefl.devices import load_device
    >>> busy_w(load_device("pixel-4"))
    5.66
    """
    if device.thermal is not None and device.thermal.busy_w is not None:
        return device.thermal.busy_w
    clusters = () if device.cpu is None else device.cpu.clusters
    if not clusters or any(cluster.max_ma is None for cluster in clusters):
        return None
    return sum(cluster.cores * (cluster.max_ma or 0.0) for cluster in clusters) / 1e3 * _voltage_v(device)


def power_of(device: Device, bearer: Bearer = "mobile") -> Power | None:
    """What the device draws and holds; None for one without a battery.

    A current that the profile leaves out is not drawn. `ProfileError` where it does not say what computing
    draws: that is most of it.
    """
    battery = device.battery
    if battery is None:
        return None
    watts, volts = busy_w(device), _voltage_v(device)
    if watts is None:
        raise ProfileError(
            f"device {device.id!r} does not say what computing draws: give thermal.busy_w, or "
            "cpu.clusters with max_ma"
        )
    capacity_j = battery.capacity_mah * volts * 3.6
    radio_ma = {"mobile": battery.radio_ma, "wifi": battery.wifi_ma, "wired": 0.0}[bearer]
    return Power(
        (battery.idle_ma or 0.0) * volts / 1e3,
        watts,
        (radio_ma or 0.0) * volts / 1e3,
        capacity_j,
        (battery.min_soc or 0.0) * capacity_j,
        battery.charge_w or 0.0,
    )


def energy_j(
    device: Device, *, compute_s: float, radio_s: float = 0.0, idle_s: float = 0.0, bearer: Bearer = "mobile"
) -> float:
    """Joules that a device takes for so many seconds of computing, of transfers and of neither.

    `ProfileError` where its profile has no battery or does not say what computing draws.

    >>> from edgefl.devices import load_device
    >>> round(energy_j(load_device("pixel-4"), compute_s=10.0), 1)
    56.8
    """
    power = power_of(device, bearer)
    if power is None:
        raise ProfileError(f"device {device.id!r} has no [battery], so what it draws is not known")
    seconds = compute_s + radio_s + idle_s
    return power.idle_w * seconds + power.busy_w * compute_s + power.radio_w * radio_s


def _voltage_v(device: Device) -> float:
    stated = None if device.battery is None else device.battery.voltage_v
    return NOMINAL_V if stated is None else stated
