"""List every key of an experiment with its default, allowed values and meaning, taken from its type.

The meaning of a field is the docstring below it, which is parsed from the source.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import msgspec.inspect

from edgefl import strategies
from edgefl.errors import ConfigError, unknown
from edgefl.experiment import Experiment
from edgefl.validation import Table, allowed, join, parts, shown


class Setting(NamedTuple):
    """One key of an experiment. Its name is dotted, such as ``training.lr``, as in ``--set``."""

    name: str
    default: str
    """The default value as TOML text; empty if the key is required or has no default."""
    allowed: str
    meaning: str


def keys(which: str = "") -> list[Setting]:
    """List the keys of the table or strategy called ``which``, or of the whole experiment if it is "".

    Raises `ConfigError` for an unknown table or strategy.

    >>> [key.name for key in keys("checkpoint")]
    ['checkpoint.every_s']
    >>> "strategy.buffer_size" in [key.name for key in keys("fedbuff")]
    True
    """
    name = which.removeprefix("strategy.")
    if name != which or name in strategies.names() or ":" in name:
        return list(_of(strategies.kind(name), "strategy"))
    found = list(_of(Experiment, ""))
    chosen = [key for key in found if not which or key.name == which or key.name.startswith(f"{which}.")]
    if not chosen:
        tables = sorted({key.name.rpartition(".")[0] for key in found} - {""})
        raise ConfigError(unknown("table", which, [*tables, "a strategy's name"]))
    return chosen


def _of(kind: type, table: str) -> Iterator[Setting]:
    """Yield the keys of a struct or dataclass, and of the tables in it."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, Table)
    for field in info.fields:
        key = join(table, field.encode_name)
        inner = next((part for part in parts(field.type) if isinstance(part, Table)), None)
        if inner is None:
            yield Setting(key, _default(field), allowed(field.type), _meaning(kind, field.name))
        else:
            yield from _of(inner.cls, key)


def _default(field: msgspec.inspect.Field) -> str:
    made = field.default_factory
    default = field.default if made is msgspec.NODEFAULT else made()
    if default is None or default is msgspec.NODEFAULT:
        return ""
    return shown(list(default) if isinstance(default, tuple) else default)


def _meaning(kind: type, name: str) -> str:
    """Return the docstring below a field, from the class or base class that defines the field."""
    owners = [owner for owner in kind.__mro__ if name in inspect.get_annotations(owner)]
    return next(filter(None, (_texts(owner).get(name, "") for owner in owners)), "")


@cache
def _texts(owner: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text).replace("\n", " ")
    return found
