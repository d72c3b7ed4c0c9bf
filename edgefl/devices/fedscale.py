"""Reads FedScale's device dictionaries (capacities and behaviors) as JSON, and writes capacities.

FedScale itself distributes both dictionaries as pickles (docs/profiles.md).

``client_device_capacity`` maps a client to ``{"computation": ms, "communication": kbit/s}``. A training step
takes 3 · batch size · ``computation``; the transfers of a trip take (upload + download size) /
``communication``. FedScale does not state which network's inference takes ``computation``, so MobileNet-V2
with images of 224 × 224 pixels is assumed.

``client_behave_trace`` maps a client to ``{"inactive": […], "finish_time", "active": […], …}``, in seconds.
The client is online from active[i] to inactive[i], and these intervals repeat with the period finish_time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from edgefl.devices import Device, FleetFile, load_device, load_network
from edgefl.devices.imports import (
    ImportOptions,
    ImportResult,
    checked,
    profile_file,
    profile_names,
    read_bytes,
)
from edgefl.devices.prediction import time_model
from edgefl.errors import ProfileError
from edgefl.learning.operations import StepWork
from edgefl.validation import from_json

Client = TypeVar("Client")
LIMIT_MIB = 256
CLIENTS = 100  # default maximum number of imported clients
MAX_CLIENTS = 5000  # a larger fleet would not fit in a profile file
FORWARD_GFLOP = 0.6
"""Operations for one inference of MobileNet-V2 on an image of 224 × 224 pixels, in GFLOP: 300 million
multiply-adds (Sandler et al. 2018)."""
BATCH = 16
"""Batch size of the training step of MobileNet-V2 from whose time the ``computation`` of a device with a
runtime is derived."""
UNCERTAIN = 6.0
Figure = Annotated[float, msgspec.Meta(gt=0, lt=1e12)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class Capacity(msgspec.Struct):
    """An entry of ``client_device_capacity``; FedScale has one bandwidth for both directions."""

    computation: Figure
    communication: Figure


class Behavior(msgspec.Struct):
    """An entry of ``client_behave_trace``."""

    finish_time: Figure
    active: list[Seconds]
    inactive: list[Seconds]


def read(path: Path, options: ImportOptions) -> ImportResult:
    """Import capacities as a fleet, or behaviors as an availability file.

    The fleet has one device and one network per client. At most ``options.clients`` clients are imported,
    evenly spaced in a list ordered by speed (for capacities) or by client id (for behaviors).
    """
    clients = from_json(read_bytes(path, LIMIT_MIB), f"{path}: not JSON", kind=ProfileError)
    if not isinstance(clients, dict) or not clients:
        raise ProfileError(f"{path}: must be an object with an entry for each client")
    most = CLIENTS if options.clients is None else options.clients
    if not 1 <= most <= MAX_CLIENTS:
        raise ProfileError(f"--clients: got {options.clients}; allowed: 1 to {MAX_CLIENTS}")
    client, first = next(iter(clients.items()))
    for key, reads in (("computation", _capacities), ("active", _behavior)):
        if isinstance(first, dict) and key in first:
            return reads(path, clients, options.profile_name(path.stem), most)
    allowed = "computation and communication, or active, inactive and finish_time"
    raise ProfileError(f"{path}: client {client!r}: must have {allowed}")


def write(fleet: FleetFile) -> bytes:
    """Return a fleet's ``client_device_capacity`` as JSON.

    FedScale has one bandwidth per client, and no packet headers. The bandwidth is chosen so that a download
    and an upload of equal size take the same total time as in the profile, apart from delays.
    """
    clients: list[dict[str, float]] = []
    for name, count in fleet.drawn(seed=0).items():
        device = load_device(name)
        network = load_network(fleet.network if isinstance(fleet.network, str) else fleet.network[name])
        if device.cpu is None or device.slowdown is not None:
            why = "no cpu" if device.cpu is None else "a drawn slowdown"
            raise ProfileError(f"device {device.id!r} has {why}; FedScale has one speed per client")
        down, up = network.down.rate_mbps, network.up.rate_mbps
        if down is None or up is None:
            why = f"network {network.id!r} has no rate; FedScale has one bandwidth per client"
            raise ProfileError(why)
        payload_mbps = 2 / (1 / down + 1 / up) * network.payload_bytes / network.mtu_bytes
        computation_ms = _computation_ms(device, device.cpu.rate_gflops.train)
        clients += [{"computation": computation_ms, "communication": payload_mbps * 1e3}] * count
    return json.dumps(dict(enumerate(clients))).encode() + b"\n"


def _computation_ms(device: Device, train_gflops: float) -> float:
    """Return the time of an inference of MobileNet-V2 in ms: a third of a training step's time per image."""
    if device.runtime_name is None:
        return FORWARD_GFLOP / train_gflops * 1e3
    return time_model(device).seconds(_mobilenet_v2()) / (3 * BATCH) * 1e3


