"""A user's own strategy, model or data, named ``"my_module:name"`` in the experiment.

The module is looked for in the experiment file's folder, then in the current folder, then where Python
finds installed modules. Experiments in different folders may have modules of the same name.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError, unknown


def load_attribute(name: str, key: str, search_path: Iterable[str | Path] = ()) -> Any:
    """Returns what ``"module:attribute"`` names; ``search_path`` holds the experiment file's folder.

    Raises `ConfigError`, which names ``key``, if the module is not found or does not import, or has no such
    attribute.

    >>> load_attribute("math:sqrt", "model.name")(9.0)
    3.0
    >>> load_attribute("math:squrt", "model.name")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: model.name: attribute of module 'math' 'squrt' not found; did you mean ...
    """
    module_name, colon, attribute = name.partition(":")
    parts = module_name.split(".")
    if not colon or not all(part.isidentifier() for part in [*parts, attribute]):
        raise ConfigError(f"{key} must look like 'my_module:name' (got {name!r})")
    folders = list(dict.fromkeys(str(Path(folder).resolve()) for folder in (*search_path, ".")))
    sys.path[:0] = folders
    importlib.invalidate_caches()
    try:
        module = _import(module_name, key, folders)
    finally:
        for folder in folders:
            if folder in sys.path:
                sys.path.remove(folder)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [other for other in vars(module) if not other.startswith("_")]
        message = unknown(f"attribute of module {module_name!r}", attribute, public)
        raise ConfigError(f"{key}: {message}") from None


def call(factory: Any, name: str, key: str, /, **arguments: Any) -> Any:
    """Call a user's function; what it raises becomes one `ConfigError` line naming its type.

    >>> call(int, "my_module:make", "model.name", x=1)
    Traceback (most recent call last):
    edgefl.errors.ConfigError: model.name: 'my_module:make' raised TypeError: ...
    """
    if not callable(factory):
        raise ConfigError(f"{key}: {name!r} must be a function or class (got {type(factory).__name__})")
    try:
        return factory(**arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {name!r} raised {type(error).__name__}: {_line(error)}") from error


def _import(name: str, key: str, folders: Sequence[str]) -> Any:
    _forget_stranger(name.partition(".")[0])
    module = f"{key}: module {name!r}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            looked = ", ".join(folders)
            raise ConfigError(f"{module} not found; looked in {looked} and Python's path") from None
        raise ConfigError(f"{module} needs {error.name!r} (not installed)") from error
    except Exception as error:
        raise ConfigError(f"{module} does not import: {type(error).__name__}: {_line(error)}") from error


def _forget_stranger(top: str) -> None:
    """Drop a module of the same name that an earlier experiment loaded from another folder."""
    origin = getattr(sys.modules.get(top), "__file__", None)
    if origin is None or top == __package__:
        return
    importlib.invalidate_caches()
    found = importlib.machinery.PathFinder.find_spec(top)
    if found is not None and found.origin is not None and Path(found.origin) != Path(origin):
        for name in [name for name in sys.modules if name == top or name.startswith(top + ".")]:
            del sys.modules[name]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
