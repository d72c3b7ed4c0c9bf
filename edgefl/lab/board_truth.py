"""Compares predicted with measured rates of single-board computers: 7-zip, AES-256-CBC and memcpy.

The measured rates are results of the benchmark sbc-bench.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgefl.devices.boards import Board, BoardRow, bundled_boards, read_boards
from edgefl.devices.code import (
    CodeClass,
    CodeCluster,
    CoreTable,
    Rate,
    core_rate,
    core_table,
    rate,
    throughput,
)
from edgefl.devices.code_fit import fit
from edgefl.lab.bench import Say, silent
from edgefl.results import tables
from edgefl.results.tables import percent

QUANTITIES = {
    "decompress": "7-zip decompression, one thread",
    "compress": "7-zip compression, one thread",
    "all_cores_decompress": "7-zip decompression, all cores",
    "all_cores_compress": "7-zip compression, all cores",
    "aes256cbc": "AES-256-CBC",
    "memcpy": "memcpy",
}
ASSUMED_CORES = 2.0
"""Factor that widens a prediction's interval if the number of cores of the board is a guess."""


class BoardRate(NamedTuple):
    """A measured rate of a board, and the prediction of this rate."""

    fields: dict[str, str]
    quantity: str
    measured: float
    predicted: Rate | None
    """The prediction; None if the type of core is unknown."""
    basis: str

    def plain(self) -> dict[str, Any]:
        value, low, high = self.predicted or (None, None, None)
        figures = {"quantity": self.quantity, "measured": self.measured}
        return {**self.fields, **figures, "predicted": value, "low": low, "high": high, "basis": self.basis}


def run(quick: bool = False, *, boards: Path | None = None, say: Say = silent) -> dict[str, Any]:
    """Compare the measured rates of boards with predicted rates.

    The rates of boards in the file ``boards`` are predicted from ``cores.toml``. Without a file, the rates of
    each bundled board are predicted from a fit to all other boards.

    In the result, ``boards`` contains an entry for each measured rate, and ``quantities`` contains the errors
    of each quantity. If no file is given and ``quick`` is False, ``unseen_socs`` contains the errors of fits
    that leave out all boards with the same SoC.
    """
    if boards is not None:
        found = list(compared(read_boards(boards), lambda board: core_table()))
        return {"boards": [each.plain() for each in found], "quantities": summaries(found)}
    known = read_boards(bundled_boards())
    say("fitting with each board left out in turn, then with each SoC left out")
    found = list(compared(known, lambda left: fit([each for each in known if each.result != left.result])))
    result = {"boards": [each.plain() for each in found], "quantities": summaries(found)}
    if not quick:
        socs = compared(known, lambda left: fit([each for each in known if _kind(each) != _kind(left)]))
        result["unseen_socs"] = summaries(list(socs))
    return result


def _kind(board: Board) -> str:
    return board.soc or board.name


def compared(boards: Sequence[Board], table_for: Callable[[Board], CoreTable]) -> Iterator[BoardRate]:
    """Yield all measured rates of the boards, each with its prediction from ``table_for(board)``."""
    for board in boards:
        table = table_for(board)
        for number, row in enumerate(board.rows):
            yield from _of_one_core(board, number, row, table)
        yield from _of_all_cores(board, table)


def _of_one_core(board: Board, number: int, row: BoardRow, table: CoreTable) -> Iterator[BoardRate]:
    measured: list[tuple[str, CodeClass, float | None, BoardRow]] = [
        ("decompress", "integer", row.decompress, row),
        ("compress", "memory", row.compress, row),
        ("memcpy", "copy", row.memcpy_mb_s, row),
    ]
    if row.aes_mb_s is not None:
        measured.append(("aes256cbc", "crypto", row.aes_mb_s, board.aes_row(number)))
    for quantity, code_class, value, at in measured:
        if value is not None:
            predicted = None if at.core is None else rate(board.cluster(at), code_class, table)
            yield BoardRate(row.fields, quantity, value, predicted, _basis(board, at, row, code_class, table))


def _basis(board: Board, at: BoardRow, row: BoardRow, code_class: CodeClass, table: CoreTable) -> str:
    if at.core is None:
        return f"unknown core {row.fields['core']!r}"
    boards = core_rate(board.cluster(at), code_class, table).boards
    text = f"{at.core} at {at.mhz:g} MHz, " + (f"{boards} boards" if boards else "from similar cores")
    return text if at is row else f"{text}; the value is that of CPU {at.cpu}'s cluster"


def _of_all_cores(board: Board, table: CoreTable) -> Iterator[BoardRate]:
    fields = board.rows[0].fields
    clusters, known = board.clusters()
    judged: list[tuple[str, CodeClass, float | None]] = [
        ("all_cores_decompress", "integer", board.all_decompress),
        ("all_cores_compress", "memory", board.all_compress),
    ]
    for quantity, code_class, value in judged:
        if value is not None:
            predicted = _together(clusters, code_class, known, table)
            yield BoardRate(fields, quantity, value, predicted, _cores_basis(clusters, known))


def _together(
    clusters: Sequence[CodeCluster], code_class: CodeClass, known: bool, table: CoreTable
) -> Rate | None:
    if not all(each.core for each in clusters):
        return None
    found = throughput(clusters, code_class, sum(each.cores for each in clusters), table)
    return found if known else found.times(Rate.within(1.0, ASSUMED_CORES))


def _cores_basis(clusters: Sequence[CodeCluster], known: bool) -> str:
    text = " + ".join(f"{each.cores} {each.core or 'unknown'} at {each.mhz:.0f} MHz" for each in clusters)
    return text if known else f"{text}; the number of cores is assumed"


# ---- errors ---------------------------------------------------------------------------------------


def summaries(found: Sequence[BoardRate]) -> list[dict[str, Any]]:
    """Summarise the errors |predicted ÷ measured − 1| of each quantity."""
    rates = [(quantity, [each for each in found if each.quantity == quantity]) for quantity in QUANTITIES]
    return [_summary(quantity, own) for quantity, own in rates if own]


def _summary(quantity: str, found: Sequence[BoardRate]) -> dict[str, Any]:
    pairs = [(each.measured, each.predicted) for each in found if each.predicted is not None]
    errors = [abs(predicted.value / measured - 1) for measured, predicted in pairs]
    held = [predicted.low <= measured <= predicted.high for measured, predicted in pairs]
    return {
        "quantity": quantity,
        "n": len(pairs),
        "unknown": len(found) - len(pairs),
        "median": float(np.median(errors)) if pairs else None,
        "p90": float(np.quantile(errors, 0.9)) if pairs else None,
        "held": sum(held) / len(held) if held else None,
    }


def show(result: dict[str, Any]) -> None:
    heads = ["figure", ">measured", ">median", ">90%", ">held", ">unknown core"]
    titles = {"quantities": "Boards", "unseen_socs": "Boards, by fits without their SoC"}
    if "unseen_socs" in result:
        titles["quantities"] = "Boards, by fits without the board"
    for key, title in titles.items():
        if key in result:
            tables.show(tables.table(heads, map(_line, result[key]), title))
    tables.show("median, 90%: |predicted ÷ measured - 1|; held: share within the 90% interval")


def _line(one: dict[str, Any]) -> list[Any]:
    figures = [percent(one["median"]), percent(one["p90"]), percent(one["held"], 0)]
    return [QUANTITIES[one["quantity"]], one["n"], *figures, one["unknown"] or ""]
