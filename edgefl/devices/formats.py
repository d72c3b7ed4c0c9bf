"""Reads and writes other projects' file formats, chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from edgefl.devices import device_formats, fedscale, load_fleet, load_network, network_formats
from edgefl.devices.imports import ImportOptions, ImportResult
from edgefl.devices.schema import Network
from edgefl.errors import ProfileError, unknown


class Format(NamedTuple):
    """The function that reads a format, and the fields of `ImportOptions` that it uses."""

    read: Callable[[Path, ImportOptions], ImportResult]
    takes: tuple[str, ...]


class Export(NamedTuple):
    """A file's content, and the properties of the profile that the format cannot express."""

    content: bytes
    left_out: tuple[str, ...] = ()


FORMATS: dict[str, Format] = {
    "bouquetfl": Format(device_formats.read_bouquetfl, ("only",)),
    "devtools": Format(network_formats.read_devtools, ("name", "only")),
    "fedscale": Format(fedscale.read, ("name", "clients")),
    "mahimahi": Format(network_formats.read_mahimahi, ("name", "up")),
    "power-profile": Format(device_formats.read_power_profile, ("name", "base")),
    "webpagetest": Format(network_formats.read_webpagetest, ("only",)),
}
WRITTEN = ("devtools", "fedscale", "mahimahi", "webpagetest")
"""Formats that can be written: fedscale from a fleet profile, all others from a network profile."""


def read(format_name: str, path: Path, options: ImportOptions) -> ImportResult:
    """Import a file as profiles. Raises ProfileError if the format, an option or the file is invalid."""
    found = _format(format_name)
    for option, given in options._asdict().items():
        if given not in (None, ()) and option not in found.takes:
            allowed = ", ".join(f"--{name}" for name in found.takes)
            raise ProfileError(f"--{option} is not used by {format_name}; allowed: {allowed}")
    return found.read(path, options)


def write(name: str, format_name: str, way: Literal["down", "up"] | None = None) -> Export:
    """Export a profile, given by name or path; ``way`` selects the direction of a trace (default: down).

    Raises ProfileError if the format is read-only, cannot express the profile, or does not use ``way``.

    >>> print(write("3g", "webpagetest").content.decode(), end="")
    [3g]
    label="3G"
    bwIn=1600000
    bwOut=768000
    latency=300
    plr=0
    """
    _format(format_name)
    if format_name not in WRITTEN:
        raise ProfileError(f"format {format_name!r} is read-only; writable formats: {', '.join(WRITTEN)}")
    if way is not None and format_name != "mahimahi":
        raise ProfileError(f"--way is not used by {format_name}; only a mahimahi file has a single direction")
    if format_name == "fedscale":
        fleet = load_fleet(name)
        others = () if fleet.draw is None else ("the fleets that other seeds than 0 draw",)
        return Export(fedscale.write(fleet), ("all but each client's speed and bandwidth", *others))
    network = load_network(name)
    if format_name == "mahimahi":
        content = network_formats.write_mahimahi(network, network.up if way == "up" else network.down)
        return Export(content.encode(), _inexpressible(network, rate_only=True))
    if network.replays:
        raise ProfileError(f"network {name!r} replays a trace, which {format_name} cannot hold; use mahimahi")
    webpagetest, devtools = network_formats.write_webpagetest, network_formats.write_devtools
    text, left_out = (webpagetest if format_name == "webpagetest" else devtools)(network)
    return Export(text.encode(), (*left_out, *_inexpressible(network)))


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ProfileError(unknown("format", name, FORMATS))
    return FORMATS[name]


def _inexpressible(network: Network, *, rate_only: bool = False) -> tuple[str, ...]:
    """List the network's properties that no format can express.

    With ``rate_only``, list all its properties except the rates.
    """
    ways = (network.down, network.up)
    has = {
        "delay": rate_only and any(way.delay_ms for way in ways),
        "loss": rate_only and any(way.loss_pct for way in ways),
        "jitter": any(way.jitter_ms for way in ways),
        "variation of the rate": any(way.rate_cv for way in ways),
        "packet and header size": (network.mtu_bytes, network.header_bytes) != (1500, 40),
        "bearer": network.bearer != "mobile",
        "radio": network.radio is not None,
        "loss of the connection": any(way.loss_pct and way.on_loss == "disconnect" for way in ways),
    }
    return tuple(what for what, there in has.items() if there)
