"""Emulates a client's link in user space: copies real bytes in chunks at the network profile's rate.

A recorded link is replayed from a Mahimahi trace. This is a text file of ascending times in whole
milliseconds, one per line, at each of which one packet can be delivered. The trace repeats, and its last time
is the period (Winstein et al., NSDI 2013; mm-link(1)).
"""

from __future__ import annotations

import functools
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from edgefl.devices.schema import Direction, Network
from edgefl.errors import EdgeflError, ProfileError
from edgefl.files import read as read_file
from edgefl.host.pacing import Pacer, PhaseTime

# Bytes sent between two waits. A 400 Mbps link was 3.7% too slow with 16 KiB and 0.01% too slow with 64 KiB.
CHUNK_BYTES = 65536
ALIGN_BYTES = 256  # chunks start at multiples of this size
OPPORTUNITY_BYTES = 1504
"""Bytes that are delivered at each time in a trace: an Ethernet packet of 1500 bytes and Mahimahi's header of
4 bytes."""
MAX_BYTES = 64 << 20
LONGEST_MS = 60_000
EXACT = 1e-4  # relative error allowed when a constant rate is written as a periodic trace


class Disconnected(EdgeflError):
    """The link was lost in the middle of a message."""


class Transfer(NamedTuple):
    """One message in one direction of a link, planned before it is sent."""

    nbytes: int
    wire_bytes: int
    """Bytes including packet headers and retransmitted packets."""
    lost_packets: int
    lead_s: float
    """Emulated seconds until the first byte arrives: delay, jitter and, after a loss, a round trip."""
    rate_bytes_per_s: float
    """Payload bytes per emulated second after ``lead_s`` (the mean if a trace sets the rate); ``inf`` if
    unlimited."""
    chunk_bytes: int
    breaks_after: int | None = None
    """Payload bytes after which the connection is lost; None if it is not lost."""
    trace: Trace | None = None
    """Trace that sets the rate instead of ``rate_bytes_per_s``."""
    flows_at_s: float = 0.0
    """Time in the trace, in seconds, at which bytes start to flow."""

    @property
    def declared_s(self) -> float:
        """Emulated seconds from the first byte sent to the last byte received."""
        return self.lead_s + self.takes_s(self.nbytes)

    @property
    def breaks_s(self) -> float:
        """Emulated seconds from the first byte sent until the connection is lost; infinite if it never is."""
        return math.inf if self.breaks_after is None else self.lead_s + self.takes_s(self.breaks_after)

    @property
    def broken(self) -> str:
        """Description of how much of the message was transferred before the loss."""
        return f"the link was lost after {self.breaks_after} of {self.nbytes} bytes"

    def takes_s(self, nbytes: float) -> float:
        """Return the emulated seconds after ``lead_s`` until the first ``nbytes`` of payload are received."""
        if self.trace is None:
            return nbytes / self.rate_bytes_per_s
        return self.trace.delivers_s(self.flows_at_s, nbytes * self.wire_bytes / self.nbytes)


class Link:
    """The link of one client: a network profile and the random stream of its jitter and losses.

    A transfer takes ``delay + jitter + wire_bytes·8/rate`` (plus one round trip if a packet was lost). The
    rate is drawn for each message if the profile has a ``rate_cv``. A lost packet is sent again or, with
    ``on_loss = "disconnect"``, ends the connection. A trace is replayed from ``at_s``, the emulated time at
    which the trip starts, plus the fraction ``shift`` of the trace's period.

    >>> from edgefl.devices import load_network
    >>> link = Link(load_network("defedavg-400"), np.random.default_rng(0))
    >>> link.down(2_200_000).declared_s                       # 2.2 MB at 400 Mbps
    0.044
    """

    def __init__(
        self, network: Network, rng: np.random.Generator, at_s: float = 0.0, shift: float = 0.0
    ) -> None:
        self.network, self._rng, self._at_s, self._shift = network, rng, at_s, shift

    def down(self, nbytes: int) -> Transfer:
        """Plan the download of ``nbytes``."""
        return Message(self.network, "down", nbytes).transfer(self._rng, self._at_s, self._shift)

    def up(self, nbytes: int) -> Transfer:
        """Plan the upload of ``nbytes``."""
        return Message(self.network, "up", nbytes).transfer(self._rng, self._at_s, self._shift)


