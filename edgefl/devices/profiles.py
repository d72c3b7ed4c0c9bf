"""Loading device, network and fleet profiles.

A name is looked up in the profiles that come with edgefl; anything with a slash or ending in ``.toml`` is
the path of the user's own file. A wrong file is a `ProfileError` whose one line names the file, the key,
what was got and what is allowed.

Where profile files lie, and reading one as plain tables.

What is wrong with a profile file: every fault of it, one line each.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from edgefl import toml
from edgefl.devices.link import read_trace
from edgefl.devices.schema import (
    SCHEMA,
    Availability,
    Cpu,
    Device,
    Direction,
    FleetFile,
    Network,
    Profile,
    Thermal,
)
from edgefl.errors import ConfigError, ProfileError, unknown

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
        table = read_tables(path)
    except ProfileError as wrong:
        return [str(wrong)]
    found = list(problems(path, table, TYPES[kind_of(table)]))
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
    table = read_tables(path)
    for problem in problems(path, table, TYPES[kind]):
        raise ProfileError(problem)
    return table


def _path(kind: Kind, name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or is_path(text):
        return Path(name_or_path)
    names = bundled_names(kind)
    if text not in names:
        raise ProfileError(unknown(f"{kind.removesuffix('s')} profile", text, names))
    return bundled_folder() / kind / f"{text}.toml"


def _traced(way: Direction, folder: Path) -> Direction:
    return msgspec.structs.replace(way, trace=str((folder / way.trace).resolve())) if way.trace else way


def _beside(name: str, folder: Path) -> str:
    there = folder / name
    return str(there.resolve()) if is_path(name) and there.exists() else name


Kind = Literal["devices", "networks", "fleets"]
TYPES: dict[Kind, type[Profile]] = {"devices": Device, "networks": Network, "fleets": FleetFile}


def device_names() -> tuple[str, ...]:
    """Names of the device profiles that come with edgefl, sorted."""
    return bundled_names("devices")


def network_names() -> tuple[str, ...]:
    """Names of the network profiles that come with edgefl, sorted."""
    return bundled_names("networks")


def fleet_names() -> tuple[str, ...]:
    """Names of the fleet files that come with edgefl, sorted."""
    return bundled_names("fleets")


@cache
def bundled_folder() -> Path:
    """Where edgefl's own profiles lie: package data when installed, beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for found in (package / "_profiles", package.parent / "profiles"):
        if (found / "devices").is_dir():
            return found
    raise ProfileError(f"edgefl's own profiles are not at {package / '_profiles'}; install edgefl again")


