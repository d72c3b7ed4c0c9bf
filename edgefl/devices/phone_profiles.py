"""Device profiles of the phones in the table of `edgefl.devices.phones`.

Nobody measured training on most of these phones. Their times are those of the Pixel 4 in MNN, times the
ratio of both phones' inference times. Where both ratios are known, they differ by up to `TRANSFER`: FLASH's
training times on the Nexus 6, Redmi Note 8 and Galaxy Note 10 are 1642 : 588 : 179, inference 172 : 95 : 33.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np

from edgefl.devices.phones import Phone, PhoneTable, of_measured, of_phone, speeds
from edgefl.devices.time_model import FEMNIST_STEP, TimeModel, joined

BRIDGE: Final = "Pixel_4"
"""Model of the phone whose training times are scaled."""
BRIDGE_PROFILE: Final = "pixel-4"
TRAINING: Final = "mnn"
TRANSFER: Final = 1.75
"""Factor between the ratios of two phones' training and inference times; the largest of three is 1.73."""
RATE_FACTOR: Final = 6.0
"""Uncertainty of one rate for all operations, as in other profiles."""
LARGE_HEAP_MIB: Final = 512.0
SMALL_HEAP_MIB: Final = 256.0
SMALL_RAM_GIB: Final = 1.5
"""Phones with less RAM have the smaller heap."""
SPECIFICATION: Final = "{}'s technical specifications"


def profile_tables(table: PhoneTable, phone: Phone, bridge: TimeModel) -> dict[str, Any]:
    """Return a phone's profile as the tables of its file; ``bridge`` is `BRIDGE`'s time model of training."""
    trains = training(table, phone, bridge)
    train_gflops = FEMNIST_STEP.flop / trains.seconds(FEMNIST_STEP) / 1e9
    cpu: dict[str, Any] = {"rate_gflops": {"train": float(f"{train_gflops:.4g}")}}
    optional: dict[str, Any] = {"year": phone.year, "soc": phone.soc}
    if phone.cores and phone.core and phone.mhz:
        cpu["clusters"] = [{"uarch": _uarch(phone), "cores": phone.cores, "max_mhz": phone.mhz}]
    if phone.ram_gib:
        optional["memory"] = {"ram_mib": phone.ram_gib * 1024, "app_limit_mib": _heap_mib(phone.ram_gib)}
    filled = {name: value for name, value in optional.items() if value is not None}
    uncertainty = {"cpu.rate_gflops.train": RATE_FACTOR}
    if phone.ram_gib:
        uncertainty["memory.app_limit_mib"] = 2.0
    return {
        "id": phone.id,
        "default_runtime": TRAINING,
        "name": phone.name,
        "class": phone.kind,
        **filled,
        "network": "lte",
        "cpu": cpu,
        "runtime": {
            TRAINING: _plain(trains),
            "tflite": _plain(of_measured(table, phone)),
        },
        "units": _units(phone),
        "sources": _sources(table, phone, filled, cpu),
        "uncertainty": uncertainty,
    }


def training(table: PhoneTable, phone: Phone, bridge: TimeModel) -> TimeModel:
    """Time model of training, by the ratio of inference times."""
    slower = slower_than_bridge(table, phone)
    model = bridge.slowed(slower)
    costs = {
        name: float(f"{getattr(model, name):.4g}")
        for name in model.__struct_fields__
        if isinstance(getattr(model, name), float)
    }
    factor = float(f"{joined(bridge.error_factor, TRANSFER):.4g}")
    return msgspec.structs.replace(model, **{**costs, "error_factor": factor})


def slower_than_bridge(table: PhoneTable, phone: Phone) -> float:
    """Inference time of the typical network ÷ that of the `BRIDGE`."""
    bridge = next(each for each in table.phones if each.model == BRIDGE)
    own, its = (float(speeds(of_phone(each).mean[None])[0]) for each in (phone, bridge))
    return math.exp(own - its)


def _units(phone: Phone) -> dict[str, float]:
    """Time of each measured unit ÷ the middle one's."""
    own = {name: float(speeds(np.log([unit.ms]))[0]) for name, unit in phone.units.items()}
    middle = float(speeds(of_phone(phone).mean[None])[0])
    return {name: round(math.exp(log - middle), 3) for name, log in own.items()}


def _uarch(phone: Phone) -> str:
    family = phone.about().family
    return f"{phone.core} (Cortex-{family})" if phone.core.startswith("Kryo ") else phone.core


def _heap_mib(ram_gib: float) -> float:
    return SMALL_HEAP_MIB if ram_gib < SMALL_RAM_GIB else LARGE_HEAP_MIB


def _plain(model: TimeModel) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(model).items() if value}


def _sources(table: PhoneTable, phone: Phone, filled: dict[str, Any], cpu: dict[str, Any]) -> dict[str, str]:
    inference = f"derived: {table.source}; model {phone.model}"
    slower = slower_than_bridge(table, phone)
    sources = {
        f"runtime.{TRAINING}": f"derived: {TRAINING} of {BRIDGE_PROFILE} x {slower:.3g}, the ratio of "
        f"inference times; the interval joins {BRIDGE_PROFILE}'s and {TRANSFER:g} for the transfer",
        "runtime.tflite": inference,
        "units": inference,
        "cpu.rate_gflops.train": f"derived: LEAF's FEMNIST CNN in runtime.{TRAINING}",
    }
    if "clusters" in cpu:
        maker = f"; number of such cores by the specification of the {phone.soc}" if phone.soc else ""
        sources["cpu.clusters"] = f"core and clock: {table.source}{maker}"
    if "memory" in filled:
        sources["memory.ram_mib"] = table.source
        sources["memory.app_limit_mib"] = (
            "derived: dalvik.vm.heapsize, the ceiling of an app with a large heap, in AOSP "
            "frameworks/native/build/phone-xhdpi-*-dalvik-heap.mk for this much RAM"
        )
    known = (name for name in ("year", "soc") if name in filled)
    return {**sources, **{name: SPECIFICATION.format(phone.name) for name in known}}
