"""Convert a TOML file, ``--set`` overrides and arguments into a valid `Experiment`, and back into TOML."""

from __future__ import annotations

import numbers
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from edgefl import toml
from edgefl.config import checks
from edgefl.errors import ConfigError, ProfileError, shortened
from edgefl.experiment import DEFAULT_NETWORK, Experiment
from edgefl.files import DATA_FILES
from edgefl.terminal import say
from edgefl.validation import Fault, convert, shown

ONE_OF: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    (table, name): tuple((table, other) for other in names if other != name)
    for table, *names in (
        ("training", "steps", "epochs"),
        ("evaluation", "every_versions", "every_trips", "every_s"),
    )
    for name in names
}
"""Mutually exclusive keys: if a later source, such as ``--set``, sets one of them, the others are removed."""
RECORDED_BYTES = 64 << 20
"""Maximum size of a file written by a run. A strategy given in Python may have a number for each client."""
RETIRED = {"durability": "memory", "partial_sums": False}
"""Keys that ``[server]`` no longer has, each with the value that a file of an earlier version may contain."""


def load(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    seed: int | None = None,
    clock: str | None = None,
    unset: Iterable[str] = (),
    transport: str | None = None,
    recorded: bool = False,
    grid: Collection[str] = (),
) -> Experiment:
    """Load the experiment from the TOML file at ``path``, and apply ``overrides`` (``a.b=v``).

    ``seed`` and ``clock`` take precedence over the overrides. Keys in ``unset`` are removed from the file's
    tables first. If ``strategy.name`` is overridden, fields of the file's strategy that the new strategy
    lacks are dropped and listed on standard error. ``transport`` is the default for ``server.transport``.
    ``grid`` contains the keys that a grid will replace: if ``fleet.devices`` is one of them, a network that
    is not set remains the default, so that each fleet file of the grid has its own networks.

    If ``recorded``, the file was written by a run. Its `RETIRED` keys are then ignored, and so is
    ``every_versions`` if the file sets another evaluation interval too. Files that were moved together with
    the run are found: the run's arrays in its folder, and others beside ``experiment.toml`` or in the working
    directory, at the place that they had relative to the experiment's file.

    The result is complete (see `validate`). Relative paths are resolved against the file's folder, and then
    against the working directory. Raises a one-line `ConfigError` that names the key, the value and the
    allowed values.
    """
    path = Path(path)
    tables = toml.read(path, RECORDED_BYTES if recorded else toml.MAX_BYTES)
    for key in unset:
        _unset(tables, key, path)
    if recorded:
        _find_arrays(tables, path.absolute().parent)
        _find_moved(tables, path.absolute().parent)
        if isinstance(rules := tables.get("evaluation"), dict) and rules.keys() & {"every_trips", "every_s"}:
            rules.pop("every_versions", None)
    if isinstance(server := tables.setdefault("server", {}), dict):
        for key, value in RETIRED.items() if recorded else ():
            if server.get(key) == value:
                del server[key]
        if transport is not None:
            server.setdefault("transport", transport)
    given = {"--seed": (("seed",), seed), "--clock": (("clock", "kind"), clock)}
    found = _changed(tables, overrides, path.parent, str(path), given)
    if "fleet.devices" in grid and "network" not in tables["fleet"]:
        fleet = msgspec.structs.replace(found.fleet, network=DEFAULT_NETWORK)
        found = msgspec.structs.replace(found, fleet=fleet)
    return found


def change(
    experiment: Experiment, overrides: Iterable[str], base: str | Path = ".", *, option: str = "--set"
) -> Experiment:
    """Apply ``overrides`` (``a.b=v``) to the experiment; like `load`, return a complete and valid experiment.

    Error messages name ``option`` as the source of an override.

    >>> from edgefl.experiment import Fleet, Stop
    >>> plain = Experiment(fleet=Fleet(devices={"pi-4": 2}), stop=Stop(versions=3))
    >>> change(plain, ["training.lr=0.5"]).training.lr
    0.5
    """
    overrides = [*overrides]
    # `experiment.fleet` may be a dict instead of a `Fleet`.
    tables, fleet = plain(validate(experiment, base)), plain(experiment)["fleet"]
    of_file = isinstance(fleet["devices"], str) and fleet.get("network", DEFAULT_NETWORK) == DEFAULT_NETWORK
    if of_file and any(text.startswith("fleet.devices=") for text in overrides):
        tables["fleet"]["network"] = DEFAULT_NETWORK  # this fleet file's networks are for its own devices
    return _changed(tables, overrides, Path(base), "the experiment", {}, option, complete=True)


