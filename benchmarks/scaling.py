"""Measure the error of time models that are scaled from one measured device to another.

    python benchmarks/scaling.py

This needs timm for the networks that were measured on Raspberry Pis. Each line shows the device from which
the times were scaled, the device to which they were scaled, the median ratio of predicted to measured time,
and the largest factor by which the best 90% of the predictions are wrong.
"""

from __future__ import annotations

import statistics

import msgspec

from edgefl.devices import load_device, measurements
from edgefl.devices.fit import holding, predicted
from edgefl.devices.profiles import bundled_folder
from edgefl.devices.scaling import scaled
from edgefl.devices.schema import Device
from edgefl.errors import ConfigError

PAIRS = (("pi-4", "pi-5", "torch"), ("redmi-note-8", "galaxy-note-10", "dl4j"))


def compare(base: Device, device: Device, runtime: str, how: str) -> None:
    model = scaled(device, base, runtime).model
    file = "networks.csv" if runtime == "torch" else "layers.csv"
    steps = measurements.read(bundled_folder() / "measured" / file)
    found = [
        predicted(model, step.row) for step in steps if (step.profile, step.runtime) == (device.id, runtime)
    ]
    bias = statistics.median(unseen.factor for unseen in found)
    words = f"{base.id} -> {device.id}, {runtime}, by {how}"
    print(f"{words:55} {len(found)} steps, median {bias:.2f}, 90% within {holding(found):.2f}")


def blind(device: Device) -> Device:
    """Return a copy of the device without its memory bandwidth: times are then scaled by GEMM rate only."""
    return msgspec.structs.replace(device, memory=None)


def main() -> None:
    for one, other, runtime in PAIRS:
        for base, device in ((one, other), (other, one)):
            try:
                pair = load_device(base), load_device(device)
                if all(each.memory and each.memory.bandwidth_gbytes_per_s for each in pair):
                    compare(*pair, runtime, "gemm and memcpy")
                compare(blind(pair[0]), blind(pair[1]), runtime, "gemm alone")
            except ConfigError as error:
                print(f"{base} -> {device}: {error}")


if __name__ == "__main__":
    main()
