"""``edgefl profiles`` and ``edgefl calibrate``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.errors import ConfigError, ProfileError, unknown

if TYPE_CHECKING:
    from rich.table import Table

    from edgefl.emulation import Device, FleetFile, Network
    from edgefl.emulation.schema import Profile


def add(app: typer.Typer) -> None:
    app.command()(profiles)
    app.command()(calibrate)


def profiles(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this one; or the word check.")
    ] = None,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="What to check.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List profiles, show one, or: profiles check FILE."""
    if name == "check":
        _check(file)
    elif file is not None:
        raise ConfigError(f"profiles {name} {file}: one name only; to check a file: profiles check FILE")
    elif name is None:
        _list(as_json)
    else:
        _show(name, as_json)


def calibrate(
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again even if the last one holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Measure what this machine computes a second."""
    from edgefl.emulation.calibration import EXPIRES_S
    from edgefl.emulation.calibration import calibrate as measure

    found = measure(force=fresh)
    if as_json:
        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return

    from edgefl.cli.tables import show, table

    rows = [(name, rate.median, unit, 100 * rate.cv) for name, rate, unit in found.measured.rates()]
    title = f"one thread of {found.cpu}\n{found.library}"
    show(table(("what", ">median", "", ">CV %"), rows, title=title))
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.at_unix_s + EXPIRES_S))
    typer.echo(f"a second is one of CPU time; holds until {until}")
    cache_mib, arrays_mib = found.measured.cache_mib, 3 * found.measured.triad_mib
    if arrays_mib < 2 * cache_mib:
        typer.echo(f"the triad's {arrays_mib:.0f} MiB are not well past the cache of {cache_mib:.0f} MiB")


def _check(file: Path | None) -> None:
    if file is None:
        raise ConfigError("profiles check: no FILE given")
    from edgefl.emulation import check_file

    problems = check_file(file)
    for problem in problems:
        typer.echo(problem)
    if problems:
        count = len(problems)
        raise ConfigError(f"{file}: {count} problem{'s' if count > 1 else ''}")
    typer.echo(f"{file}: good")


def _list(as_json: bool) -> None:
    from edgefl import emulation

    devices = [emulation.load_device(name) for name in emulation.device_names()]
    networks = [emulation.load_network(name) for name in emulation.network_names()]
    fleets = [emulation.load_fleet(name) for name in emulation.fleet_names()]
    if as_json:
        found: dict[str, Sequence[Profile]] = {"devices": devices, "networks": networks, "fleets": fleets}
        plain = {kind: {p.id: emulation.to_json(p) for p in these} for kind, these in found.items()}
        typer.echo(json.dumps(plain, indent=2))
        return

    from edgefl.cli.tables import show

    show(_devices(devices), _networks(networks), _fleets(fleets))


def _devices(devices: list[Device]) -> Table:
    from edgefl.cli.tables import table

    rows = []
    for device in devices:
        rate = device.cpu.rate_gflops.train if device.cpu else None
        ram = device.memory.ram_mib if device.memory else None
        rows.append((device.id, device.kind, device.year, rate, ram, device.app_limit_mib, device.network))
    return table(("device", "class", ">year", ">GFLOPS", ">RAM MiB", ">app MiB", "network"), rows)


def _networks(networks: list[Network]) -> Table:
    from edgefl.cli.tables import table

    rows = []
    for network in networks:
        down, up = network.down, network.up
        rtt_ms = down.delay_ms + up.delay_ms
        rows.append((network.id, down.rate_mbps, up.rate_mbps, rtt_ms, down.loss_pct, up.loss_pct))
    return table(("network", ">down Mbps", ">up Mbps", ">RTT ms", ">down loss %", ">up loss %"), rows)


def _fleets(fleets: list[FleetFile]) -> Table:
    from edgefl.cli.tables import table

    rows = [(f.id, f.clients, len(f.devices), f.name) for f in fleets]
    return table(("fleet", ">clients", ">kinds", "name"), rows)


def _show(name: str, as_json: bool) -> None:
    from edgefl import emulation

    kinds: tuple[tuple[Any, Any], ...] = (
        (emulation.device_names, emulation.load_device),
        (emulation.network_names, emulation.load_network),
        (emulation.fleet_names, emulation.load_fleet),
    )
    path = "/" in name or name.endswith(".toml")
    for names, load in kinds:
        if name in names():
            profile = load(name)
            break
    else:
        if path:
            raise ConfigError(f"profiles {name}: a path; to check a file: edgefl profiles check {name}")
        raise ProfileError(unknown("profile", name, [n for names, _ in kinds for n in names()]))
    plain = emulation.to_json(profile)
    if as_json:
        typer.echo(json.dumps(plain, indent=2))
        return

    from edgefl.cli.tables import show, table

    sources: dict[str, str] = plain.pop("sources", {})
    rows = [(key, value, _source(key, sources)) for key, value in _flat(plain)]
    show(table(("field", "value", "source"), rows))


def _flat(plain: Any, key: str = "") -> list[tuple[str, object]]:
    """Nested figures as dotted keys."""
    if isinstance(plain, dict):
        return [row for name, v in plain.items() for row in _flat(v, f"{key}.{name}" if key else name)]
    if isinstance(plain, list) and any(isinstance(item, dict) for item in plain):
        return [row for place, v in enumerate(plain) for row in _flat(v, f"{key}[{place}]")]
    return [(key, ", ".join(map(str, plain)) if isinstance(plain, list) else plain)]


def _source(key: str, sources: dict[str, str]) -> str:
    """The source of the figure, or of the nearest table around it."""
    steps = key.replace("[", ".").split(".")
    for count in range(len(steps), 0, -1):
        found = sources.get(".".join(steps[:count]))
        if found is not None:
            return found
    return ""
