"""Finds, reads and validates the profiles of devices, networks and fleets.

A name refers to a bundled profile; anything with a slash or ending in ``.toml`` is the path of the user's own
file. An invalid file raises a one-line `ProfileError` with the file, the key, the allowed values and the
value found.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from edgefl import toml
from edgefl.devices import phone_profiles, phones
from edgefl.devices.link import read_trace
from edgefl.devices.schema import (
    NAME_PATTERN,
    NAME_WORDS,
    SCHEMA,
    Availability,
    Delay,
    Device,
    FleetFile,
    Network,
    Profile,
    Thermal,
)
from edgefl.devices.time_model import TERMS
from edgefl.errors import ConfigError, ProfileError, listed, unknown
from edgefl.experiment import Fleet
from edgefl.validation import Fault, faults, join, wrong

Kind = Literal["devices", "networks", "fleets"]
P = TypeVar("P", bound=Profile)
TYPES: dict[Kind, type[Profile]] = {"devices": Device, "networks": Network, "fleets": FleetFile}


def load_device(name_or_path: str | Path) -> Device:
    """Load the bundled device profile with this name, or the TOML file at this path.

    >>> load_device("pixel-3a").train_flop_per_s
    1750000000.0
    >>> load_device("pixel3a")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    edgefl.errors.ProfileError: device profile 'pixel3a' not found; did you mean 'pixel-3a'? available: ...
    """
    return _load(Device, "devices", name_or_path)[0]


def load_network(name_or_path: str | Path) -> Network:
    """Load the network profile with this name or path, and make the paths of its traces absolute.

    >>> load_network("3g").down.rate_mbps
    1.6
    """
    network, folder = _load(Network, "networks", name_or_path)
    ways = {
        name: msgspec.structs.replace(way, trace=str((folder / way.trace).resolve()))
        for name, way in (("down", network.down), ("up", network.up))
        if way.trace
    }
    return msgspec.structs.replace(network, **ways)


def load_fleet(name_or_path: str | Path) -> FleetFile:
    """Load the fleet file with this name or path.

    The bundled profiles named in the file must exist. A relative path is looked up first in the folder of the
    fleet file, and then in the working directory.

    >>> load_fleet("paper-fedstaleweight").clients
    15
    """
    fleet, folder = _load(FleetFile, "fleets", name_or_path)

    def beside(name: str) -> str:
        return str((folder / name).resolve()) if is_path(name) and (folder / name).exists() else name

    network = fleet.network
    if isinstance(network, dict):
        network = {beside(name): beside(net) for name, net in network.items()}
    else:
        network = beside(network)
    devices = {beside(name): count for name, count in fleet.devices.items()}
    if len(devices) < len(fleet.devices):
        raise ProfileError(f"{name_or_path}: devices: a profile is listed under two names; list each once")
    return msgspec.structs.replace(fleet, devices=devices, network=network)


def own_files(fleet: Fleet) -> list[str]:
    """Return the paths of the user's files that a validated ``fleet`` names: profiles, traces that the
    profiles replay, and the availability file.

    >>> own_files(Fleet(devices={"pi-4": 2}, network="lte-varying"))
    []
    """
    networks = [fleet.network] if isinstance(fleet.network, str) else list(fleet.network.values())
    found = [*filter(is_path, fleet.devices), *filter(is_path, networks), fleet.availability]
    for link in filter(is_path, networks):
        with contextlib.suppress(ProfileError):  # a node lacks the files that only the server reads
            network = load_network(link)
            found += [network.down.trace, network.up.trace]
    return list(dict.fromkeys(filter(None, found)))


def as_written(kind: Kind, name_or_path: str | Path) -> Profile:
    """Load a profile without making its paths absolute: the paths stay relative to the profile's file.

    >>> as_written("networks", "lte-varying").down.trace
    'traces/lte-varying-down.trace'
    """
    return _load(TYPES[kind], kind, name_or_path)[0]


def _load(of: type[P], kind: Kind, name_or_path: str | Path) -> tuple[P, Path]:
    """Return a validated profile, and its folder."""
    if isinstance(name_or_path, Path) or is_path(name_or_path):
        path = Path(name_or_path)
        return _checked(of, kind, path, read_tables(path))
    return _bundled(kind, name_or_path)


@cache
def _bundled(kind: Kind, name: str) -> tuple[Any, Path]:
    """Return the bundled profile with this name, and its folder. The profile's file is read only once."""
    path = bundled_folder() / kind / f"{name}.toml"
    if name in _file_names(kind):  # this avoids reading the large table of phones
        return _checked(TYPES[kind], kind, path, read_tables(path))
    if name not in bundled_names(kind):
        raise ProfileError(_no_profile(kind, name))
    return _checked(TYPES[kind], kind, path, phone_tables(name))


