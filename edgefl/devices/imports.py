"""Shared functions for importing other projects' files: reading with a size limit, validation and naming."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from edgefl import toml
from edgefl.devices.profiles import Kind, profile_faults
from edgefl.devices.schema import SCHEMA
from edgefl.errors import ProfileError, unknown
from edgefl.files import read as read_file
from edgefl.validation import faults

T = TypeVar("T")


class ImportOptions(NamedTuple):
    """The user's options for an import; each format accepts only the options that it uses."""

    name: str | None = None
    """Id of the imported profile or fleet, for formats whose files contain only one. The default is the
    file's name."""
    only: tuple[str, ...] = ()
    """Names of the entries to import from a file with several entries; empty to import all entries."""
    clients: int | None = None
    base: str | None = None
    """Device profile to complete, if the file does not contain compute rates."""
    up: Path | None = None

    def profile_name(self, default: str) -> str:
        """Return ``name``, or else ``default``, converted to a valid profile name."""
        return profile_names([self.name or default])[0]


class ImportResult(NamedTuple):
    """Contents of the files to write, keyed by file name, and notes for the user."""

    files: dict[str, str]
    notes: tuple[str, ...] = ()


def read_bytes(path: Path, limit_mib: int = 1) -> bytes:
    """Read a file. Raises `ProfileError` if it is missing, unreadable or larger than ``limit_mib``."""
    try:
        return read_file(path, limit_mib << 20)
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file") from None
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Read a file as UTF-8. Raises `ProfileError` if it cannot be read or is not UTF-8."""
    raw = read_bytes(path)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ProfileError(f"{path}: line {line}: not UTF-8: byte 0x{raw[error.start]:02x}") from None


def checked(where: str, value: Any, of: type[T]) -> T:
    """Convert untrusted data to the type ``of``, which limits the range of each number.

    Raises `ProfileError` if the data are invalid.
    """
    try:
        return msgspec.convert(value, of)
    except msgspec.ValidationError as error:
        for fault in faults(value, of):
            raise ProfileError(f"{where}: {fault}") from None
        raise ProfileError(f"{where}: {error}") from None


def profile_names(texts: Iterable[str]) -> list[str]:
    """Convert strings to valid and distinct profile names.

    >>> profile_names(["Slow 3G", "slow 3g", "Ryzen 5 3600", "__"])
    ['slow-3g', 'slow-3g-2', 'ryzen-5-3600', 'unnamed']
    """
    found: dict[str, None] = {}
    for text in texts:
        name, copies = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unnamed", 1
        while (own := name if copies == 1 else f"{name}-{copies}") in found:
            copies += 1
        found[own] = None
    return list(found)


def pick(path: Path, only: Sequence[str], entries: Sequence[tuple[str, T]]) -> Iterator[tuple[str, str, T]]:
    """Yield the profile name, the name in the file and the value of each entry that ``only`` names.

    If ``only`` is empty, all entries are picked.
    """
    have = [name for name, _ in entries]
    for name in only:
        if name not in have:
            raise ProfileError(f"{path}: {unknown('entry', name, have[:50])}")
    picked = [entry for entry in entries if not only or entry[0] in only]
    for own, entry in zip(profile_names(name for name, _ in picked), picked, strict=True):
        yield own, *entry


def profile_file(source: Path, kind: Kind, tables: dict[str, Any]) -> dict[str, str]:
    """Return a dictionary that maps the name of a profile's file to its content.

    Raises `ProfileError`, whose message names the file ``source``, if the profile is invalid.
    """
    tables = {"schema": SCHEMA, **tables}
    for last in ("sources", "uncertainty"):
        if last in tables:
            tables[last] = tables.pop(last)
    for fault in profile_faults(str(tables["id"]), tables, kind):
        raise ProfileError(f"{source}: {tables.get('name', tables['id'])}: {fault}")
    return {f"{tables['id']}.toml": toml.write(tables)}
