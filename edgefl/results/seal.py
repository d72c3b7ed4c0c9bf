"""The seal of a record: a file with a checksum of each page of the record, because SQLite keeps no checksums.

SQLite changes the record's file only when it copies pages from its log, whose entries have checksums. `Store`
starts each copy: it removes the seal, has SQLite copy the pages, and writes a new seal. So a sealed file can
be checked even after the writer was killed or the power failed. A file without a seal passes the check, since
its writer may have been killed during a copy.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.files import flush_folder, replace

ENDING = "-seal"
"""Suffix of the seal's file, which holds an 8-byte checksum of each page and a checksum of all of them."""
PAGE = 4096
AT_ONCE = 256 * PAGE
"""Number of bytes per read, limited because a long run's record may exceed the server's memory."""
_WORDS = PAGE // 8
_VOLATILE = (18, 19, *range(24, 28), *range(92, 100))
"""Offsets of bytes in the first page that SQLite changes without its log: journal mode, change counters."""
# The factors are odd, so that a changed bit always changes the sum of products.
_FACTORS = (2 * np.arange(_WORDS, dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)


def put(record: Path) -> None:
    """Write the seal of the record's current content. Raises OSError if that fails."""
    replace(_place(record), [_sums(record)])


def lift(record: Path) -> None:
    """Remove the seal before the record changes, and flush the removal to disk. Raises OSError on failure."""
    with contextlib.suppress(FileNotFoundError):
        _place(record).unlink()
        flush_folder(record.parent)


def check(record: Path) -> None:
    """Raise `ConfigError` if the file differs from its seal; a file without a seal passes."""
    place, before = _place(record), b""
    try:
        while (sealed := place.read_bytes()) != before:
            if sealed == _sums(record):
                return
            before = sealed  # a writer may have replaced the record and the seal meanwhile
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"run record {record} cannot be read: {error.strerror}") from None
    raise ConfigError(
        f"run record {record} is damaged: it does not match its seal "
        f"(if you changed it yourself, remove {place.name})"
    )


_MAGIC, _LONGEST = bytes.fromhex("d9d505f920a163d7"), 512
"""An SQLite journal may end with the name of another file, the name's length (at most 512), a checksum and
these bytes. SQLite deletes that file when it has rolled the journal back."""


def refuse_foreign_journal(record: Path) -> None:
    """Raise `ConfigError` if opening the record could make SQLite delete a file that its journal names."""
    journal = f"{os.path.realpath(record)}-journal"  # SQLite follows links, too
    with contextlib.suppress(OSError), open(journal, "rb") as file:  # usually there is no journal
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16))
        end = file.read()
        if end.endswith(_MAGIC) and 0 < int.from_bytes(end[:4]) <= _LONGEST:
            raise ConfigError(f"{journal} names another file, so edgefl did not write it; remove it")


def _place(record: Path) -> Path:
    return record.with_name(record.name + ENDING)


def _sums(record: Path) -> bytes:
    """Return the checksums of all pages, and a checksum of these checksums; a partial last page is padded."""
    sums = [np.empty(0, np.uint64)]
    with open(record, "rb") as file:
        while (content := np.fromfile(file, np.uint8, AT_ONCE)).size:
            content = np.pad(content, (0, -content.size % PAGE), constant_values=1)
            if len(sums) == 1:
                content[list(_VOLATILE)] = 0
            sums.append(np.einsum("ij,j->i", content.view("<u8").reshape(-1, _WORDS), _FACTORS))
    pages: NDArray[np.uint64] = np.concatenate(sums)
    factors = 2 * np.arange(pages.size, dtype=np.uint64) + 1
    return pages.tobytes() + np.sum(pages * factors, dtype=np.uint64).tobytes()
