"""Finding, reading and checking profile files: devices, networks and fleets in TOML.

A name is looked up in the profiles that come with edgefl; anything with a slash or ending in ``.toml`` is
the path of the user's own file. A wrong file is a `ProfileError` whose one line names the file, the key,
what was got and what is allowed.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from edgefl.emulation.schema import Device, FleetFile, Network, Profile
from edgefl.errors import ProfileError, unknown

Kind = Literal["devices", "networks", "fleets"]
TYPES: dict[Kind, type[Profile]] = {"devices": Device, "networks": Network, "fleets": FleetFile}
P = TypeVar("P", Device, Network, FleetFile)

_NEEDS_NO_SOURCE = {"id", "name", "class", "sources", "uncertainty", "network"}


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
    """The network profile of that name, or in the TOML file at that path.

    >>> load_network("3g").down.rate_mbps
    1.6
    """
    return _load("networks", Network, name_or_path)


def load_fleet(name_or_path: str | Path) -> FleetFile:
    """The fleet file of that name, or at that path; the profiles it names must exist.

    >>> load_fleet("paper-fedstaleweight").clients
    15
    """
    return _load("fleets", FleetFile, name_or_path)


def device_names() -> tuple[str, ...]:
    """Names of the device profiles that come with edgefl, sorted."""
    return _names("devices")


def network_names() -> tuple[str, ...]:
    """Names of the network profiles that come with edgefl, sorted."""
    return _names("networks")


def fleet_names() -> tuple[str, ...]:
    """Names of the fleet files that come with edgefl, sorted."""
    return _names("fleets")


def check_file(path: str | Path) -> list[str]:
    """All that is wrong with a profile file, one line each; empty if nothing is.

    What kind of file it is, is read off its keys: ``devices`` is in fleets only, ``down`` or ``up`` in
    networks only.
    """
    path = Path(path)
    try:
        table = _read(path)
    except ProfileError as wrong:
        return [str(wrong)]
    kind: Kind = "devices"
    if "devices" in table:
        kind = "fleets"
    elif "down" in table or "up" in table:
        kind = "networks"
    return list(_problems(path, table, TYPES[kind]))


def _load(kind: Kind, of: type[P], name_or_path: str | Path) -> P:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(".toml"):
        return _parse(Path(name_or_path), of)
    return _builtin(kind, of, text)


def _builtin(kind: Kind, of: type[P], name: str) -> P:
    if name not in _names(kind):
        raise ProfileError(unknown(f"{kind.removesuffix('s')} profile", name, _names(kind)))
    return _parse(_folder() / kind / f"{name}.toml", of)


@cache
def _folder() -> Path:
    """Where edgefl's own profiles lie: package data when installed, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_profiles", package.parent / "profiles"):
        if (folder / "devices").is_dir():
            return folder
    raise ProfileError(f"edgefl's own profiles are not at {package / '_profiles'}; install edgefl again")


@cache
def _names(kind: Kind) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (_folder() / kind).glob("*.toml")))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProfileError(f"profile file {str(path)!r} not found") from None
    except (OSError, UnicodeDecodeError) as wrong:
        raise ProfileError(f"profile file {str(path)!r} cannot be read: {wrong}") from None
    except tomllib.TOMLDecodeError as wrong:
        raise ProfileError(f"{path}: not TOML: {wrong}") from None


def _parse(path: Path, of: type[P]) -> P:
    table = _read(path)
    for problem in _problems(path, table, of):
        raise ProfileError(problem)
    return msgspec.convert(table, of)


def _problems(path: Path, table: dict[str, Any], of: type[Profile]) -> Iterator[str]:
    """Every problem of a file, one line each, nothing raised."""

    def line(key: str, got: object, allowed: str) -> str:
        return f"{path}: {key}: got {got!r}; allowed: {allowed}"

    wrong_values = [line(*found) for found in _unfit(table, of, "")]
    if wrong_values:
        yield from wrong_values
        return
    try:
        profile = msgspec.convert(table, of)
    except msgspec.ValidationError as wrong:
        yield line("file", "a table that does not fit", str(wrong))
        return
    if path.stem != profile.id:
        yield line("id", profile.id, f"the file's name, {path.stem!r}")
    if isinstance(profile, FleetFile):
        yield from (line(*found) for found in _unfit_fleet(profile))
        return
    yield from (line(*found) for found in _unfit_sources(table))
    unfit = _unfit_device(profile) if isinstance(profile, Device) else _unfit_network(profile)
    yield from (line(*found) for found in unfit)


Unfit = tuple[str, object, str]
"""Dotted key, what was got, what is allowed."""


def _unfit(value: Any, of: Any, key: str) -> Iterator[Unfit]:
    """Keys that no table has, keys that are missing, and values of the wrong type or size, at any depth."""
    struct = _struct(of)
    if isinstance(value, float) and not math.isfinite(value):
        yield key, value, "a finite number"
    elif isinstance(value, dict) and struct is not None:
        fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
        for name, inner in value.items():
            inner_key = f"{key}.{name}" if key else name
            if name in fields:
                yield from _unfit(inner, fields[name].type, inner_key)
            else:
                yield inner_key, inner, f"one of {', '.join(sorted(fields))}"
        for name, field in fields.items():
            if field.required and name not in value:
                yield f"{key}.{name}" if key else name, "nothing", "a value, it must be given"
    elif isinstance(value, dict) and (inner_type := _inner(of, dict, 1)) is not None:
        for name, inner in value.items():
            yield from _unfit(inner, inner_type, f"{key}.{name}")
    elif isinstance(value, list) and (inner_type := _inner(of, tuple, 0)) is not None:
        for at, inner in enumerate(value):
            yield from _unfit(inner, inner_type, f"{key}[{at}]")
    else:
        try:
            msgspec.convert(value, of)
        except msgspec.ValidationError as wrong:
            allowed = str(wrong).removeprefix("Expected ").split(", got")[0]
            yield key, value, allowed.replace(" | null", "").replace("object", "table")