@cache
def bundled_names(kind: Kind) -> tuple[str, ...]:
    """Names of edgefl's own profiles of that kind, sorted."""
    return tuple(sorted(path.stem for path in (bundled_folder() / kind).glob("*.toml")))


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


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a profile file, unchecked; ProfileError if it cannot be read or is not TOML."""
    if "\0" in str(path):
        raise ProfileError("a path holds a NUL")
    try:
        return toml.read(path)
    except ConfigError as wrong:
        raise ProfileError(str(wrong)) from None


_NEEDS_NO_SOURCE = {"id", "name", "class", "schema", "sources", "uncertainty", "network", "bearer"}


def problems(path: Path, table: dict[str, Any], of: type[Profile]) -> Iterator[str]:
    """Every problem of a file, one line each, nothing raised."""

    def line(key: str, got: object, allowed: str) -> str:
        return f"{path}: {key}: got {_shown(got)}; allowed: {allowed}"

    schema = table.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:  # what else is in it nobody here can judge
        yield line("schema", schema, f"at most {SCHEMA}, the newest that this edgefl reads; upgrade edgefl")
        return
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


def _shown(got: object) -> str:
    text = repr(got)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _one_of(got: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(got, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"one of {', '.join(sorted(names))}{hint}"


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
                yield inner_key, inner, _one_of(name, fields)
        for name, field in fields.items():
            if field.required and name not in value:
                yield f"{key}.{name}" if key else name, "nothing", "a value, it must be given"
    elif isinstance(value, dict) and (held := _inner(of, dict)):
        for name, inner in value.items():
            yield from _unfit(inner, held[1], f"{key}.{name}")
    elif isinstance(value, list) and (inner_type := _listed(of)) is not None:
        for at, inner in enumerate(value):
            yield from _unfit(inner, inner_type, f"{key}[{at}]")
    else:
        try:
            msgspec.convert(value, of)
        except msgspec.ValidationError as wrong:
            allowed = str(wrong).removeprefix("Expected ").split(", got")[0].split(" - at ")[0]
            yield key, value, allowed.replace(" | null", "").replace("object", "table")


def _inner(of: Any, container: type) -> tuple[Any, ...]:
    """The types that ``of`` holds, where it is, or may be, such a container."""
    if get_origin(of) is container:
        return get_args(of)
    return next((inner for arg in get_args(of) if (inner := _inner(arg, container))), ())


def _listed(of: Any) -> Any:
    """What a list of any length holds; None where ``of`` is no such list."""
    held = _inner(of, tuple)
    return held[0] if held[1:] == (...,) else None


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
        yield from _unfit_cpu(device.cpu)
    if device.memory is not None and device.memory.app_limit_mib > device.memory.ram_mib:
        yield (
            "memory.app_limit_mib",
            device.memory.app_limit_mib,
            f"at most ram_mib = {device.memory.ram_mib}",
        )
    if device.thermal is not None:
        yield from _unfit_thermal(device.thermal)
    if device.battery is not None and (device.battery.min_soc or 0.0) > 0.99:
        yield "battery.min_soc", device.battery.min_soc, "at most 0.99, or the device never works"
    if device.availability is not None:
        yield from unfit_availability(device.availability)
    if device.network is not None and device.network not in network_names():
        yield "network", device.network, _one_of(device.network, network_names())


def _unfit_cpu(cpu: Cpu) -> Iterator[Unfit]:
    for op_class in ("gemm", "conv", "depthwise", "elementwise"):
        rate = getattr(cpu.rate_gflops, op_class)
        key = f"cpu.rate_gflops.{op_class}"
        if rate is not None and rate.one is None and rate.all is None:
            yield key, {}, "1t, nt, or both"
        elif rate is not None and rate.one and rate.all and rate.all < rate.one:
            yield f"{key}.nt", rate.all, f"at least 1t = {rate.one}"
    for at, cluster in enumerate(cpu.clusters):
        key = f"cpu.clusters[{at}]"
        steps, currents = cluster.freq_mhz, cluster.power_ma
        if steps and (list(steps) != sorted(set(steps)) or steps[-1] != cluster.max_mhz):
            yield f"{key}.freq_mhz", list(steps), f"ascending figures that end in max_mhz = {cluster.max_mhz}"
        if currents and len(currents) != len(steps):
            yield f"{key}.power_ma", list(currents), f"a figure for each of freq_mhz, {len(steps)}"
        elif currents and cluster.max_ma is not None and currents[-1] != cluster.max_ma:
            yield f"{key}.power_ma", list(currents), f"figures that end in max_ma = {cluster.max_ma}"


def _unfit_thermal(thermal: Thermal) -> Iterator[Unfit]:
    temps = [trip.temp_c for trip in thermal.trips]
    scales = [trip.freq_scale for trip in thermal.trips]
    if not temps or temps != sorted(set(temps)):
        yield "thermal.trips", temps, "at least one, temp_c ascending"
    elif scales != sorted(scales, reverse=True):
        yield "thermal.trips", scales, "freq_scale that does not rise with the temperature"
    elif thermal.off_c is not None and thermal.off_c < temps[-1]:
        yield "thermal.off_c", thermal.off_c, f"at least the last trip's temp_c = {temps[-1]}"
    if temps and thermal.ambient_c is not None and thermal.ambient_c >= temps[0]:
        yield "thermal.ambient_c", thermal.ambient_c, f"below the first trip's temp_c = {temps[0]}"
    given = {name: getattr(thermal, name) for name in ("ambient_c", "r_c_per_w", "tau_s")}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        yield f"thermal.{missing[0]}", "nothing", f"a value, as {' and '.join(given)} only work together"


def unfit_availability(availability: Availability) -> Iterator[Unfit]:
    end = 0.0
    if not availability.intervals_s:
        yield "availability.intervals_s", [], "at least one interval"
    for at, (start, stop) in enumerate(availability.intervals_s):
        key = f"availability.intervals_s[{at}]"
        if stop <= start or start < end:
            yield key, [start, stop], f"a start of at least {end:g}, and an end after it"
        end = max(end, stop)
    if end > availability.period_s:
        yield "availability.period_s", availability.period_s, f"at least the last interval's end, {end:g}"


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
        if way.trace is not None and way.rate_mbps is not None:
            yield f"{name}.trace", way.trace, "nothing beside rate_mbps: one of the two sets the rate"


def _unfit_fleet(fleet: FleetFile) -> Iterator[Unfit]:
    if not fleet.devices:
        yield "devices", fleet.devices, "at least one profile = count"
    for name in fleet.devices:
        if not _is_known("devices", name):
            yield f"devices.{name}", name, f"a path, or {_one_of(name, device_names())}"
    of_device = fleet.network if isinstance(fleet.network, dict) else {}
    for name, network in of_device.items() if of_device else [("", str(fleet.network))]:
        if name and name not in fleet.devices:
            yield f"network.{name}", name, f"one of this fleet's devices: {', '.join(fleet.devices)}"
        if not _is_known("networks", network):
            yield "network", network, f"a path, or {_one_of(network, network_names())}"
    missing = [name for name in fleet.devices if of_device and name not in of_device]
    if missing:
        yield "network", f"nothing for {', '.join(missing)}", "a network for each of the fleet's devices"


def _is_known(kind: Kind, name: str) -> bool:
    return is_path(name) or name in bundled_names(kind)
