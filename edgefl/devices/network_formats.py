"""Reads and writes network files of WebPageTest, Chrome (throttling presets) and Mahimahi (traces).

An imported network gets half of the round-trip time and the full loss rate in each direction. WebPageTest's
``connectivity.ini`` has one section per network: rates in bit/s (0 means unlimited), latency in ms, and loss
in percent. Chrome's presets are JSON: a single preset, a list, or an object keyed by name. Three kinds are
read: DevTools custom profiles (bytes/s, −1 means unlimited), parameters of the DevTools protocol's
``Network.emulateNetworkConditions``, and Lighthouse's ``throttling``. Lighthouse multiplies the values that
it passes to DevTools by a factor (latency by 3.75, throughput by 0.9). The target values without this factor
are imported; the upload has no target value, so its rate is divided by the download's factor. Lighthouse's
kbit is 1024 bits.
"""

from __future__ import annotations

import configparser
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from edgefl.devices.imports import ImportOptions, ImportResult, checked, pick, profile_file, read_text
from edgefl.devices.link import constant_trace, read_trace, trace_text
from edgefl.devices.schema import Direction, Network
from edgefl.errors import ProfileError
from edgefl.validation import from_json

Bits = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
Throughput = Annotated[float, msgspec.Meta(ge=-1, lt=1e12)]
Latency = Annotated[float, msgspec.Meta(ge=0, lt=1e7)]
Loss = Annotated[float, msgspec.Meta(ge=0, lt=100)]
Kbits = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
_INSIDE = ("throttling", "settings", "configSettings")
Entry = tuple[str, dict[str, Any]]


def _network(title: str, mbps: Sequence[float], round_trip_ms: float, loss_pct: float, source: str) -> Entry:
    """Make a network with constant download and upload rates; a rate of 0 or below means unlimited."""
    link = {"delay_ms": round_trip_ms / 2, "loss_pct": loss_pct}
    down, up = (link | ({"rate_mbps": rate} if rate > 0 else {}) for rate in mbps)
    return title, {"name": title, "down": down, "up": up, "sources": {"down": source, "up": source}}


def _networks(path: Path, entries: Sequence[Entry], options: ImportOptions) -> ImportResult:
    files: dict[str, str] = {}
    picked = list(pick(path, options.only, entries))
    for name, _, tables in picked:
        own = options.profile_name(name) if len(picked) == 1 else name
        files |= profile_file(path, "networks", {"id": own, **tables})
    return ImportResult(files)


class Section(msgspec.Struct):
    """A section of WebPageTest's file; configparser converts keys to lower case."""

    bwin: Bits
    bwout: Bits
    latency: Latency
    plr: Loss = 0.0


def read_webpagetest(path: Path, options: ImportOptions) -> ImportResult:
    """Import each section as a network; sections without limits, such as ``[general]``, are skipped."""
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), comment_prefixes=(";", "#"), default_section=""
    )
    try:
        parser.read_string(read_text(path))
    except configparser.Error as error:
        raise ProfileError(
            f"{path}: is not a valid connectivity.ini: {' '.join(str(error).split())[:200]}"
        ) from None
    found = []
    for name in parser.sections():
        keys = {key: text.strip("\"' ") for key, text in parser[name].items()}
        if keys.keys() & {"bwin", "bwout", "latency"}:
            figures = {key: _number(keys[key]) for key in Section.__struct_fields__ if key in keys}
            one = checked(f"{path}: [{name}]", figures, Section)
            how = "bwIn down, bwOut up, half of latency and plr each way"
            source = f"WebPageTest connectivity file {path.name}, section {name}: {how}"
            title, mbps = keys.get("label") or name, (one.bwin / 1e6, one.bwout / 1e6)
            found.append((name, _network(title, mbps, one.latency, one.plr, source)[1]))
    if not found:
        raise ProfileError(f"{path}: must have at least one section with bwIn, bwOut and latency (got none)")
    return _networks(path, found, options)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def write_webpagetest(network: Network) -> tuple[str, tuple[str, ...]]:
    """Return the network as a ``connectivity.ini`` section, and the properties that it cannot express."""
    down, up = network.down, network.up
    bits = [0 if way.rate_mbps is None else max(1, round(way.rate_mbps * 1e6)) for way in (down, up)]
    label = " ".join(network.name.split()).replace('"', "'")
    round_trip_ms = down.delay_ms + up.delay_ms
    text = (
        f'[{network.id}]\nlabel="{label}"\nbwIn={bits[0]}\nbwOut={bits[1]}\n'
        f"latency={round(round_trip_ms)}\nplr={max(down.loss_pct, up.loss_pct):g}\n"
    )
    rounded = () if round_trip_ms == round(round_trip_ms) else ("fractions of a millisecond of delay",)
    return text, (*_merged(network), *rounded)


def _merged(network: Network) -> tuple[str, ...]:
    """List differences between download and upload that a format with one value for both cannot express."""
    down, up = network.down, network.up
    differ = {"loss": down.loss_pct != up.loss_pct, "delay": down.delay_ms != up.delay_ms}
    return tuple(f"separate {what} for download and upload" for what, lost in differ.items() if lost)


class CustomProfile(msgspec.Struct):
    """A DevTools custom profile; a throughput below 0 means unlimited, and three zeros mean offline."""

    download: Throughput
    upload: Throughput
    latency: Latency
    packetLoss: Loss = 0.0


class NetworkConditions(msgspec.Struct):
    """Parameters of ``Network.emulateNetworkConditions``; a throughput below 0 means unlimited."""

    latency: Latency
    downloadThroughput: Throughput
    uploadThroughput: Throughput
    offline: bool = False
    packetLoss: Loss = 0.0


