"""Reads other projects' device files: BouquetFL's hardware databases and Android's power profiles.

BouquetFL's TOML lists processors, graphics cards and locations (imported as networks), but no training
rates. Processors and graphics cards are assumed to train at 0.07 of their peak rate, the fraction that phones
measured by FLASH reached (docs/profiles.md). The peak rate is 32 FLOP per cycle and core of a processor (two
256-bit fused multiply-adds), and 2 FLOP per cycle and core of a graphics card. The rates are uncertain by a
factor of 10.

Android's ``power_profile.xml`` has ``<item name=…>`` and ``<array name=…>`` with the cores' frequencies in
kHz, and with currents in mA at the battery's nominal voltage. Older files name the arrays ``cpu.speeds`` and
``cpu.active``, and omit ``.cluster0`` if there is only one cluster. If the cores' currents are equal at every
frequency, they were not measured, so they are not imported.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from xml.etree import ElementTree

import msgspec

from edgefl.devices.imports import ImportOptions, ImportResult, checked, pick, profile_file, read_text
from edgefl.devices.profiles import Kind, load_device, read_tables
from edgefl.devices.schema import NOMINAL_V, to_json
from edgefl.errors import ProfileError, as_config_error

TRAIN_SHARE = 0.07
CPU_FLOP_PER_CYCLE = 32
GPU_FLOP_PER_CYCLE = 2
UNCERTAIN = 10.0
_CORES = r"\A([1-9]\d{0,3})( / \d{1,4})?\Z"
_CLOCK = r"\A(\d+(\.\d+)? to )?(?P<ghz>\d+(\.\d+)?) GHz\Z"
Figure = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
_Table = dict[str, Any]


class Processor(msgspec.Struct):
    """An entry of ``cpus`` in a BouquetFL file."""

    name: str
    cores: Annotated[str, msgspec.Meta(pattern=_CORES, description="'cores' or 'cores / threads'")]
    core_clock: Annotated[str, msgspec.Meta(pattern=_CLOCK, description="a clock such as '3.6 to 4.2 GHz'")]


class GraphicsCard(msgspec.Struct):
    """An entry of ``gpus`` in a BouquetFL file; its clock is in MHz."""

    name: str
    cuda_cores: Figure
    clock_speed: Figure
    memory_gb: Figure


class Location(msgspec.Struct):
    """An entry of ``locations`` in a BouquetFL file."""

    name: str
    download_mbps: Figure
    upload_mbps: Figure


class _BouquetFile(msgspec.Struct):
    schema_version: Literal[1] = 1
    cpus: list[_Table] = []
    gpus: list[_Table] = []
    locations: list[_Table] = []


def read_bouquetfl(path: Path, options: ImportOptions) -> ImportResult:
    """Make a device from each processor or graphics card, and a network from each location."""
    file = checked(str(path), read_tables(path), _BouquetFile)
    kinds: list[tuple[type[Processor | GraphicsCard | Location], list[_Table]]]
    kinds = [(Processor, file.cpus), (GraphicsCard, file.gpus), (Location, file.locations)]
    entries = [(str(one.get("name") or "?"), (of, one)) for of, ones in kinds for one in ones]
    if not entries:
        raise ProfileError(f"{path}: has no entries; allowed: cpus, gpus or locations")
    files: dict[str, str] = {}
    for name, title, (of, one) in pick(path, options.only, entries):
        kind, tables = _bouquetfl_profile(path.name, checked(f"{path}: {title}", one, of))
        files |= profile_file(path, kind, {"id": name, "name": title, **tables})
    return ImportResult(files)


def _bouquetfl_profile(file: str, entry: Processor | GraphicsCard | Location) -> tuple[Kind, _Table]:
    if isinstance(entry, Location):
        source = f"BouquetFL {file}: {entry.name}; it states no delay"
        ways = {"down": {"rate_mbps": entry.download_mbps}, "up": {"rate_mbps": entry.upload_mbps}}
        return "networks", {**ways, "sources": {"down": source, "up": source}}
    if isinstance(entry, Processor):
        cores = int(entry.cores.split(" ")[0])
        clock = re.search(_CLOCK, entry.core_clock)
        assert clock is not None
        ghz = float(clock["ghz"])
        made = _desktop(CPU_FLOP_PER_CYCLE, cores, ghz, f"{ghz:g} GHz")
        made["cpu"]["clusters"] = [{"uarch": entry.name, "cores": cores, "max_mhz": round(ghz * 1e3, 3)}]
        made["sources"]["cpu.clusters"] = f"BouquetFL {file}: cores and core_clock of {entry.name}"
        return "devices", made
    mhz, memory_mib = entry.clock_speed, entry.memory_gb * 1024
    made = _desktop(GPU_FLOP_PER_CYCLE, entry.cuda_cores, mhz / 1e3, f"{mhz:g} MHz")
    made["memory"] = {"ram_mib": memory_mib, "app_limit_mib": memory_mib}
    made["sources"]["memory"] = f"BouquetFL {file}: memory_gb of {entry.name}, the card's own memory"
    return "devices", made


def _desktop(flop_per_cycle: int, cores: float, ghz: float, clock: str) -> _Table:
    peak = f"{flop_per_cycle} FLOP a cycle x {cores:g} cores x {clock}"
    return {
        "class": "desktop",
        "network": "fios",
        "cpu": {"rate_gflops": {"train": round(TRAIN_SHARE * flop_per_cycle * cores * ghz, 4)}},
        "sources": {"cpu.rate_gflops.train": f"assumed: {TRAIN_SHARE} of a peak of {peak}"},
        "uncertainty": {"cpu.rate_gflops.train": UNCERTAIN},
    }


PLACEHOLDER_MA = 0.1  # placeholder for every current in Android's sample file
OF_CURRENTS = "derived: max_ma of all cores x voltage_v"
"""Start of the ``sources`` entry for a ``thermal.busy_w`` that was computed from the cores' currents."""
SAME_MHZ = 0.01
"""Maximum relative difference in top frequency between a cluster in the file and its match in the profile."""
_BATTERY = {
    "capacity_mah": ("battery.capacity", ""),
    "idle_ma": ("cpu.idle", ""),
    "wifi_ma": ("wifi.active", "wifi.controller"),
    "radio_ma": ("radio.active", "modem.controller"),
}
"""Maps a field of the profile to the name of an item in the file, and to the name of a controller. If the
item is missing, the mean of the controller's receive (rx) and transmit (tx) currents replaces it."""
Items = dict[str, list[float]]


