"""Reading strangers' files: no longer than allowed, and names from them that are names of profiles.

What the user says of an import beyond its file.

What an importer gives back: files of profiles, each checked as any other profile is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from edgefl import toml
from edgefl.devices.profiles import Kind, profile_faults
from edgefl.devices.schema import SCHEMA
from edgefl.errors import ProfileError, unknown

_NOT_NAME = re.compile(r"[^a-z0-9.]+")


def read_bytes(path: Path, limit_mib: int = 1) -> bytes:
    """The file's content; ProfileError if it cannot be read or is longer than ``limit_mib``."""
    limit = limit_mib << 20
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file") from None
    except (OSError, ValueError) as wrong:  # ValueError: a NUL in the path
        raise ProfileError(f"{path}: cannot be read: {getattr(wrong, 'strerror', None) or wrong}") from None
    if len(raw) > limit:
        raise ProfileError(f"{path}: longer than {limit_mib} MiB, too long for a file of this format")
    return raw


def read_text(path: Path, limit_mib: int = 1) -> str:
    """The same as text; ProfileError also if it is not UTF-8."""
    raw = read_bytes(path, limit_mib)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = raw.count(b"\n", 0, wrong.start) + 1
        raise ProfileError(f"{path}: line {line}: not UTF-8: byte 0x{raw[wrong.start]:02x}") from None


def profile_name(text: str) -> str:
    """A name of a profile from any text.

    >>> profile_name("Slow 3G"), profile_name("Ryzen 5 3600"), profile_name("__")
    ('slow-3g', 'ryzen-5-3600', 'unnamed')
    """
    return _NOT_NAME.sub("-", text.lower()).strip("-.") or "unnamed"


def profile_names(texts: Iterable[str]) -> list[str]:
    """The same for many, each its own.

    >>> profile_names(["3G", "3g", "LTE"])
    ['3g', '3g-2', 'lte']
    """
    found: dict[str, None] = {}
    for text in texts:
        name, copies = profile_name(text), 1
        while (own := name if copies == 1 else f"{name}-{copies}") in found:
            copies += 1
        found[own] = None
    return list(found)


def chosen(path: Path, names: Iterable[str], only: tuple[str, ...]) -> list[str]:
    """Of a file's own ``names`` those that are asked for, all if none is; ProfileError for one it has not."""
    names = list(names)
    for name in only:
        if name not in names:
            raise ProfileError(f"{path}: {unknown('entry', name, names[:50])}")
    return [name for name in names if not only or name in only]


CLIENTS = 100


class ImportOptions(NamedTuple):
    """What a format has no use for must not be given: `formats.read` sees to it."""

    name: str | None = None
    """Id of the one profile, or of the fleet, that is made; by default the file's name."""
    only: tuple[str, ...] = ()
    """Of a file that holds many, these alone: the file's own names."""
    clients: int | None = None
    """Of a file that holds very many clients, so many; by default `CLIENTS`."""
    base: str | None = None
    """The device profile that a file without computing rates completes."""
    up: Path | None = None
    """The trace of the other way."""


class ImportResult(NamedTuple):
    """Files to write, by name, and what the user should know of them."""

    files: dict[str, str]
    notes: tuple[str, ...] = ()


def profile_file(source: Path, kind: Kind, tables: dict[str, Any]) -> tuple[str, str]:
    """The profile's file name and content; ProfileError naming ``source`` if it would not be a right one."""
    tables = {"schema": SCHEMA, **tables}
    for last in ("sources", "uncertainty"):
        if last in tables:
            tables[last] = tables.pop(last)
    name = f"{tables['id']}.toml"
    for fault in profile_faults(str(tables["id"]), tables, kind):
        raise ProfileError(f"{source}: {tables.get('name', tables['id'])}: {fault}")
    return name, toml.write(tables)
