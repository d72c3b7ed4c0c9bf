"""Devices: the hardware that an emulated client represents, and its changes over time.

schema      contents of device, network and fleet files; delays drawn from a distribution
time_model  duration of a step as a function of its work
fit         fits a time model to measured steps; fitted makes a profile of it
csv_lines   lines and numbers of a CSV of measurements
measurements  measured steps from files; kit_result: results of the measurement kit
prediction  predicted duration of a network's step on a real device
code        speed of code that is not torch, by core type; code_fit fits it to boards (sbc-bench's results)
phones      inference times of measured phones, and of phones known by their core or one network; phone_fit
            makes their table (phone_file) from phone_rows and phone_networks; phone_profiles: their profiles,
            phone_estimate: others', phone_layers: a torch module's layers
scaling     derives the time model of an unmeasured device from a measured, similar one
profiles    loads and validates profiles
fleet       device, link, presence and trips of each client of a run
individuals  differences between phones of one model: unit speed, trip scatter, phase
link        a client's link; may replay a recorded trace
plan        a client's whole trip, decided before it starts
thermal     heating and throttling of a device during training
energy      joules of computing and transfers, by the profile's currents or a metered radio
condition   advances temperature and battery from one time to a later one
presence    when a client is online: windows and churn, also from a fleet's availability file
dynamics    changes of clients during a run that no task causes; a function of the journal
formats     other projects' file formats by name; imports is shared by their importers
network_formats, device_formats, fedscale    readers and writers of these formats
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