def _checked(of: type[P], kind: Kind, path: Path, table: dict[str, Any]) -> tuple[P, Path]:
    for fault in profile_faults(path.stem, table, kind):
        raise ProfileError(f"{path}: {fault}")
    return msgspec.convert(table, of), path.parent


def check_file(path: str | Path) -> list[str]:
    """Return all faults in a profile file and in the files that it names, one line per fault."""
    path = Path(path)
    try:
        table = read_tables(path)
    except ProfileError as error:
        return [str(error)]
    found = [str(fault) for fault in profile_faults(path.stem, table, kind_of(table))]
    if not found and kind_of(table) == "fleets":
        return list(_faults_of_named(path))
    for way in ("down", "up") if not found else ():
        if (trace := table.get(way, {}).get("trace")) is not None:
            try:
                read_trace(str((path.parent / trace).resolve()))
            except ProfileError as error:
                found.append(f"{way}.trace: {error}")
    return [f"{path}: {fault}" for fault in found]


def _faults_of_named(path: Path) -> Iterator[str]:
    """Yield the faults in the user's files that the fleet file at ``path`` names, one line per fault."""
    try:
        fleet = load_fleet(path)
    except ProfileError as error:
        yield str(error)
        return
    networks = [fleet.network] if isinstance(fleet.network, str) else fleet.network.values()
    for key, load, names in (("devices", load_device, fleet.devices), ("network", load_network, networks)):
        for name in filter(is_path, dict.fromkeys(names)):
            try:
                load(name)
            except ProfileError as error:
                yield f"{path}: {key}: {error}"
            else:
                yield from check_file(name)  # reads a network's traces, too


@cache
def bundled_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of the bundled profiles of this kind, sorted."""
    return tuple(sorted(_file_names(kind) | set(phone_names() if kind == "devices" else ())))


@cache
def _file_names(kind: Kind) -> frozenset[str]:
    """Return the names of the bundled profiles of this kind that have their own file."""
    return frozenset(path.stem for path in (bundled_folder() / kind).glob("*.toml"))


def phone_table() -> phones.PhoneTable:
    """Return the table of measured phones. Raises `ProfileError` if it is missing."""
    path = bundled_folder() / phones.FILE
    if not path.exists():
        raise ProfileError(f"edgefl's table of phones is missing at {path}; reinstall edgefl")
    return phones.load(path)


@cache
def phone_names() -> tuple[str, ...]:
    """Return the names of the profiles in the table of phones, sorted."""
    return tuple(phone.id for phone in phone_table().phones)


def phone_tables(name: str) -> dict[str, Any]:
    """Return the profile of a phone in the table of phones, as the TOML tables of a profile file."""
    table = phone_table()
    phone = next(each for each in table.phones if each.id == name)
    bridge = load_device(phone_profiles.BRIDGE_PROFILE).runtime[phone_profiles.TRAINING]
    return phone_profiles.profile_tables(table, phone, bridge)


device_names = partial(bundled_names, "devices")
network_names = partial(bundled_names, "networks")
fleet_names = partial(bundled_names, "fleets")


@cache
def bundled_folder() -> Path:
    """Return the folder of the bundled profiles.

    The folder is inside the installed package, or beside the package in a source checkout.
    """
    package = Path(__file__).resolve().parent.parent
    for found in (package / "_profiles", package.parent / "profiles"):
        if (found / "devices").is_dir():
            return found
    raise ProfileError(f"edgefl's profiles are missing at {package / '_profiles'}; reinstall edgefl")


def is_path(name: str) -> bool:
    """Return True for the path of a user's file, False for the name of a bundled profile."""
    return "/" in name or name.endswith(".toml")


