"""Devices: what an emulated client runs on, and how that changes over time.

schema      what a device, network and fleet file hold, and delays drawn from a distribution
time_model  what a step takes, from what it does
fit         a time model from measured steps; fitted makes a profile of it
measurements  measured steps from files; kit_result: those of a measuring kit
prediction  what a real device takes for a step of a network
scaling     the time model of a device that nobody measured, from one of a device like it
profiles    loading profiles and checking them
fleet       the device, link, presence and trips of each client of a run
individuals  what tells phones of one model apart: unit, scatter of trips, phase
link        a client's link, also one that replays a recorded trace
plan        a client's whole trip, decided before it starts
thermal     how a device gets hot and slow as it trains
condition   temperature and battery from one instant to a later one
presence    when a client is online: windows and churn, a fleet's from a file
dynamics    what changes by itself during a run; a function of the journal
cells       links that many clients share, under either clock
formats     other projects' files by name; imports is what their importers share
network_formats, device_formats, fedscale    what reads and writes each of them
"""

from __future__ import annotations

from edgefl.devices.prediction import predict
from edgefl.devices.profiles import (
    check_file,
    device_names,
    fleet_names,
    load_device,
    load_fleet,
    load_network,
    network_names,
)
from edgefl.devices.schema import Device, FleetFile, Network, to_json
from edgefl.devices.time_model import Prediction

__all__ = [
    "Device",
    "FleetFile",
    "Network",
    "Prediction",
    "check_file",
    "device_names",
    "fleet_names",
    "load_device",
    "load_fleet",
    "load_network",
    "network_names",
    "predict",
    "to_json",
]
