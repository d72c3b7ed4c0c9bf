"""Energy used by computing and transfers, in joules, with a 90% interval.

    E = idle_w · (all seconds) + compute_w · computing + download_w · download + upload_w · upload

Power is the battery's voltage times the currents of the cores, the Wi-Fi and the modem, which the profile
takes from Android's power_profile.xml. If the network profile has the field ``radio``, the power measured for
this kind of radio is used instead (`METERED`). It is assumed that a radio draws power only during transfers
(not while it stays awake afterwards), that all cores compute and that the screen is off.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import msgspec

from edgefl.devices.link import mean_mbps
from edgefl.devices.schema import Device, Network, Radio
from edgefl.devices.time_model import joined
from edgefl.errors import ProfileError

UNSTATED_FACTOR: Final = 2.0
"""Error factor of a current whose uncertainty the profile does not give. With probability 90%, the true value
is within this factor of the value in the profile."""


class RadioPower(NamedTuple):
    """Power of a radio during transfers, in addition to the power of the idle phone.

    It is fitted to the readings of a power meter: P = ``down_w`` · exp(``down_growth`` · √Mbps) for
    downloads, and P = ``up_w`` for uploads at every rate, because the readings for uploads show no trend
    with the rate.
    """

    down_w: float
    down_growth: float
    up_w: float
    factor: float
    """90% of the readings at a location that was not used in the fit are within this factor of the fit."""

    def download_w(self, mbps: float) -> float:
        """Return the power of a download at this rate, in watts.

        >>> round(METERED["5g-low-band"].download_w(100.0), 2)
        2.59
        """
        return self.down_w * math.exp(self.down_growth * math.sqrt(mbps))


METERED: Final[dict[Radio, RadioPower]] = {
    "5g-low-band": RadioPower(2.222, 0.01548, 2.515, 1.28),
    "5g-mmwave": RadioPower(3.174, 0.02027, 5.114, 1.28),
}
"""Fits to the power of a Galaxy S20 Ultra, measured with a Monsoon meter, minus the power of the screen and
of the idle phone (SIGCOMM21-5G/artifact at 35aaf28): least squares on the logarithms of the medians in bins
of throughput, with equal weights. The median residual is 3% (low band) and 8% (mmWave). A fit to one of the
two mmWave locations predicts the power at the other with a median error of 12%, and with an error of 26% at
the 90th percentile. The low band was measured at only one location, so its `RadioPower.factor` is that of
mmWave."""


class Energy(NamedTuple):
    """Energy in joules for each use, and the 90% interval of the total energy."""

    idle_j: float
    compute_j: float
    download_j: float
    upload_j: float
    low_j: float
    high_j: float

    @property
    def total_j(self) -> float:
        """Total energy: the sum of the energies of the four uses."""
        return self.idle_j + self.compute_j + self.download_j + self.upload_j


class PowerDraw(msgspec.Struct, frozen=True, kw_only=True):
    """Power of a device on a network, in watts.

    The idle device draws ``idle_w``; the other powers are in addition to it.
    """

    idle_w: float
    compute_w: float
    download_w: float
    upload_w: float
    idle_factor: float = UNSTATED_FACTOR
    """Error factor of ``idle_w``: with probability 90%, the true value is within this factor. The next two
    fields are the error factors of ``compute_w`` and of the power of the radio."""
    compute_factor: float = UNSTATED_FACTOR
    radio_factor: float = UNSTATED_FACTOR

    def energy(
        self,
        *,
        compute_s: float = 0.0,
        download_s: float = 0.0,
        upload_s: float = 0.0,
        idle_s: float = 0.0,
        time_factor: float = 1.0,
    ) -> Energy:
        """Return the energy used in phases of these durations; the phases must not overlap.

        ``time_factor`` is the error factor of ``compute_s``: with probability 90%, the true time is within
        this factor. The errors of the idle power, the computing power, the computing time and the radio
        power are assumed to be independent.

        >>> draw = PowerDraw(idle_w=0.5, compute_w=4.0, download_w=1.0, upload_w=2.0)
        >>> found = draw.energy(compute_s=10.0, download_s=2.0, upload_s=1.0)
        >>> found.total_j, found.compute_j, found.low_j < found.total_j < found.high_j
        (50.5, 40.0, True)
        """
        idle_j = self.idle_w * (compute_s + download_s + upload_s + idle_s)
        compute_j = self.compute_w * compute_s
        download_j, upload_j = self.download_w * download_s, self.upload_w * upload_s
        total_j = idle_j + compute_j + download_j + upload_j
        kinds = (
            (idle_j, self.idle_factor),
            (compute_j, joined(self.compute_factor, time_factor)),
            (download_j + upload_j, self.radio_factor),
        )
        below = math.hypot(*(joules * (1.0 - 1.0 / factor) for joules, factor in kinds))
        above = math.hypot(*(joules * (factor - 1.0) for joules, factor in kinds))
        return Energy(idle_j, compute_j, download_j, upload_j, total_j - below, total_j + above)


def draw_of(device: Device, network: Network | None = None) -> PowerDraw | None:
    """Return the power of the device on ``network``; None if the device has no battery.

    If ``network`` is None, the device uses its mobile radio. Currents that the profile lacks are assumed to
    be 0. Raises `ProfileError` if the profile lacks the power that computing takes.

    >>> from edgefl.devices import load_device
    >>> draw = draw_of(load_device("pixel-4"))
    >>> round(draw.energy(compute_s=10.0).total_j, 1)
    56.8
    """
    battery, watts, volts = device.battery, device.busy_w, device.voltage_v
    if battery is None:
        return None
    if watts is None:
        needed = "give thermal.busy_w, or cpu.clusters with max_ma"
        raise ProfileError(f"device {device.id!r} does not give its power while computing: {needed}")
    stated = device.thermal is not None and device.thermal.busy_w is not None
    busy_w_key = "thermal.busy_w" if stated else "cpu.clusters"  # the figure that determines `Device.busy_w`
    bearer = "mobile" if network is None else network.bearer
    current = {"mobile": "radio_ma", "wifi": "wifi_ma", "wired": ""}[bearer]
    radio_w = (getattr(battery, current) or 0.0) * volts / 1e3 if current else 0.0
    download_w = upload_w = radio_w
    radio_factor = device.uncertainty_of(f"battery.{current}", UNSTATED_FACTOR)
    if network is not None and network.radio is not None:
        metered = METERED[network.radio]
        download_w, upload_w, radio_factor = (
            metered.download_w(mean_mbps(network.down) or 0.0),
            metered.up_w,
            metered.factor,
        )
    return PowerDraw(
        idle_w=(battery.idle_ma or 0.0) * volts / 1e3,
        compute_w=watts,
        download_w=download_w,
        upload_w=upload_w,
        idle_factor=device.uncertainty_of("battery.idle_ma", UNSTATED_FACTOR),
        compute_factor=device.uncertainty_of(busy_w_key, UNSTATED_FACTOR),
        radio_factor=radio_factor,
    )
