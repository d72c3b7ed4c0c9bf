"""The log of updates: those that arrived since the last checkpoint, on the disk before anyone is told.

One file of entries, each a head, the update as it lies in its slot, and what its client keeps from then on.
It ends at the first entry that is not whole: a power cut tears the last ones at most, and nobody was told of
those. A checkpoint holds all of them, so that the next file begins with it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl import failpoints, kernels
from edgefl.files import flush_folder
from edgefl.kernels.arguments import Floats
from edgefl.parameters.buffer import ParameterBuffer
from edgefl.parameters.update_format import Raw

_HEAD = struct.Struct("<8s7QI")
_MAGIC = b"edgeflU1"
_NONE: Raw = np.empty(0, np.uint8)


class Delivered(NamedTuple):
    """An update that arrived; ``slot`` is where it lies, −1 where it was of no use and is not kept."""

    task: int
    client: int
    checksum: int
    """As its client sent it."""
    slot: int


class Logged(NamedTuple):
    """An update from the log, as it lay in its slot, and what its client kept; empty if it was of no use."""

    checksum: int
    update: Raw
    kept: Floats


class UpdateLog:
    """The writer, in a run's folder of checkpoints. Raises OSError.

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> from edgefl.parameters.buffer import Shape
    >>> buffer = ParameterBuffer.create(Shape(size=2, ring=2, slots=1)); buffer.slot(0)[:] = [1, 2]
    >>> log = UpdateLog(folder); log.restart(journal_seq=0)
    >>> log.append([Delivered(task=7, client=0, checksum=5, slot=0)], buffer); log.close()
    >>> read(folder)[7].update.view("float32").tolist()
    [1.0, 2.0]
    >>> buffer.close()
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1

    def restart(self, journal_seq: int) -> None:
        """A checkpoint holds everything up to that event: begin a new file, and remove the others."""
        self.close()
        path = self._folder / f"updates-{journal_seq:010d}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        for old in self._folder.glob("updates-*.log"):
            if old != path:
                old.unlink()
        flush_folder(self._folder)

    def append(self, entries: Sequence[Delivered], buffer: ParameterBuffer) -> None:
        """Have the disk confirm these updates and what their clients keep."""
        for entry in entries:
            update = buffer.raw(entry.slot) if entry.slot >= 0 else _NONE
            keeps = entry.slot >= 0 and buffer.shape.clients
            kept = buffer.kept(entry.client).view(np.uint8) if keeps else _NONE
            self._write(_head(entry.task, entry.client, entry.checksum, update, kept))
            half = update.size // 2
            self._write(update[:half].data)
            failpoints.pass_by("payload")
            self._write(update[half:].data)
            self._write(kept.data)
        if entries:
            os.fsync(self._fd)
            failpoints.pass_by("synced")

    def _write(self, piece: bytes | memoryview) -> None:
        left = memoryview(piece)
        while left:
            left = left[os.write(self._fd, left) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _head(task: int, client: int, checksum: int, update: Raw, kept: Raw) -> bytes:
    sums = (kernels.checksum(part) if part.size else 0 for part in (update, kept))
    fields = (_MAGIC, task, client, checksum, update.size, kept.size, *sums)
    return _HEAD.pack(*fields, zlib.crc32(repr(fields).encode()))


def read(folder: Path) -> dict[int, Logged]:
    """The updates in the log by task, up to the first that is not whole. They are read when they are used."""
    found: dict[int, Logged] = {}
    for path in sorted(folder.glob("updates-*.log")):
        found.update(_entries(path))
    return found


def _entries(path: Path) -> Iterator[tuple[int, Logged]]:
    if not path.stat().st_size:
        return
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    at = 0
    while (body := at + _HEAD.size) <= whole.size:
        head = whole[at:body].tobytes()
        magic, task, client, checksum, update_bytes, kept_bytes, *_ = _HEAD.unpack(head)
        if magic != _MAGIC or (at := body + update_bytes + kept_bytes) > whole.size:
            return
        update, kept = whole[body : body + update_bytes], whole[body + update_bytes : at]
        if head != _head(task, client, checksum, update, kept):
            return
        yield task, Logged(checksum, update, np.frombuffer(kept.tobytes(), np.float32))
