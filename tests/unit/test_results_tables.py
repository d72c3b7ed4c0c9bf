"""Tables in terminals of any width: no line too long, no word or number broken, no column left out."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from edgefl.cli import main
from edgefl.results.tables import table

COLUMNS = ("run", ">accuracy", ">slow*", ">client trips", "network", "")
ROWS = [
    ("fedstaleweight ×3", "98.6 ±1.2%", "99.3%", "3,375", "lte and 3g-fast", "computed"),
    (),
    ("fedbuff", "80.5%", "56.9%", "2,317", "wifi", "INVALID"),
]


def printed(width: int, fold: bool = False) -> list[str]:
    file = StringIO()
    made = table(COLUMNS, ROWS, "Runs side by side", caption="a caption of some words", fold=fold)
    Console(file=file, width=width).print(made)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [120, 80, 60, 40, 30])
@pytest.mark.parametrize("fold", [True, False])
def test_every_word_is_whole_and_in_its_order(width: int, fold: bool) -> None:
    lines = printed(width, fold)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for column in COLUMNS[1:]:  # a block needs no name for its first line
        assert set(column.lstrip(">").split()) <= set(words)
    for row in ROWS:
        for cell in row:
            assert set(cell.split()) <= set(words)
    assert {"side", "caption"} <= set(words)


def test_a_narrow_terminal_has_a_row_under_its_name() -> None:
    lines = printed(40)
    at = [line.rstrip() for line in lines].index("fedbuff")
    assert lines[at + 1].rstrip() == "  accuracy 80.5% · slow* 56.9%"
    assert lines[at + 2].rstrip() == "  client trips 2,317 · network wifi"
    assert "─" in "".join(printed(80))
    assert "─" not in "".join(lines)


def test_a_wide_one_is_not_filled() -> None:
    widths = {len(line) for line in printed(120) if "─" in line}
    assert widths == {len(line) for line in printed(200) if "─" in line}


def test_spare_columns_and_long_headings_are_for_those_who_have_room() -> None:
    heads = ("run", ">accuracy on slow phones' classes", ">loss", ">client trips")
    made = table(heads, [("fedbuff", "89.1 ±9.7%", "0.4 ±0.1", "1,502")] * 2, spare=(2,),
                 short={"accuracy on slow phones' classes": "slow", "client trips": "trips"})  # fmt: skip

    def shown(width: int) -> str:
        file = StringIO()
        Console(file=file, width=width).print(made)
        assert max(map(len, file.getvalue().splitlines())) <= width
        return " ".join(file.getvalue().split())

    assert shown(80).startswith("run accuracy on slow phones' classes loss client trips ──")
    assert "loss" in shown(45), "headings wrap before a column is left out"
    assert "loss" not in shown(30)
    narrow = shown(24)
    assert narrow.startswith("run slow trips ──")
    assert "slow: accuracy on slow phones' classes; trips: client trips" in narrow
    assert shown(20).startswith("fedbuff accuracy on slow phones' classes 89.1 ±9.7% client trips 1,502")


@pytest.mark.parametrize("width", [60, 80])
def test_profiles_are_listed_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for word in (
        "class",
        "flagship",
        "network",
        "lte",
        "round",
        "clients",
        "pixel-4",
        "defedavg-400",
        "tiers-30",
    ):
        assert word in words
