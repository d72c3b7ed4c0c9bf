"""The algorithms, one paper's a file; a file put here is a built-in strategy, found by its name.

    base.py          the seam: View, Step, Strategy, ServerOptimizer
    asynchronous.py  who trains when, without rounds             → fedasync
    buffered.py      … and a step when a buffer is full          → fedbuff, fedstaleweight, asysg, …
    polled.py        every so often take clients wherever they are → favano, quafl
    rounds.py        draw a cohort, wait for it, step            → fedavg, fedprox, fedavgm, fedadam, …

Data walks one way: the core shows a View, the strategy answers with clients to start and a Step.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError, unknown
from edgefl.kernels.steps import ServerOptimizer
from edgefl.loading import load_attribute
from edgefl.strategies.base import Client, Given, LocalTerms, Step, Strategy, Update, VectorSum, View
from edgefl.strategies.buffered import Buffered
from edgefl.strategies.rounds import Rounds

__all__ = [
    "Buffered",
    "Client",
    "Given",
    "LocalTerms",
    "Rounds",
    "ServerOptimizer",
    "Step",
    "Strategy",
    "Update",
    "VectorSum",
    "View",
    "kind",
    "names",
    "resolve",
]

_SCAFFOLD = {"__init__", "asynchronous", "base", "buffered", "polled", "rounds"}


def names() -> list[str]:
    """The built-in strategies.

    >>> "fedbuff" in names()
    True
    """
    files = Path(__file__).parent.glob("*.py")
    return sorted(file.stem.replace("_", "-") for file in files if file.stem not in _SCAFFOLD)


def resolve(table: Mapping[str, Any], search_path: Iterable[str | Path] = ()) -> Strategy:
    """The strategy that an experiment's ``[strategy]`` table asks for: its ``name``, and that one's fields.

    ``"my_module:Mine"`` is found as `edgefl.loading` says, first in the folders of ``search_path``.
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
    cls = kind(name, search_path)
    allowed = _fields(cls)
    for key in values:
        if key not in allowed:
            raise ConfigError(f"strategy.{key}: " + unknown(f"field of {name}", key, allowed))
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"strategy {name!r} cannot be made: {error}") from None


def fields(name: Any, search_path: Iterable[str | Path] = ()) -> list[str]:
    """The fields that the strategy of that name has. `ConfigError` if there is no such strategy.

    >>> fields("fedasync")[:2]
    ['server_lr', 'concurrency']
    """
    return _fields(kind(name, search_path))


def kind(name: Any, search_path: Iterable[str | Path] = ()) -> type[Strategy]:
    """The class of the strategy of that name. `ConfigError` if there is no such strategy."""
    if not isinstance(name, str):
        have = ", ".join(names())
        raise ConfigError(f"strategy.name must be one of {have} or 'my_module:Mine', got {name!r}")
    cls = load_attribute(name, "strategy.name", search_path) if ":" in name else _built_in(name)
    if not (isinstance(cls, type) and issubclass(cls, Strategy) and cls is not Strategy):
        raise ConfigError(f"strategy.name {name!r} must be a dataclass derived from Strategy, got {cls!r}")
    return cls


def _fields(cls: type[Strategy]) -> list[str]:
    return [item.name for item in dataclasses.fields(cls) if item.init]


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
