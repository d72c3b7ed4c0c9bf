"""A seal over the record's file: a checksum of each of its pages, since SQLite keeps none.

SQLite changes the file itself only when it copies pages there from its log, whose entries have checksums.
`Store` does that at moments of its own choice: it breaks the seal, has the pages copied, and seals the file
anew. So a sealed file holds what was written into it, also beside a log and after a kill or a power cut; one
that was cut off in between has no seal, and is believed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.files import flush_folder, replace

ENDING = "-seal"
"""Suffix of the seal's file: 8 bytes per page of the record, and 8 bytes over all of these."""
PAGE = 4096
AT_ONCE = 256 * PAGE
"""Bytes that are looked at together: a record of a long run is larger than what its server holds."""
_WORDS = PAGE // 8
_VOLATILE = (18, 19, *range(24, 28), *range(92, 100))
"""Bytes of the first page that SQLite changes without its log: how the file is journaled, and counters
of changes."""
# Odd, so that no changed bit leaves a sum of products as it was.
_FACTORS = (2 * np.arange(_WORDS, dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)


def put(record: Path) -> None:
    """Seal the file as it is. Raises OSError."""
    sums = _sums(record)
    replace(_place(record), [sums.tobytes(), _over(sums)])


def lift(record: Path) -> None:
    """Break the seal: the file is about to change, and the disk knows it. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        _place(record).unlink()
        flush_folder(record.parent)


def check(record: Path) -> None:
    """Raise `ConfigError` if the file is not as it was sealed; a file without a seal passes."""
    place = _place(record)
    try:
        while True:
            status, sealed = place.stat(), place.read_bytes()
            found = _sums(record)
            if sealed == found.tobytes() + _over(found):
                return
            now = place.stat()  # raises FileNotFoundError if the writer is at it
            if (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns):
                raise ConfigError(
                    f"run record {record} is damaged: it is not as it was sealed "
                    f"(if you changed it yourself, remove {place.name})"
                )
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"run record {record} cannot be read: {error.strerror}") from None


def _place(record: Path) -> Path:
    return record.with_name(record.name + ENDING)


def _sums(record: Path) -> NDArray[np.uint64]:
    """A checksum a page; what a file that was cut holds of its last page counts as a whole one."""
    sums: list[NDArray[np.uint64]] = []
    with open(record, "rb") as file:
        while (content := np.fromfile(file, np.uint8, AT_ONCE)).size:
            if content.size % PAGE:
                content = np.pad(content, (0, -content.size % PAGE), constant_values=1)
            if not sums:
                content[list(_VOLATILE)] = 0
            sums.append(np.einsum("ij,j->i", content.view("<u8").reshape(-1, _WORDS), _FACTORS))
    return np.concatenate([np.empty(0, np.uint64), *sums])


def _over(sums: NDArray[np.uint64]) -> bytes:
    count = np.arange(sums.size, dtype=np.uint64)
    return np.uint64(np.sum(sums * (2 * count + 1), dtype=np.uint64)).tobytes()
