"""Mahimahi's traces of packet delivery: one way of a link, a line of whole milliseconds for each 1504 bytes.

Read into a network that replays the trace; written for a network's constant rate, or as the trace that the
network replays itself. `synthetic` makes the traces that come with edgefl: of real links only the published
mean and coefficient of variation are in them.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist, fmean, pstdev
from typing import Any

import numpy as np

from edgefl.devices.imports import ImportOptions, ImportResult, profile_file, profile_name
from edgefl.devices.link import OPPORTUNITY_BYTES, Trace, read_trace
from edgefl.devices.schema import Direction, Network
from edgefl.errors import ProfileError

LONGEST_MS = 60_000
EXACT = 1e-4
"""A constant rate is written over the shortest whole period that gives it within this share."""


def read(path: Path, asked: ImportOptions) -> ImportResult:
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
    return ImportResult({file: text, **files}, tuple(f"{way}: {source}" for way, source in sources.items()))


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


def synthetic(mean_mbps: float, cv: float, seconds: int, seed: int) -> Trace:
    """A trace whose 1 s windows have that mean rate and coefficient of variation, and no more of a real one.

    The windows' rates are the log-normal distribution's quantiles at (i + ½) / ``seconds``, with the σ that
    gives these very quantiles the ``cv``, in an order shuffled by ``seed``; packets are even within a window.

    >>> trace = synthetic(5.0, 0.5, seconds=20, seed=1)
    >>> trace.period_ms, round(trace.rate_mbps, 2)
    (20000, 5.0)
    """
    normal = [NormalDist().inv_cdf((at + 0.5) / seconds) for at in range(seconds)]
    low, high = 0.0, 10.0
    while high - low > 1e-12:
        sigma = (low + high) / 2
        rates = [math.exp(sigma * z) for z in normal]
        low, high = (sigma, high) if pstdev(rates) / fmean(rates) < cv else (low, sigma)
    scale = mean_mbps * 1e6 / (8 * OPPORTUNITY_BYTES) / fmean(rates)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(seconds)
    at_ms: list[int] = []
    owed = 0.0
    for second, which in enumerate(order):
        owed += rates[which] * scale
        packets, owed = int(owed), owed - int(owed)
        at_ms += [second * 1000 + math.ceil((number + 1) * 1000 / packets) for number in range(packets)]
    at_ms[-1] = seconds * 1000
    return Trace(at_ms, seconds * 1000)


def trace_text(trace: Trace) -> str:
    """The trace as Mahimahi reads it."""
    return "".join(f"{at_ms}\n" for at_ms in trace.at_ms)
