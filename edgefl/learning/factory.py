"""A user's own function or class, named ``"my_module:name"`` in the experiment."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError, unknown


def load_attribute(name: str, key: str, search_path: Sequence[Path] = ()) -> Any:
    """What ``"module:attribute"`` names; ``key`` is the experiment's key, for the error.

    The module is looked for in ``search_path`` (the experiment file's folder), then in the current folder,
    then where Python finds its modules. Raises `ConfigError` if it is not there, does not import or has no
    such attribute.

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
    folders = [*(str(Path(folder).resolve()) for folder in search_path), str(Path.cwd())]
    with _first_on_path(folders):
        module = _import(module_name, key, folders)
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


def _import(module_name: str, key: str, folders: Sequence[str]) -> Any:
    _forget_stranger(module_name.partition(".")[0])
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            looked = ", ".join(dict.fromkeys(folders))
            raise ConfigError(
                f"{key}: module {module_name!r} not found; looked in {looked} and Python's path"
            ) from None
        raise ConfigError(f"{key}: module {module_name!r} needs {error.name!r} (not installed)") from error
    except Exception as error:
        raise ConfigError(
            f"{key}: module {module_name!r} does not import: {type(error).__name__}: {_line(error)}"
        ) from error


def _forget_stranger(top: str) -> None:
    """Drop a module of the same name that an earlier experiment loaded from another folder."""
    loaded = sys.modules.get(top)
    if loaded is None or (origin := getattr(loaded, "__file__", None)) is None:
        return
    importlib.invalidate_caches()
    found = importlib.machinery.PathFinder.find_spec(top)
    if found is not None and found.origin is not None and Path(found.origin) != Path(origin):
        for name in [name for name in sys.modules if name == top or name.startswith(top + ".")]:
            del sys.modules[name]


@contextmanager
def _first_on_path(folders: Sequence[str]) -> Iterator[None]:
    added = list(dict.fromkeys(folders))
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in added:
            if folder in sys.path:
                sys.path.remove(folder)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