@functools.cache
def _mobilenet_v2() -> StepWork:
    """Count the work of a training step of MobileNet-V2 on `BATCH` images."""
    import torch

    from edgefl.learning.benchmark_networks import NAMED
    from edgefl.learning.work import step_work

    make, shape = NAMED["mobilenet_v2"]
    with torch.device("meta"):
        return step_work(make(), shape, BATCH)


def _capacities(path: Path, clients: dict[Any, Any], name: str, most: int) -> ImportResult:
    found = {client: checked(f"{path}: client {client!r}", one, Capacity) for client, one in clients.items()}
    speeds = {client: (one.computation, one.communication, str(client)) for client, one in found.items()}
    picked = _spread(sorted(found, key=speeds.__getitem__), most)
    owns = [f"{name}-{client}" for client in picked]
    _, *ids = profile_names([name, *owns, *(f"{own}-link" for own in owns)])
    files: dict[str, str] = {}
    fleet, networks = {}, {}
    for client, own, link in zip(picked, ids[: len(owns)], ids[len(owns) :], strict=True):
        files |= _client(path, own, link, client, found[client])
        fleet[f"./{own}.toml"] = 1
        networks[f"./{own}.toml"] = f"./{link}.toml"
    spread = f"{len(picked)} of {len(clients)} clients, evenly spaced in order of speed"
    source = f"FedScale's {path.name}: {spread}"
    tables = {"id": name, "name": name, "source": source, "devices": fleet, "network": networks}
    return ImportResult(files | profile_file(path, "fleets", tables), (source,))


def _client(path: Path, name: str, link: str, client: Any, capacity: Capacity) -> dict[str, str]:
    """Create the files of a client's device and network."""
    title, file = f"FedScale client {client}", f"client {client} in FedScale's {path.name}"
    ms, rate = capacity.computation, {"rate_mbps": capacity.communication / 1e3}
    train = "cpu.rate_gflops.train"
    how = f"derived: {FORWARD_GFLOP} GFLOP (MobileNet-V2, assumed) in {ms:g} ms, the computation of {file}"
    device = {
        "id": name,
        "name": title,
        "class": "tier",
        "cpu": {"rate_gflops": {"train": FORWARD_GFLOP / ms * 1e3}},
        "sources": {train: how},
        "uncertainty": {train: UNCERTAIN},
    }
    source = f"communication of {file}; it states no delay"
    network = {
        "id": link,
        "name": f"{title}'s link",
        "header_bytes": 0,
        "down": rate,
        "up": rate,
        "sources": {"down": source, "up": source, "header_bytes": "FedScale counts none"},
    }
    return profile_file(path, "devices", device) | profile_file(path, "networks", network)


def _behavior(path: Path, clients: dict[Any, Any], name: str, most: int) -> ImportResult:
    usable, turned = {}, 0
    for client, entry in clients.items():
        one = checked(f"{path}: client {client!r}", entry, Behavior)
        if len(one.active) != len(one.inactive):
            raise ProfileError(f"{path}: client {client!r}: inactive: must have as many entries as active")
        turned += sum(end < start for start, end in zip(one.active, one.inactive, strict=True))
        merged = _merged(one)
        if merged:
            usable[client] = {"intervals_s": merged, "period_s": one.finish_time}
    if not usable:
        raise ProfileError(f"{path}: no client is ever active; at least one must be")
    picked = _spread(sorted(usable, key=lambda client: (len(client), client)), most)
    text = json.dumps([usable[client] for client in picked])
    note = f"{len(picked)} of {len(clients)} clients; {len(clients) - len(usable)} never active"
    if turned:
        note += f"; intervals left out, because they end before they start: {turned}"
    return ImportResult({f"{name}.json": text + "\n"}, (note,))


def _merged(one: Behavior) -> list[list[float]]:
    """Merge the client's intervals within the period into sorted, disjoint intervals."""
    merged: list[list[float]] = []
    for start, end in sorted(zip(one.active, one.inactive, strict=True)):
        end = min(end, one.finish_time)
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def _spread(ordered: Sequence[Client], count: int) -> list[Client]:
    """Choose ``count`` entries at evenly spaced ranks, (i + ½) / count; choose all if there are fewer."""
    count = min(count, len(ordered))
    return [ordered[int((at + 0.5) * len(ordered) / count)] for at in range(count)]
