"""Check plain data from TOML or JSON against types, and describe each fault in one line.

The types may be structs and dataclasses (for tables), literals, unions, numbers, strings and arrays. They may
have bounds, such as ``Annotated[float, msgspec.Meta(gt=0)]``. If the ``Meta`` has a ``description``, messages
contain this description instead of the type and its bounds. Numbers must be finite.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from edgefl.errors import ConfigError, as_config_error, listed, near, shortened
from edgefl.toml import pieces

T = TypeVar("T")
Table: TypeAlias = inspect.StructType | inspect.DataclassType
_LONGEST = 60


class Fault(ConfigError):
    """An invalid or missing value, or an unknown key. ``key`` is its dotted key, which is also in the
    message."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        """Make `pickle` use the constructor: `multiprocessing` passes exceptions between processes."""
        return type(self), (self.key, str(self))


def require(what: str, given: object, fits: bool, allowed: str) -> None:
    """Raise `ConfigError` if a function's argument is invalid, that is, if ``fits`` is False.

    >>> require("runs", 3, False, "a list of runs")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: runs: must be a list of runs, got 3
    """
    if not fits:
        raise ConfigError(f"{what}: must be {allowed}, got {shortened(repr(given))}")


def path(what: str, given: object) -> Path:
    """Check that an argument is a path, and return it as a `Path`."""
    require(what, given, isinstance(given, str | os.PathLike) and given != "", "a path")
    return Path(given)  # type: ignore[arg-type]


def whole(what: str, given: object, least: int, most: int = sys.maxsize) -> int:
    """Check that an argument is an integer (Python or numpy) from ``least`` to ``most``; return it as int."""
    try:
        number = None if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        number = None
    allowed = f"a whole number from {least}{'' if most == sys.maxsize else f' to {most}'}"
    require(what, given, number is not None and least <= number <= most, allowed)
    assert number is not None
    return number


def convert(value: Any, of: type[T], key: str = "") -> T:
    """Convert ``value`` to the type ``of``. Raises the first `Fault` if the value is invalid.

    >>> from edgefl.experiment import Stop
    >>> convert({"versions": 3}, Stop).versions
    3
    >>> convert({"version": 3}, Stop, "stop")
    Traceback (most recent call last):
    edgefl.validation.Fault: unknown key 'stop.version'; did you mean 'stop.versions'? allowed in [stop]: \
