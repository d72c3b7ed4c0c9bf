"""From a TOML file, ``--set`` overrides and arguments to one checked `Experiment`, and back to TOML."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from edgefl import checks, toml
from edgefl.checks import Fault
from edgefl.errors import ConfigError, ProfileError
from edgefl.experiment import Experiment

_ONE_OF: dict[tuple[str, ...], str] = {
    ("training", "steps"): "epochs",
    ("training", "epochs"): "steps",
}
"""Of these pairs only one may be given, so a later source that gives one takes the other back."""


def load(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    seed: int | None = None,
    clock: str | None = None,
) -> Experiment:
    """The experiment in the TOML file at ``path``: arguments beat ``overrides`` (``a.b=v``) beat the file.

    Raises `ConfigError`, one line naming the key, what was got and what is allowed.
    """
    tables = toml.read(Path(path))
    origin: dict[str, str] = {}
    for text in overrides:
        keys, value = toml.assignment(text)
        _set(tables, keys, value, f"--set {text}")
        origin[".".join(keys)] = f"--set {text}"
    for argument, keys, value in (("--seed", ("seed",), seed), ("--clock", ("clock", "kind"), clock)):
        if value is not None:
            _set(tables, keys, value, argument)
            origin[".".join(keys)] = argument
    try:
        return _experiment(tables)
    except Fault as fault:
        sources = [source for key, source in origin.items() if _within(fault.key, key)]
        raise Fault(fault.key, f"{sources[-1] if sources else path}: {fault}") from None
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def validate(experiment: Experiment) -> Experiment:
    """The experiment with every table complete and checked, however it was made.

    Tables may be given as dicts, numbers as numpy scalars. Neither ``training.steps`` nor
    ``training.epochs`` means one epoch. Raises `ConfigError`, one line naming the key.

    >>> from edgefl.experiment import Experiment, Fleet, Stop
    >>> validate(Experiment(fleet=Fleet(devices={"pi-4": 0}), stop=Stop(versions=3)))
    Traceback (most recent call last):
    edgefl.checks.Fault: fleet.devices.pi-4: must be a whole number from 1 to 100000, got 0
    """
    return _experiment(_plain(experiment))


def dump(experiment: Experiment) -> str:
    """The experiment as TOML text that `load` reads back as the same experiment; None is left out."""
    return toml.write(_plain(experiment))


def _experiment(tables: dict[str, Any]) -> Experiment:
    checks.shape(tables)
    checks.figures(tables)
    training = tables.get("training", {})
    if training.get("steps") is None and training.get("epochs") is None:
        tables = {**tables, "training": {**training, "epochs": 1}}
    experiment = msgspec.convert(tables, Experiment)
    _profiles(experiment)
    return experiment


def _profiles(experiment: Experiment) -> None:
    """Raise `ProfileError` if a device, fleet or network named here does not exist."""


def _plain(value: Any) -> Any:
    """Structs as dicts without their Nones, tuples as lists, numpy's numbers as Python's."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: _plain(item) for name, item in fields.items() if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (bool, str)) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _set(tables: dict[str, Any], keys: tuple[str, ...], value: Any, source: str) -> None:
    table = tables
    for place, key in enumerate(keys[:-1]):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            name = ".".join(keys[: place + 1])
            raise ConfigError(f"{source}: {name} is {checks.shown(inner)}, not a table")
        table = inner
    table[keys[-1]] = value
    if keys in _ONE_OF:
        table.pop(_ONE_OF[keys], None)


def _within(key: str, setting: str) -> bool:
    return key == setting or key.startswith((f"{setting}.", f"{setting}["))