def delay_ms(way: Direction, rng: np.random.Generator) -> float:
    """Return the one-way delay, including random jitter, in emulated milliseconds."""
    jitter_ms = 0.0
    match way.jitter_dist:
        case "normal":
            jitter_ms = rng.normal(0.0, way.jitter_ms)
        case "uniform":
            jitter_ms = rng.uniform(-way.jitter_ms, way.jitter_ms)
        case "exponential":
            jitter_ms = rng.exponential(way.jitter_ms)
    return max(0.0, way.delay_ms + float(jitter_ms))


class _Rate(NamedTuple):
    """The distribution of a message's rate: mean · exp(deviation · N(0, 1) − half_variance)."""

    mean: float
    """Payload bytes per emulated second; ``inf`` if unlimited."""
    deviation: float = 0.0
    """Standard deviation of the rate's logarithm; 0 if the rate does not vary."""
    half_variance: float = 0.0

    def draw(self, rng: np.random.Generator) -> float:
        """Draw the rate of one transfer."""
        if not self.deviation:
            return self.mean
        return self.mean * math.exp(self.deviation * float(rng.standard_normal()) - self.half_variance)


class Message:
    """A message of ``nbytes`` in one direction of a network, which can be transferred any number of times.

    Values that are the same for all transfers are computed when the message is created. See `Link` for the
    duration of a transfer.
    """

    def __init__(self, network: Network, name: Literal["down", "up"], nbytes: int) -> None:
        way = network.down if name == "down" else network.up
        if nbytes < 0:
            raise ValueError(f"nbytes must be at least 0 (got {nbytes})")
        self._network, self._way, self._nbytes = network, way, nbytes
        self._packets = -(-nbytes // network.payload_bytes)
        self._wire_bytes = nbytes + self._packets * network.header_bytes
        self._mbps = mean_mbps(way) if nbytes else None
        self._chunk_bytes = max(1, nbytes) if self._mbps is None else CHUNK_BYTES
        self._trace = None if self._mbps is None or way.trace is None else read_trace(way.trace)
        self._loses = way.loss_pct > 0 and nbytes > 0
        self._rate = self._rate_of(self._wire_bytes)

    def transfer(self, rng: np.random.Generator, at_s: float = 0.0, shift: float = 0.0) -> Transfer:
        """Draw the delay, the losses and the rate of one transfer, in this order."""
        way, trace, rate, wire, lost = self._way, self._trace, self._rate, self._wire_bytes, 0
        lead_s, breaks_after = delay_ms(way, rng) / 1e3, None
        if self._loses:
            network, packets, chance = self._network, self._packets, way.loss_pct / 100.0
            if way.on_loss == "disconnect":
                arrived = int(rng.geometric(chance)) - 1
                breaks_after = arrived * network.payload_bytes if arrived < packets else None
            else:
                # The number of losses before `packets` packets have arrived is negative binomial.
                lost = int(rng.negative_binomial(packets, 1.0 - chance))
            if lost:
                lead_s += (network.down.delay_ms + network.up.delay_ms) / 1e3
                wire += lost * min(network.mtu_bytes, self._nbytes + network.header_bytes)
                rate = self._rate_of(wire)
        bytes_per_s, flows_at_s = rate.draw(rng), 0.0
        if trace is not None:
            flows_at_s = at_s + shift * trace.period_ms / 1e3 + lead_s
        return Transfer(
            self._nbytes, wire, lost, lead_s, bytes_per_s, self._chunk_bytes, breaks_after, trace, flows_at_s
        )

    def _rate_of(self, wire_bytes: int) -> _Rate:
        """Return the distribution of the payload rate if ``wire_bytes`` are sent in total."""
        if self._mbps is None:
            return _Rate(math.inf)
        seconds = wire_bytes * 8 / (self._mbps * 1e6)
        variance = math.log1p(self._way.rate_cv**2 / max(1.0, seconds))
        return _Rate(self._nbytes / seconds, math.sqrt(variance), variance / 2)


def mean_mbps(way: Direction) -> float | None:
    """Return the rate of this direction in 10⁶ bit/s (the mean rate of a trace); None if it is unlimited."""
    return way.rate_mbps if way.trace is None else read_trace(way.trace).rate_mbps


def move(pacer: Pacer, transfer: Transfer, copy: Callable[[int, int], None]) -> PhaseTime:
    """Copy a message's real bytes at the link's rate: call ``copy(start, stop)`` when a chunk is due.

    Raises `Disconnected` if the connection is lost; exceptions from ``copy`` or the pacer's wait propagate.
    """
    end = transfer.nbytes if transfer.breaks_after is None else transfer.breaks_after
    takes, start, step = None if transfer.trace is None else transfer.takes_s, 0, transfer.chunk_bytes
    phase = pacer.phase(transfer.rate_bytes_per_s, transfer.lead_s, takes)
    phase.lead()
    while end - start > step:
        copy(start, start + step)
        phase.done(step)
        start += step
    if end:
        copy(start, end)
    spent = phase.end(end - start)
    if transfer.breaks_after is not None:
        raise Disconnected(transfer.broken)
    return spent


class Trace(NamedTuple):
    """Times of packet deliveries in one period, and the period's length.

    >>> trace = Trace((1, 1, 4), 4)                       # 3 packets in each 4 ms
    >>> [round(trace.delivers_s(0.0, n * 1504) * 1e3) for n in (1, 2, 3, 4, 6)]
    [1, 1, 4, 5, 8]
    """

    at_ms: Sequence[int]
    period_ms: int

    @property
    def rate_mbps(self) -> float:
        """The mean rate, in 10⁶ bit/s."""
        return len(self.at_ms) * OPPORTUNITY_BYTES * 8 / (self.period_ms * 1e3)

    def delivers_s(self, start_s: float, nbytes: float) -> float:
        """Return the seconds from ``start_s`` until ``nbytes`` are delivered; 0 if ``nbytes`` is 0."""
        packets = math.ceil(nbytes / OPPORTUNITY_BYTES * (1.0 - 1e-12))
        if packets <= 0:
            return 0.0
        turn, phase_ms = divmod(start_s * 1e3, self.period_ms)
        more, at = divmod(bisect_left(self.at_ms, phase_ms) + packets - 1, len(self.at_ms))
        return max(0.0, ((turn + more) * self.period_ms + self.at_ms[at]) / 1e3 - start_s)


@functools.cache
def read_trace(path: str) -> Trace:
    """Read a trace from a file. Raises a one-line `ProfileError` if it is invalid."""
    try:
        text = read_file(path, MAX_BYTES).decode("ascii")
    except (OSError, ValueError) as error:
        why = "not text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", error)
        raise ProfileError(f"trace {path!r} cannot be read: {why}") from None
    lines = text.split()
    if not lines:
        raise ProfileError(f"trace {path!r} must have at least one line")
    times_ms = array("q")
    for number, line in enumerate(lines, start=1):
        at_ms = int(line) if line.isdecimal() and len(line) < 16 else -1
        if at_ms < (times_ms[-1] if times_ms else 0):
            allowed = "ascending whole milliseconds"
            raise ProfileError(f"trace {path!r}, line {number}: got {line[:40]!r}; allowed: {allowed}")
        times_ms.append(at_ms)
    if times_ms[-1] < 1:
        raise ProfileError(f"trace {path!r}: the last time must be at least 1 ms (got {times_ms[-1]})")
    return Trace(times_ms, times_ms[-1])


def constant_trace(rate_mbps: float) -> Trace:
    """Return the shortest trace with this rate.

    >>> constant_trace(6.016).at_ms, constant_trace(24.064).at_ms    # a packet per 2 ms, two per ms
    ((2,), (1, 1))
    """
    per_ms = rate_mbps * 1e3 / (8 * OPPORTUNITY_BYTES)
    for period_ms in range(max(1, math.ceil(0.5 / per_ms)), LONGEST_MS + 1):
        packets = round(per_ms * period_ms)
        if abs(packets / (per_ms * period_ms) - 1) <= EXACT:
            at_ms = tuple(math.ceil(number * period_ms / packets) for number in range(1, packets + 1))
            return Trace(at_ms, period_ms)
    raise ProfileError(f"a rate of {rate_mbps:g} Mbps is too low for a trace of {LONGEST_MS / 1e3:g} s")


def trace_text(trace: Trace) -> str:
    """Return the trace as the text of a Mahimahi file."""
    return "".join(f"{at_ms}\n" for at_ms in trace.at_ms)
