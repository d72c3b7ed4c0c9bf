"""Where this process's control groups are: the mounted hierarchies, of version 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from edgefl.errors import ConfigError

PROC = Path("/proc")


class Place(NamedTuple):
    """The control group that a process is in, for one controller."""

    folder: Path
    version: int


class NoGroup(ConfigError):
    """Control groups cannot be used here; the message says why, in one line."""


def find(controller: str, pid: int | str = "self") -> Place:
    """The group of process ``pid`` in the hierarchy that has ``controller``: ``cpu`` or ``memory``.

    A controller belongs to one hierarchy: to one of version 1 that names it, else to version 2. `NoGroup`
    if there is none, or none that this process can see.
    """
    own = _own_paths(pid)
    unified: Place | None = None
    for mount, root, kind, options in _mounts():
        if kind == "cgroup" and controller in options:
            if controller in own:
                return Place(_below(mount, root, own[controller]), 1)
        elif kind == "cgroup2" and "" in own:
            unified = Place(_below(mount, root, own[""]), 2)
    if unified is None:
        raise NoGroup(f"no control group hierarchy with the {controller} controller is mounted")
    if controller not in words(unified.folder / "cgroup.controllers"):
        raise NoGroup(f"the {controller} controller is not given to {unified.folder}")
    return unified


def words(file: Path) -> list[str]:
    """The words in a control file; none if it cannot be read."""
    try:
        return file.read_text().split()
    except OSError:
        return []


def figures(file: Path) -> dict[str, int]:
    """The lines ``name number`` of a control file; none if it cannot be read."""
    found = {}
    for line in _text(file).splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdecimal():
            found[name] = int(value)
    return found


def write(file: Path, text: str) -> None:
    """Write a control file. `NoGroup` with the system's reason where it refuses."""
    try:
        # Not write_text(): it opens for truncation too, and the value must go in one write.
        fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise NoGroup(f"{file} cannot be written: {error.strerror}") from None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _own_paths(pid: int | str) -> dict[str, str]:
    """Controller of version 1, or "" for version 2, to the group's path in its hierarchy."""
    paths = {}
    for line in _text(PROC / str(pid) / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _mounts() -> list[tuple[Path, str, str, list[str]]]:
    """Mount point, the part of the hierarchy that is mounted there, file system, super options."""
    found = []
    for line in _text(PROC / "self" / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) >= 5 and len(after) >= 3 and after[0] in ("cgroup", "cgroup2"):
            point = Path(fields[4].replace("\\040", " "))
            found.append((point, fields[3], after[0], after[2].split(",")))
    return found


def _below(mount: Path, root: str, path: str) -> Path:
    """Where a group's path is found under a mount that shows the hierarchy from ``root`` on."""
    relative = os.path.relpath(path, root)
    # In a container the path may be the host's; what can be seen of it starts at the mount itself.
    folder = mount / relative if not relative.startswith("..") else mount
    return folder if folder.is_dir() else mount
