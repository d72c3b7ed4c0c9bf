"""Simulates a disk: draws the file contents that may remain of a run's changes after a power cut.

A flush (fsync) of a file keeps its content, and a flush of a folder keeps the names in it. Any part of the
later changes may survive: a write is lost, complete, or torn between sectors; changes of names are lost or
kept, in order or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from tests.fault.shim import Change, Kind

SECTORS = (512, 4096)


@dataclass(eq=False)
class File:
    """A file's flushed content, and its later changes."""

    durable: bytes = b""
    pending: list[Change] = field(default_factory=list)

    def now(self) -> bytes:
        """Return the content that a process reads."""
        content = bytearray(self.durable)
        for change in self.pending:
            _apply(content, change, [(0, len(change.data))])
        return bytes(content)

    def left(self, part: str, rng: np.random.Generator) -> bytes:
        """Draw the content after a power cut that keeps ``part`` (none, all or some) of the changes."""
        if part == "all":
            return self.now()
        content = bytearray(self.durable)
        for change in self.pending if part == "some" else ():
            _apply(content, change, _torn(len(change.data), rng))
        return bytes(content)


def _torn(size: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Draw the pieces of a write that reached the disk: none, all, the first sectors, or any sectors."""
    how = rng.integers(4)
    if how < 2:
        return [(0, size)] if how else []
    sector = SECTORS[rng.integers(2)]
    starts = range(0, size, sector)
    count = rng.integers(len(starts) + 1)
    chosen = starts[:count] if how == 2 else rng.permutation(starts)[:count].tolist()
    return [(start, min(start + sector, size)) for start in chosen]


def _apply(content: bytearray, change: Change, pieces: Iterable[tuple[int, int]]) -> None:
    if change.kind is Kind.TRUNCATE:
        if list(pieces) != []:
            del content[change.offset :]
            content.extend(bytes(change.offset - len(content)))
        return
    for start, stop in pieces:
        end = change.offset + stop
        content.extend(bytes(max(0, end - len(content))))
        content[change.offset + start : end] = change.data[start:stop]


Names = dict[str, File | None]
"""Maps each path to its file, or to None if it is a folder."""


class Disk:
    """A folder with the changes of a log applied to it."""

    def __init__(self) -> None:
        self.names: Names = {}
        self._durable: Names = {}
        self._renamings: list[tuple[Kind, str, str, File | None]] = []
        self._files: dict[int, File] = {}

    def apply(self, change: Change) -> None:
        """Apply the next change."""
        path = change.path
        match change.kind:
            case Kind.OPEN:
                file = self._files.get(change.inode)
                if path not in self.names or self.names[path] is not file or file is None:
                    self._files[change.inode] = File()  # a new file, which may have an old inode number
                    self._rename(Kind.OPEN, path, "", self._files[change.inode])
                elif change.flag:
                    file.pending.append(change._replace(kind=Kind.TRUNCATE, offset=0, data=b"."))
            case Kind.WRITE:
                self._files[change.inode].pending.append(change)
            case Kind.TRUNCATE:
                self._files[change.inode].pending.append(change._replace(data=b"."))
            case Kind.SYNC if change.flag:
                for done in [one for one in self._renamings if _folder(one) == path]:
                    _carry_out(self._durable, *done)
                self._renamings = [one for one in self._renamings if _folder(one) != path]
            case Kind.SYNC:
                file = self._files[change.inode]
                file.durable, file.pending = file.now(), []
            case Kind.RENAME:
                self._rename(Kind.RENAME, path, change.other, self.names[path])
            case Kind.UNLINK | Kind.MKDIR:
                self._rename(change.kind, path, "", None)

    def _rename(self, kind: Kind, path: str, other: str, file: File | None) -> None:
        self._renamings.append((kind, path, other, file))
        _carry_out(self.names, kind, path, other, file)

    def files(self) -> dict[str, bytes]:
        """Return the contents that processes read."""
        return {path: file.now() for path, file in self.names.items() if file is not None}

    def left(self, rng: np.random.Generator) -> dict[str, bytes]:
        """Draw the files after a power cut at this moment."""
        names, how = dict(self._durable), ("none", "all", "first", "any")[rng.integers(4)]
        for folder in sorted({_folder(one) for one in self._renamings}):
            pending = [one for one in self._renamings if _folder(one) == folder]
            count = int(rng.integers(len(pending) + 1))
            if how == "any":
                pending = [one for one in pending if rng.integers(2)]
            for one in pending[: {"none": 0, "first": count}.get(how, len(pending))]:
                _carry_out(names, *one)
        part = ("none", "all", "some", "some")[rng.integers(4)]
        return {
            path: file.left(part, rng)
            for path, file in sorted(names.items())
            if file is not None and _above(path) <= names.keys()
        }


def _above(path: str) -> set[str]:
    return {str(folder) for folder in PurePosixPath(path).parents} - {"."}


def _folder(renaming: tuple[Kind, str, str, File | None]) -> str:
    return str(PurePosixPath(renaming[1]).parent)


def _carry_out(names: Names, kind: Kind, path: str, other: str, file: File | None) -> None:
    if kind in (Kind.RENAME, Kind.UNLINK):
        names.pop(path, None)
    if kind is not Kind.UNLINK:
        names[other or path] = file


def write(files: dict[str, bytes], folder: Path) -> None:
    """Write ``files`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
