"""What an importer gives back: files of profiles, each checked as any other profile is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from edgefl import toml
from edgefl.emulation.profile_checks import problems
from edgefl.emulation.profile_files import TYPES, Kind
from edgefl.emulation.schema import SCHEMA
from edgefl.errors import ProfileError


class Made(NamedTuple):
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
    for problem in problems(Path(name), tables, TYPES[kind]):
        said = problem.removeprefix(f"{name}: ")
        raise ProfileError(f"{source}: {tables.get('name', tables['id'])}: {said}")
    return name, toml.write(tables)