def _inner(of: Any, container: type, at: int) -> Any:
    """The type of what ``of`` holds, where it is, or may be, such a container."""
    if get_origin(of) is container:
        return get_args(of)[at]
    found = (_inner(arg, container, at) for arg in get_args(of) if get_origin(of) is not container)
    return next((inner for inner in found if inner is not None), None)


def _struct(of: Any) -> type[msgspec.Struct] | None:
    """The table type inside ``of`` (``X``, ``X | None``, ``tuple[X, ...]``), if there is one."""
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        return of
    return next((found for arg in get_args(of) if (found := _struct(arg)) is not None), None)


def _figures(value: Any, key: str = "") -> Iterator[str]:
    """Dotted keys of everything that needs a source: each number, and each word that states a fact."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if key or name not in _NEEDS_NO_SOURCE:
                yield from _figures(inner, f"{key}.{name}" if key else name)
    else:
        yield key


def _unfit_sources(table: dict[str, Any]) -> Iterator[Unfit]:
    figures = set(_figures(table))
    sources = table["sources"]
    for figure in sorted(figures):
        steps = figure.split(".")
        if not any(".".join(steps[:n]) in sources for n in range(1, len(steps) + 1)):
            yield figure, "no source", "a line in [sources] for it or for the table above it"
    for where in ("sources", "uncertainty"):
        for key in table.get(where, {}):
            if not any(figure == key or figure.startswith(f"{key}.") for figure in figures):
                yield f"{where}.{key}", "no such figure in the file", f"one of {', '.join(sorted(figures))}"


def _unfit_device(device: Device) -> Iterator[Unfit]:
    model = device.delay_model
    if model is not None and (wrong := model.problem()) is not None:
        name, got, allowed = wrong
        yield f"delay_model.{name}", got, allowed
    if device.cpu is None and (model is None or model.mode != "replace"):
        yield "cpu", "nothing", 'a value, or a delay_model with mode = "replace"'
    if device.slowdown is not None:
        if device.slowdown.high < device.slowdown.low:
            yield "slowdown.high", device.slowdown.high, f"at least low = {device.slowdown.low}"
        if device.cpu is None:
            yield "slowdown", "a value", "nothing, where there is no cpu to slow down"
    if device.cpu is not None:
        rates = device.cpu.rate_gflops
        if rates.gemm_1t and rates.gemm_nt and rates.gemm_nt < rates.gemm_1t:
            yield "cpu.rate_gflops.gemm_nt", rates.gemm_nt, f"at least gemm_1t = {rates.gemm_1t}"
    if device.memory is not None and device.memory.app_limit_mib > device.memory.ram_mib:
        yield (
            "memory.app_limit_mib",
            device.memory.app_limit_mib,
            f"at most ram_mib = {device.memory.ram_mib}",
        )
    if device.thermal is not None:
        temps = [trip.temp_c for trip in device.thermal.trips]
        if not temps or temps != sorted(set(temps)):
            yield "thermal.trips", temps, "at least one, temp_c ascending"
    if device.network is not None and device.network not in network_names():
        yield "network", device.network, f"one of {', '.join(network_names())}"


def _unfit_network(network: Network) -> Iterator[Unfit]:
    if network.header_bytes >= network.mtu_bytes:
        yield "header_bytes", network.header_bytes, f"below mtu_bytes = {network.mtu_bytes}"
    for name, way in (("down", network.down), ("up", network.up)):
        if (way.jitter_ms > 0) != (way.jitter_dist != "none"):
            yield (
                f"{name}.jitter_dist",
                way.jitter_dist,
                "a distribution where jitter_ms is above 0, else none",
            )
        if way.jitter_dist == "uniform" and way.jitter_ms > way.delay_ms:
            yield f"{name}.jitter_ms", way.jitter_ms, f"at most delay_ms = {way.delay_ms} where uniform"


def _unfit_fleet(fleet: FleetFile) -> Iterator[Unfit]:
    if not fleet.devices:
        yield "devices", fleet.devices, "at least one profile = count"
    for name in fleet.devices:
        if not _is_known("devices", name):
            yield f"devices.{name}", name, f"a path, or one of {', '.join(device_names())}"
    of_device = fleet.network if isinstance(fleet.network, dict) else {}
    for name, network in of_device.items() if of_device else [("", str(fleet.network))]:
        if name and name not in fleet.devices:
            yield f"network.{name}", name, f"one of this fleet's devices: {', '.join(fleet.devices)}"
        if not _is_known("networks", network):
            yield "network", network, f"a path, or one of {', '.join(network_names())}"
    missing = [name for name in fleet.devices if of_device and name not in of_device]
    if missing:
        yield "network", f"nothing for {', '.join(missing)}", "a network for each of the fleet's devices"


def _is_known(kind: Kind, name: str) -> bool:
    return "/" in name or name.endswith(".toml") or name in _names(kind)
