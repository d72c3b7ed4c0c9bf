"""Read and write TOML; each error message is one line with the position."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError, shortened
from edgefl.files import read as read_file

MOST_BYTES = 1 << 20
"""Maximum size of a TOML file. A larger file is a mistake, such as the path of a data set."""
MOST_PATH = 255
"""Maximum length of a path in a message."""
DEEPEST = 32
"""Maximum nesting of keys, tables and arrays. The time of Python's parser is quadratic in the nesting."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"\n]*\"|'[^'\n]*')[ \t]*\.[ \t]*"
_DEEP_KEY = re.compile(rf"(?<![A-Za-z0-9_-])(?:{_PART}){{{DEEPEST}}}")
_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read(path: Path) -> dict[str, Any]:
    """Read the file at ``path`` as plain data.

    Raises `ConfigError` if it cannot be read, is longer than 1 MiB, is not UTF-8 or is not TOML.
    """
    try:
        raw = read_file(path, MOST_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder, expected a TOML file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        name = shortened(str(path)) if len(str(path)) > MOST_PATH else path
        raise ConfigError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: not UTF-8: byte 0x{raw[error.start]:02x}") from None
    return parse(text, str(path))


def parse(text: str, source: str) -> dict[str, Any]:
    """Parse TOML ``text`` as plain data; error messages start with ``source``.

    >>> parse("[stop]\\nversions = 10", "a.toml")
    {'stop': {'versions': 10}}
    >>> parse("a = 1\\nb = ", "a.toml")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: a.toml: line 2: Invalid value
    """
    try:
        return _loads(text)
    except RecursionError:
        raise ConfigError(f"{source}: arrays or tables are nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        found, what = _AT.search(str(error)), _AT.sub("", str(error))
        if found is None:
            raise ConfigError(f"{source}: {what}") from None
        if found[1] is None or int(found[1]) > text.count("\n"):  # at the end: name the last line of text
            line = len(text.rstrip("\r\n").splitlines()) or 1
            raise ConfigError(f"{source}: line {line}: {what}") from None
        raise ConfigError(f"{source}: line {found[1]}, column {found[2]}: {what}") from None


def _loads(text: str) -> dict[str, Any]:
    """Call `tomllib.loads`, in bounded time. Raises RecursionError for nesting beyond `DEEPEST`."""
    if _DEEP_KEY.search(text):
        raise RecursionError
    found, level = tomllib.loads(text), 0
    layer: list[Any] = [found]
    while layer := [inner for each in layer for inner in _inside(each)]:
        level += 1
        if level > DEEPEST:
            raise RecursionError
    return found


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def assignment(text: str) -> tuple[tuple[str, ...], Any]:
    """Parse a ``--set`` argument into its keys and value.

    The value is parsed as TOML. If it is not valid TOML and does not begin like a string, array or table, it
    is a plain string.

    >>> assignment("strategy.name=fedbuff")
    (('strategy', 'name'), 'fedbuff')
    >>> assignment("fleet.devices={pi-4=3}")
    (('fleet', 'devices'), {'pi-4': 3})
    >>> assignment("training.lr")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: --set 'training.lr': expected KEY=VALUE, such as training.lr=0.1
    """
    shown = f"--set {shortened(text)!r}"
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{shown}: expected KEY=VALUE, such as training.lr=0.1")
    parts = keys(key.strip())
    if parts is None:
        raise ConfigError(
            f"{shown}: {shortened(key.strip())!r} is not a key; expected names joined by dots, such as a.b=1"
        )
    value = value.strip()
    if not value:
        name = shortened(key.strip())
        why = f"an empty string is {name}='\"\"'; --unset {name} removes the file's value"
        raise ConfigError(f"{shown}: no value; {why}")
    try:
        table = _loads(f"value = {value}")
    except RecursionError:
        raise ConfigError(f"{shown}: arrays or tables are nested too deep") from None
    except ValueError as error:
        if value[0] in "{['\"":
            raise ConfigError(f"{shown}: {_AT.sub('', str(error))}") from None
        return parts, value
    dated = isinstance(table["value"], (datetime.date, datetime.time))  # edgefl has no key with a date
    return parts, value if dated or len(table) > 1 else table["value"]


def keys(key: str) -> tuple[str, ...] | None:
    """Return the parts of the dotted ``key``, or None if it is invalid.

    >>> keys("fleet.devices.pi-4")
    ('fleet', 'devices', 'pi-4')
    """
    if "\n" in key or "\r" in key:
        return None
    try:
        table: Any = _loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return None
    parts: list[str] = []
    while isinstance(table, dict) and len(table) == 1:
        name, table = next(iter(table.items()))
        parts.append(name)
    return tuple(parts) if table == 0 else None


def flat(tables: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested tables with its dotted key; empty tables yield nothing.

    >>> dict(flat({"seed": 3, "fleet": {"devices": {"pi-4": 2}, "network": {}}}))
    {'seed': 3, 'fleet.devices.pi-4': 2}
    """
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def write(tables: Mapping[str, Any]) -> str:
    """Write ``tables`` as TOML text: single values, then one section per table, with inner tables inline.

    Values are str, int, float, bool, and lists and tables of these; None is left out.

    >>> print(write({"seed": 3, "fleet": {"devices": {"pi-4": 2}, "network": "lte"}}), end="")
    seed = 3
    <BLANKLINE>
    [fleet]
    devices = { pi-4 = 2 }
    network = "lte"
    """
    present = {key: value for key, value in tables.items() if value is not None}
    lines = [_line(key, value) for key, value in present.items() if not isinstance(value, Mapping)]
    for key, value in present.items():
        if isinstance(value, Mapping):
            lines += [*([""] if lines else []), f"[{_key(key)}]"]
            lines += [_line(inner, item) for inner, item in value.items() if item is not None]
    return "".join(f"{line}\n" for line in lines)


def _line(key: str, value: Any) -> str:
    return f"{_key(key)} = {literal(value)}"


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else literal(key)


def literal(value: Any) -> str:
    """Return ``value`` as TOML text.

    >>> literal([1, 2.5, "a", True, {"b": []}])
    '[1, 2.5, "a", true, { b = [] }]'
    """
    return "".join(pieces(value))


def pieces(value: Any) -> Iterator[str]:
    """Yield `literal` in pieces, so that a caller can stop early; the value may be nested endlessly.

    >>> endless = [1]
    >>> endless.append(endless)
    >>> "".join(piece for piece, _ in zip(pieces(endless), range(6)))
    '[1, [1, '
    """
    if isinstance(value, bool):
        yield "true" if value else "false"
    elif isinstance(value, int):
        yield int.__repr__(value)
    elif isinstance(value, float):
        yield float.__repr__(value)
    elif isinstance(value, str):
        # JSON's escapes are valid in TOML, except that TOML forbids a plain DEL.
        yield json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    elif isinstance(value, Mapping):
        before = "{ "
        for key, item in value.items():
            if item is not None:
                yield f"{before}{_key(key)} = "
                yield from pieces(item)
                before = ", "
        yield "{}" if before == "{ " else " }"
    elif isinstance(value, Sequence):
        before = "["
        for item in value:
            yield before
            yield from pieces(item)
            before = ", "
        yield "[]" if before == "[" else "]"
    else:
        raise TypeError(f"a {type(value).__name__} has no TOML form")
