"""Load the user's own code, such as a strategy or a model, which an experiment names as ``"my_module:name"``.

The module must be a file in the folder of the experiment file or in the current folder. Installed modules are
allowed only if the environment variable ``EDGEFL_MODULES`` lists them. Otherwise an experiment from somebody
else could run code that its user has never seen (``torch.hub``, for example, downloads code). Experiments in
different folders may have modules with the same name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError, described, listed, unknown

KEYS = (
    "strategy.name",
    "model.name",
    "data.name",
    "data.partition",
    "training.function",
    "training.loss",
    "evaluation.function",
    "fleet.attackers.kind",
)
"""Keys of an experiment whose values may name code to import."""
OF_PACKAGES = {"model.name": "timm:", "data.name": "hf:", "data.partition": "flwr:"}
"""For each of these keys, the prefix of values that refer to a package's model, data set or partitioner, not
to the user's own code."""
PICKLES = ("model.args.checkpoint_path", "model.args.pretrained_cfg", "model.args.pretrained_cfg_overlay")
"""Arguments of a timm model with which timm may load a pickle; a pickle can execute code."""


importing: list[str] = []
"""The user's modules that this process is currently importing."""
_named: set[str] = set()
"""The top-level packages of the user's modules that this process has imported by name."""
_searched: set[str] = set()
"""The folders in which this process has looked for the user's modules, except those named in `INSTALLED`."""
INSTALLED = ("site-packages", "dist-packages")
"""Names of the folders of installed packages. Such a folder is searched if the user passes an object from
an installed module, but the other packages in it are not the user's code."""


def load_attribute(name: str, key: str, search_path: Iterable[str | Path] = ()) -> Any:
    """Import a module and return its attribute, given as ``"module:attribute"``.

    The module is searched for in ``search_path`` first, which is usually the folder of the experiment file.
    Raises `ConfigError` with ``key`` in the message if the module is missing or not allowed, if it cannot be
    imported, or if it has no such attribute.

    >>> os.environ["EDGEFL_MODULES"] = "math"
    >>> load_attribute("math:sqrt", "model.name")(9.0)
    3.0
    >>> load_attribute("math:squrt", "model.name")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: model.name: module 'math': attribute 'squrt' not found; did you mean ...
    >>> del os.environ["EDGEFL_MODULES"]
    >>> load_attribute("torch.hub:load", "model.name")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: model.name: module 'torch.hub' is not a file beside the experiment; ...
    """
    module_name, colon, attribute = name.partition(":")
    parts = module_name.split(".")
    if parts[0] == "__main__":  # in a run's processes, this is a module of edgefl
        raise ConfigError(f"{key}: name the module by its file instead of __main__ (got {name!r})")
    if not colon or not all(part.isidentifier() for part in [*parts, attribute]):
        raise ConfigError(f"{key} must look like 'my_module:name' (got {name!r})")
    folders = list(dict.fromkeys(str(Path(folder).resolve()) for folder in (*search_path, ".")))
    _require_allowed(module_name, key, folders)
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
        message = unknown(f"module {module_name!r}: attribute", attribute, public)
        raise ConfigError(f"{key}: {message}") from None


def call(factory: Any, name: str, key: str, /, **arguments: Any) -> Any:
    """Call the user's function. If it raises an exception, raise a one-line `ConfigError` with the type and
    the message of the exception.

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
    except (Exception, SystemExit) as error:  # SystemExit would end the command silently
        raise ConfigError(f"{key}: {name!r} raised {described(error)}") from error


def signature(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Return a signature, like `inspect.signature`, but do not look up the names in its annotations.

    Python 3.14 and newer would look them up, which fails for types that are imported only for type checkers.
    """
    how: dict[str, Any] = {}
    if sys.version_info >= (3, 14):
        how["annotation_format"] = importlib.import_module("annotationlib").Format.STRING
    return inspect.signature(function, follow_wrapped=follow_wrapped, **how)


