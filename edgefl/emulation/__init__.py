"""What makes a process behave like a phone.

schema             what a device, network and fleet file hold
profiles           loading them; profile_files finds them, profile_checks says all that is wrong with one
delay              delays drawn from a distribution
link, plan         a client's link; its whole trip, decided before it starts
thermal, power     how a device gets hot and slow as it trains; what it draws from its battery
phone              its condition from one instant to a later one
presence           when it is online: windows, churn; availability reads a fleet's from a file
trace              replaying a recorded link
cell               links that many phones share
pacing             work-paced waiting against absolute deadlines
held               a phase of computing that a governor slows
memory             a client's memory limit without privileges
confinement        which of these means hold the phones of a run, and the cell of one phone
mechanisms         what holds a process that does not cooperate: signals, control groups
capacity           does the fleet fit the host: time scale, stolen time
calibration        what the host computes and moves a second, and a device's slowdown against it
host_operations    the operations that a calibration times
usage              who used the host during a run, and what a quota took from it
fidelity           how far the emulation was from what it declared
"""

from __future__ import annotations

from edgefl.emulation.profile_files import device_names, fleet_names, network_names
from edgefl.emulation.profiles import check_file, load_device, load_fleet, load_network
from edgefl.emulation.schema import Device, FleetFile, Network, to_json

__all__ = [
    "Device",
    "FleetFile",
    "Network",
    "check_file",
    "device_names",
    "fleet_names",
    "load_device",
    "load_fleet",
    "load_network",
    "network_names",
    "to_json",
]
