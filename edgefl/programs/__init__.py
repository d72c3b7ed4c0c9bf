"""``edgefl exec``: run any program as if on a phone, at the phone's speed and within its memory and network.

phone       `Phone`: command, device, network and forwarded connections
likeness    the code that a command resembles, and the device's speed when running such code
options     conditions that all phones share, and their checks
running     `run` and `start`: start the processes, forward output and signals, judge the result
keeper      process that starts the commands, limits CPU time and memory, and suspends absent phones
tree        process tree of one phone, which the throttle treats as one process
relay       process that forwards the phones' TCP connections at the speed of their links
way         model of one direction of a link, which computes when bytes arrive
messages    messages between these processes
result      measurements of each phone, and the verdict
report      HTML report
view        live table
"""

from __future__ import annotations

from edgefl.programs.likeness import core_shares
from edgefl.programs.options import ProgramOptions
from edgefl.programs.phone import Phone
from edgefl.programs.result import PhoneResult, ProgramsResult
from edgefl.programs.running import RunningPhones, run, start

__all__ = [
    "Phone",
    "PhoneResult",
    "ProgramOptions",
    "ProgramsResult",
    "RunningPhones",
    "core_shares",
    "run",
    "start",
]
