"""This machine: start processes, limit them to a device's speed and memory, and measure them.

process          starts a process of edgefl and configures the current one; `child` is the entry point
children         forks, reaps and kills children of this process, with their descendants
fork_server      starts processes by forking one that has imported everything
channel          messages between two processes of one machine, with descriptors
pacing           slows real work to a device's speed by waiting for absolute deadlines; needs no privileges
held             a compute phase that a governor process slows down, and the governor itself
memory           a client's memory limit, with and without privileges
confinement      selects and applies the memory and CPU limits of a run's clients
capacity         host capacity: time scale, CPU quotas, CPU usage of the host
calibration      the host's compute and memory rates, measured by host_operations and code_operations
fidelity         errors of a run's trips against their declared times
verdict          VALID or INVALID: errors of limited processes and the host's load against their bounds
throttle         CPU throttle for any process: SIGSTOP/SIGCONT or a control group's quota
groups           finds control groups; creates and removes edgefl's own
probe            tests which of these mechanisms work on this host, and reports why others do not
"""

from __future__ import annotations

from edgefl.host.memory import MemoryHold, open_memory
from edgefl.host.throttle import Achieved, Throttle, open

__all__ = ["Achieved", "MemoryHold", "Throttle", "open", "open_memory"]
