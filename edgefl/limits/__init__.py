"""The means that hold a process to a device, and the judgement of how well they did.

pacing           work-paced waiting against absolute deadlines: exact, and needs no privileges
held             a phase of computing that a governor slows, and that governor
memory           a client's memory limit, with and without privileges
confinement      which of these hold the clients of a run
capacity         does the fleet fit the host: time scale, limits that others have set, who used the host
calibration      what the host computes and moves a second; host_operations is what it times
fidelity         how far the emulation was from what it declared
throttle         a throttle on any process: SIGSTOP and SIGCONT, or a control group's CPU quota
groups           where control groups are; those of our own, gone with us
probe            which of these work here, and why not
"""

from __future__ import annotations

from edgefl.limits.memory import MemoryHold, open_memory
from edgefl.limits.throttle import Achieved, Throttle, open

__all__ = ["Achieved", "MemoryHold", "Throttle", "open", "open_memory"]
