"""Devices: the hardware that an emulated client represents, and its changes over time.

schema          contents of device, network and fleet files; delays drawn from a distribution
profiles        loads and validates profiles
time_model      duration of a step as a function of its work
fit             fits a time model to measured steps; fitted adds the result to a profile
measurements    reads measured steps; csv_lines reads a CSV, kit_result a result of the measurement kit
prediction      predicts the duration of a network's step on a real device
scaling         derives the time model of an unmeasured device from that of a similar, measured one
code            speed of code that is not torch, by core type; code_fit fits it to the sbc-bench results of
                boards
phones          inference times of phones: measured, or estimated from the core and one measured network
phone_fit       fits the table of phones to phone_rows and phone_networks; phone_file writes it
phone_profiles  makes the profiles of the phones in the table; phone_estimate those of other phones
phone_layers    lists the layers of a torch module as TFLite executes them
fleet           device, link, presence and trips of each client of a run
individuals     differences between phones of one model: speed, variation between trips, phase
link            a client's link; may replay a recorded trace
plan            a client's whole trip, decided before it starts
thermal         heating and throttling of a device during training
energy          joules of computing and transfers, by the profile's currents or a metered radio
condition       advances temperature and battery from one time to a later one
presence        when a client is online: windows and churn, also from a fleet's availability file
dynamics        changes of clients during a run that no task causes, computed from the journal
formats         file formats of other projects: network_formats, device_formats, fedscale; imports has what
                their importers share
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
