"""From the names in ``[fleet]`` to profiles that exist: fleet files read, paths made absolute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from edgefl.config.checks import Fault
from edgefl.errors import ProfileError, unknown


class ProfileFault(Fault, ProfileError):
    """A profile that ``key`` names is missing or wrong."""


def resolve(tables: dict[str, Any], base: Path) -> dict[str, Any]:
    """``tables`` with ``fleet.devices`` as profile = count and every path in it absolute.

    A fleet file gives its devices, and its networks if ``fleet.network`` is not there. A path is looked for
    in ``base``, then in the working directory. Raises `ProfileFault` if the fleet file is missing or wrong.
    """
    fleet = dict(tables["fleet"])
    data = dict(tables.get("data", {}))
    if isinstance(fleet["devices"], str):
        from edgefl.devices import load_fleet

        try:
            file = load_fleet(_absolute(fleet["devices"], base))
        except (ProfileError, ValueError) as error:
            raise ProfileFault("fleet.devices", f"fleet.devices: {error}") from None
        fleet["devices"] = dict(file.devices)
        fleet.setdefault("network", file.network)
    fleet["devices"] = _rekeyed(fleet["devices"], base)
    network = fleet.get("network", "wifi")
    if isinstance(network, str):
        fleet["network"] = _absolute(network, base)
    else:
        fleet["network"] = {name: _absolute(net, base) for name, net in _rekeyed(network, base).items()}
    if fleet.get("availability"):
        fleet["availability"] = _found(fleet["availability"], base)
    if "labels" in data:
        data["labels"] = _rekeyed(data["labels"], base)
    if data.get("path"):
        data["path"] = _found(data["path"], base)
    return {**tables, "fleet": fleet, **({"data": data} if data else {})}


def require(fleet: Mapping[str, Any]) -> None:
    """Raise a `ProfileFault` if what a resolved ``[fleet]`` names does not exist or lacks what it needs."""
    from edgefl.devices import load_device
    from edgefl.devices.presence import read_availability

    devices, network = fleet["devices"], fleet["network"]
    for name in devices:
        _tried(load_device, name, "fleet.devices", f"fleet.devices.{name}")
    _require_figures(fleet)
    _require_leaving(fleet)
    if fleet.get("availability"):
        _tried(read_availability, fleet["availability"], "fleet.availability")
    if isinstance(network, str):
        _tried(_network, network, "fleet.network")
        _require_rates(fleet, [network])
        return
    for name, net in network.items():
        if name not in devices:
            key = f"fleet.network.{name}"
            raise ProfileFault(key, f"{key}: {unknown('device in the fleet', name, devices)}")
        _tried(_network, net, f"fleet.network.{name}")
    missing = [name for name in devices if name not in network]
    if missing:
        text = f"fleet.network: no network for {', '.join(missing)}; give one for each device, or one for all"
        raise ProfileFault("fleet.network", text)
    _require_rates(fleet, network.values())


def _require_rates(fleet: Mapping[str, Any], networks: Iterable[str]) -> None:
    """Raise a `ProfileFault` if phones of a cell have links whose own rate varies."""
    from edgefl.devices import load_network

    for name in networks if fleet.get("cells") else ():
        if load_network(name).replays:
            raise ProfileFault("fleet.cells", f"fleet.cells: not together with network {name!r}, a trace")


def _network(name: str) -> None:
    """Read a network and the traces that it replays."""
    from edgefl.devices import load_network
    from edgefl.devices.link import read_trace

    network = load_network(name)
    for way in (network.down, network.up):
        if way.trace is not None:
            read_trace(way.trace)


def _require_figures(fleet: Mapping[str, Any]) -> None:
    """Raise a `ProfileFault` if heat or batteries are asked for and no profile has the figures for them."""
    from edgefl.devices import load_device
    from edgefl.devices.condition import power_of
    from edgefl.devices.thermal import thermal_model

    devices = [load_device(name) for name in fleet["devices"]]
    if fleet.get("thermal") and not any(thermal_model(device) for device in devices):
        needs = "trips, ambient_c, r_c_per_w, tau_s and busy_w"
        raise ProfileFault(
            "fleet.thermal", f"fleet.thermal: no device of the fleet gives all of thermal.{needs}"
        )
    if fleet.get("battery"):
        for name in fleet["devices"]:
            _tried(lambda name: power_of(load_device(name)), name, "fleet.battery")
        if not any(device.battery for device in devices):
            raise ProfileFault("fleet.battery", "fleet.battery: no device of the fleet has a [battery]")


def _require_leaving(fleet: Mapping[str, Any]) -> None:
    """Raise a `ProfileFault` if it is said what becomes of tasks of phones that leave, and none ever does."""
    from edgefl.devices import load_device

    if fleet.get("on_leave", "lose") == "lose":
        return
    leaves = fleet.get("availability") or fleet.get("battery") or fleet.get("thermal")
    if leaves or fleet.get("churn", {}).get("mean_online_s") is not None:
        return
    if not any(load_device(name).availability for name in fleet["devices"]):
        ways = "fleet.churn.mean_online_s, fleet.availability, fleet.battery or fleet.thermal"
        raise ProfileFault(
            "fleet.on_leave", f"fleet.on_leave: has no effect where no phone leaves by itself; give {ways}"
        )


def _tried(load: Callable[[str], object], name: str, shown: str, key: str | None = None) -> None:
    try:
        load(name)
    except (ProfileError, ValueError) as error:  # ValueError: a NUL in a path
        raise ProfileFault(key or shown, f"{shown}: {error}") from None


def _rekeyed(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    return {_absolute(name, base): value for name, value in table.items()}


def _absolute(name: str, base: Path) -> str:
    """A profile's name as it is; the path of a profile file so that it means the same from anywhere."""
    return _found(name, base) if "/" in name or name.endswith(".toml") else name


def _found(path: str, base: Path) -> str:
    beside = os.path.join(base, path)
    return os.path.abspath(beside if os.path.exists(beside) else path)
