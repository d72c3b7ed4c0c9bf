"""FedScale's two dictionaries of devices, which ship as pickles and are read as data.

``client_device_capacity``: client → ``{"computation": ms, "communication": kbit/s}``. A training step takes
3 · batch · computation (forward once, backward twice), both transfers of a trip (upload + download) over
communication. Which network's inference ``computation`` is FedScale does not state: MobileNet-V2 at 224 × 224
is assumed here.

``client_behave_trace``: client → ``{"duration", "inactive": […], "finish_time", "active": […], "model"}``,
seconds. The client is there from active[i] to inactive[i], again after each finish_time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from edgefl.devices import Device, FleetFile, Network, load_device, load_network
from edgefl.devices.imports import (
    CLIENTS,
    ImportOptions,
    ImportResult,
    profile_file,
    profile_name,
    profile_names,
    read_bytes,
)
from edgefl.errors import ProfileError
from edgefl.plain_pickle import PickleError, read_plain_pickle, write_plain_pickle

Client = TypeVar("Client")
LIMIT_MIB = 256
MOST_CLIENTS = 5000
"""A fleet of more would not fit a profile file."""
FORWARD_GFLOP = 0.6
"""MobileNet-V2's inference of one image of 224 × 224, 300 M multiply-adds (Sandler et al., CVPR 2018)."""
UNCERTAIN = 6.0
MOST = 1e12
"""No millisecond, kbit/s or second of a phone is above it."""


def read(path: Path, asked: ImportOptions) -> ImportResult:
    """Of capacities a fleet with a device and a network for each client; of behaviour an availability file.

    Of more than ``asked.clients`` clients so many are taken, evenly spaced in the order of their speed (or,
    where there is none, of their ids), so that the spread stays.
    """
    try:
        value = read_plain_pickle(read_bytes(path, LIMIT_MIB))
    except PickleError as wrong:
        raise ProfileError(f"{path}: {' '.join(str(wrong).split())}") from None
    if not isinstance(value, dict) or not value:
        raise ProfileError(f"{path}: got {_shown(value)}; allowed: a dictionary of clients")
    if not 1 <= _most(asked) <= MOST_CLIENTS:
        raise ProfileError(f"--clients: got {asked.clients}; allowed: 1 to {MOST_CLIENTS}")
    first = next(iter(value.values()))
    if isinstance(first, dict) and "computation" in first:
        return _capacities(path, value, asked)
    if isinstance(first, dict) and "active" in first:
        return _behaviour(path, value, asked)
    raise ProfileError(
        f"{path}: client {next(iter(value))!r}: got {_shown(first)}; allowed: computation and communication, "
        "or active, inactive and finish_time"
    )


def _most(asked: ImportOptions) -> int:
    return CLIENTS if asked.clients is None else asked.clients


def write(fleet: FleetFile) -> bytes:
    """``client_device_capacity`` of that fleet: plain numbers, clients counted from 0 in the fleet's order.

    FedScale has one bandwidth for both ways: the one that takes as long for both together.
    """
    clients: dict[int, dict[str, float]] = {}
    for name, count in fleet.devices.items():
        device = load_device(name)
        network = load_network(fleet.network if isinstance(fleet.network, str) else fleet.network[name])
        entry = {"computation": _computation_ms(device), "communication": _communication_kbps(network)}
        for _ in range(count):
            clients[len(clients)] = dict(entry)
    return write_plain_pickle(clients)


def _computation_ms(device: Device) -> float:
    if device.cpu is None or device.slowdown is not None:
        why = "no cpu" if device.cpu is None else "a slowdown that is drawn"
        raise ProfileError(f"device {device.id!r} has {why}; FedScale states one speed for each client")
    return FORWARD_GFLOP / device.cpu.rate_gflops.train * 1e3


def _communication_kbps(network: Network) -> float:
    down, up = network.down.rate_mbps, network.up.rate_mbps
    if down is None or up is None:
        raise ProfileError(
            f"network {network.id!r} has no rate; FedScale states one bandwidth for each client"
        )
    return 2 / (1 / down + 1 / up) * 1e3


