"""Mahimahi's traces of packet delivery: one way of a link, a line of whole milliseconds for each 1504 bytes.

Read into a network that replays the trace; written for a network's constant rate, or as the trace that the
network replays itself.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from edgefl.emulation.schema import Direction, Network
from edgefl.emulation.trace import OPPORTUNITY_BYTES, Trace, read_trace
from edgefl.errors import ProfileError
from edgefl.interchange.asked import Asked
from edgefl.interchange.files import profile_name
from edgefl.interchange.made import Made, profile_file

LONGEST_MS = 60_000
EXACT = 1e-4
"""A constant rate is written over the shortest whole period that gives it within this share."""


def read(path: Path, asked: Asked) -> Made:
    """A network with the trace as its download and ``asked.up``, or the same trace, as its upload."""
    name = profile_name(asked.name or path.stem)
    files: dict[str, str] = {}
    ways: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for way, own in (("down", path), ("up", asked.up or path)):
        trace = read_trace(str(own))
        file = f"{name}-{way}.trace" if own != path or way == "down" else f"{name}-down.trace"
        files[file] = trace_text(trace)
        ways[way] = {"trace": file}
        mean = f"mean {trace.rate_mbps:.3g} Mbps over {trace.period_ms / 1e3:g} s"
        sources[way] = f"Mahimahi trace {own.name}, {mean}; it states no delay"
        if own == path and way == "up":
            sources[way] = f"assumed: as the download; {sources[way]}"
    file, text = profile_file(path, "networks", {"id": name, "name": name, **ways, "sources": sources})
    return Made({file: text, **files}, tuple(f"{way}: {source}" for way, source in sources.items()))


def write(network: Network, way: Direction) -> str:
    """The trace of one way of the network; ProfileError if it has no rate."""
    if way.trace is not None:
        return trace_text(read_trace(way.trace))
    if way.rate_mbps is None:
        raise ProfileError(f"network {network.id!r} is unlimited this way, which no trace can say")
    return trace_text(constant(way.rate_mbps))


def constant(rate_mbps: float) -> Trace:
    """The shortest trace of that rate.

    >>> constant(6.016).at_ms, constant(24.064).at_ms          # a packet in 2 ms, and in half of one
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
    """The trace as Mahimahi reads it."""
    return "".join(f"{at_ms}\n" for at_ms in trace.at_ms)
