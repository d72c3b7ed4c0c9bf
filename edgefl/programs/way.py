"""Model of one direction of a phone's link, which computes when the bytes of a stream arrive.

A transmission (busy period) follows the model of a message in `edgefl.devices.link`. It begins when bytes
enter an idle link, and lasts as long as more bytes enter before the earlier ones are sent. Its duration is

    delay + jitter + wire_bytes·8/rate   (+ one round trip if a packet was lost)

where wire_bytes includes headers and lost packets, and jitter is drawn once per transmission. All connections
of a phone share the link.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from edgefl.devices.link import CHUNK_BYTES, Disconnected, delay_ms, mean_mbps, read_trace
from edgefl.devices.schema import Network

CHUNK_S = 0.02
"""Maximum time in seconds for which one connection may occupy the link while other connections wait."""


class Transmission:
    """A busy period in one direction of a link, and its measurements. Times are in emulated seconds."""

    def __init__(self, at_s: float, lead_s: float) -> None:
        self.began_s, self.lead_s = at_s, lead_s
        self.nbytes = self.packets = self.lost_packets = 0
        self.declared_s = 0.0
        """Time from the entry of the first byte to the arrival of the last byte."""
        self.on_its_way = 0
        """Number of parts that have not arrived yet."""
        self.achieved_s = 0.0
        self.held_up = False
        """True if the receiver delayed a delivery, so that the measured time exceeds that of the link."""


class LinkWay:
    """Model of one direction of one phone's link, without sockets or a clock.

    >>> from edgefl.devices import load_network
    >>> way = LinkWay(load_network("3g-slow"), "down", np.random.default_rng(0))
    >>> way.enter(1460, at_s=1.0).declared_s                 # 100 ms and 1500 bytes at 0.78 Mbps
    0.1153...
    >>> round(way.free_s, 4), round(way.due_s, 4)            # all bytes sent; all bytes arrived
    (1.0154, 1.1154)
    """

    def __init__(
        self, network: Network, name: Literal["down", "up"], rng: np.random.Generator, shift: float = 0.0
    ) -> None:
        self._network, self._rng = network, rng
        self._way = network.down if name == "down" else network.up
        self._trace = None if self._way.trace is None else read_trace(self._way.trace)
        self._shift_s = 0.0 if self._trace is None else shift * self._trace.period_ms / 1e3
        mbps = mean_mbps(self._way)
        self.bytes_per_s = math.inf if mbps is None else mbps * 1e6 / 8
        """Rate of the link, including headers; with a trace, its mean rate."""
        self.free_s = self.due_s = -math.inf
        """Times at which all bytes so far have been sent (``free_s``) and have arrived (``due_s``)."""
        self.busy_s = 0.0
        """Emulated seconds during which the link was sending bytes."""
        self.now: Transmission | None = None
        self.round_trip_s = (network.down.delay_ms + network.up.delay_ms) / 1e3

    @property
    def delay_s(self) -> float:
        """One-way delay without jitter."""
        return self._way.delay_ms / 1e3

    @property
    def jittered_s(self) -> float:
        """One-way delay plus the spread of its jitter."""
        return (self._way.delay_ms + self._way.jitter_ms) / 1e3

    @property
    def chunk_bytes(self) -> int:
        """Maximum number of bytes that a connection may send before other connections get a turn."""
        most = min(float(CHUNK_BYTES), self.bytes_per_s * CHUNK_S)
        return max(self._network.payload_bytes, int(most))

    def enter(self, nbytes: int, at_s: float) -> Transmission:
        """Send ``nbytes`` (at least 1) at time ``at_s``, which must not be earlier than in the last call.

        The bytes arrive at ``due_s``. Raises `Disconnected` if a packet is lost and the profile ends the
        connection on loss.
        """
        part = self.now
        if part is None or at_s > self.free_s:
            part = self.now = Transmission(at_s, delay_ms(self._way, self._rng) / 1e3)
        part.nbytes += nbytes
        new = -(-part.nbytes // self._network.payload_bytes) - part.packets
        part.packets += new
        self._lose(part, new)
        resent = part.lost_packets * min(self._network.mtu_bytes, part.nbytes + self._network.header_bytes)
        flows_s = self._takes_s(part, part.nbytes + part.packets * self._network.header_bytes + resent)
        before_s, self.free_s = max(self.free_s, part.began_s), part.began_s + flows_s
        self.busy_s += self.free_s - before_s
        self.due_s = max(self.due_s, self.free_s + part.lead_s)
        part.declared_s = self.due_s - part.began_s
        part.on_its_way += 1
        return part

    def _lose(self, part: Transmission, packets: int) -> None:
        """Draw the number of losses among ``packets`` new packets, and add it to the transmission."""
        chance = self._way.loss_pct / 100.0
        if not (chance and packets):
            return
        if self._way.on_loss == "disconnect":
            if int(self._rng.geometric(chance)) <= packets:
                self.now = None
                raise Disconnected("the link was lost")
            return
        lost = int(self._rng.negative_binomial(packets, 1.0 - chance))
        if lost and not part.lost_packets:
            part.lead_s += self.round_trip_s
        part.lost_packets += lost

    def _takes_s(self, part: Transmission, wire_bytes: int) -> float:
        if self._trace is None:
            return wire_bytes / self.bytes_per_s
        return self._trace.delivers_s(part.began_s + self._shift_s + part.lead_s, wire_bytes)
