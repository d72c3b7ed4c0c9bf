"""Mechanisms that hold a process to the pace and memory of a device, behind one seam.

throttle    the seam: a throttle on any process
target      a process: the CPU time it has used, stopping it
account     what it was allowed, against what it has used
duty        SIGSTOP and SIGCONT
quota       a control group's CPU quota
governor    the thread that looks after throttled processes
hierarchy   where control groups are; versions 1 and 2
groups      control groups of our own, gone with us
memory      a control group's memory limit
enclosure   limits that others have set on this process
load        a process that knows nothing of limits, to try them on
probe       which of them work here, and why not

Work-paced waiting (``edgefl.emulation.pacing``) is the best where code cooperates: it needs no privileges and
is exact. These are for code that does not.

    throttle = mechanisms.open("sigstop", pid, share=0.2)    # a fifth of a core of this host
    ...
    throttle.achieved().error                                # used over declared CPU time, less 1
    throttle.close()                                         # it runs on for good
"""

from __future__ import annotations

from edgefl.emulation.mechanisms.account import Achieved
from edgefl.emulation.mechanisms.memory import MemoryHold, open_memory
from edgefl.emulation.mechanisms.throttle import Throttle, open

__all__ = ["Achieved", "MemoryHold", "Throttle", "open", "open_memory"]
