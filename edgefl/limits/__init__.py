"""How a process is held to a device.

pacing             work-paced waiting against absolute deadlines: exact, and needs no privileges
held               a phase of computing that a governor slows
memory             a client's memory limit without privileges
confinement        which of these means hold the phones of a run, and the cell of one phone
capacity           does the fleet fit the host: time scale, stolen time, limits that others have set
calibration        what the host computes and moves a second; host_operations is what it times
usage              who used the host during a run, and what a quota took from it
fidelity           how far the emulation was from what it declared

For code that does not cooperate:

throttle           a throttle on any process; target is that process, account what it was allowed
duty, quota        SIGSTOP and SIGCONT; a control group's CPU quota
governor           the thread that looks after throttled processes
hierarchy, groups  where control groups are; those of our own, gone with us
group_memory       a control group's memory limit
probe              which of them work here, and why not; load is a process to try them on

    throttle = limits.open("sigstop", pid, share=0.2)        # a fifth of a core of this host
    ...
    throttle.achieved().error                                # used over declared CPU time, less 1
    throttle.close()                                         # it runs on for good
"""

from __future__ import annotations

from edgefl.limits.account import Achieved
from edgefl.limits.group_memory import MemoryHold, open_memory
from edgefl.limits.throttle import Throttle, open

__all__ = ["Achieved", "MemoryHold", "Throttle", "open", "open_memory"]