PowerCluster = tuple[int | None, list[float], list[float]]
"""Number of cores of one kind (None if the file does not state it), their frequencies in MHz, and their
currents in mA."""


def read_power_profile(path: Path, options: ImportOptions) -> ImportResult:
    """Complete the device profile ``options.base`` with the battery values and core currents in the file."""
    items = _items(path)
    _refuse_placeholders(path, items)
    clusters, notes = _clusters(path, items), []
    seen = [ma for _, _, power_ma in clusters for ma in power_ma]
    if len(seen) > len(clusters) and len(set(seen)) == 1:
        notes.append(f"left out: the cores' currents, which are equal at every frequency ({seen[0]:g} mA)")
        clusters = []
    if options.base is None:
        needed = "give the device profile to complete: --base PROFILE"
        raise ProfileError(f"{path}: has no computing rates; {needed}")
    tables = to_json(load_device(options.base))
    sources, source = tables["sources"], f"Android power_profile.xml: {path.name}"
    given, battery = tables.get("battery", {}), _battery(items)
    if "capacity_mah" not in given | battery:
        allowed = "above 0 mAh, because the base profile has no capacity"
        raise ProfileError(f"{path}: battery.capacity: missing; allowed: {allowed}")
    before = sources.pop("battery", None)
    for key in given if before is not None else ():
        sources.setdefault(f"battery.{key}", before)
    sources |= {f"battery.{key}": f"{source}, {origin}" for key, (_, origin) in battery.items()}
    tables["battery"] = given | {key: figure for key, (figure, _) in battery.items()}
    left_out = _fit(clusters, tables)
    if len(left_out) < len(clusters):
        before = sources.get("cpu.clusters", sources.get("cpu"))
        previous = before.split("; currents from")[0] + "; " if before else ""
        sources["cpu.clusters"] = f"{previous}currents from {source}"
    _compute_busy_w(tables)
    tables["id"] = options.profile_name(tables["id"])
    return ImportResult(profile_file(path, "devices", tables), (*notes, *left_out))


def _compute_busy_w(tables: _Table) -> None:
    """Recompute ``thermal.busy_w`` from the profile's new currents and voltage if it had been derived from
    the old values."""
    if not tables["sources"].get("thermal.busy_w", "").startswith(OF_CURRENTS):
        return
    clusters = tables.get("cpu", {}).get("clusters", [])
    if clusters and all("max_ma" in each for each in clusters):
        currents_ma = sum(each["cores"] * each["max_ma"] for each in clusters)
        voltage_v = tables["battery"].get("voltage_v", NOMINAL_V)
        tables["thermal"]["busy_w"] = round(currents_ma / 1e3 * voltage_v, 2)


