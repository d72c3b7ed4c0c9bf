"""Where profile files lie, and reading one as plain tables."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from edgefl import toml
from edgefl.devices.schema import Device, FleetFile, Network, Profile
from edgefl.errors import ConfigError, ProfileError

Kind = Literal["devices", "networks", "fleets"]
TYPES: dict[Kind, type[Profile]] = {"devices": Device, "networks": Network, "fleets": FleetFile}


def device_names() -> tuple[str, ...]:
    """Names of the device profiles that come with edgefl, sorted."""
    return names("devices")


def network_names() -> tuple[str, ...]:
    """Names of the network profiles that come with edgefl, sorted."""
    return names("networks")


def fleet_names() -> tuple[str, ...]:
    """Names of the fleet files that come with edgefl, sorted."""
    return names("fleets")


@cache
def folder() -> Path:
    """Where edgefl's own profiles lie: package data when installed, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for found in (package / "_profiles", package.parent / "profiles"):
        if (found / "devices").is_dir():
            return found
    raise ProfileError(f"edgefl's own profiles are not at {package / '_profiles'}; install edgefl again")


@cache
def names(kind: Kind) -> tuple[str, ...]:
    """Names of edgefl's own profiles of that kind, sorted."""
    return tuple(sorted(path.stem for path in (folder() / kind).glob("*.toml")))


def is_path(name: str) -> bool:
    """Whether ``name`` is the path of a user's file, not the name of one of edgefl's own profiles."""
    return "/" in name or name.endswith(".toml")


def kind_of(table: dict[str, Any]) -> Kind:
    """What kind of profile these tables are, read off keys that only one kind has.

    >>> kind_of({"id": "mine", "up": {}}), kind_of({"id": "mine", "devices": {}}), kind_of({})
    ('networks', 'fleets', 'devices')
    """
    if "devices" in table:
        return "fleets"
    return "networks" if "down" in table or "up" in table else "devices"


def read(path: Path) -> dict[str, Any]:
    """The tables of a profile file, unchecked; ProfileError if it cannot be read or is not TOML."""
    if "\0" in str(path):
        raise ProfileError("a path holds a NUL")
    try:
        return toml.read(path)
    except ConfigError as wrong:
        raise ProfileError(str(wrong)) from None
