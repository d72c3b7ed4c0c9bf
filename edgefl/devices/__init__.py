"""What a phone is.

schema             what a device, network and fleet file hold
profiles           loading them; profile_files finds them, profile_checks says all that is wrong with one
fleet              the device and link of each client of a run, and when it is online
delay              delays drawn from a distribution
link, plan, trips  a client's link; its whole trip, decided before it starts; the trips of a fleet
thermal, power     how a device gets hot and slow as it trains; what it draws from its battery
phone              its condition from one instant to a later one
presence           when it is online: windows and churn, a fleet's from a file
dynamics           the book of what changes by itself; a function of the journal
trace              replaying a recorded link
cell, air          links that many phones share, under either clock
formats            other projects' files by name; imports is what their importers share
fedscale, mahimahi, webpagetest, devtools, power_profile, bouquetfl    one format each
"""

from __future__ import annotations

from edgefl.devices.profile_files import device_names, fleet_names, network_names
from edgefl.devices.profiles import check_file, load_device, load_fleet, load_network
from edgefl.devices.schema import Device, FleetFile, Network, to_json

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