def own_code(tables: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the keys whose values refer to the user's modules, or to pickles, in an experiment given as
    plain tables.

    >>> own_code({"seed": 1, "strategy": {"name": "mine:Mine"}, "model": {"name": "timm:vit", "args": {}}})
    ['strategy.name']
    >>> own_code({"strategy": {"name": "hf:Mine"}})  # the user's module hf.py
    ['strategy.name']
    >>> own_code({"model": {"name": "timm:vit", "args": {"checkpoint_path": "mine.pth"}}})
    ['model.args.checkpoint_path']
    """
    keys = []
    for key, value in tables.items():
        name = prefix + key
        if name in PICKLES:
            keys.append(name)
        elif isinstance(value, Mapping):
            keys += own_code(value, f"{name}.")
        elif name in KEYS and ":" in str(value) and not str(value).startswith(OF_PACKAGES.get(name, ())):
            keys.append(name)
    return keys


def digests(files: Iterable[str] = ()) -> dict[str, str]:
    """Return the SHA-256 hashes of the user's modules that this process has imported, keyed by module, and of
    other ``files`` of the user, keyed by path. Folders are left out.

    The modules are those that an experiment names, and those that they import from their own package or from
    the folders in which modules are searched for, except folders of installed packages.
    """
    found, resolved = dict[str, str](), functools.cache(os.path.realpath)
    for name, module in sorted(sys.modules.items()) if _named else ():
        top, file = name.partition(".")[0], getattr(module, "__dict__", {}).get("__file__")
        if top == __package__ or not isinstance(file, str) or not file:
            continue
        path = Path(file)
        depth = name.count(".") + (path.stem == "__init__")
        if top in _named or resolved(path.parents[min(depth, len(path.parents) - 1)]) in _searched:
            with contextlib.suppress(OSError):
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    for file in files:
        with contextlib.suppress(OSError), open(file, "rb") as stream:  # a node lacks the server's files
            found[file] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def code_change(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a sentence that names the modules and files whose digests in ``before`` and ``now`` differ, or
    "".

    >>> code_change({"mine": "a1", "other": "b2"}, {"mine": "a3", "other": "b2", "new": "c3"})
    'your own code has changed since the run began (mine): the run goes on with the new code'
    >>> code_change({"/profiles/lte.toml": "a1"}, {"/profiles/lte.toml": "a3"})
    'your own files have changed since the run began (/profiles/lte.toml): the run goes on with the new files'
    >>> code_change({"mine": "a1"}, {"mine": "a1"})
    ''
    """
    names = changed_modules(before, now)
    what, have = ("files", "have") if any("/" in name for name in names) else ("code", "has")
    since = f"{have} changed since the run began ({listed(names)}): the run goes on with the new {what}"
    return f"your own {what} {since}" if names else ""


def changed_modules(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the modules and files in both mappings whose digests differ."""
    return [name for name in before if now.get(name, before[name]) != before[name]]


def _require_allowed(module: str, key: str, folders: Sequence[str]) -> None:
    top = module.partition(".")[0]
    allowed = {name.strip() for name in os.environ.get("EDGEFL_MODULES", "").split(",")}
    importlib.invalidate_caches()
    beside = importlib.machinery.PathFinder.find_spec(top, folders) is not None
    if not beside and not allowed & {top, module} and importlib.util.find_spec(top) is not None:
        raise ConfigError(
            f"{key}: module {module!r} is not a file beside the experiment; if you trust it, set "
            f"EDGEFL_MODULES={module}"
        )


def _import(name: str, key: str, folders: Sequence[str]) -> Any:
    _forget_other_folder(name.partition(".")[0])
    _named.add(name.partition(".")[0])
    _searched.update(folder for folder in folders if Path(folder).name not in INSTALLED)
    module = f"{key}: module {name!r}"
    importing.append(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            looked = ", ".join(folders)
            raise ConfigError(f"{module} not found; looked in {looked} and Python's path") from None
        raise ConfigError(f"{module} needs {error.name!r} (not installed)") from error
    except (Exception, SystemExit) as error:  # SystemExit would end the command silently
        raise ConfigError(f"{module} cannot be imported: {described(error)}") from error
    finally:
        importing.pop()


def _forget_other_folder(top: str) -> None:
    """Forget a module with the same name that was imported from another folder for an earlier experiment."""
    origin = getattr(sys.modules.get(top), "__file__", None)
    if origin is None or top == __package__:
        return
    importlib.invalidate_caches()
    found = importlib.machinery.PathFinder.find_spec(top)
    if found is not None and found.origin is not None and _place(found.origin) != _place(origin):
        for name in [name for name in sys.modules if name == top or name.startswith(top + ".")]:
            del sys.modules[name]


def _place(file: str) -> tuple[str, str]:
    """Return a file's folder, without symbolic links, and its name; a folder may have several paths."""
    folder, name = os.path.split(file)
    return os.path.realpath(folder), name
