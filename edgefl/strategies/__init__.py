"""Federated-learning algorithms, one file per paper.

A file's name is the name of its built-in strategy. The following files are not strategies; the arrows point
to strategies that use them:

    base.py          the interface: Client, View, Update, Step, Until, Strategy
    rows.py          the parameters of a step's updates             → median, trimmed-mean, krum, rfa
    asynchronous.py  starts clients without rounds                    → fedasync
    buffered.py      the same, with a step when a buffer is full      → fedbuff, fedstaleweight, asysg, …
    polled.py        polls clients at intervals, while they train     → favano, quafl
    rounds.py        draws a cohort and waits for its updates         → fedavg, fedprox, fedavgm, fedadam, …

The core passes a View to the strategy, which returns the clients to start and the next Step. Your own
strategy can be a subclass of `Asynchronous`, `Buffered`, `Polled` or `Rounds`:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class BufferedAdam(Buffered):
    ...     def optimizer(self):
    ...         return ServerOptimizer(kind="adam", lr=self.server_lr)
    >>> BufferedAdam(buffer_size=5, server_lr=0.01).optimizer().lr
    0.01
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from edgefl.errors import ConfigError, described, shortened, unknown
from edgefl.kernels.steps import ServerOptimizer
from edgefl.loading import load_attribute
from edgefl.strategies.asynchronous import Asynchronous
from edgefl.strategies.base import (
    Arrivals,
    Client,
    LocalTerms,
    Step,
    Strategy,
    TripInputs,
    Until,
    Update,
    VectorSum,
    View,
)
from edgefl.strategies.buffered import Buffered
from edgefl.strategies.polled import Polled
from edgefl.strategies.rounds import Rounds
from edgefl.strategies.rows import Rows

__all__ = [
    "Arrivals",
    "Asynchronous",
    "Buffered",
    "Client",
    "LocalTerms",
    "Polled",
    "Rounds",
    "Rows",
    "ServerOptimizer",
    "Step",
    "Strategy",
    "TripInputs",
    "Until",
    "Update",
    "VectorSum",
    "View",
    "kind",
    "names",
    "resolve",
]

_SCAFFOLD = {"__init__", "asynchronous", "base", "buffered", "polled", "rounds", "rows"}


def names() -> list[str]:
    """Return the names of the built-in strategies in alphabetical order.

    >>> "fedbuff" in names()
    True
    """
    files = Path(__file__).parent.glob("*.py")
    return sorted(file.stem.replace("_", "-") for file in files if file.stem not in _SCAFFOLD)


def resolve(table: Mapping[str, Any], search_path: Iterable[str | Path] = ()) -> Strategy:
    """Create the strategy that the ``[strategy]`` table of an experiment describes by a ``name`` and fields.

    A name such as ``"my_module:Mine"`` is imported by `edgefl.loading`, which first searches the folders in
    ``search_path``. Raises `ConfigError` for an unknown name or field, for a value of the wrong type, and for
    a value out of range.

    >>> resolve({"name": "fedbuff", "buffer_size": 5}).buffer_size
    5
    >>> resolve({"name": "fedbuff", "bufer_size": 5})
    Traceback (most recent call last):
    edgefl.errors.ConfigError: strategy.bufer_size: field of fedbuff 'bufer_size' not found; \
did you mean 'buffer_size'? available: arrival_process, ...
    """
    values = dict(table)
    name = values.pop("name", None)
    cls = kind(name, search_path)
    allowed = _fields(cls)
    for key in values:
        if key not in allowed:
            raise ConfigError(f"strategy.{shortened(key)}: " + unknown(f"field of {name}", key, allowed))
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # from the user's own ``__post_init__``
        raise ConfigError(f"strategy {name!r} cannot be created: {described(error)}") from error


def fields(name: Any, search_path: Iterable[str | Path] = ()) -> list[str]:
    """Return the field names of the strategy ``name``. Raises `ConfigError` if there is no such strategy.

    >>> fields("fedasync")[:2]
    ['server_lr', 'concurrency']
    """
    return _fields(kind(name, search_path))


def hyperparameters(strategy: Strategy) -> dict[str, Any]:
    """Return the fields that the strategy's constructor takes, as plain data for the record.

    A field is left out if the user's own ``__post_init__`` has replaced its value with an object that is not
    plain data; arrays become lists.

    >>> from edgefl.strategies.fedavgm import FedAvgM
    >>> hyperparameters(FedAvgM(momentum=0.5))["momentum"]
    0.5
    """
    found: dict[str, Any] = {}
    for name in _fields(type(strategy)):
        with contextlib.suppress(AttributeError, TypeError):
            found[name] = msgspec.to_builtins(getattr(strategy, name), enc_hook=lambda array: array.tolist())
    return found


def kind(name: Any, search_path: Iterable[str | Path] = ()) -> type[Strategy]:
    """Return the class of the strategy ``name``. Raises `ConfigError` if there is no such strategy."""
    if not isinstance(name, str):
        have = ", ".join(names())
        raise ConfigError(
            f"strategy.name must be one of {have}, or your own class, such as 'my_module:Mine' (got {name!r})"
        )
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
        f"{module.__file__} must define a Strategy whose lower-case name is {wanted!r}, got none"
    )
