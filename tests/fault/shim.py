"""The preloaded shim: built here, its environment, and its log of what a run did to its files."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).with_name("shim.c")
_HEAD = struct.Struct("<IIQQIIII")


class Kind(IntEnum):
    """A change of a file, as `shim.c` numbers them."""

    OPEN = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7


class Change(NamedTuple):
    """One call that changed a file, or had the disk confirm it."""

    kind: Kind
    process: int
    inode: int
    offset: int
    """Where a write begins; the new size."""
    path: str
    other: str
    """A renamed file's new path."""
    data: bytes
    flag: bool
    """The file was emptied as it was opened; what was confirmed is a folder."""


def build(folder: Path) -> Path:
    """The shim, compiled; the test is skipped where there is no C compiler or no LD_PRELOAD."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not Path("/proc/self/fd").exists():
        pytest.skip("the shim needs a C compiler and Linux")
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    return library


def environment(library: Path, folder: Path, log: Path) -> dict[str, str]:
    """Environment of a command whose changes below ``folder`` are appended to ``log``."""
    return {"LD_PRELOAD": str(library), "EDGEFL_SHIM_FOLDER": str(folder), "EDGEFL_SHIM_LOG": str(log)}


def changes(log: Path, folder: Path) -> Iterator[Change]:
    """The log's entries, with paths relative to ``folder``."""
    content, at, root = log.read_bytes(), 0, str(folder.resolve())
    while at < len(content):
        kind, process, inode, offset, *sizes, flag = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        parts = []
        for size in sizes:
            parts.append(content[at : at + size])
            at += size
        path, other = (os.path.relpath(os.fsdecode(part), root) if part else "" for part in parts[:2])
        yield Change(Kind(kind), process, inode, offset, path, other, parts[2], bool(flag))
