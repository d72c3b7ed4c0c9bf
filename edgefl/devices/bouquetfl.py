"""BouquetFL's TOML databases of hardware and places: ``cpus.toml``, ``gpus.toml`` and ``locations.toml``.

    schema_version = 1
    [[cpus]]       name = "Ryzen 5 3600", cores = "6 / 12", core_clock = "3.6 to 4.2 GHz"
    [[gpus]]       name = "GeForce GTX 1070", cuda_cores = 1920, clock_speed = 1683 (MHz), memory_gb = 8
    [[locations]]  name = "Luxembourg", download_mbps = 215, upload_mbps = 125

BouquetFL states no training rates. A processor is given 0.07 of a peak of 32 FLOP a cycle and core (two
256-bit fused multiply-adds), a graphics card 0.07 of two FLOP a cycle and core: the share that FLASH's phones
reached of their inference rates (docs/profiles.md), assumed to hold, and tenfold uncertain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgefl import toml
from edgefl.devices.imports import ImportOptions, ImportResult, chosen, profile_file, profile_names
from edgefl.devices.profiles import Kind
from edgefl.errors import ConfigError, ProfileError

TRAIN_SHARE = 0.07
CPU_FLOP_PER_CYCLE = 32
GPU_FLOP_PER_CYCLE = 2
UNCERTAIN = 10.0
_CORES = re.compile(r"(\d{1,4})(?: / \d{1,4})?")
_CLOCK = re.compile(r"(?:\d+(?:\.\d+)? to )?(\d+(?:\.\d+)?) GHz")


def read(path: Path, asked: ImportOptions) -> ImportResult:
    """A device for each processor or graphics card, a network for each place."""
    try:
        tables = toml.read(path)
    except ConfigError as wrong:
        raise ProfileError(str(wrong)) from None
    if (version := tables.get("schema_version", 1)) != 1:
        raise ProfileError(f"{path}: schema_version: got {version!r}; allowed: 1")
    readers: dict[str, tuple[Kind, Callable[[_Entry], dict[str, Any]]]] = {
        "cpus": ("devices", _cpu),
        "gpus": ("devices", _gpu),
        "locations": ("networks", _location),
    }
    found = [key for key in readers if key in tables]
    if not found:
        raise ProfileError(f"{path}: got {', '.join(tables) or 'nothing'}; allowed: cpus, gpus or locations")
    files = {}
    for key in found:
        kind, make = readers[key]
        entries = _entries(path, key, tables[key])
        wanted = chosen(path, entries, asked.only)
        for name, title in zip(profile_names(wanted), wanted, strict=True):
            made = {"id": name, "name": title, **make(entries[title])}
            file, text = profile_file(path, kind, made)
            files[file] = text
    return ImportResult(files)


class _Entry:
    """One entry of the file: `figure` and `match` read a key, or say what is wrong with it."""

    def __init__(self, path: Path, where: str, table: dict[str, Any]) -> None:
        self.path, self.where, self.table = path, where, table

    def wrong(self, key: str, allowed: str) -> ProfileError:
        got = repr(self.table[key])[:60] if key in self.table else "nothing"
        return ProfileError(f"{self.path}: {self.where}: {key}: got {got}; allowed: {allowed}")

    def figure(self, key: str) -> float:
        value = self.table.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def match(self, key: str, pattern: re.Pattern[str], allowed: str) -> float:
        value = self.table.get(key)
        found = pattern.fullmatch(value) if isinstance(value, str) else None
        if found is None or float(found[1]) <= 0:
            raise self.wrong(key, allowed)
        return float(found[1])


def _entries(path: Path, key: str, tables: Any) -> dict[str, _Entry]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ProfileError(f"{path}: {key}: got {type(tables).__name__}; allowed: [[{key}]] tables")
    found: dict[str, _Entry] = {}
    for at, table in enumerate(tables):
        name = table.get("name")
        if not isinstance(name, str) or not name or name in found:
            raise ProfileError(f"{path}: {key}[{at}].name: got {name!r}; allowed: a text that no other has")
        found[name] = _Entry(path, name, table)
    return found


def _device(train_gflops: float, peak: str) -> dict[str, Any]:
    return {
        "class": "desktop",
        "network": "fios",
        "cpu": {"rate_gflops": {"train": round(train_gflops, 4)}},
        "sources": {"cpu.rate_gflops.train": f"assumed: {TRAIN_SHARE} of a peak of {peak}"},
        "uncertainty": {"cpu.rate_gflops.train": UNCERTAIN},
    }


def _cpu(entry: _Entry) -> dict[str, Any]:
    cores = int(entry.match("cores", _CORES, "cores, or cores / threads, such as '6 / 12'"))
    ghz = entry.match("core_clock", _CLOCK, "a clock such as '3.6 to 4.2 GHz'")
    peak = f"{CPU_FLOP_PER_CYCLE} FLOP a cycle x {cores} cores x {ghz:g} GHz"
    made = _device(TRAIN_SHARE * CPU_FLOP_PER_CYCLE * cores * ghz, peak)
    made["cpu"]["clusters"] = [{"uarch": entry.where, "cores": cores, "max_mhz": round(ghz * 1e3, 3)}]
    made["sources"]["cpu.clusters"] = f"BouquetFL {entry.path.name}: cores and core_clock of {entry.where}"
    return made


def _gpu(entry: _Entry) -> dict[str, Any]:
    cores, mhz = entry.figure("cuda_cores"), entry.figure("clock_speed")
    memory_mib = entry.figure("memory_gb") * 1024
    peak = f"{GPU_FLOP_PER_CYCLE} FLOP a cycle x {cores:g} cores x {mhz:g} MHz"
    made = _device(TRAIN_SHARE * GPU_FLOP_PER_CYCLE * cores * mhz / 1e3, peak)
    made["memory"] = {"ram_mib": memory_mib, "app_limit_mib": memory_mib}
    made["sources"]["memory"] = (
        f"BouquetFL {entry.path.name}: memory_gb of {entry.where}, the card's own memory"
    )
    return made


def _location(entry: _Entry) -> dict[str, Any]:
    source = f"BouquetFL {entry.path.name}: {entry.where}; it states no delay"
    return {
        "down": {"rate_mbps": entry.figure("download_mbps")},
        "up": {"rate_mbps": entry.figure("upload_mbps")},
        "sources": {"down": source, "up": source},
    }