def kind_of(table: dict[str, Any]) -> Kind:
    """Determine the kind of a profile from keys that only one kind has.

    >>> kind_of({"id": "mine", "up": {}}), kind_of({"id": "mine", "devices": {}}), kind_of({})
    ('networks', 'fleets', 'devices')
    """
    if "devices" in table:
        return "fleets"
    return "networks" if "down" in table or "up" in table else "devices"


def read_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file's tables without validation. Raises `ProfileError` if it is unreadable or not TOML."""
    if "\0" in str(path):
        raise ProfileError("path contains a NUL byte")
    try:
        return toml.read(path)
    except ConfigError as error:
        raise ProfileError(str(error)) from None


def _no_profile(kind: Kind, name: str) -> str:
    return unknown(f"{kind.removesuffix('s')} profile", name, bundled_names(kind))


_NEEDS_NO_SOURCE = {
    "id", "name", "class", "schema", "sources", "uncertainty", "network", "bearer", "radio", "default_runtime"
}  # fmt: skip


def profile_faults(stem: str, table: dict[str, Any], kind: Kind) -> Iterator[Fault]:
    """Yield all faults in a profile's tables; ``stem`` is the name of the profile's file without suffix."""
    schema = table.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:  # a newer schema cannot be validated further
        yield wrong("schema", f"at most {SCHEMA} (upgrade edgefl to read newer schemas)", schema)
        return
    if unfit := list(faults(table, TYPES[kind])):
        yield from unfit
        return
    profile: Profile = msgspec.convert(table, TYPES[kind])
    if stem != profile.id:
        yield wrong("id", f"the file's name, {stem!r}", profile.id)
    if isinstance(profile, FleetFile):
        yield from _fleet_faults(profile)
        return
    yield from _source_faults(table)
    yield from _device_faults(profile) if isinstance(profile, Device) else _network_faults(profile)


