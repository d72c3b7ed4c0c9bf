"""Android's ``power_profile.xml``: what a device's parts draw, in mA at the battery's nominal voltage.

    <device name="Android">
        <item name="battery.capacity">2800</item>
        <array name="cpu.clusters.cores"><value>4</value><value>4</value></array>
        <array name="cpu.core_speeds.cluster0"><value>300000</value>…</array>     kHz
        <array name="cpu.core_power.cluster0"><value>39.4</value>…</array>        mA of one core

The file says nothing of how fast a device computes, so it completes a device profile that does. Older files
name the arrays ``cpu.speeds`` and ``cpu.active``, and leave ``.cluster0`` out where there is one cluster.
Files in which nothing was measured, with the 0.1 mA of Android's own sample, are refused; currents that are
the same at every frequency were not measured either, and are left out.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

from edgefl.devices import load_device, to_json
from edgefl.devices.imports import ImportOptions, ImportResult, profile_file, profile_name, read_bytes
from edgefl.errors import ProfileError

PLACEHOLDER_MA = 0.1
SAME_MHZ = 0.01
"""A cluster of the file is one of the profile's if their highest frequencies differ by a smaller share."""


def read(path: Path, asked: ImportOptions) -> ImportResult:
    """The device profile that ``asked.base`` names, with the file's battery and currents of the cores."""
    items = _items(path)
    _refuse_placeholders(path, items)
    clusters = _clusters(path, items)
    seen = [ma for cluster in clusters for ma in cluster.power_ma]
    notes = []
    if len(seen) > len(clusters) and len(set(seen)) == 1:
        notes.append(f"left out: the cores' currents, {seen[0]:g} mA at every frequency")
        clusters = []
    if asked.base is None:
        raise ProfileError(
            f"{path}: has no computing rates; name the device profile that it completes: --base"
        )
    tables = to_json(load_device(asked.base))
    source = f"Android power_profile.xml: {path.name}"
    sources = tables["sources"]
    battery = _battery(items)
    if "capacity_mah" not in tables.get("battery", {}) | battery:
        raise ProfileError(
            f"{path}: battery.capacity: got nothing; allowed: above 0 mAh, as the base has none"
        )
    before = sources.pop("battery", None)
    for key in tables.get("battery", {}):
        if before is not None:
            sources.setdefault(f"battery.{key}", before)
    sources |= {f"battery.{key}": f"{source}, {_SAID[key]}" for key in battery}
    fitted, left_out = _fit(clusters, tables)
    if fitted:
        before = sources.get("cpu.clusters", sources.get("cpu"))
        told = before.split("; currents from")[0] + "; " if before else ""
        sources["cpu.clusters"] = f"{told}currents from {source}"
    tables["battery"] = tables.get("battery", {}) | battery
    tables["id"] = profile_name(asked.name or tables["id"])
    file, text = profile_file(path, "devices", tables)
    return ImportResult({file: text}, (*notes, *left_out))


_SAID = {
    "capacity_mah": "battery.capacity",
    "idle_ma": "cpu.idle",
    "wifi_ma": "wifi.active, or the mean of wifi.controller.rx and .tx",
    "radio_ma": "radio.active, or the mean of modem.controller.rx and .tx",
}


def _battery(items: dict[str, list[float]]) -> dict[str, float]:
    figures = {
        "capacity_mah": items.get("battery.capacity", []),
        "idle_ma": items.get("cpu.idle", []),
        "wifi_ma": _transfer(items, "wifi.active", "wifi.controller"),
        "radio_ma": _transfer(items, "radio.active", "modem.controller"),
    }
    return {
        key: round(value[0], 2) for key, value in figures.items() if value and (value[0] or key == "idle_ma")
    }


def _transfer(items: dict[str, list[float]], plain: str, controller: str) -> list[float]:
    """What a radio draws while it transfers: the file's figure, or the middle of receiving and sending."""
    if any(items.get(plain, [])):
        return items[plain][:1]
    received, sent = items.get(f"{controller}.rx", []), items.get(f"{controller}.tx", [])
    both = [sum(part) / len(part) for part in (received, sent) if part and sum(part) > 0]
    return [sum(both) / len(both)] if both else []


class _Cluster(NamedTuple):
    """Of the file; ``cores`` is None where it does not say."""

    cores: int | None
    freq_mhz: list[float]
    power_ma: list[float]

    def __str__(self) -> str:
        return f"{self.cores or 'all'} cores of {self.freq_mhz[-1]:g} MHz"

    def is_of(self, known: dict[str, Any]) -> bool:
        """Whether it is that cluster of the profile."""
        same_size = self.cores is None or known["cores"] == self.cores
        return bool(same_size and abs(known["max_mhz"] / self.freq_mhz[-1] - 1) < SAME_MHZ)