class LighthouseThrottling(msgspec.Struct):
    """Lighthouse's ``throttling``; a value of 0 means no throttling."""

    rttMs: Latency = 0.0
    throughputKbps: Kbits = 0.0
    requestLatencyMs: Latency = 0.0
    downloadThroughputKbps: Kbits = 0.0
    uploadThroughputKbps: Kbits = 0.0


def read_devtools(path: Path, options: ImportOptions) -> ImportResult:
    """Import each preset as a network."""
    value = from_json(read_text(path), f"{path}: not JSON", kind=ProfileError)
    presets = list(_presets(path, value, options.name or path.stem))
    if not presets:
        allowed = "tables with download, upload and latency, with downloadThroughput, or with throttling"
        raise ProfileError(f"{path}: has no preset; expected {allowed}")
    return _networks(path, presets, options)


def write_devtools(network: Network) -> tuple[str, tuple[str, ...]]:
    """Return the network as a DevTools custom profile, and the properties that the format cannot express."""
    down, up = network.down, network.up
    rates = [-1 if way.rate_mbps is None else way.rate_mbps * 1e6 / 8 for way in (down, up)]
    preset = {"title": network.name, "download": rates[0], "upload": rates[1]}
    preset["latency"] = down.delay_ms + up.delay_ms
    if loss_pct := max(down.loss_pct, up.loss_pct):
        preset["packetLoss"] = loss_pct
    return json.dumps(preset, indent=2) + "\n", _merged(network)


def _presets(path: Path, value: Any, name: str, depth: int = 0) -> Iterator[Entry]:
    if isinstance(value, list) and depth < 4:
        for at, item in enumerate(value):
            yield from _presets(path, item, f"{name}-{at + 1}", depth + 1)
    if not isinstance(value, dict) or depth >= 4:
        return
    title = value.get("title") or value.get("label") or name
    title = title if isinstance(title, str) else name
    if (
        "downloadThroughput" in value
        or ("download" in value and "upload" in value)
        or value.keys() & {"rttMs", "throughputKbps", "downloadThroughputKbps"}
    ):
        yield _preset(path, title, value)
    elif isinstance(value.get("params"), dict):
        yield from _presets(path, value["params"], title, depth + 1)
    else:
        inside = [key for key in _INSIDE if isinstance(value.get(key), dict)]
        for key in inside or value:
            yield from _presets(path, value[key], title if inside else str(key), depth + 1)


def _preset(path: Path, title: str, value: dict[str, Any]) -> Entry:
    where, at = f"{path}: {title}", f"in {path.name}: {title}"
    if "downloadThroughput" in value:
        sent = checked(where, value, NetworkConditions)
        if sent.offline:
            raise ProfileError(f"{where}: offline: must be false, got true")
        source = f"Network.emulateNetworkConditions, half of latency each way, {at}"
        mbps = sent.downloadThroughput * 8 / 1e6, sent.uploadThroughput * 8 / 1e6
        return _network(title, mbps, sent.latency, sent.packetLoss, source)
    if "download" in value and "upload" in value:
        own = checked(where, value, CustomProfile)
        if not (own.download or own.upload or own.latency):
            raise ProfileError(f"{where}: download, upload and latency are all 0, which means offline")
        source = f"download, upload and half of latency of the DevTools profile {at}"
        mbps = own.download * 8 / 1e6, own.upload * 8 / 1e6
        return _network(title, mbps, own.latency, own.packetLoss, source)
    one = checked(where, value, LighthouseThrottling)
    down, up, round_trip_ms = one.downloadThroughputKbps, one.uploadThroughputKbps, one.rttMs
    if one.throughputKbps > 0:
        scale = one.throughputKbps / down if down > 0 else 1.0
        down, up = one.throughputKbps, up * scale if up > 0 else one.throughputKbps
    else:
        round_trip_ms = one.rttMs or one.requestLatencyMs
    source = f"Lighthouse throttling, target values, half of rttMs each way, {at}"
    return _network(title, (down * 1024 / 1e6, up * 1024 / 1e6), round_trip_ms, 0.0, source)


def read_mahimahi(path: Path, options: ImportOptions) -> ImportResult:
    """Import the trace as the download of a network; the upload is ``options.up``, or else the same trace."""
    name = options.profile_name(path.stem)
    traces: dict[str, str] = {}
    tables: dict[str, Any] = {"id": name, "name": name}
    sources: dict[str, str] = {}
    for way, own in (("down", path), ("up", options.up or path)):
        trace, same = read_trace(str(own)), own == path
        file = f"{name}-{'down' if same else way}.trace"
        traces[file], tables[way] = trace_text(trace), {"trace": file}
        mean = f"mean {trace.rate_mbps:.3g} Mbps over {trace.period_ms / 1e3:g} s"
        assumed = "assumed: as the download; " if same and way == "up" else ""
        sources[way] = f"{assumed}Mahimahi trace {own.name}, {mean}; it states no delay"
    files = profile_file(path, "networks", tables | {"sources": sources})
    return ImportResult(files | traces, tuple(f"{way}: {source}" for way, source in sources.items()))


def write_mahimahi(network: Network, way: Direction) -> str:
    """Return one direction of the network as a trace. Raises `ProfileError` if the rate is unlimited."""
    if way.trace is not None:
        return trace_text(read_trace(way.trace))
    if way.rate_mbps is None:
        raise ProfileError(f"network {network.id!r} has no rate limit in this direction, so it has no trace")
    return trace_text(constant_trace(way.rate_mbps))
