"""Read and write TOML. Each error message is one line that gives the position of the error."""

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

MAX_BYTES = 1 << 20
"""Maximum size of a TOML file, in bytes. A larger file, such as a data set, was probably given by mistake."""
MAX_PATH = 255
"""Maximum length of a path in a message, in characters."""
DEEPEST = 32
"""Maximum depth to which keys, tables and arrays may be nested. The time that Python's parser takes grows
quadratically with this depth."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"\n]*\"|'[^'\n]*')[ \t]*\.[ \t]*"
_DEEP_KEY = re.compile(rf"(?<![A-Za-z0-9_-])(?:{_PART}){{{DEEPEST}}}")
_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read(path: Path, most_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Read the TOML file at ``path`` and return its content as plain data.

    Raises `ConfigError` if the file cannot be read, is longer than ``most_bytes``, is not UTF-8 or is not
    TOML.
    """
    try:
        raw = read_file(path, most_bytes)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a folder; expected a TOML file") from None
    except (OSError, ValueError) as error:  # ValueError is raised for a NUL in the path
        name = shortened(str(path)) if len(str(path)) > MAX_PATH else path
        raise ConfigError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: not UTF-8: byte 0x{raw[error.start]:02x}") from None
    return parse(text, str(path))


def parse(text: str, source: str) -> dict[str, Any]:
    """Parse TOML ``text`` and return its content as plain data. Error messages start with ``source``.

    >>> parse("[stop]\\nversions = 10", "a.toml")
    {'stop': {'versions': 10}}
    >>> parse("a = 1\\nb = ", "a.toml")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: a.toml: line 2: Invalid value
    """
    try:
        return _loads(text)
    except RecursionError:
        raise ConfigError(f"{source}: arrays or tables are nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        found, what = _AT.search(str(error)), _AT.sub("", str(error))
        if found is None:
            raise ConfigError(f"{source}: {what}") from None
        if found[1] is None or int(found[1]) > text.count("\n"):  # at the end: report the last line of text
            line = len(text.rstrip("\r\n").splitlines()) or 1
            raise ConfigError(f"{source}: line {line}: {what}") from None
        raise ConfigError(f"{source}: line {found[1]}, column {found[2]}: {what}") from None


def _loads(text: str) -> dict[str, Any]:
    """Parse TOML text with `tomllib.loads` in bounded time. Raises RecursionError if it is nested deeper than
    `DEEPEST`."""
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
    """Parse an argument of ``--set`` into the parts of its key and its value.

    The value is parsed as TOML. If it is not valid TOML and does not begin like a string, an array or a
    table, it is used as a plain string.

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
        why = f"for an empty string, write {name}='\"\"'; to remove the file's value, use --unset {name}"
        raise ConfigError(f"{shown}: the value is missing; {why}")
    try:
        table = _loads(f"value = {value}")
    except RecursionError:
        raise ConfigError(f"{shown}: arrays or tables are nested too deeply") from None
    except ValueError as error:
        if value[0] in "{['\"":
            raise ConfigError(f"{shown}: {_AT.sub('', str(error))}") from None
        return parts, value
    # No key of edgefl takes a date or a time, so a value that looks like one is kept as plain text.
    dated = isinstance(table["value"], (datetime.date, datetime.time))
    return parts, value if dated or len(table) > 1 else table["value"]


def keys(key: str) -> tuple[str, ...] | None:
    """Return the parts of a dotted key, or None if the key is invalid.

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
    """Yield each value in nested tables together with its dotted key. Nothing is yielded for an empty table.

    >>> dict(flat({"seed": 3, "fleet": {"devices": {"pi-4": 2}, "network": {}}}))
    {'seed': 3, 'fleet.devices.pi-4': 2}
    """
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def write(tables: Mapping[str, Any]) -> str:
    """Return ``tables`` as TOML text. Single values come first, followed by one section for each table, in
    which inner tables are written inline.

    Values may be of the types str, int, float and bool, and lists and tables of these. A value of None is
    left out together with its key.

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
    """Yield, in pieces, the text that `literal` returns, so that a caller can stop early, for example if the
    value contains itself.

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
        # JSON's escape sequences are valid in TOML. The DEL character must be escaped in TOML only.
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
