"""List every key of an experiment with its default, allowed values and meaning, read from the types.

A field's meaning is the docstring below it, parsed from the source.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any, NamedTuple

import msgspec

from edgefl import strategies
from edgefl.errors import ConfigError, unknown
from edgefl.experiment import Experiment
from edgefl.validation import allowed, join, shown


class Setting(NamedTuple):
    """One key, dotted as in ``--set``."""

    name: str
    default: str
    """TOML text; empty for a required key or one without a default."""
    allowed: str
    meaning: str


def keys(which: str = "") -> list[Setting]:
    """List the keys of one table of the experiment, of a strategy (``strategy.fedbuff``), or of everything.

    Raises `ConfigError` for an unknown table or strategy.

    >>> [key.name for key in keys("checkpoint")]
    ['checkpoint.every_s']
    >>> "strategy.buffer_size" in [key.name for key in keys("strategy.fedbuff")]
    True
    """
    table, _, name = which.partition(".")
    if table == "strategy" and name:
        return list(_of(strategies.kind(name), "strategy"))
    found = list(_of(Experiment, ""))
    chosen = [key for key in found if not which or key.name == which or key.name.startswith(f"{which}.")]
    if not chosen:
        tables = sorted({key.name.rpartition(".")[0] for key in found} - {""})
        raise ConfigError(unknown("table", which, [*tables, "strategy.NAME"]))
    return chosen


def _of(kind: type, table: str) -> Iterator[Setting]:
    """Yield the keys of a struct or dataclass, and of the tables in it."""
    types = typing.get_type_hints(kind, include_extras=True)
    for name, default in _defaults(kind):
        key, meaning = join(table, name), _meaning(kind, name)
        inner = _table(types[name])
        if inner is None:
            yield Setting(key, _written(default), allowed(types[name]), meaning)
        else:
            yield from _of(inner, key)


def _defaults(kind: type) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(kind):
        for each in dataclasses.fields(kind):
            made = each.default_factory
            yield each.name, each.default if made is dataclasses.MISSING else made()
    else:
        for field in msgspec.structs.fields(kind):
            made = field.default_factory
            yield field.name, field.default if made is msgspec.NODEFAULT else made()


def _written(default: Any) -> str:
    if default is None or default is msgspec.NODEFAULT or default is dataclasses.MISSING:
        return ""
    return shown(list(default) if isinstance(default, tuple) else default)


def _table(of: Any) -> type | None:
    """Return the struct among the types that a value may have, or None."""
    if typing.get_origin(of) is typing.Annotated:
        return _table(typing.get_args(of)[0])
    if typing.get_origin(of) in (typing.Union, UnionType):
        return next(filter(None, map(_table, typing.get_args(of))), None)
    return of if isinstance(of, type) and issubclass(of, msgspec.Struct) else None


def _meaning(kind: type, name: str) -> str:
    """Return the docstring below a field, in its class or the base class that defines it."""
    owners = [owner for owner in kind.__mro__ if name in inspect.get_annotations(owner)]
    return next(filter(None, (_texts(owner).get(name, "") for owner in owners)), "")


def _texts(owner: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text).replace("\n", " ")
    return found