def _changed(
    tables: dict[str, Any],
    overrides: Iterable[str],
    base: Path,
    source: str,
    arguments: Mapping[str, tuple[tuple[str, ...], Any]],
    option: str = "--set",
    *,
    complete: bool = False,
) -> Experiment:
    """Apply ``overrides``, then ``arguments``, to the tables from ``source``, and validate the result.

    If ``complete``, the tables also contain the keys that nobody has set, with their default values.
    """
    overrides = [_as_utf8(text) for text in overrides]
    origin: dict[str, str] = {}
    pairs = [toml.assignment(text) for text in overrides]
    texts = (f"{option} {shortened(text)}" for text in overrides)
    option_text = {keys: text for text, (keys, _) in zip(texts, pairs, strict=True)}
    for keys, value in pairs:
        for other in ONE_OF.get(keys, ()):
            if other in option_text:
                raise ConfigError(f"{option_text[keys]} and {option_text[other]}: give only one of them")
        if keys == ("strategy", "name"):
            _drop_foreign(tables, value, base, f"{option_text[keys]}: ", source)
    for keys, value in pairs:
        origin[_set(tables, keys, value, option_text[keys])] = option_text[keys]
    for argument, (keys, value) in arguments.items():
        if value is not None:
            origin[_set(tables, keys, value, argument)] = argument
    if complete and not option_text.keys() & {("fleet",), ("fleet", "network")}:
        _drop_default_network(tables)
    try:
        return _experiment(tables, base)
    except Fault as fault:
        sources = [s for key, s in origin.items() if _within(fault.key, key) or _within(key, fault.key)]
        raise type(fault)(fault.key, f"{sources[-1] if sources else source}: {fault}") from None


def validate(experiment: Experiment, base: str | Path = ".") -> Experiment:
    """Complete every table of an experiment and validate it.

    Tables may be dicts, and numbers may be numpy scalars. The name of a fleet file is replaced by the file's
    devices, and a default ``fleet.network`` by the file's networks. Paths become absolute: they are resolved
    against ``base``, and then against the working directory. ``training.epochs`` becomes 1 if neither it nor
    ``training.steps`` is given. Raises a one-line `ConfigError` that names the key, the value and the allowed
    values.

    >>> from edgefl.experiment import Experiment, Fleet, Stop
    >>> validate(Experiment(fleet=Fleet(devices={"pi-4": 0}), stop=Stop(versions=3)))
    Traceback (most recent call last):
    edgefl.validation.Fault: fleet.devices.pi-4: must be a whole number from 1 to 10000000, got 0
    """
    tables = plain(experiment)
    _drop_default_network(tables)
    return _experiment(tables, Path(base))


def _drop_default_network(tables: dict[str, Any]) -> None:
    """Drop the default ``fleet.network`` if ``fleet.devices`` names a fleet file, which overrides it."""
    fleet = tables.get("fleet")
    if not isinstance(fleet, dict):
        return
    if fleet.get("network") == DEFAULT_NETWORK and isinstance(fleet.get("devices"), str):
        del fleet["network"]


def dump(experiment: Experiment) -> str:
    """Return the experiment as TOML text that `load` reads back unchanged; None values are omitted."""
    return toml.write(plain(experiment))


def _experiment(tables: dict[str, Any], base: Path) -> Experiment:
    if isinstance(strategy := tables.get("strategy"), Mapping):
        tables = {**tables, "strategy": {"name": "fedbuff", **strategy}}
    convert(tables, Experiment)
    tables = _resolved(tables, base)
    checks.check_storable(tables)
    found = convert(tables, Experiment)
    checks.check_relations(found)
    checks.check_profiles(found.fleet)
    if found.training.steps is None and found.training.epochs is None:
        training = msgspec.structs.replace(found.training, epochs=1)
        found = msgspec.structs.replace(found, training=training)
    return found


def _resolved(tables: dict[str, Any], base: Path) -> dict[str, Any]:
    """Replace a fleet file with its devices (and networks, if none are given); make every path absolute."""
    fleet, data = dict(tables["fleet"]), dict(tables.get("data", {}))
    if isinstance(fleet["devices"], str):
        from edgefl.devices import load_fleet

        try:
            file = load_fleet(_absolute(fleet["devices"], base))
        except (ProfileError, ValueError) as error:
            raise checks.ProfileFault("fleet.devices", f"fleet.devices: {error}") from None
        fleet["devices"] = file.drawn(tables.get("seed", 0))
        fleet.setdefault("network", file.network_of(fleet["devices"]))
    fleet["devices"] = _rekeyed("fleet.devices", fleet["devices"], base)
    network = fleet.get("network", DEFAULT_NETWORK)
    if isinstance(network, str):
        fleet["network"] = _absolute(network, base)
    else:
        networks = _rekeyed("fleet.network", network, base)
        fleet["network"] = {name: _absolute(net, base) for name, net in networks.items()}
    if fleet.get("availability"):
        fleet["availability"] = _found(fleet["availability"], base)
    if "labels" in data:
        data["labels"] = _rekeyed("data.labels", data["labels"], base)
    if data.get("path"):
        data["path"] = _found(data["path"], base)
    return {**tables, "fleet": fleet, "data": data}


