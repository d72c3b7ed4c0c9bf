"""Builds the preloaded shim `shim.c`, which logs a run's file changes, and reads its log."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
    """For an open: True if it truncated the file. For a flush: True if its target is a folder."""


def build(folder: Path) -> Path:
    """Compile the shim; skip the test without a C compiler or Linux."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not Path("/proc/self/fd").exists():
        pytest.skip("the shim needs a C compiler and Linux")
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    return library


class Run(NamedTuple):
    """An ``edgefl run`` of the experiment ``file`` into ``out``, with environment variables for the shim."""

    file: Path
    out: Path
    environment: dict[str, str]


FORKED = """
import ctypes, json, os, sys
from edgefl.host.children import exit_with
from tests.process import warm

warm.up()
for file, out, environment in json.loads(sys.argv[1]):
    if (pid := os.fork()) == 0:
        os.environ.update(environment)
        ctypes.CDLL(os.environ["LD_PRELOAD"]).edgefl_shim_begin()
        os.dup2(os.open(f"{out}.err", os.O_CREAT | os.O_WRONLY), 2)
        words = "run", file, "--quiet", "--accept-invalid", "--out", out
        exit_with(lambda: warm.command(warm.Wanted(words, dict(os.environ), os.getcwd())))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def run(library: Path, runs: Sequence[Run]) -> list[tuple[int, str]]:
    """Fork all runs from one process that has the shim loaded and has imported torch.

    Return the exit code and stderr of each run.
    """
    given = json.dumps([(str(one.file), str(one.out), one.environment) for one in runs])
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", FORKED, given]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    errors = [Path(f"{one.out}.err").read_text() for one in runs]
    return list(zip(map(int, done.stdout.split()), errors, strict=True))


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
