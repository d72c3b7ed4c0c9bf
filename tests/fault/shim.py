"""Builds the preloaded shim `shim.c`, which logs a run's file changes, and reads its log."""

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
    """Kinds of changes, numbered as in `shim.c`."""

    OPEN = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7


class Change(NamedTuple):
    """A call that changed or flushed a file or folder."""

    kind: Kind
    process: int
    inode: int
    offset: int
    """Start of a write; new size of a truncated file."""
    path: str
    other: str
    """New path of a renamed file."""
    data: bytes
    flag: bool
    """True if opening emptied the file, or if a folder was flushed."""


def build(folder: Path) -> Path:
    """Compile the shim; skip the test without a C compiler or Linux."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not Path("/proc/self/fd").exists():
        pytest.skip("the shim needs a C compiler and Linux")
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    return library


def environment(library: Path, folder: Path, log: Path) -> dict[str, str]:
    """Return environment variables with which a command appends its changes below ``folder`` to ``log``."""
    return {"LD_PRELOAD": str(library), "EDGEFL_SHIM_FOLDER": str(folder), "EDGEFL_SHIM_LOG": str(log)}


def changes(log: Path, folder: Path) -> Iterator[Change]:
    """Yield the log's entries, with paths relative to ``folder``."""
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