def _figures(value: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted key of each value that needs a source: numbers, and text values that state a fact."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if key or name not in _NEEDS_NO_SOURCE:
                yield from _figures(inner, f"{key}.{name}" if key else name)
    else:
        yield key


def _source_faults(table: dict[str, Any]) -> Iterator[Fault]:
    figures = set(_figures(table))
    sources = table["sources"]
    for figure in sorted(figures):
        steps = figure.split(".")
        if not any(".".join(steps[:n]) in sources for n in range(1, len(steps) + 1)):
            text = f"{figure}: has no source; add one to [sources] for it or for a table that contains it"
            yield Fault(figure, text)
    for where in ("sources", "uncertainty"):
        for key in table.get(where, {}):
            if not any(figure == key or figure.startswith(f"{key}.") for figure in figures):
                place = join(where, key)
                yield Fault(place, f"{place}: is not a figure in this file; available: {listed(figures)}")


def _device_faults(device: Device) -> Iterator[Fault]:
    delay, cpu, memory = device.delay_model, device.cpu, device.memory
    if delay is not None:
        yield from _delay_faults(delay)
    yield from _cpu_faults(device)
    if device.slowdown is not None:
        if device.slowdown.high < device.slowdown.low:
            yield wrong("slowdown.high", f"at least low = {device.slowdown.low}", device.slowdown.high)
        if cpu is None:
            yield Fault("slowdown", "slowdown: has no effect without a cpu to slow down")
        elif device.timed_by_draw:
            yield Fault("slowdown", "slowdown: has no effect with a delay_model that replaces a trip's time")
    yield from _runtime_faults(device)
    if memory is not None and memory.app_limit_mib > memory.ram_mib:
        yield wrong("memory.app_limit_mib", f"at most ram_mib = {memory.ram_mib}", memory.app_limit_mib)
    if device.thermal is not None:
        yield from _thermal_faults(device.thermal)
    if device.availability is not None:
        yield from availability_faults(device.availability, "availability.")
    if device.network is not None and device.network not in network_names():
        yield Fault("network", f"network: {_no_profile('networks', device.network)}")


def _delay_faults(delay: Delay) -> Iterator[Fault]:
    wanted = Delay.FIELDS[delay.dist]
    takes = f"dist = {delay.dist!r}, which takes {' and '.join(wanted)}"
    for name in itertools.chain(*Delay.FIELDS.values()):
        got, key = getattr(delay, name), f"delay_model.{name}"
        if name in wanted and got is None:
            yield Fault(key, f"{key}: missing; needed for {takes}")
        elif name not in wanted and got is not None:
            yield wrong(key, f"left out with {takes}", got)
    if delay.low_s is not None and delay.high_s is not None and delay.low_s >= delay.high_s:
        yield wrong("delay_model.high_s", f"above low_s = {delay.low_s}", delay.high_s)
    if delay.values_s is not None and not any(delay.values_s):
        allowed = "a list with at least one value above 0"
        yield wrong("delay_model.values_s", allowed, delay.values_s)


def _cpu_faults(device: Device) -> Iterator[Fault]:
    delay, cpu = device.delay_model, device.cpu
    if cpu is None and (delay is None or delay.mode != "replace"):
        yield Fault("cpu", 'cpu: missing; give it, or a delay_model with mode = "replace"')
    if cpu is None:
        return
    for op_class in ("gemm", "conv", "depthwise", "elementwise"):
        rate = getattr(cpu.rate_gflops, op_class)
        key = f"cpu.rate_gflops.{op_class}"
        if rate is not None and rate.one is None and rate.all is None:
            yield wrong(key, "a table with 1t, nt, or both", {})
        elif rate is not None and rate.one and rate.all and rate.all < rate.one:
            yield wrong(f"{key}.nt", f"at least 1t = {rate.one}", rate.all)
    for at, cluster in enumerate(cpu.clusters):
        key = f"cpu.clusters[{at}]"
        steps, currents = cluster.freq_mhz, cluster.power_ma
        if steps and (list(steps) != sorted(set(steps)) or steps[-1] != cluster.max_mhz):
            yield wrong(f"{key}.freq_mhz", f"ascending and end with max_mhz = {cluster.max_mhz}", steps)
        if currents and len(currents) != len(steps):
            yield wrong(f"{key}.power_ma", f"one value for each of the {len(steps)} in freq_mhz", currents)
        elif currents and cluster.max_ma is not None and currents[-1] != cluster.max_ma:
            yield wrong(f"{key}.power_ma", f"values that end with max_ma = {cluster.max_ma}", currents)


def _runtime_faults(device: Device) -> Iterator[Fault]:
    names, default = device.runtime, device.default_runtime
    for name in names:
        if not re.search(NAME_PATTERN, name):
            yield wrong(f"runtime.{name}", NAME_WORDS, name)
        lengths = [len(row) for row in names[name].cost_errors]
        if lengths and lengths != list(range(1, len(TERMS) + 2)):
            yield wrong(f"runtime.{name}.cost_errors", f"rows of 1 to {len(TERMS) + 1} numbers", lengths)
        varied = names[name].cost_variations
        if varied and len(varied) != len(TERMS) + 1:
            yield wrong(f"runtime.{name}.cost_variations", f"{len(TERMS) + 1} numbers", varied)
    if names and device.schema < 2:
        yield wrong("schema", "2 for a profile with a runtime", device.schema)
    if default is not None and default not in names:
        yield Fault("default_runtime", f"default_runtime: {unknown('runtime', default, names)}")
    elif default is None and len(names) > 1:
        yield Fault("default_runtime", f"default_runtime: missing; must be one of {', '.join(sorted(names))}")


def _thermal_faults(thermal: Thermal) -> Iterator[Fault]:
    temps = [step.temp_c for step in thermal.trips]
    scales = [step.freq_scale for step in thermal.trips]
    if temps != sorted(set(temps)):
        yield wrong("thermal.trips", "in ascending order of temp_c", temps)
    elif scales != sorted(scales, reverse=True):
        yield wrong("thermal.trips", "steps whose freq_scale does not rise with temp_c", scales)
    elif thermal.off_c is not None and thermal.off_c < temps[-1]:
        yield wrong("thermal.off_c", f"at least {temps[-1]}, the temp_c of the last step", thermal.off_c)
    elif thermal.off_c == temps[0]:  # it returns when it has cooled to the first step: at once
        yield wrong("thermal.off_c", f"above {temps[0]}, the temp_c of the only step", thermal.off_c)
    if thermal.ambient_c is not None and thermal.ambient_c >= temps[0]:
        yield wrong("thermal.ambient_c", f"below {temps[0]}, the temp_c of the first step", thermal.ambient_c)
    together = ("ambient_c", "r_c_per_w", "tau_s")
    missing = [f"thermal.{name}" for name in together if getattr(thermal, name) is None]
    if missing and len(missing) < len(together):
        yield Fault(missing[0], f"{missing[0]}: missing; {' and '.join(together)} only work together")


def availability_faults(availability: Availability, prefix: str = "") -> Iterator[Fault]:
    """Yield all faults in the intervals and the period; ``prefix`` is put before the keys in the faults."""
    end = 0.0
    for at, (start, stop) in enumerate(availability.intervals_s):
        if stop <= start or start < end:
            allowed = f"[start, end] with a start of at least {end:g} and an end after it"
            yield wrong(f"{prefix}intervals_s[{at}]", allowed, [start, stop])
        end = max(end, stop)
    if end > availability.period_s:
        yield wrong(f"{prefix}period_s", f"at least the last interval's end, {end:g}", availability.period_s)


def _network_faults(network: Network) -> Iterator[Fault]:
    if network.header_bytes >= network.mtu_bytes:
        yield wrong("header_bytes", f"below mtu_bytes = {network.mtu_bytes}", network.header_bytes)
    if network.radio is not None and network.bearer != "mobile":
        yield wrong("bearer", "'mobile' if a metered radio is given", network.bearer)
    if network.radio is not None and network.down.rate_mbps is None and network.down.trace is None:
        yield Fault("radio", "radio: needs down.rate_mbps, on which a metered radio's power depends")
    for name, way in (("down", network.down), ("up", network.up)):
        if (way.jitter_ms > 0) != (way.jitter_dist != "none"):
            allowed = "a distribution if jitter_ms is above 0, else 'none'"
            yield wrong(f"{name}.jitter_dist", allowed, way.jitter_dist)
        if way.jitter_dist == "uniform" and way.jitter_ms > way.delay_ms:
            allowed = f"at most delay_ms = {way.delay_ms} for a uniform distribution"
            yield wrong(f"{name}.jitter_ms", allowed, way.jitter_ms)
        if way.trace is not None and way.rate_mbps is not None:
            yield wrong(f"{name}.trace", "left out with rate_mbps (only one may set the rate)", way.trace)
        if way.rate_cv > 0 and way.rate_mbps is None:
            yield wrong(f"{name}.rate_cv", "left out without rate_mbps, which it varies", way.rate_cv)


def _fleet_faults(fleet: FleetFile) -> Iterator[Fault]:
    of_device = fleet.network if isinstance(fleet.network, dict) else {}
    named: list[tuple[str, Kind, str]] = [(f"devices.{name}", "devices", name) for name in fleet.devices]
    named += [("network", "networks", name) for name in of_device.values() or [str(fleet.network)]]
    for key, kind, name in named:
        if not is_path(name) and name not in bundled_names(kind):
            yield Fault(key, f"{key}: {_no_profile(kind, name)}")
    for name in of_device:
        if name not in fleet.devices:
            key = f"network.{name}"
            yield Fault(key, f"{key}: {unknown('device in the fleet', name, fleet.devices)}")
    if missing := [name for name in fleet.devices if of_device and name not in of_device]:
        yield Fault("network", f"network: has no entry for {listed(missing)}; give one for each device")
