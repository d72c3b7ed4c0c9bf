"""The device as the measured function sees it: what a parameter named ``edge_device`` is given."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.devices.link import Disconnected, Link
from edgefl.devices.schema import Device, Network
from edgefl.errors import ConfigError
from edgefl.regression.device_clock import DeviceClock


class Phone:
    """One device with its link. A stand-in for it in other tests needs `name` and `send` only."""

    def __init__(self, device: Device, network: Network | None, rng: np.random.Generator) -> None:
        self._device = device
        self._network = network
        self._rng = rng
        self._clock: DeviceClock | None = None
        self.sent_bytes = 0

    def begin(self, clock: DeviceClock | None) -> None:
        """A call begins: nothing is sent yet. Without a clock nothing is waited for."""
        self._clock = clock
        self.sent_bytes = 0

    @property
    def name(self) -> str:
        """The profile's id."""
        return self._device.id

    def send(self, data: Any) -> float:
        """Send ``data`` (bytes, or anything that holds them: an array, a tensor) up the device's link.

        Takes what the link takes, and returns that in emulated seconds. TypeError for what holds no bytes;
        `Disconnected` if the link breaks.

        >>> from edgefl.devices import load_device, load_network
        >>> phone = Phone(load_device("pi-4"), load_network("defedavg-400"), np.random.default_rng(0))
        >>> round(phone.send(bytes(2_200_000)), 3), phone.sent_bytes
        (0.044, 2200000)
        """
        count = nbytes(data)
        if self._network is None:
            raise ConfigError(
                f"device {self.name!r} has no network to send over; name one: "
                f'@pytest.mark.edge_device("{self.name}", network="lte")'
            )
        at_s = self._clock.now_s() if self._clock is not None else 0.0
        transfer = Link(self._network, self._rng, at_s=at_s).up(count)
        if transfer.breaks_after is not None:
            raise Disconnected(transfer.broken)
        self.sent_bytes += count
        if self._clock is not None:
            self._clock.transfer(transfer.declared_s)
        return transfer.declared_s


def nbytes(data: Any) -> int:
    """Bytes that ``data`` holds. TypeError if it holds none.

    >>> nbytes(b"abc"), nbytes(np.zeros(4, np.float32))
    (3, 16)
    """
    try:
        with memoryview(data) as view:
            return view.nbytes
    except TypeError:
        count = getattr(data, "nbytes", None)  # a tensor that requires a gradient has no buffer
    if isinstance(count, int):
        return count
    raise TypeError(f"send() takes bytes, an array or a tensor (got {type(data).__name__})")
