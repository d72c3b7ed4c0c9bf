"""Tests of boards measured by sbc-bench: reading, fitted core types, and `edgefl bench truth --boards`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from edgefl.devices.boards import Board, bundled_boards, read_boards
from edgefl.devices.code import CodeCluster, CoreTable, core_table, rate
from edgefl.devices.code_fit import fit, write
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import ConfigError
from edgefl.lab import board_truth

Boards = tuple[Board, ...]
HEAD = (
    "result,board,system,cpu,core,mhz,zip_compress_mips,zip_decompress_mips,aes256cbc_kb_s,memcpy_mb_s,"
    "memset_mb_s,all_cores_compress_mips,all_cores_decompress_mips\n"
)
RK3399 = (
    "x,My board (RK3399),Jammy arm64,0,Cortex-A53,1500,850,1400,1140000,1800,,5200,8400\n"
    "x,My board (RK3399),Jammy arm64,4,Cortex-A72,2000,1600,2130,,3500,,,\n"
)
STRANGE = "y,Odd board,Jammy arm64,0,Pentium,1500,850,1400,,,,5200,8400\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "boards.csv"
    path.write_text(HEAD + text)
    return path


@pytest.fixture(scope="module")
def boards() -> Boards:
    return read_boards(bundled_boards())


@pytest.fixture(scope="module")
def refit(boards: Boards) -> CoreTable:
    return fit(boards)


def test_the_bundled_file_is_the_fit_of_the_bundled_boards(refit: CoreTable) -> None:
    assert write(refit) == (bundled_folder() / "cores.toml").read_text()


@pytest.mark.parametrize(("soc", "known", "cores"), [("RK3399", True, (4, 2)), ("RK9999", False, (4, 4))])
def test_a_known_soc_gives_the_number_of_cores(tmp_path: Path, soc: str, known: bool, cores: Any) -> None:
    (board,) = read_boards(written(tmp_path, RK3399.replace("RK3399", soc)))
    clusters = [("Cortex-A53", cores[0], 1500.0), ("Cortex-A72", cores[1], 2000.0)]
    found = board.clusters()
    assert ([(each.core, each.cores, each.mhz) for each in found[0]], found[1]) == (clusters, known)


def test_aes_values_are_those_of_each_second_cluster(tmp_path: Path, boards: Boards) -> None:
    """In result 1ET4 (Minisforum MS-R1), the first AES value, 520 MB/s, belongs to the Cortex-A520 (0.29 MB/s
    per MHz), and the second, 1234 MB/s, to a Cortex-A720 (0.56 MB/s per MHz)."""
    (two,) = read_boards(written(tmp_path, RK3399))
    assert two.aes_row(0).core == "Cortex-A72"
    four = next(each for each in boards if each.result == "1ET4")
    assert [four.aes_row(number).mhz for number in (0, 1)] == [1795.0, 2198.0]


def test_the_soc_gives_the_core_of_a_line_without_one(tmp_path: Path) -> None:
    line = "x,Raspberry Pi 4 B (BCM2711),Raspbian Buster,0,,1500,1300,2000,,,,,\n"
    (board,) = read_boards(written(tmp_path, line))
    assert (board.rows[0].core, board.system_bits, board.aes) == ("Cortex-A72", 32, False)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("1500", "-1", r"line 2: mhz must be a number above 0 and at most 100000, or empty, got '-1'"),
        ("2130", "1e300", r"line 3: zip_decompress_mips must be a number above 0 and at most 1e\+09"),
        ("1500", "", r"line 2: mhz must be above 0"),
        ("2130", "many", r"line 3: zip_decompress_mips must be a number"),
        (",4,Cortex-A72", ",four,Cortex-A72", r"line 3: cpu must be a whole number"),
    ],
)
def test_an_error_names_the_invalid_line(tmp_path: Path, old: str, new: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_boards(written(tmp_path, RK3399.replace(old, new)))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="must be a CSV file with the columns result, board"):
        read_boards(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_boards(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("lines", "lacks"), [(RK3399, "a rate of crypto_without_aes"), (STRANGE, "a rate of integer")]
)
def test_boards_that_lack_a_rate_of_the_fit_are_refused(tmp_path: Path, lines: str, lacks: str) -> None:
    with pytest.raises(ConfigError, match=f"no board has {lacks} for a core of known type"):
        fit(read_boards(written(tmp_path, lines)))


def test_the_fit_of_a_core_with_one_board_is_shrunk_towards_related_cores(boards: Boards) -> None:
    own = [each for each in boards if each.result == "4kiu"]
    doubled = [
        each._replace(rows=tuple(row._replace(compress=2 * (row.compress or 0)) for row in each.rows))
        for each in own
    ]
    others = [each for each in boards if each.result not in ("4kiu", "4zGI")]
    plain, more = (fit([*others, *some]).cores["Neoverse-N1"].memory.per_mhz for some in (own, doubled))
    assert 1.2 < more / plain < 1.9


def test_a_core_with_fewer_boards_has_a_wider_interval() -> None:
    cores = core_table().cores
    assert cores["Cortex-A53"].integer.spread < cores["Cortex-A710"].integer.spread
    assert cores["Cortex-A710"].integer.boards == 0


def test_a_row_whose_rate_contradicts_its_frequency_is_not_fitted(boards: Boards, refit: CoreTable) -> None:
    """Old versions of sbc-bench read the clock of an idle core: 92 MHz for a Cortex-A53 that ran at about
    1400 MHz."""
    without = [each for each in boards if each.result != "1iSQ"]
    assert fit(without).cores["Cortex-A53"].integer == refit.cores["Cortex-A53"].integer


def test_predictions_are_compared_with_a_file_of_boards(tmp_path: Path) -> None:
    result = board_truth.run(boards=written(tmp_path, RK3399 + STRANGE))
    rows = [(row["quantity"], row["core"]) for row in result["boards"] if row["result"] == "x"]
    one = ["decompress", "compress", "memcpy"]
    assert rows == [
        *((quantity, "Cortex-A53") for quantity in [*one, "aes256cbc"]),
        *((quantity, "Cortex-A72") for quantity in one),
        ("all_cores_decompress", "Cortex-A53"),
        ("all_cores_compress", "Cortex-A53"),
    ]
    first = result["boards"][0]
    expected = rate(CodeCluster("Cortex-A53", 1500.0), "integer")
    assert (first["measured"], first["mhz"]) == (1400.0, "1500")
    assert (first["predicted"], first["low"], first["high"]) == expected
    assert "Cortex-A53 at 1500 MHz" in first["basis"]
    strange = [row for row in result["boards"] if row["result"] == "y"]
    assert {row["predicted"] for row in strange} == {None}
    assert "unknown core 'Pentium'" in strange[0]["basis"]
    summary = {each["quantity"]: each for each in result["quantities"]}
    assert (summary["decompress"]["n"], summary["decompress"]["unknown"]) == (2, 1)
    assert summary["decompress"]["held"] == 1.0


def test_unseen_boards_are_predicted_within_the_limits(boards: Boards) -> None:
    """A fit to two thirds of the boards predicts the others; the limits are those of docs/truth.md."""
    left = boards[::3]
    table = fit([each for each in boards if each not in left])
    compared = list(board_truth.compared(left, lambda _: table))
    found = {each["quantity"]: each for each in board_truth.summaries(compared)}
    assert found["decompress"]["median"] < 0.08
    assert found["compress"]["median"] < 0.15
    assert found["all_cores_decompress"]["median"] < 0.20
    assert found["aes256cbc"]["median"] < 0.20
    assert 0.80 < found["decompress"]["held"] <= 1.0
    assert not math.isnan(found["memcpy"]["median"])
