"""Reads sbc-bench results of single-board computers from a CSV file with one line per CPU cluster.

The columns are ``result`` and ``board`` (the same in all lines of a board), ``system``, ``cpu`` (the id of
the first CPU of the cluster), ``core`` (may be empty in old results), ``mhz``, the rates of 7-zip with one
thread (``zip_compress_mips`` and ``zip_decompress_mips``), ``aes256cbc_kb_s`` and ``memcpy_mb_s``. The first
line of a board also contains the rates of 7-zip on all cores, ``all_cores_compress_mips`` and
``all_cores_decompress_mips``. Values may be empty.

sbc-bench measures AES in each cluster, but its results contain only every second value. The CSV file lists
these values in the board's first lines. If the board has more than one cluster, value k (counting from 0)
was measured in cluster 2k + 1 (`aes_row`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edgefl.devices.code import MAX_MHZ, CodeCluster, has_aes, known_core, soc_cores, soc_in
from edgefl.devices.csv_lines import csv_lines, positive
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import ConfigError

REQUIRED = ("result", "board", "system", "cpu", "core", "mhz", "zip_compress_mips", "zip_decompress_mips")
MAX_RATE = 1e9
"""Maximum rate accepted from a file, in any unit. The fastest boards reach about 10⁷ (kB/s of AES)."""


class BoardRow(NamedTuple):
    """One cluster of a board; rates that were not measured are None."""

    fields: dict[str, str]
    """All fields of the line, keyed by column name."""
    cpu: int
    core: str | None
    """Core type from the file, or else from the SoC if all of its cores are of one type; None if unknown."""
    mhz: float
    compress: float | None
    decompress: float | None
    aes_mb_s: float | None
    memcpy_mb_s: float | None


class Board(NamedTuple):
    """All clusters of a board, from one sbc-bench result."""

    result: str
    name: str
    rows: tuple[BoardRow, ...]
    soc: str | None
    aes: bool
    """False if the SoC lacks AES instructions."""
    system_bits: int
    """32 if the system runs 32-bit code, else 64."""
    all_compress: float | None
    all_decompress: float | None

    def aes_row(self, number: int) -> BoardRow:
        """Return the row of the cluster in which the AES value listed in row ``number`` was measured."""
        listed = [at for at, row in enumerate(self.rows) if row.aes_mb_s is not None]
        if len(self.rows) == 1 or len(listed) > len(self.rows) // 2 + len(self.rows) % 2:
            return max(self.rows, key=lambda row: row.mhz)
        return self.rows[min(2 * listed.index(number) + 1, len(self.rows) - 1)]

    def clusters(self) -> tuple[tuple[CodeCluster, ...], bool]:
        """Return the board's clusters, and whether their core counts are known (True) or assumed (False).

        The counts are known for an SoC in ``socs.toml``. On other boards, each cluster is assumed to end
        just before the first CPU of the next cluster, and the last cluster is assumed to have 4 cores.
        """
        if self.soc is not None and any(row.core for row in self.rows):
            return tuple(self._of_soc(self.soc)), True
        ends = [*(row.cpu for row in self.rows[1:]), self.rows[-1].cpu + 4]
        pairs = zip(self.rows, ends, strict=True)
        return tuple(self.cluster(row, max(1, end - row.cpu)) for row, end in pairs), False

    def _of_soc(self, soc: str) -> list[CodeCluster]:
        found = []
        for core, count in soc_cores(soc):
            same = [row for row in self.rows if row.core == known_core(core)] or list(self.rows)
            mhz = math.fsum(row.mhz for row in same) / len(same)
            found.append(CodeCluster(core, mhz, count, self.aes, system_bits=self.system_bits))
        return found

    def cluster(self, row: BoardRow, cores: int = 1) -> CodeCluster:
        """Return the cluster that a row describes, with the given number of cores."""
        return CodeCluster(row.core or "", row.mhz, cores, self.aes, system_bits=self.system_bits)


def bundled_boards() -> Path:
    """Return the path of the measurements to which ``cores.toml`` was fitted."""
    return bundled_folder() / "code" / "boards.csv"


def read_boards(path: Path) -> tuple[Board, ...]:
    """Read all boards in a file. Raises `ConfigError` with the line number if a line is invalid."""
    alike: dict[tuple[str, str], list[BoardRow]] = {}
    for place, line in csv_lines(path, REQUIRED):
        alike.setdefault((line["result"], line["board"]), []).append(_row(line, place))
    return tuple(_board(rows) for rows in alike.values())


def _row(line: dict[str, str], place: str) -> BoardRow:
    mhz = positive(line, "mhz", place, MAX_MHZ)
    if mhz is None:
        raise ConfigError(f"{place}: mhz must be above 0 and at most {MAX_MHZ:g}, got {line['mhz']!r}")
    aes = positive(line, "aes256cbc_kb_s", place, MAX_RATE)
    if not line["cpu"].isdecimal():
        raise ConfigError(f"{place}: cpu must be a whole number, got {line['cpu']!r}")
    return BoardRow(
        fields=line,
        cpu=int(line["cpu"]),
        core=known_core(line["core"]),
        mhz=mhz,
        compress=positive(line, "zip_compress_mips", place, MAX_RATE),
        decompress=positive(line, "zip_decompress_mips", place, MAX_RATE),
        aes_mb_s=None if aes is None else aes / 1e3,
        memcpy_mb_s=positive(line, "memcpy_mb_s", place, MAX_RATE),
    )


def _board(rows: Sequence[BoardRow]) -> Board:
    first = rows[0].fields
    soc = soc_in(first["board"])
    cores = None if soc is None else {known_core(name) for name, _ in soc_cores(soc)}
    if cores is not None and len(cores) == 1:
        rows = [row._replace(core=row.core or next(iter(cores))) for row in rows]
    return Board(
        result=first["result"],
        name=first["board"],
        rows=tuple(rows),
        soc=soc,
        aes=has_aes(first["board"]),
        system_bits=system_bits(first["system"]),
        all_compress=positive(first, "all_cores_compress_mips", first["board"], MAX_RATE),
        all_decompress=positive(first, "all_cores_decompress_mips", first["board"], MAX_RATE),
    )


def system_bits(system: str) -> int:
    """Return the word size of a system, 32 or 64 bits.

    A Raspberry Pi OS is assumed to be a 32-bit system unless its name contains ``arm64``.

    >>> system_bits("Jammy arm64"), system_bits("Raspbian Buster")
    (64, 32)
    """
    plain = system.lower()
    if "armhf" in plain or "armv6" in plain or "armv7" in plain:
        return 32
    return 32 if "rasp" in plain and "arm64" not in plain else 64
