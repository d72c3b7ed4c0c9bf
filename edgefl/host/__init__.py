"""This machine: processes that are started, held to a device's speed and memory, and measured.

process          starts a process of edgefl, and configures the present one; a started one begins in `child`
children         forks, reaps and kills children of this process, with their descendants
fork_server      starts processes of edgefl's by forking one that has imported everything
channel          messages between two processes of one machine, with descriptors
pacing           wait against absolute deadlines after doing real work: exact, needs no privileges
held             a compute phase slowed by a governor process, and that governor
memory           a client's memory limit, with and without privileges
confinement      selects and applies the mechanisms for the clients of a run
capacity         host capacity: time scale, outer quotas, CPU usage of the host
calibration      the host's compute and memory rates; host_operations and code_operations are what it times
fidelity         errors of a run's trips against their declared times
verdict          the verdict on how well processes were held: errors and the host's load against their bounds
throttle         CPU throttle for any process: SIGSTOP/SIGCONT or a control group's quota
groups           finds control groups; creates and removes edgefl's own
probe            tests which of these mechanisms work here, and why others do not
"""

from __future__ import annotations

from edgefl.host.memory import MemoryHold, open_memory
from edgefl.host.throttle import Achieved, Throttle, open

__all__ = ["Achieved", "MemoryHold", "Throttle", "open", "open_memory"]