def _battery(items: Items) -> dict[str, tuple[float, str]]:
    """Return the file's battery values, each with a description of its origin."""
    found: dict[str, tuple[float, str]] = {}
    for key, (item, controller) in _BATTERY.items():
        figures, origin = items.get(item, []), item
        if controller:
            origin = f"{item}, or the mean of {controller}.rx and .tx"
            parts = [items.get(f"{controller}.{way}", []) for way in ("rx", "tx")]
            both = [sum(part) / len(part) for part in parts if sum(part) > 0]
            figures = figures if any(figures) or not both else [sum(both) / len(both)]
        figure = round(float(figures[0]), 2) if figures else 0.0
        if figures and (figure or key == "idle_ma"):
            found[key] = figure, origin
    return found


def _fit(clusters: list[PowerCluster], tables: _Table) -> list[str]:
    """Copy frequencies and currents to the matching clusters of the profile.

    Return a note for each cluster that has no match in the profile.
    """
    known, notes = tables.get("cpu", {}).get("clusters", []), []
    have = " + ".join(f"{one['cores']} cores of {one['max_mhz']:g} MHz" for one in known)
    for cores, freq_mhz, power_ma in clusters:
        for one in known:
            if one["cores"] == (cores or one["cores"]) and abs(one["max_mhz"] / freq_mhz[-1] - 1) < SAME_MHZ:
                one |= {"max_mhz": freq_mhz[-1], "freq_mhz": freq_mhz}
                one |= {"max_ma": power_ma[-1], "power_ma": power_ma}
                break
        else:
            got = f"{cores or 'all'} cores of {freq_mhz[-1]:g} MHz"
            notes.append(f"left out: {got}, which are not in the profile ({have or 'it has no clusters'})")
    return notes


def _clusters(path: Path, items: Items) -> list[PowerCluster]:
    found: list[PowerCluster] = []
    for at, cores in enumerate(items.get("cpu.clusters.cores", [0.0])):
        for speeds_key, currents_key in (("cpu.core_speeds", "cpu.core_power"), ("cpu.speeds", "cpu.active")):
            suffix = f".cluster{at}" if f"{speeds_key}.cluster{at}" in items else ""
            speeds, currents = items.get(speeds_key + suffix), items.get(currents_key + suffix)
            if speeds is None or currents is None:
                continue
            if len(speeds) != len(currents) or not speeds or speeds != sorted(set(speeds)):
                got = f"{len(speeds)} speeds and {len(currents)} currents"
                allowed = "as many currents as speeds, and ascending speeds"
                raise ProfileError(f"{path}: {speeds_key}{suffix}: got {got}; allowed: {allowed}")
            if speeds[0] <= 0 or min(currents) <= 0:
                raise ProfileError(f"{path}: {currents_key}{suffix}: speeds and currents must be above 0")
            found.append((int(cores) or None, [khz / 1e3 for khz in speeds], currents))
            break
    return found


def _refuse_placeholders(path: Path, items: Items) -> None:
    """Raise `ProfileError` if the file contains the placeholder currents of Android's sample file.

    This is the case if all cores, or the radios and the screen, have the placeholder as their current.
    """
    cores = [
        ma for key, mas in items.items() if key.startswith(("cpu.core_power", "cpu.active")) for ma in mas
    ]
    parts = [mas[0] for key in ("wifi.active", "radio.active", "screen.full") if (mas := items.get(key))]
    for what, figures in (("every core", cores), ("Wi-Fi, radio and screen", parts)):
        if figures and all(0 < figure <= PLACEHOLDER_MA for figure in figures):
            sample = f"{what} at {PLACEHOLDER_MA} mA as in Android's sample"
            raise ProfileError(f"{path}: is a placeholder file ({sample}); expected measured currents")


def _items(path: Path) -> Items:
    """Parse every item and array of the file as numbers.

    A file with a DOCTYPE declaration is rejected, because the declaration could define XML entities.
    """
    text = read_text(path)
    if "<!DOCTYPE" in text:
        raise ProfileError(f"{path}: has a document type; power profiles have none")
    with as_config_error(f"{path}: not XML", ElementTree.ParseError, kind=ProfileError):
        root = ElementTree.fromstring(text)
    found: Items = {}
    for element in root if root.tag == "device" else ():
        if element.tag not in ("item", "array"):  # Android 13 and later: a nested table of the modem
            continue
        values = element.findall("value") if element.tag == "array" else [element]
        name = element.get("name", "")
        found[name] = [_figure(path, name, value.text or "") for value in values]
    if not found:
        allowed = "<device> with items and arrays"
        raise ProfileError(f"{path}: <{root.tag[:40]}> has no items; allowed: {allowed}")
    return found


def _figure(path: Path, name: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise ProfileError(f"{path}: {name}: got {text.strip()[:40]!r}; allowed: a number of at least 0")
