"""Makes device profiles of the phones in the table of `edgefl.devices.phones`.

Training was not measured on most of these phones. Their training times are those of the Pixel 4 in MNN,
multiplied by the ratio of the two phones' inference times. For phones whose ratio of training times is also
known, the two ratios differ by a factor of up to `TRANSFER`: on the Nexus 6, Redmi Note 8 and Galaxy Note 10,
the training times measured by FLASH are in the ratio 1642 : 588 : 179, and the inference times are in the
ratio 172 : 95 : 33.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np

from edgefl.devices.phones import TFLITE, Costs, Phone, PhoneTable, of_measured, of_phone, speeds
from edgefl.devices.time_model import FEMNIST_STEP, ONE_RATE_FACTOR, TimeModel, joined

BRIDGE: Final = "Pixel_4"
"""Model of the phone whose training times are scaled."""
BRIDGE_PROFILE: Final = "pixel-4"
TRAINING: Final = "mnn"
TRANSFER: Final = 1.75
"""Error factor of predicting the ratio of two phones' training times by the ratio of their inference times.
It is the largest of the errors of three pairs of phones."""
LARGE_HEAP_MIB: Final = 512.0
SMALL_HEAP_MIB: Final = 256.0
SMALL_RAM_GIB: Final = 1.5
"""The heap of an app is assumed to be `SMALL_HEAP_MIB` on phones with less RAM than this."""
HEAP_FACTOR: Final = 2.0
HEAP_SOURCE: Final = (
    "derived: dalvik.vm.heapsize, the ceiling of an app with a large heap, in AOSP "
    "frameworks/native/build/phone-xhdpi-*-dalvik-heap.mk for this much RAM"
)


def profile_tables(table: PhoneTable, phone: Phone, bridge: TimeModel) -> dict[str, Any]:
    """Return a measured phone's profile as the tables of a profile file.

    ``bridge`` is the time model of training on the phone `BRIDGE`, from which training times are transferred.
    """
    trains, slower = training(table, of_phone(phone), bridge)
    inference = f"derived: {table.source}; model {phone.model}"
    profile = facts(phone, trains, table.source)
    profile["runtime"] = {TRAINING: _plain(trains), TFLITE: _plain(of_measured(table, phone))}
    profile["units"] = _units(phone)
    profile["sources"] |= {
        f"runtime.{TRAINING}": f"derived: {TRAINING} of {BRIDGE_PROFILE} x {slower:.3g}, the ratio of "
        f"inference times; the interval joins {BRIDGE_PROFILE}'s and {TRANSFER:g} for the transfer",
        f"runtime.{TFLITE}": inference,
        "units": inference,
    }
    return profile


def facts(phone: Phone, trains: TimeModel, source: str) -> dict[str, Any]:
    """Return a profile's tables, such as the training rate and the known hardware, but not the runtimes."""
    train_gflops = FEMNIST_STEP.flop / trains.seconds(FEMNIST_STEP) / 1e9
    cpu: dict[str, Any] = {"rate_gflops": {"train": float(f"{train_gflops:.4g}")}}
    sources = {"cpu.rate_gflops.train": f"derived: LEAF's FEMNIST CNN in runtime.{TRAINING}"}
    uncertainty = {"cpu.rate_gflops.train": ONE_RATE_FACTOR}
    known = {name: value for name in ("year", "soc") if (value := getattr(phone, name)) is not None}
    sources |= dict.fromkeys(known, f"{phone.name}'s technical specifications")
    if phone.cores and phone.core and phone.mhz:
        cpu["clusters"] = [{"uarch": _uarch(phone), "cores": phone.cores, "max_mhz": phone.mhz}]
        maker = f"; number of such cores by the specification of the {phone.soc}"
        sources["cpu.clusters"] = f"core and clock: {source}{maker}"
    if phone.ram_gib:
        heap_mib = SMALL_HEAP_MIB if phone.ram_gib < SMALL_RAM_GIB else LARGE_HEAP_MIB
        ram_mib = phone.ram_gib * 1024
        known["memory"] = {"ram_mib": ram_mib, "app_limit_mib": min(heap_mib, ram_mib)}
        sources |= {"memory.ram_mib": source, "memory.app_limit_mib": HEAP_SOURCE}
        uncertainty["memory.app_limit_mib"] = HEAP_FACTOR
    return {
        "id": phone.id,
        "default_runtime": TRAINING,
        "name": phone.name,
        "class": phone.kind,
        "network": "lte",
        **known,
        "cpu": cpu,
        "sources": sources,
        "uncertainty": uncertainty,
    }


def training(table: PhoneTable, costs: Costs, bridge: TimeModel) -> tuple[TimeModel, float]:
    """Return the time model of training, and the ratio of the phone's inference time to that of `BRIDGE`."""
    reference = next(phone for phone in table.phones if phone.model == BRIDGE)
    own, its = (float(speeds(each.mean[None])[0]) for each in (costs, of_phone(reference)))
    slower = math.exp(own - its)
    model = bridge.slowed(slower)
    values = msgspec.structs.asdict(model).items()
    rounded = {name: float(f"{value:.4g}") for name, value in values if isinstance(value, float)}
    factor = float(f"{joined(bridge.error_factor, TRANSFER):.4g}")
    return msgspec.structs.replace(model, **{**rounded, "error_factor": factor}), slower


def _units(phone: Phone) -> dict[str, float]:
    """Return the time of each measured unit, divided by the geometric mean of the times of all units."""
    own = {name: float(speeds(np.log([unit.ms]))[0]) for name, unit in phone.units.items()}
    middle = float(speeds(of_phone(phone).mean[None])[0])
    return {name: round(math.exp(log - middle), 3) for name, log in own.items()}


def _uarch(phone: Phone) -> str:
    family = phone.about().family
    return f"{phone.core} (Cortex-{family})" if phone.core.startswith("Kryo ") else phone.core


def _plain(model: TimeModel) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(model).items() if value}
