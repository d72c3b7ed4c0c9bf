"""The algorithms, one paper's a file; a file put here is a built-in strategy, found by its name.

    base.py          the seam: View, Step, Strategy, ServerOptimizer
    asynchronous.py  who trains when, without rounds             → fedasync
    buffered.py      … and a step when a buffer is full          → fedbuff, fedstaleweight, asysg, …
    rounds.py        draw a cohort, wait for it, step            → fedavg, fedprox, fedavgm, fedadam, …
    optimizer.py     carries a ServerOptimizer out on flat vectors

Data walks one way: the core shows a View, the strategy answers with clients to start and a Step.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from edgefl.errors import ConfigError, unknown
from edgefl.strategies.base import (
    Device,
    ServerOptimizer,
    Step,
    Strategy,
    Update,
    View,
)
from edgefl.strategies.buffered import Buffered
from edgefl.strategies.rounds import Rounds

__all__ = [
    "Buffered",
    "Device",
    "Rounds",
    "ServerOptimizer",
    "Step",
    "Strategy",
    "Update",
    "View",
    "names",
    "resolve",
]

_SCAFFOLD = {"__init__", "asynchronous", "base", "buffered", "noise", "optimizer", "rounds"}


def names() -> list[str]:
    """The built-in strategies.

    >>> "fedbuff" in names()
    True
    """
    files = Path(__file__).parent.glob("*.py")
    return sorted(file.stem.replace("_", "-") for file in files if file.stem not in _SCAFFOLD)


def resolve(table: Mapping[str, Any], search_path: Iterable[str | Path] = (".",)) -> Strategy:
    """The strategy that an experiment's ``[strategy]`` table asks for: its ``name``, and that one's fields.

    ``"my_module:Mine"`` is looked for in the folders of ``search_path``, then among installed modules.
    `ConfigError` names what is not known, not of the right type or out of range.

    >>> resolve({"name": "fedbuff", "buffer_size": 5}).buffer_size
    5
    >>> resolve({"name": "fedbuff", "bufer_size": 5})
    Traceback (most recent call last):
    edgefl.errors.ConfigError: strategy.bufer_size: field of fedbuff 'bufer_size' not found; \
did you mean 'buffer_size'? have: arrival_process, ...
    """
    values = dict(table)
    name = values.pop("name", None)
    if not isinstance(name, str):
        have = ", ".join(names())
        raise ConfigError(f"strategy.name must be one of {have} or 'my_module:Mine', got {name!r}")
    cls = _user_class(name, search_path) if ":" in name else _built_in(name)
    allowed = [item.name for item in dataclasses.fields(cls) if item.init]
    for key in values:
        if key not in allowed:
            raise ConfigError(f"strategy.{key}: " + unknown(f"field of {name}", key, allowed))
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"strategy {name!r} cannot be made: {error}") from None


def _built_in(name: str) -> type[Strategy]:
    if name not in names():
        raise ConfigError("strategy.name: " + unknown("strategy", name, names()))
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    wanted = name.replace("-", "")
    for key, value in vars(module).items():
        if key.lower() == wanted and isinstance(value, type) and issubclass(value, Strategy):
            return value
    raise ConfigError(
        f"{module.__file__} must hold a Strategy whose name in lower case is {wanted!r}, got none"
    )


def _user_class(name: str, search_path: Iterable[str | Path]) -> type[Strategy]:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ConfigError(f"strategy.name must be a built-in or like 'my_module:Mine', got {name!r}")
    folders = [Path(folder).resolve() for folder in search_path]
    try:
        module = _user_module(module_name, folders)
    except ImportError as error:
        looked = ", ".join(map(str, folders))
        message = f"strategy.name {name!r} cannot be imported: {error}; looked in {looked}"
        raise ConfigError(message) from error
    except Exception as error:  # whatever the user's file does when it is imported
        message = f"strategy.name {name!r} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(message) from error
    found = getattr(module, attribute, None)
    if found is None:
        have = [
            key
            for key, value in vars(module).items()
            if _is_strategy(value) and value.__module__ == module.__name__
        ]
        raise ConfigError("strategy.name: " + unknown(f"strategy in {module_name}", attribute, have))
    if not _is_strategy(found):
        raise ConfigError(f"strategy.name {name!r} must be a dataclass derived from Strategy, got {found!r}")
    strategy: type[Strategy] = found
    return strategy


def _is_strategy(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Strategy) and value is not Strategy


def _user_module(name: str, folders: list[Path]) -> ModuleType:
    relative = Path(*name.split("."))
    for folder in folders:
        for file in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if file.is_file():
                return _load(name, file, folder)
    return importlib.import_module(name)


def _load(name: str, file: Path, folder: Path) -> ModuleType:
    """Import ``file`` as ``name``, or under a name of its own if another file has that name already."""
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(file):
            return known
        name = f"{name}@{file}"
        if name in sys.modules:
            return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(folder))  # so that it can import its neighbours
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(folder))
    return module
