"""Where a function is, said by the test's process and found again by the measuring one."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import reprlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from edgefl.errors import ConfigError
from edgefl.regression.orders import Function


def locate(function: Any, name: str = "the function") -> Function:
    """Where a module-level function is. ConfigError for what another process could not find.

    >>> locate(lambda: None)
    Traceback (most recent call last):
    edgefl.errors.ConfigError: the function must be defined at the top of a module, so that another process \
finds it (got a lambda)
    """
    if not callable(function):
        got = " ".join(reprlib.repr(function).split())
        raise ConfigError(f"{name} must be a function at the top of a module (got {got}: not callable)")
    if (kind := _suspended(function)) is not None:
        got = f"{_name(function)}, {kind}"
        raise ConfigError(f"{name} must do its work when it is called, as a plain function does (got {got})")
    if not inspect.isfunction(function):
        raise _lost(name, f"a {type(function).__name__}")
    module, qualname = function.__module__, function.__qualname__
    if "<lambda>" in qualname:
        raise _lost(name, "a lambda")
    if "<locals>" in qualname:
        raise _lost(name, f"{qualname.replace('.<locals>', '')}, which is inside another function")
    try:
        found: Any = functools.reduce(getattr, qualname.split("."), sys.modules[module])
        file = inspect.getsourcefile(function)
    except (AttributeError, KeyError, TypeError):
        found, file = None, None
    if "." in qualname and not _static(sys.modules[module], qualname):
        raise _lost(name, f"{qualname}, a method, which would need its object")
    if found is not function or file is None:
        raise _lost(name, f"{module}.{qualname}, whose name there is another object's")
    # A script's own functions are in a module that has another name in another process.
    return Function(
        f"_script_{Path(file).stem}" if module == "__main__" else module, str(Path(file).resolve()), qualname
    )


def _suspended(function: Any) -> str | None:
    """What a function is that answers with an object at once and does nothing until that is used."""
    for kind, known in (
        ("a coroutine function", inspect.iscoroutinefunction),
        ("a generator function", inspect.isgeneratorfunction),
        ("an async generator function", inspect.isasyncgenfunction),
    ):
        if known(function):  # of a partial, too
            return kind
    return None


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _static(module: ModuleType, qualname: str) -> bool:
    *owners, last = qualname.split(".")
    return isinstance(
        inspect.getattr_static(functools.reduce(getattr, owners, module), last, None), staticmethod
    )


def find(where: Function) -> Callable[..., Any]:
    """The function. ConfigError if its module cannot be imported or does not have it."""
    try:
        found: Any = _module(where)
        for name in where.qualname.split("."):
            found = getattr(found, name)
    except Exception as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{where.file}: cannot be imported: {type(error).__name__}: {line}") from error
    function: Callable[..., Any] = found
    return function


def _module(where: Function) -> ModuleType:
    if where.module in sys.modules:
        return sys.modules[where.module]
    try:
        spec = importlib.util.find_spec(where.module)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(where.file):
        return importlib.import_module(where.module)
    spec = importlib.util.spec_from_file_location(where.module, where.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[where.module] = module
    spec.loader.exec_module(module)
    return module


def _lost(name: str, got: str) -> ConfigError:
    return ConfigError(
        f"{name} must be defined at the top of a module, so that another process finds it (got {got})"
    )
