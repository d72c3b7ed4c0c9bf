"""Chrome's throttling presets as JSON, in three dialects.

    {"title": "Slow", "download": 50000, "upload": 20000, "latency": 400}
        a custom profile of the DevTools, or a list of them: bytes/s, ms; −1 is unlimited
    {"downloadThroughput": 50000, "uploadThroughput": 20000, "latency": 400, "packetLoss": 1}
        parameters of the protocol's ``Network.emulateNetworkConditions``, bare or in their message
    {"settings": {"throttling": {"rttMs": 150, "throughputKbps": 1638.4, …}}}
        a Lighthouse configuration or result; bare ``throttling`` tables by name will do

What Lighthouse hands to the DevTools is fudged (latency · 3.75, throughput · 0.9): the target values are
taken, and its upload divided by what the download was multiplied with. Its kbit is 1024 bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from edgefl.devices.imports import (
    ImportOptions,
    ImportResult,
    chosen,
    profile_file,
    profile_names,
    read_bytes,
)
from edgefl.devices.schema import Direction, Network
from edgefl.errors import ProfileError

Throughput = Annotated[float, msgspec.Meta(ge=-1, lt=1e12)]
Latency = Annotated[float, msgspec.Meta(ge=0, lt=1e7)]
Loss = Annotated[float, msgspec.Meta(ge=0, lt=100)]
_KBIT = 1024
_INSIDE = ("throttling", "settings", "configSettings")


class CustomProfile(msgspec.Struct):
    """A custom profile of the DevTools."""

    download: Throughput
    upload: Throughput
    latency: Latency
    title: str | None = None
    packetLoss: Loss = 0.0


class NetworkConditions(msgspec.Struct):
    """Parameters of ``Network.emulateNetworkConditions``; a throughput below 0 is unlimited."""

    latency: Latency
    downloadThroughput: Throughput
    uploadThroughput: Throughput
    offline: bool = False
    packetLoss: Loss = 0.0


class LighthouseThrottling(msgspec.Struct):
    """Lighthouse's ``throttling``; 0 everywhere is none."""

    rttMs: Latency = 0.0
    throughputKbps: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0
    requestLatencyMs: Latency = 0.0
    downloadThroughputKbps: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0
    uploadThroughputKbps: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0


Preset = CustomProfile | NetworkConditions | LighthouseThrottling


def read(path: Path, asked: ImportOptions) -> ImportResult:
    """A network a preset."""
    try:
        value = msgspec.json.decode(read_bytes(path))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise ProfileError(f"{path}: not JSON: {wrong}") from None
    found = list(_presets(path, value, asked.name or path.stem))
    if not found:
        raise ProfileError(
            f"{path}: no preset; allowed: tables with download, upload and latency, with downloadThroughput, "
            "or with throttling"
        )
    wanted = chosen(path, [title for title, _ in found], asked.only)
    picked = [(title, preset) for title, preset in found if title in wanted]
    files = {}
    for name, (title, preset) in zip(profile_names(title for title, _ in picked), picked, strict=True):
        file, text = profile_file(path, "networks", _network(path, name, title, preset))
        files[file] = text
    return ImportResult(files)


def write(network: Network) -> tuple[str, tuple[str, ...]]:
    """A custom profile of the DevTools, and what of the network it cannot say."""
    down, up = network.down, network.up
    preset = {
        "title": network.name,
        "download": _bytes_per_s(down),
        "upload": _bytes_per_s(up),
        "latency": down.delay_ms + up.delay_ms,
    }
    return json.dumps(preset, indent=2) + "\n", ("loss",) if down.loss_pct or up.loss_pct else ()


def _bytes_per_s(way: Direction) -> float:
    return -1 if way.rate_mbps is None else way.rate_mbps * 1e6 / 8


def _presets(path: Path, value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Preset]]:
    if isinstance(value, list) and depth < 4:
        for at, item in enumerate(value):
            yield from _presets(path, item, f"{name}-{at + 1}", depth + 1)
    if not isinstance(value, dict) or depth >= 4:
        return
    title = value.get("title") or value.get("label") or name
    title = title if isinstance(title, str) else name
    if "downloadThroughput" in value:
        yield title, _as(path, title, value, NetworkConditions)
    elif "download" in value and "upload" in value:
        yield title, _as(path, title, value, CustomProfile)
    elif value.keys() & {"rttMs", "throughputKbps", "downloadThroughputKbps"}:
        yield title, _as(path, title, value, LighthouseThrottling)
    elif isinstance(value.get("params"), dict):
        yield from _presets(path, value["params"], title, depth + 1)
    else:
        inside = [key for key in _INSIDE if isinstance(value.get(key), dict)]
        for key in inside or value:
            yield from _presets(path, value[key], title if inside else str(key), depth + 1)


def _as(path: Path, title: str, value: dict[str, Any], of: type[Preset]) -> Preset:
    try:
        return msgspec.convert(value, of)
    except msgspec.ValidationError as wrong:
        raise ProfileError(f"{path}: {title}: {str(wrong).replace(' - at `$.', ' at `')}") from None


def _network(path: Path, name: str, title: str, preset: Preset) -> dict[str, Any]:
    match preset:
        case CustomProfile():
            loss_pct, delay_ms = preset.packetLoss, preset.latency / 2
            down, up = preset.download * 8 / 1e6, preset.upload * 8 / 1e6
            said = "download, upload and half of latency of the DevTools profile"
        case NetworkConditions():
            if preset.offline:
                raise ProfileError(f"{path}: {title}: offline: got true; allowed: false")
            loss_pct, delay_ms = preset.packetLoss, preset.latency / 2
            down, up = preset.downloadThroughput * 8 / 1e6, preset.uploadThroughput * 8 / 1e6
            said = "Network.emulateNetworkConditions, half of latency each way,"
        case LighthouseThrottling():
            loss_pct = 0.0
            down_kbit, up_kbit, rtt_ms = _target(preset)
            down, up, delay_ms = down_kbit * _KBIT / 1e6, up_kbit * _KBIT / 1e6, rtt_ms / 2
            said = "Lighthouse throttling, target values, half of rttMs each way,"
    source = f"{said} in {path.name}: {title}"
    ways = {
        way: {"delay_ms": delay_ms, "loss_pct": loss_pct} | ({"rate_mbps": rate} if rate > 0 else {})
        for way, rate in (("down", down), ("up", up))
    }
    return {"id": name, "name": title, **ways, "sources": {"down": source, "up": source}}


def _target(preset: LighthouseThrottling) -> tuple[float, float, float]:
    """Download and upload in Lighthouse's kbit/s and the round trip in ms, without the fudge factors."""
    down, up = preset.downloadThroughputKbps, preset.uploadThroughputKbps
    if preset.throughputKbps > 0:
        scale = preset.throughputKbps / down if down > 0 else 1.0
        return preset.throughputKbps, (up * scale if up > 0 else preset.throughputKbps), preset.rttMs
    return down, up, preset.rttMs or preset.requestLatencyMs