def _fit(clusters: list[_Cluster], tables: dict[str, Any]) -> tuple[bool, list[str]]:
    """Put each cluster's frequencies and currents into the profile's; say which are none of it."""
    known = tables["cpu"].get("clusters", []) if "cpu" in tables else []
    fitted, notes = False, []
    for cluster in clusters:
        same = [one for one in known if cluster.is_of(one)]
        if not same:
            have = " + ".join(f"{one['cores']} cores of {one['max_mhz']:g} MHz" for one in known)
            notes.append(f"left out: {cluster}, which the profile has not ({have or 'it has no clusters'})")
            continue
        fitted = True
        same[0].update(
            max_mhz=cluster.freq_mhz[-1],
            freq_mhz=cluster.freq_mhz,
            max_ma=cluster.power_ma[-1],
            power_ma=cluster.power_ma,
        )
    return fitted, notes


def _clusters(path: Path, items: dict[str, list[float]]) -> list[_Cluster]:
    found = []
    for at, cores in enumerate(items.get("cpu.clusters.cores", [0.0])):
        for speeds_key, currents_key in (("cpu.core_speeds", "cpu.core_power"), ("cpu.speeds", "cpu.active")):
            suffix = f".cluster{at}" if f"{speeds_key}.cluster{at}" in items else ""
            speeds, currents = items.get(speeds_key + suffix), items.get(currents_key + suffix)
            if speeds is None or currents is None:
                continue
            if len(speeds) != len(currents) or not speeds or speeds != sorted(set(speeds)):
                raise ProfileError(
                    f"{path}: {speeds_key}{suffix}: got {len(speeds)} speeds and {len(currents)} currents; "
                    "allowed: as many of both, the speeds ascending"
                )
            if speeds[0] <= 0 or min(currents) <= 0:
                raise ProfileError(f"{path}: {currents_key}{suffix}: allowed: speeds and currents above 0")
            found.append(_Cluster(int(cores) or None, [khz / 1e3 for khz in speeds], currents))
            break
    return found


def _refuse_placeholders(path: Path, items: dict[str, list[float]]) -> None:
    """A file whose cores, or whose radios and screen, all draw Android's sample value was never measured."""
    cores = [
        ma for key, mas in items.items() if key.startswith(("cpu.core_power", "cpu.active")) for ma in mas
    ]
    parts = [mas[0] for key in ("wifi.active", "radio.active", "screen.full") if (mas := items.get(key))]
    for what, figures in (("every core", cores), ("Wi-Fi, radio and screen", parts)):
        if figures and all(0 < figure <= PLACEHOLDER_MA for figure in figures):
            raise ProfileError(
                f"{path}: a placeholder file, {what} at {PLACEHOLDER_MA} mA as in Android's sample; allowed: "
                "measured currents"
            )


def _items(path: Path) -> dict[str, list[float]]:
    """Every item and array of the file as numbers. No document type, so no entities, is accepted."""
    found: dict[str, list[float]] = {}
    inside: list[str] = []
    name, text = "", ""

    def fail(why: str) -> None:
        raise ProfileError(f"{path}: line {parser.CurrentLineNumber}: {why}")

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal name, text
        inside.append(tag)
        text = ""
        if inside == ["device", "item"] or inside == ["device", "array"]:
            name = attributes.get("name", "")
            found[name] = []
        elif inside not in (["device"], ["device", "array", "value"]):
            fail(
                f"<{tag}> inside {'/'.join(inside[:-1]) or 'nothing'}; allowed: device with items and arrays"
            )

    def end(tag: str) -> None:
        if inside in (["device", "item"], ["device", "array", "value"]):
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not (math.isfinite(value) and value >= 0):
                fail(f"{name}: got {text.strip()[:40]!r}; allowed: a number of at least 0")
            found[name].append(value)
        inside.pop()

    def characters(more: str) -> None:
        nonlocal text
        text += more

    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = characters
    parser.StartDoctypeDeclHandler = lambda *_: fail("a document type, which no power profile has")
    try:
        parser.Parse(read_bytes(path), True)
    except expat.ExpatError as wrong:
        raise ProfileError(f"{path}: not XML: {wrong}") from None
    if not found:
        raise ProfileError(f"{path}: no items; allowed: <device> with items and arrays")
    return found