accuracy, accuracy_over, emulated_s, metric, min_improvement, patience_evaluations, trips, versions, wall_s
    """
    for fault in faults(value, of, key):
        raise fault
    try:
        return msgspec.convert(value, of)
    except msgspec.ValidationError as error:  # a type or bound that `faults` does not cover
        raise Fault(key, f"{key}{': ' if key else ''}{error}") from None


def from_json(text: bytes | str, what: str, of: Any = Any, kind: type[ConfigError] = ConfigError) -> Any:
    """Parse JSON as type ``of``. Invalid text raises ``kind`` with a message that starts with ``what``."""
    with as_config_error(what, msgspec.DecodeError, UnicodeDecodeError, RecursionError, kind=kind):
        return msgspec.json.decode(text, type=of)


def faults(value: Any, of: Any, key: str = "") -> Iterator[Fault]:
    """Yield a `Fault` for each unknown key, each missing key, and each value that has a wrong type or is out
    of bounds, at any depth of nesting.

    ``of`` is the expected type, a class or an annotation. ``key`` is the dotted key of ``value`` itself; it
    is empty if ``value`` is a whole file.

    >>> from typing import Annotated
    >>> positive = Annotated[float, msgspec.Meta(gt=0)]
    >>> [str(fault) for fault in faults({"lr": 0, "momentum": "x"}, dict[str, positive], "training")]
    ['training.lr: must be a finite number above 0, got 0', \
"training.momentum: must be a finite number above 0, got 'x'"]
    """
    kind, inner = _class_type(of) if isinstance(of, type) else _type_and_keys(of)
    return _faults(value, kind, key, [join(key, name) for name in inner])


def _type_and_keys(of: Any) -> tuple[inspect.Type, list[str]]:
    kind = inspect.type_info(of)
    return kind, list(_keys(kind))


_class_type = lru_cache(maxsize=64)(_type_and_keys)
"""`_type_and_keys` for classes, with cached results, because a call takes milliseconds."""


def wrong(key: str, allowed: str, got: Any) -> Fault:
    """Return the fault for a value. ``allowed`` describes the allowed values, and ``got`` is the invalid
    value.

    >>> print(wrong("stop.trips", "a whole number of at least 1", 0.5))
    stop.trips: must be a whole number of at least 1, got 0.5
    """
    return Fault(key, f"{key}{': ' if key else ''}must be {allowed}, got {shown(got)}")


def shown(value: Any) -> str:
    """Return ``value`` as TOML text of at most 60 characters. A long value is not read to the end.

    >>> shown("fast"), shown([1, True]), shown({"a": None})
    ("'fast'", '[1, true]', '{}')
    """
    text = ""
    try:
        for piece in (repr(value),) if isinstance(value, str) else pieces(value):
            text += piece
            if len(text) > _LONGEST:
                break
    except TypeError:
        text = f"a {type(value).__name__}"
    except ValueError:  # an integer of thousands of digits
        text = "a very long integer"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def join(key: str, name: str) -> str:
    """Return the dotted key of ``name`` in the table ``key``, which is "" for the top level. A long name is
    shortened."""
    name = shortened(name)
    return f"{key}.{name}" if key else name


# ---- values ------------------------------------------------------------------------------------


def _faults(value: Any, kind: inspect.Type, key: str, known: list[str]) -> Iterator[Fault]:
    part = next((part for part in parts(kind) if _is_a(value, part) and _within(value, part)), None)
    if part is None:
        literals = (part.values for part in parts(kind) if isinstance(part, inspect.LiteralType))
        hint = near(value, map(str, chain.from_iterable(literals))) if isinstance(value, str) else ""
        found = wrong(key, allowed(kind), value)
        yield Fault(key, f"{found};{hint}") if hint else found
    elif isinstance(part, Table):
        yield from _table_faults(value, part, key, known)
    elif isinstance(part, inspect.DictType):
        for name, item in value.items():
            if isinstance(name, str):
                yield from _faults(item, part.value_type, join(key, name), known)
            else:
                yield Fault(key, f"{key}: keys must be strings, got {shown(name)}")
    elif isinstance(part, inspect.ListType | inspect.VarTupleType):
        for place, item in enumerate(value):
            yield from _faults(item, part.item_type, f"{key}[{place}]", known)
    elif isinstance(part, inspect.TupleType):
        for place, (item, of) in enumerate(zip(value, part.item_types, strict=True)):
            yield from _faults(item, of, f"{key}[{place}]", known)


def _table_faults(table: Mapping[str, Any], kind: Table, key: str, known: list[str]) -> Iterator[Fault]:
    fields = {field.encode_name: field for field in kind.fields}
    for name, value in table.items():
        if name in fields:
            yield from _faults(value, fields[name].type, join(key, name), known)
        elif isinstance(kind, inspect.DataclassType) or kind.forbid_unknown_fields:
            yield _unknown(key, str(name), fields, known)
    for name, field in fields.items():
        if field.required and name not in table:
            missing = join(key, name)
            yield Fault(missing, f"{missing}: missing; must be {allowed(field.type)}")


def parts(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield each type in a union. If ``kind`` is not a union, yield only the type itself."""
    if isinstance(kind, inspect.Metadata):
        yield from parts(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for part in kind.types:
            yield from parts(part)
    else:
        yield kind


_KINDS: dict[type[inspect.Type], tuple[Any, str]] = {
    inspect.BoolType: (bool, "true or false"),
    inspect.IntType: (int, "a whole number"),
    inspect.FloatType: ((int, float), "a number"),
    inspect.StrType: (str, "a string"),
    inspect.NoneType: (type(None), "nothing"),
    inspect.DictType: (Mapping, "a table"),
    inspect.StructType: (Mapping, "a table"),
    inspect.DataclassType: (Mapping, "a table"),
    inspect.ListType: ((list, tuple), "an array"),
    inspect.VarTupleType: ((list, tuple), "an array"),
    inspect.TupleType: ((list, tuple), "an array"),
}
"""The Python types that are valid for each type of field, and a description for messages."""


def _is_a(value: Any, kind: inspect.Type) -> bool:
    """Return True if a value has the type ``kind``, regardless of its bounds and of the items in it."""
    if isinstance(kind, inspect.LiteralType):
        return value in kind.values
    if isinstance(value, bool):
        return isinstance(kind, inspect.BoolType | inspect.AnyType)
    python, _ = _KINDS.get(type(kind), (object, ""))
    if isinstance(kind, inspect.TupleType) and isinstance(value, list | tuple):
        return len(value) == len(kind.item_types)
    return isinstance(value, python)


def _within(value: Any, kind: inspect.Type) -> bool:
    """Return True if a value is within the bounds of the type ``kind``, which it must already have."""
    if isinstance(kind, inspect.FloatType) and not abs(value) <= sys.float_info.max:
        return False
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        bounds = ((ge, kind.ge), (gt, kind.gt), (le, kind.le), (lt, kind.lt))
        return all(limit is None or holds(value, limit) for holds, limit in bounds)
    if isinstance(kind, inspect.StrType) and kind.pattern and not re.search(kind.pattern, value):
        return False
    least = getattr(kind, "min_length", None)
    return least is None or len(value) >= least


# ---- phrases in messages -----------------------------------------------------------------------


def allowed(kind: inspect.Type) -> str:
    """Return a noun phrase that describes the allowed values of a type.

    >>> from edgefl.experiment import Count
    >>> allowed(inspect.type_info(Count | None))
    'a whole number from 1 to 1000000000'
    """
    if isinstance(kind, inspect.Metadata):
        return str((kind.extra_json_schema or {}).get("description") or allowed(kind.type))
    if isinstance(kind, inspect.UnionType):
        return " or ".join(allowed(part) for part in kind.types if not isinstance(part, inspect.NoneType))
    if isinstance(kind, inspect.LiteralType):
        words = [repr(word) for word in kind.values]
        return " or ".join(words) if len(words) < 5 else f"one of {', '.join(words)}"
    if isinstance(kind, inspect.TupleType):
        return f"an array of {len(kind.item_types)}"
    if isinstance(kind, inspect.IntType):
        return f"a whole number{_bounds(kind)}"
    if isinstance(kind, inspect.FloatType):
        bounded = kind.le is not None or kind.lt is not None
        return f"{'a' if bounded else 'a finite'} number{_bounds(kind)}"
    if isinstance(kind, inspect.StrType) and kind.pattern:
        return f"a string that matches {kind.pattern}"
    least = getattr(kind, "min_length", None) or 0
    length = {0: "", 1: " that is not empty"}.get(least, f" with a length of at least {least}")
    _, noun = _KINDS.get(type(kind), (object, "a value"))
    return f"{noun}{length}"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {_figure(kind.ge)} to {_figure(kind.le)}"
    pairs = (("above", kind.gt), ("of at least", kind.ge), ("below", kind.lt), ("at most", kind.le))
    given = [f"{word} {_figure(bound)}" for word, bound in pairs if bound is not None]
    return f" {' and '.join(given)}" if given else ""


def _figure(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _unknown(table: str, name: str, fields: Iterable[str], known: Iterable[str]) -> Fault:
    """Return the fault for an unknown key.

    The hint suggests a key of the same table that is almost the same, a key with the same name in another
    table, a key that consists of the unknown key's initials (``lr`` for ``learning_rate``), or a key of the
    same table with a similar spelling.
    """
    key, here = join(table, name), list(fields)
    close = [join(table, field) for field in get_close_matches(name, here, n=1, cutoff=0.6)]
    same = [other for other in known if "." in other and other.rpartition(".")[2] == name]
    initials = "".join(word[:1] for word in name.split("_"))
    if get_close_matches(name, here, n=1, cutoff=0.9):
        found = close
    elif same:
        found = same
    elif len(name) > 2 and initials in here:
        found = [join(table, initials)]
    else:
        found = close
    hint = f" did you mean {found[0]!r}?" if found else ""
    where = f"in [{table}]" if table else "at the top level"
    return Fault(key, f"unknown key {key!r};{hint} allowed {where}: {listed(fields)}")


def _keys(kind: inspect.Type, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of a type's fields, except fields that are themselves tables.

    The fields of inner tables are included; the fields of tables in arrays are not.
    """
    tables = [part for part in parts(kind) if isinstance(part, Table)]
    if key and not tables:
        yield key
    for table in tables:
        for field in table.fields:
            yield from _keys(field.type, join(key, field.encode_name))
