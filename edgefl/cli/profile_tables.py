"""Profiles as tables in the terminal: all of a kind, or every figure of one with its source."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from edgefl.devices import Device, FleetFile, Network, to_json
from edgefl.devices.schema import Profile
from edgefl.results.tables import table


def devices_table(devices: list[Device]) -> Table:
    """A line a device: what paces it and what it may hold."""
    rows = []
    for device in devices:
        rate = device.cpu.rate_gflops.train if device.cpu else None
        ram = device.memory.ram_mib if device.memory else None
        rows.append((device.id, device.kind, device.year, rate, ram, device.app_limit_mib, device.network))
    return table(("device", "class", ">year", ">GFLOPS", ">RAM MiB", ">app MiB", "network"), rows)


def networks_table(networks: list[Network]) -> Table:
    """A line a network."""
    rows = []
    for network in networks:
        down, up = network.down, network.up
        rates = [("trace" if way.trace else way.rate_mbps) for way in (down, up)]
        rtt_ms = down.delay_ms + up.delay_ms
        rows.append((network.id, *rates, rtt_ms, down.loss_pct, up.loss_pct))
    return table(("network", ">down Mbps", ">up Mbps", ">RTT ms", ">down loss %", ">up loss %"), rows)


def fleets_table(fleets: list[FleetFile]) -> Table:
    """A line a fleet."""
    rows = [(fleet.id, fleet.clients, len(fleet.devices), fleet.name) for fleet in fleets]
    return table(("fleet", ">clients", ">kinds", "name"), rows)


def one(profile: Profile) -> tuple[RenderableType, ...]:
    """Every figure of the profile, how uncertain it is where that is known, and its numbered source."""
    plain = to_json(profile)
    sources: dict[str, str] = plain.pop("sources", {})
    uncertainty: dict[str, float] = plain.pop("uncertainty", {})
    numbers: dict[str, int] = {}
    rows = []
    for key, value in _flat(plain):
        source, factor = _nearest(key, sources), _nearest(key, uncertainty)
        number = numbers.setdefault(source, len(numbers) + 1) if source is not None else ""
        rows.append((key, value, "" if factor is None else f"{factor:g}x", number))
    told = Table.grid(padding=(0, 1), pad_edge=True)
    for source, number in numbers.items():
        told.add_row(Text(str(number)), Text(source))
    return table(("field", "value", ">within", ">source"), rows), told


def _flat(plain: Any, key: str = "") -> list[tuple[str, object]]:
    """Nested figures as dotted keys."""
    if isinstance(plain, dict):
        return [row for name, v in plain.items() for row in _flat(v, f"{key}.{name}" if key else name)]
    if isinstance(plain, list) and plain and all(_is_step(item) for item in plain):
        return [(key, ", ".join(f"{item['temp_c']:g} °C: {item['freq_scale']:g}" for item in plain))]
    if isinstance(plain, list) and any(isinstance(item, dict) for item in plain):
        return [row for place, v in enumerate(plain) for row in _flat(v, f"{key}[{place}]")]
    if not isinstance(plain, list):
        return [(key, plain)]
    texts = ["–".join(f"{x:g}" for x in item) if isinstance(item, list) else f"{item:g}" for item in plain]
    if len(texts) > 4:
        texts = [*texts[:2], "…", f"{texts[-1]} ({len(texts)})"]
    return [(key, ", ".join(texts).replace("…,", "…"))]


def _is_step(item: object) -> bool:
    """Whether it is one of ``thermal.trips``, which are read best in a row."""
    return isinstance(item, dict) and item.keys() == {"temp_c", "freq_scale"}


def _nearest(key: str, said: dict[str, Any]) -> Any:
    """What is said of the figure, or of the nearest table around it."""
    steps = key.replace("[", ".").split(".")
    for count in range(len(steps), 0, -1):
        found = said.get(".".join(steps[:count]))
        if found is not None:
            return found
    return None
