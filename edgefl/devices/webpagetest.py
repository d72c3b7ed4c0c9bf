"""WebPageTest's ``connectivity.ini``: a section a network, bit/s, round trip in ms, packet loss in percent.

    [3G]
    label="Mobile 3G (1.6 Mbps/768 Kbps 300ms RTT)"
    bwIn=1600000
    bwOut=768000
    latency=300
    plr=0

A bandwidth of 0 is unlimited. Half the round trip and the whole loss go to each way.
"""

from __future__ import annotations

import configparser
import math
from pathlib import Path
from typing import Any

from edgefl.devices.imports import (
    ImportOptions,
    ImportResult,
    chosen,
    profile_file,
    profile_names,
    read_text,
)
from edgefl.devices.schema import Direction, Network
from edgefl.errors import ProfileError


def read(path: Path, asked: ImportOptions) -> ImportResult:
    """A network a section; sections that limit nothing, such as ``[general]``, are not networks."""
    sections = _sections(path)
    names = chosen(path, sections, asked.only)
    files = {}
    for name, section in zip(profile_names(names), names, strict=True):
        file, text = profile_file(path, "networks", _network(path, name, section, sections[section]))
        files[file] = text
    return ImportResult(files)


def write(network: Network) -> tuple[str, tuple[str, ...]]:
    """The section of that network, and what of it the format cannot say."""
    down, up = network.down, network.up
    label = network.name.replace('"', "'")
    lines = [
        f"[{network.id}]",
        f'label="{label}"',
        f"bwIn={_bits(down)}",
        f"bwOut={_bits(up)}",
        f"latency={round(down.delay_ms + up.delay_ms)}",
        f"plr={max(down.loss_pct, up.loss_pct):g}",
    ]
    lost = ["the two ways' loss"] if down.loss_pct != up.loss_pct else []
    if down.delay_ms != up.delay_ms:
        lost.append("the two ways' delay")
    return "\n".join(lines) + "\n", tuple(lost)


def _bits(way: Direction) -> int:
    return 0 if way.rate_mbps is None else max(1, round(way.rate_mbps * 1e6))


def _sections(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(
        interpolation=None, strict=True, delimiters=("=",), comment_prefixes=(";", "#"), default_section=""
    )
    try:
        parser.read_string(read_text(path))
    except configparser.Error as wrong:
        raise ProfileError(f"{path}: not WebPageTest's INI: {' '.join(str(wrong).split())}") from None
    found = {name: dict(parser[name]) for name in parser.sections()}
    networks = {name: keys for name, keys in found.items() if keys.keys() & {"bwin", "bwout", "latency"}}
    if not networks:
        raise ProfileError(f"{path}: got no section with bwIn, bwOut and latency; allowed: at least one")
    return networks


def _network(path: Path, name: str, section: str, keys: dict[str, str]) -> dict[str, Any]:
    label = keys.get("label", section).strip("\"' ") or section
    delay_ms = _figure(path, section, keys, "latency", 1e7) / 2
    loss_pct = _figure(path, section, keys, "plr", 100, missing=0.0)
    said = f"WebPageTest connectivity file {path.name}, section {section}"
    sources = {"down": f"{said}: bwIn, half of latency, plr", "up": f"{said}: bwOut, half of latency, plr"}
    ways: dict[str, dict[str, float]] = {}
    for way, key in (("down", "bwIn"), ("up", "bwOut")):
        rate_mbps = _figure(path, section, keys, key, 1e12) / 1e6
        limited = {"rate_mbps": rate_mbps} if rate_mbps else {}
        ways[way] = {"delay_ms": delay_ms, "loss_pct": loss_pct} | limited
    return {"id": name, "name": label, **ways, "sources": sources}


def _figure(
    path: Path, section: str, keys: dict[str, str], key: str, most: float, missing: float | None = None
) -> float:
    text = keys.get(key.lower())
    if text is None and missing is not None:
        return missing
    try:
        value = float((text or "").strip("\"' "))
    except ValueError:
        value = math.nan
    if not 0 <= value < most:
        got = "nothing" if text is None else repr(text)
        raise ProfileError(f"{path}: [{section}] {key}: got {got}; allowed: 0 to below {most:g}")
    return value
