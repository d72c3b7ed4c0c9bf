"""Links that are made up to be measured: rates from 1 to 400 Mbps, delays, jitter of each kind, loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from edgefl.lab import fidelity_bars as bars
from edgefl.lab.exercise import Exercise
from edgefl.lab.fidelity_bars import Line
from edgefl.lab.fidelity_runs import EACH, Floats, Played, Way, trial

SLOW_PARAMETERS = 62_500
"""A quarter of a megabyte each way: two seconds at 1 Mbps."""
FAST_PARAMETERS = 1_000_000
COMPUTE_S, FAST_COMPUTE_S = 0.02, 0.1
LOSSY = {"loss-1": (5.0, 1.0), "loss-5": (5.0, 5.0)}
"""Mbps and packets lost on the way up, %."""
JITTER = {"normal": (50.0, 10.0), "uniform": (40.0, 20.0), "exponential": (30.0, 10.0)}
"""One-way delay and its spread on the way up, ms."""
MTU_BYTES, HEADER_BYTES = 1500, 40


class Plain(NamedTuple):
    """A link without jitter and loss: its rate both ways, and a delay one way."""

    rate_mbps: float
    delayed: Literal["down", "up"]
    delay_ms: float

    @property
    def ways(self) -> dict[str, Way]:
        """Both directions."""
        delays = {"down": 0.0, "up": 0.0} | {self.delayed: self.delay_ms}
        return {way: Way(self.rate_mbps, delay_ms) for way, delay_ms in delays.items()}


SLOW = {"mbps-1": Plain(1.0, "down", 150.0), "mbps-10": Plain(10.0, "up", 50.0)}
FAST = {"mbps-100": Plain(100.0, "down", 10.0), "mbps-400": Plain(400.0, "up", 2.0)}


def links(
    devices: Sequence[str],
    seconds: float,
    fast_seconds: float,
    curves: dict[str, Any],
    say: Callable[[str], None],
) -> list[Line]:
    """Two runs, of links up to 10 Mbps and from 100 Mbps on, and a line for each thing declared."""
    networks = {
        **{name: link.ways for name, link in SLOW.items()},
        **{name: {"down": Way(), "up": Way(rate, loss_pct=loss)} for name, (rate, loss) in LOSSY.items()},
        **{
            kind: {"down": Way(), "up": Way(None, delay, spread, kind)}
            for kind, (delay, spread) in JITTER.items()
        },
    }
    say("links to 10 Mbps, with jitter and loss")
    fleet = dict.fromkeys(devices[: len(networks)], EACH)
    assigned = dict(zip(devices, networks, strict=False))
    slow = trial(fleet, networks, Exercise(SLOW_PARAMETERS, COMPUTE_S), seconds, assigned=assigned)
    say("links of 100 and 400 Mbps")
    networks = {name: link.ways for name, link in FAST.items()}
    half = len(devices) // 2
    assigned = {
        device: name
        for name, part in zip(networks, (devices[:half], devices[half:]), strict=True)
        for device in part
    }
    fleet = dict.fromkeys(devices, EACH)
    fast = trial(fleet, networks, Exercise(FAST_PARAMETERS, FAST_COMPUTE_S), fast_seconds, assigned=assigned)
    return [
        *(bars.transfer(link.rate_mbps, name, slow) for name, link in SLOW.items()),
        *(bars.transfer(link.rate_mbps, name, fast) for name, link in FAST.items()),
        *(bars.delay(link.delay_ms, name, slow) for name, link in SLOW.items()),
        *(bars.delay(link.delay_ms, name, fast) for name, link in FAST.items()),
        *(_jitter(kind, slow, curves) for kind in JITTER),
        *(_loss(name, slow) for name in LOSSY),
    ]


def _jitter(kind: str, run: Played, curves: dict[str, Any]) -> Line:
    delay, spread = JITTER[kind]
    _, achieved_s = run.times("delay", run.on(kind))
    curves.setdefault("delays_ms", {})[kind] = np.sort(achieved_s * 1e3).tolist()
    return bars.jitter(f"{kind}, {delay:g} ± {spread:g} ms", lambda s: cdf(kind, s * 1e3), kind, run)


def cdf(kind: str, ms: Floats) -> Floats:
    """The distribution function that a network with this jitter declares for its delay.

    >>> [round(float(cdf(kind, np.array([JITTER[kind][0]]))[0]), 3) for kind in JITTER]
    [0.5, 0.5, 0.0]
    """
    delay, spread = JITTER[kind]
    if kind == "normal":
        return np.array([0.5 * (1.0 + math.erf((x - delay) / (spread * math.sqrt(2.0)))) for x in ms])
    if kind == "uniform":
        return np.clip((ms - delay + spread) / (2.0 * spread), 0.0, 1.0)
    return 1.0 - np.exp(-np.maximum(ms - delay, 0.0) / spread)


def _loss(name: str, run: Played) -> Line:
    """Packets that were sent again, by what each upload took longer than one without loss."""
    rate_mbps, loss_pct = LOSSY[name]
    _, achieved_s = run.times("up", run.on(name))
    nbytes = 4 * SLOW_PARAMETERS
    packets = math.ceil(nbytes / (MTU_BYTES - HEADER_BYTES))
    took_bytes = achieved_s * rate_mbps * 1e6 / 8
    again = np.rint((took_bytes - nbytes - packets * HEADER_BYTES) / MTU_BYTES).clip(0)
    lost = int(again.sum())
    return bars.loss(loss_pct, lost, lost + packets * len(again), run)
