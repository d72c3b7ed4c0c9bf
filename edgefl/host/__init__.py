"""Start processes on this machine, limit them to a device's speed and memory, and measure them.

process          starts a process of edgefl and configures the current one; `child` is the entry point
children         forks, reaps and kills children of this process, with their descendants
forked           calls a function in a forked child of this process
fork_server      starts processes by forking one that has imported everything
channel          exchanges messages and file descriptors between two processes of one machine
pacing           slows real work to a device's speed by waiting for absolute deadlines; needs no privileges
held             slows a compute phase by a throttle that runs in a separate process, the governor
memory           limits a client's memory, with or without privileges
confinement      selects and applies the memory and CPU limits of a run's clients
capacity         measures the host's capacity and CPU usage, and chooses the time scale
calibration      measures the host's compute and memory rates with host_operations and code_operations
fidelity         compares the times of a run's trips with their declared times
verdict          decides whether a run is VALID or INVALID, by bounds on the errors and on the host's load
throttle         throttles the CPU use of any process by SIGSTOP and SIGCONT or by a control group's quota
awake            keeps cores from going idle, which would slow throttled programs down
groups           finds control groups; creates and removes edgefl's own
probe            tests which of these mechanisms work on this host, and reports why others do not
"""

from __future__ import annotations

from edgefl.host.memory import MemoryHold, open_memory
from edgefl.host.throttle import Achieved, Throttle, open

__all__ = ["Achieved", "MemoryHold", "Throttle", "open", "open_memory"]