def _capacities(path: Path, clients: dict[Any, Any], asked: ImportOptions) -> ImportResult:
    speeds = {client: _capacity(path, client, entry) for client, entry in clients.items()}
    ordered = sorted(speeds, key=lambda client: (speeds[client], str(client)))
    picked = _spread(ordered, _most(asked))
    name = profile_name(asked.name or path.stem)
    files: dict[str, str] = {}
    fleet, networks = {}, {}
    for own, client in zip(profile_names(f"{name}-{client}" for client in picked), picked, strict=True):
        computation_ms, kbps = speeds[client]
        device, text = profile_file(path, "devices", _device(path, own, client, computation_ms))
        files[device] = text
        network, text = profile_file(path, "networks", _network(path, f"{own}-link", client, kbps))
        files[network] = text
        fleet[f"./{device}"] = 1
        networks[f"./{device}"] = f"./{network}"
    source = (
        f"FedScale's {path.name}: {len(picked)} of {len(clients)} clients, evenly spaced in order of speed"
    )
    file, text = profile_file(
        path, "fleets", {"id": name, "name": name, "source": source, "devices": fleet, "network": networks}
    )
    files[file] = text
    return ImportResult(files, (source,))


def _capacity(path: Path, client: Any, entry: Any) -> tuple[float, float]:
    figures = []
    for key in ("computation", "communication"):
        value = entry.get(key) if isinstance(entry, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST:
            got = "nothing" if value is None else _shown(value)
            raise ProfileError(f"{path}: client {client!r}: {key}: got {got}; allowed: a number above 0")
        figures.append(float(value))
    return figures[0], figures[1]


def _device(path: Path, name: str, client: Any, computation_ms: float) -> dict[str, Any]:
    return {
        "id": name,
        "name": f"FedScale client {client}",
        "class": "tier",
        "cpu": {"rate_gflops": {"train": FORWARD_GFLOP / computation_ms * 1e3}},
        "sources": {
            "cpu.rate_gflops.train": f"derived: {FORWARD_GFLOP} GFLOP (MobileNet-V2, assumed) in "
            f"{computation_ms:g} ms, the computation of client {client} in FedScale's {path.name}"
        },
        "uncertainty": {"cpu.rate_gflops.train": UNCERTAIN},
    }


def _network(path: Path, name: str, client: Any, kbps: float) -> dict[str, Any]:
    rate = {"rate_mbps": kbps / 1e3}
    source = f"communication of client {client} in FedScale's {path.name}; it states no delay"
    return {
        "id": name,
        "name": f"FedScale client {client}'s link",
        "header_bytes": 0,
        "down": rate,
        "up": rate,
        "sources": {"down": source, "up": source, "header_bytes": "FedScale counts none"},
    }


def _behaviour(path: Path, clients: dict[Any, Any], asked: ImportOptions) -> ImportResult:
    usable = {}
    for client, entry in clients.items():
        availability = _availability(path, client, entry)
        if availability is not None:
            usable[client] = availability
    if not usable:
        raise ProfileError(f"{path}: no client is ever active; allowed: at least one")
    picked = _spread(sorted(usable, key=lambda client: (str(type(client)), client)), _most(asked))
    name = profile_name(asked.name or path.stem)
    text = json.dumps([usable[client] for client in picked])
    never = len(clients) - len(usable)
    notes = (f"{len(picked)} of {len(clients)} clients; {never} never active",)
    return ImportResult({f"{name}.json": text + "\n"}, notes)


def _availability(path: Path, client: Any, entry: Any) -> dict[str, Any] | None:
    """The client's intervals, in order and apart; None if it is never there."""

    def wrong(key: str, allowed: str) -> ProfileError:
        got = _shown(entry.get(key, "nothing")) if isinstance(entry, dict) else _shown(entry)
        return ProfileError(f"{path}: client {client!r}: {key}: got {got}; allowed: {allowed}")

    table = entry if isinstance(entry, dict) else {}
    period = table.get("finish_time")
    if not _is_time(period) or period == 0:
        raise wrong("finish_time", "seconds above 0")
    for key in ("active", "inactive"):
        times = table.get(key)
        if not isinstance(times, list | tuple) or not all(_is_time(time) for time in times):
            raise wrong(key, "a list of seconds")
    starts, ends = table["active"], table["inactive"]
    if len(starts) != len(ends):
        raise wrong("inactive", f"as many as active, {len(starts)}")
    merged: list[list[float]] = []
    for start, end in sorted(zip(starts, ends, strict=True)):
        end = min(end, period)
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return {"intervals_s": merged, "period_s": period} if merged else None


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST


def _spread(ordered: Sequence[Client], count: int) -> list[Client]:
    """``count`` of these at even ranks, (i + ½) / count; all if there are no more."""
    if len(ordered) <= count:
        return list(ordered)
    return [ordered[int((at + 0.5) * len(ordered) / count)] for at in range(count)]


def _shown(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:60]
