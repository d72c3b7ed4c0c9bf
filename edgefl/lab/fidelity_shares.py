"""Processes that know nothing of it, held to shares of a core: the throttles without a client's help."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import numpy as np

from edgefl import limits
from edgefl.devices import load_device
from edgefl.lab import fidelity_bars as bars
from edgefl.lab.fidelity_runs import EACH, Throttle
from edgefl.limits import load, probe
from edgefl.limits.capacity import StealMeter, UsageMeter, usable_cores
from edgefl.limits.fidelity import Conditions

LOAD = 0.3
"""Share of the host's cores that all of them are given together."""


def held(mechanism: Throttle, devices: Sequence[str], seconds: float) -> bars.Line:
    """Hold busy processes for so long, two a device, to shares in proportion to the devices' rates."""
    rates = np.repeat([load_device(name).train_flop_per_s for name in devices], EACH)
    shares = rates / rates.sum() * LOAD * usable_cores()
    usage, steal = UsageMeter(), StealMeter()
    usage.begin()
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(probe.loaded("compute", load.LONGEST_S)) for _ in shares]
        throttles = [
            stack.enter_context(limits.open(mechanism, child.pid, share))
            for child, share in zip(children, shares.tolist(), strict=True)
        ]
        time.sleep(seconds)
        found = np.array([throttle.achieved().error for throttle in throttles])
    used = usage.usage()  # once the processes have ended: their time is this process's then
    return bars.share(mechanism, found, Conditions(others=used.others, steal=steal.share()))
