"""Tables fit terminals of any width, and no word, number or column is cut."""

from __future__ import annotations

import os
from io import StringIO

import pytest

from edgefl.cli import main
from edgefl.results.tables import PlainConsole, table
from tests.reports import printed

COLUMNS = ("run", ">accuracy", ">slow*", ">client trips", "network", "")
ROWS = [
    ("fedstaleweight ×3", "98.6 ±1.2%", "99.3%", "3,375", "lte and 3g-fast", "computed"),
    (),
    ("fedbuff", "80.5%", "56.9%", "2,317", "wifi", "INVALID"),
]


def shown(width: int, fold: bool = False) -> list[str]:
    made = table(COLUMNS, ROWS, "Runs side by side", caption="a caption of some words", fold=fold)
    return printed(made, width=width).splitlines()


@pytest.mark.parametrize("width", [120, 80, 60, 40, 30])
@pytest.mark.parametrize("fold", [True, False])
def test_no_word_is_broken(width: int, fold: bool) -> None:
    words = " ".join(shown(width, fold)).split()
    for column in COLUMNS[1:]:  # a narrow table does not name the column of its first cells
        assert set(column.lstrip(">").split()) <= set(words)
    for row in ROWS:
        for cell in row:
            assert set(cell.split()) <= set(words)
    assert {"side", "caption"} <= set(words)


def test_in_a_narrow_terminal_each_row_becomes_a_block_of_lines() -> None:
    lines = shown(40)
    at = [line.rstrip() for line in lines].index("fedbuff")
    assert lines[at + 1].rstrip() == "  accuracy 80.5% · slow* 56.9%"
    assert lines[at + 2].rstrip() == "  client trips 2,317 · network wifi"
    assert "─" in "".join(shown(80))
    assert "─" not in "".join(lines)


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("60", 60)])
def test_columns_of_0_do_not_hide_the_output(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    monkeypatch.setenv("COLUMNS", columns)
    assert PlainConsole(file=StringIO()).width == width


def test_a_table_is_not_stretched_to_a_wide_terminal() -> None:
    widths = {len(line) for line in shown(120) if "─" in line}
    assert widths == {len(line) for line in shown(200) if "─" in line}


def test_optional_columns_and_long_headings_are_dropped_in_narrow_terminals() -> None:
    heads = ("run", ">accuracy on slow phones' classes", ">loss", ">client trips")
    made = table(heads, [("fedbuff", "89.1 ±9.7%", "0.4 ±0.1", "1,502")] * 2, spare=(2,),
                 short={"accuracy on slow phones' classes": "slow", "client trips": "trips"})  # fmt: skip

    def words(width: int) -> str:
        return " ".join(printed(made, width=width).split())

    assert words(80).startswith("run accuracy on slow phones' classes loss client trips ──")
    assert "loss" in words(45), "headings wrap before a column is left out"
    assert "loss" not in words(30)
    assert words(24).startswith("run slow trips ──")
    assert "slow: accuracy on slow phones' classes; trips: client trips" in words(24)
    assert words(20).startswith("fedbuff accuracy on slow phones' classes 89.1 ±9.7% client trips 1,502")


def test_profiles_are_listed_in_60_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    words = "class flagship network lte round clients pixel-4 defedavg-400 tiers-30"
    assert set(words.split()) <= set(" ".join(lines).split())
