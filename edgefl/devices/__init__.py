"""Models of devices and networks: profiles, step times, transfers, energy, heat and availability.

schema          defines device, network and fleet profiles, and random delays
profiles        loads and validates profiles
time_model      computes the duration of a training or inference step from its operations and bytes
fit             fits a time model to measured steps; fitted adds the result to a profile
measurements    reads measured steps from CSV files (csv_lines) and from measurement kit results (kit_result)
prediction      predicts the duration of a network's step on a real device
scaling         derives the time model of an unmeasured device from that of a similar, measured device
code            predicts, from the core type, the speed of code that does not use torch; code_fit fits the
                rates to results of sbc-bench, which boards reads
phones          computes inference times of phones: from measurements, or from the core and one measured
                network
phone_fit       fits the table of phones to measured times (phone_rows) of known networks (phone_networks);
                phone_file writes the table
phone_profiles  makes the profiles of the phones in the table; phone_estimate makes those of other phones
phone_layers    lists the layers of a torch module as TFLite executes them
fleet           computes each client's device, link, presence and trips
individuals     draws the differences between phones of one model: speed, variation between trips, and phase
link            emulates a client's network link with the profile's rates or a recorded trace
plan            plans a client's whole trip (download, training and upload) before it starts
thermal         models the heating and throttling of a device during training
energy          computes the energy that computing and transfers use, in joules, from the currents in the
                profile or from measurements of a radio's power
condition       computes a client's temperature and battery charge over time
presence        determines when a client is online, from availability windows (in a profile or a file) and
                from churn
dynamics        tracks how clients heat up, discharge, go offline and return; a resumed run restores the
                clients' state from its journal
formats         reads and writes files of other projects with network_formats, device_formats and fedscale,
                which share the functions in imports
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
