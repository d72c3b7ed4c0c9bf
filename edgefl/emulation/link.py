"""A client's link in user space: real bytes, moved chunk by chunk at the network profile's rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from edgefl.emulation.pacing import Pacer, Spent
from edgefl.emulation.schema import Direction, Network

CHUNK_BYTES = 65536
"""Bytes between two waits: with 16 KiB a 400 Mbps link ran 3.7% slow, with 64 KiB 0.01%."""


class Transfer(NamedTuple):
    """One message over one direction of a link, decided before it moves."""

    nbytes: int
    """Payload: the bytes really copied."""
    wire_bytes: int
    """With packet headers and with the packets that are sent twice."""
    lost_packets: int
    lead_s: float
    """Before the first byte arrives: one-way delay, jitter and, after a loss, one round trip. Emulated s."""
    rate_bytes_per_s: float
    """Payload bytes per emulated second once they flow; ``inf`` on an unlimited link."""
    chunk_bytes: int

    @property
    def declared_s(self) -> float:
        """Emulated seconds from the first byte sent to the last byte received."""
        return self.lead_s + self.nbytes / self.rate_bytes_per_s


class Link:
    """The link of one client: a network profile and the stream its jitter and losses are drawn from.

    A transfer takes ``delay + jitter + wire_bytes·8/rate`` (+ one round trip if a packet was lost). Delay
    comes before the bytes and does not slow them: latency eats no bandwidth. A lost packet is never a lost
    message; it costs its bytes again.

    >>> from edgefl.emulation import load_network
    >>> link = Link(load_network("defedavg-400"), np.random.default_rng(0))
    >>> link.down(2_200_000).declared_s                       # 2.2 MB at 400 Mbps
    0.044
    """

    def __init__(self, network: Network, rng: np.random.Generator) -> None:
        self.network = network
        self._rng = rng

    def down(self, nbytes: int) -> Transfer:
        """Plan the download of ``nbytes``."""
        return self._plan(self.network.down, nbytes)

    def up(self, nbytes: int) -> Transfer:
        """Plan the upload of ``nbytes``."""
        return self._plan(self.network.up, nbytes)

    def _plan(self, way: Direction, nbytes: int) -> Transfer:
        if nbytes < 0:
            raise ValueError(f"nbytes must be at least 0 (got {nbytes})")
        network = self.network
        lead_s = self._delay_ms(way) / 1e3
        packets = -(-nbytes // network.payload_bytes)
        lost = 0
        if way.loss_pct and packets:
            # Sends until `packets` got through, minus those that did: negative binomial.
            lost = int(self._rng.negative_binomial(packets, 1.0 - way.loss_pct / 100.0))
        if lost:
            lead_s += (network.down.delay_ms + network.up.delay_ms) / 1e3
        wire = (
            nbytes
            + packets * network.header_bytes
            + lost * min(network.mtu_bytes, nbytes + network.header_bytes)
        )
        rate = math.inf
        if way.rate_mbps is not None and nbytes:
            rate = nbytes / (wire * 8 / (way.rate_mbps * 1e6))
        unpaced = math.isinf(rate)
        return Transfer(nbytes, wire, lost, lead_s, rate, max(1, nbytes) if unpaced else CHUNK_BYTES)

    def _delay_ms(self, way: Direction) -> float:
        match way.jitter_dist:
            case "none":
                return way.delay_ms
            case "normal":
                return max(0.0, way.delay_ms + float(self._rng.normal(0.0, way.jitter_ms)))
            case "uniform":
                return way.delay_ms + float(self._rng.uniform(-way.jitter_ms, way.jitter_ms))
            case "exponential":
                return way.delay_ms + float(self._rng.exponential(way.jitter_ms))


def move(pacer: Pacer, transfer: Transfer, copy: Callable[[int, int], None]) -> Spent:
    """Copy a message's real bytes at the link's pace: ``copy(start, stop)`` for each chunk, in order.

    Returns what it took in emulated seconds. Whatever ``copy`` or the pacer's wait raises passes through.
    """
    phase = pacer.phase(transfer.rate_bytes_per_s, transfer.lead_s)
    for start in range(0, transfer.nbytes, transfer.chunk_bytes):
        stop = min(start + transfer.chunk_bytes, transfer.nbytes)
        copy(start, stop)
        phase.done(stop - start)
    return phase.end()
