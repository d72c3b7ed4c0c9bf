"""Loading device, network and fleet profiles.

A name is looked up in the profiles that come with edgefl; anything with a slash or ending in ``.toml`` is
the path of the user's own file. A wrong file is a `ProfileError` whose one line names the file, the key,
what was got and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from edgefl.devices import profile_files
from edgefl.devices.profile_checks import problems
from edgefl.devices.profile_files import TYPES, Kind
from edgefl.devices.schema import Device, Direction, FleetFile, Network, Profile
from edgefl.devices.trace import read_trace
from edgefl.errors import ProfileError, unknown

P = TypeVar("P", Device, Network, FleetFile)


def load_device(name_or_path: str | Path) -> Device:
    """The device profile of that name, or in the TOML file at that path.

    >>> load_device("pixel-3a").train_flop_per_s
    1750000000.0
    >>> load_device("pixel3a")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    edgefl.errors.ProfileError: device profile 'pixel3a' not found; did you mean 'pixel-3a'? have: ...
    """
    return _load("devices", Device, name_or_path)


def load_network(name_or_path: str | Path) -> Network:
    """The network profile of that name, or in the TOML file at that path; its traces' paths are absolute.

    >>> load_network("3g").down.rate_mbps
    1.6
    """
    network = _load("networks", Network, name_or_path)
    folder = _path("networks", name_or_path).parent
    down, up = _traced(network.down, folder), _traced(network.up, folder)
    return msgspec.structs.replace(network, down=down, up=up)


def load_fleet(name_or_path: str | Path) -> FleetFile:
    """The fleet file of that name, or at that path.

    The profiles that it names must exist; a path in it is looked for beside it first.

    >>> load_fleet("paper-fedstaleweight").clients
    15
    """
    fleet = _load("fleets", FleetFile, name_or_path)
    folder = _path("fleets", name_or_path).parent
    network = fleet.network
    if isinstance(network, dict):
        network = {_beside(name, folder): _beside(net, folder) for name, net in network.items()}
    else:
        network = _beside(network, folder)
    devices = {_beside(name, folder): count for name, count in fleet.devices.items()}
    return msgspec.structs.replace(fleet, devices=devices, network=network)


def as_written(kind: Kind, name_or_path: str | Path) -> Profile:
    """The profile as its file says it: paths in it are relative to the file.

    >>> as_written("networks", "lte-varying").down.trace
    'traces/lte-varying-down.trace'
    """
    profile: Profile = msgspec.convert(_checked(kind, name_or_path), TYPES[kind])
    return profile


def check_file(path: str | Path) -> list[str]:
    """All that is wrong with a profile file and the traces that it names, one line each; empty if nothing is.

    What kind of file it is, is read off its keys: ``devices`` is in fleets only, ``down`` or ``up`` in
    networks only.
    """
    path = Path(path)
    try:
        table = profile_files.read(path)
    except ProfileError as wrong:
        return [str(wrong)]
    found = list(problems(path, table, TYPES[profile_files.kind_of(table)]))
    return found or [f"{path}: {problem}" for problem in _trace_problems(path, table)]


def _trace_problems(path: Path, table: dict[str, Any]) -> Iterator[str]:
    for way in ("down", "up"):
        trace = table.get(way, {}).get("trace")
        if trace is not None:
            try:
                read_trace(str((path.parent / trace).resolve()))
            except ProfileError as wrong:
                yield f"{way}.trace: {wrong}"


def _load(kind: Kind, of: type[P], name_or_path: str | Path) -> P:
    return msgspec.convert(_checked(kind, name_or_path), of)


def _checked(kind: Kind, name_or_path: str | Path) -> dict[str, Any]:
    path = _path(kind, name_or_path)
    table = profile_files.read(path)
    for problem in problems(path, table, TYPES[kind]):
        raise ProfileError(problem)
    return table


def _path(kind: Kind, name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or profile_files.is_path(text):
        return Path(name_or_path)
    names = profile_files.names(kind)
    if text not in names:
        raise ProfileError(unknown(f"{kind.removesuffix('s')} profile", text, names))
    return profile_files.folder() / kind / f"{text}.toml"


def _traced(way: Direction, folder: Path) -> Direction:
    return msgspec.structs.replace(way, trace=str((folder / way.trace).resolve())) if way.trace else way


def _beside(name: str, folder: Path) -> str:
    there = folder / name
    return str(there.resolve()) if profile_files.is_path(name) and there.exists() else name