def _rekeyed(key: str, table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        if (absolute := _absolute(name, base)) in found:
            raise ConfigError(f"{key}: {name!r} is a second name for {absolute}; name each profile once")
        found[absolute] = value
    return found


def _absolute(name: str, base: Path) -> str:
    """Make the path of a profile file absolute; return a profile's name unchanged."""
    return _found(name, base) if "/" in name or name.endswith(".toml") else name


def _found(path: str, base: Path) -> str:
    path = os.path.expanduser(path)
    beside = os.path.join(base, path)
    return os.path.abspath(beside if os.path.exists(beside) else path)


def plain(value: Any) -> Any:
    """Convert structs to dicts without None values, tuples to lists, and scalars of numpy or torch, which
    include arrays without dimensions, to Python values."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: plain(item) for name, item in fields.items() if item is not None}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, (bool, str)) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _as_utf8(text: str) -> str:
    """Decode a command-line argument as UTF-8, even if the locale has a different encoding.

    Python keeps bytes that the locale cannot decode as surrogates.
    """
    try:
        return text.encode(errors="surrogateescape").decode(errors="surrogateescape")
    except UnicodeEncodeError:  # not from a command line; `check_storable` reports it
        return text


def _set(tables: dict[str, Any], keys: tuple[str, ...], value: Any, source: str) -> str:
    """Set the key ``keys`` to ``value``.

    Return its dotted name or, if tables were created for it, the name of the outermost new table.
    """
    table, made = tables, len(keys)
    for place, key in enumerate(keys[:-1]):
        if key not in table:
            made = min(made, place + 1)
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            name = ".".join(keys[: place + 1])
            raise ConfigError(f"{source}: {name} is {shown(inner)}, not a table")
        table = inner
    table[keys[-1]] = value
    for other in ONE_OF.get(keys, ()):
        table.pop(other[-1], None)
    return ".".join(keys[:made])


def _find_arrays(tables: dict[str, Any], folder: Path) -> None:
    """Correct the path of a run's arrays if the folder that contains them was moved or copied. This is the
    run's ``folder`` or the folder of its sweep."""
    data = tables.get("data")
    if not isinstance(data, dict) or not isinstance(path := data.get("path"), str):
        return
    for place in (folder, folder.parent.parent):
        found = place / os.path.basename(path)
        if found.match(DATA_FILES) and found.is_file():
            tables["data"] = {**data, "path": str(found)}
            return


def _find_moved(tables: dict[str, Any], folder: Path) -> None:
    """Correct the paths of a run's other files that are missing, if they were moved with the run."""
    from edgefl.results.run_folder import begun_in

    def found(value: Any) -> Any:
        if isinstance(value, dict):
            return {found(key): found(item) for key, item in value.items()}
        if not isinstance(value, str) or not value.startswith("/") or os.path.exists(value):
            return value
        if not (base := begun_in(folder)):
            return value
        places = (os.path.join(place, os.path.relpath(value, base)) for place in (folder, Path.cwd()))
        return next(map(os.path.normpath, filter(os.path.exists, places)), value)

    for name in ("fleet", "data"):
        if name in tables:
            tables[name] = found(tables[name])


def _unset(tables: dict[str, Any], key: str, path: Path) -> None:
    """Delete ``key`` from ``tables``. Raises `ConfigError` if it is missing."""
    *outer, last = toml.keys(key) or [key]
    table: Any = tables
    for name in outer:
        table = table.get(name) if isinstance(table, dict) else None
    if not isinstance(table, dict) or last not in table:
        raise ConfigError(f"--unset {key}: {path} does not set it")
    del table[last]


def _drop_foreign(tables: dict[str, Any], name: Any, base: Path, prefix: str, source: str) -> None:
    """Drop fields of the file's strategy that the strategy called ``name`` lacks, and list them on stderr."""
    from edgefl import strategies

    given = tables.get("strategy")
    if not isinstance(given, dict) or given.get("name", "fedbuff") == name:
        return
    try:
        known = {"name", *strategies.fields(name, [base])}
    except ConfigError:
        return  # the error is reported when the strategy is created
    dropped = [key for key in given if key not in known]
    for key in dropped:
        del given[key]
    if dropped:
        left_out = ", ".join(f"strategy.{key}" for key in dropped)
        say(f"edgefl: {prefix}dropped {left_out} from {source}: {name} has no such field", err=True)


def _within(key: str, setting: str) -> bool:
    return key == setting or key.startswith((f"{setting}.", f"{setting}["))
