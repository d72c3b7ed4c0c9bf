"""Published results of device tests: annotations, Markdown, page, history, badge, and the command."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest
from regression_samples import entry, repetition
from shell import Shell
from test_regression_checkout import git

from edgefl.cli import main
from edgefl.regression import baseline
from edgefl.regression.badge import colour
from edgefl.regression.counts import CountedEntry, PythonEntry
from edgefl.regression.gate import GateResults, GateRow, load_results, place_of
from edgefl.regression.gate_page import gate_page
from edgefl.regression.history import Point, Series, history, steps
from edgefl.regression.markdown import MARKER, comment, markdown, workflow_commands
from edgefl.regression.publish import Outlets, PlacedRow, gate_results, publish
from edgefl.regression.table import ResultRow


def row(**given: Any) -> GateRow:
    known = {"test": "tests/test_a.py::test_a[pi-4]", "function": "train", "device": "pi-4", "outcome": "OK"}
    return GateRow(**{**known, **given})


SLOWER = row(
    outcome="REGRESSION",
    why="time +31% (1 → 2 ms)",
    file="tests/test_a.py",
    line=7,
    seconds=0.25,
    predicted=True,
)
UNJUDGED = row(outcome="NOT JUDGED", why="the base cannot be imported", device="moto-g4")
RESULTS = GateResults(base="main (0123abcde)", rows=(row(), UNJUDGED, SLOWER))


def test_a_reason_that_is_not_utf_8_is_published(tmp_path: Path) -> None:
    odd = ResultRow(
        test="a.py::test", label="", function="", device="pi-4", outcome="FAIL", why="no caf\udce9"
    )
    results = gate_results([PlacedRow(odd, tmp_path / "a.py", 1)], "", tmp_path, skip=False)
    outlets, summary = Outlets(tmp_path / "r.json", tmp_path / "r.html"), tmp_path / "summary.md"
    assert publish(results, [], outlets, {"GITHUB_STEP_SUMMARY": str(summary)}).complete
    assert [one.why for one in load_results(tmp_path / "r.json").rows] == ["no caf\\udce9"]
    assert "no caf" in summary.read_text()


def test_a_predicted_time_is_marked() -> None:
    assert [SLOWER.time, row(seconds=0.25).time, row().time] == ["~250 ms", "250 ms", ""]
    assert "~250 ms" in comment(RESULTS)
    assert "~250 ms" in gate_page(RESULTS, [], "2026-11-26")


def test_a_red_row_is_annotated_where_its_test_is() -> None:
    """GitHub reads one line per command, so line breaks and percent signs in a reason are encoded."""
    hostile = msgspec.structs.replace(SLOWER, why="+31%,\nsure: yes")
    first, second = workflow_commands(GateResults(rows=(row(), UNJUDGED, hostile)))
    assert first == (
        "::error file=tests/test_a.py,line=7,title=edgefl%3A REGRESSION::train on pi-4: +31%25,%0Asure: yes"
    )
    assert second.startswith("::error title=edgefl%3A COULD NOT BE JUDGED::train on moto-g4")
    skipped = GateResults(rows=(msgspec.structs.replace(UNJUDGED, skipped=True),))
    assert next(workflow_commands(skipped)).startswith("::warning ")
    assert not skipped.red


def test_markdown_has_the_worst_row_first_and_escapes_texts() -> None:
    why = "a | b\n<img src=x> *c* `d`, argument #1 of @team"
    hostile = row(outcome="FAIL", why=why, test="t.py::test_x[a|`b`]", device="d|e")
    text = markdown(GateResults(base="main", rows=(row(), hostile, SLOWER)))
    heading, *_, worst, failed, good = text.splitlines()
    assert heading == "### edgefl: 1 REGRESSION, 1 FAIL, 1 OK"
    assert worst.startswith("| **REGRESSION** | `tests/test_a.py::test_a: train` | pi-4 | ~250 ms |")
    assert good.startswith("| OK |")
    for line in (worst, failed, good):
        assert len(re.findall(r"(?<!\\)\|", line)) == 6
    assert "\\<img" in failed
    assert "argument #<!-- -->1 of @<!-- -->team" in failed  # links no issue, notifies nobody


def test_a_comment_has_a_marker_and_a_length_that_github_accepts() -> None:
    rows = tuple(row(outcome="FAIL", why="w" * 1000) for _ in range(200))
    text = comment(GateResults(rows=rows))
    assert text.startswith(MARKER)
    assert len(text) < 65_536
    assert re.search(r"\n\d+ more are left out\.\n$", text)


def test_results_without_measurements_are_red() -> None:
    assert GateResults().red
    assert "nothing was measured" in markdown(GateResults())


def test_the_badge_is_a_picture_or_shields_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(msgspec.json.encode(GateResults(rows=(row(), row()))))
    assert main(["gate", "badge", str(file)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"schemaVersion": 1, "label": "edgefl", "message": "2 OK", "color": "brightgreen"}
    assert main(["gate", "badge", str(file), "--out", str(tmp_path / "a.svg")]) == 0
    texts = [one.text for one in ET.parse(tmp_path / "a.svg").iter() if one.tag.endswith("text")]
    assert texts == ["edgefl", "2 OK"]
    assert main(["gate", "badge", str(file), "--out", str(tmp_path / "a.png")]) == 2
    skipped = msgspec.structs.replace(UNJUDGED, skipped=True)
    others = [(SLOWER, "red"), (UNJUDGED, "red"), (skipped, "orange"), (row(outcome="XFAIL"), "brightgreen")]
    for last, shade in others:
        assert colour(GateResults(rows=(row(), last))) == shade


def test_the_command_comments_and_refuses_other_files(tmp_path: Path, edgefl: Shell) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(msgspec.json.encode(RESULTS))
    assert edgefl.shows("gate", "comment", str(file)) == comment(RESULTS)
    for text in ("{", "[]", '{"rows": [{"test": 1}]}'):
        file.write_text(text)
        assert "not a results file" in edgefl.refuses(2, "gate", "comment", str(file))
    assert "none.json: cannot be read" in edgefl.refuses(2, "gate", "comment", str(tmp_path / "none.json"))


def test_publishing_appends_to_githubs_summary(tmp_path: Path) -> None:
    summary, file, html = tmp_path / "summary.md", tmp_path / "r.json", tmp_path / "r.html"
    summary.write_text("before\n")
    environment = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    lines, complete = publish(RESULTS, [tmp_path / "test_a.py"], Outlets(file, html), environment)
    assert complete
    assert [line.partition(" ")[0] for line in lines] == ["::error", "::error", "wrote", "wrote"]
    assert summary.read_text() == f"before\n{markdown(RESULTS)}"
    assert load_results(file) == RESULTS
    assert "REGRESSION" in html.read_text()
    assert publish(RESULTS, [], Outlets(), {}) == ([], True)


def test_a_file_that_cannot_be_written_is_reported_and_the_others_are_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (lost, wrote), complete = publish(RESULTS, [], Outlets(file / "r.json", tmp_path / "r.html"), {})
    assert not complete
    assert lost.startswith("NOT written: ")
    assert wrote == f"wrote {tmp_path / 'r.html'}"


def test_a_place_is_relative_to_githubs_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "project" / "tests" / "test_a.py"
    assert place_of(file, tmp_path / "project") == "tests/test_a.py"
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert place_of(file, tmp_path / "project") == "project/tests/test_a.py"
    assert place_of(Path("/elsewhere/test_a.py"), tmp_path) == "/elsewhere/test_a.py"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([5.0] * 6, []),
        ([5.0, 5.0, 5.0, 6.0, 6.0, 6.0], [3]),
        ([5.0, 5.0, 6.0, 6.0, 4.0, 4.0], [2, 4]),
        ([100, 101, 99, 100, 99, 101, 100, 120, 121, 119, 120, 121], [7]),
        ([100, 103, 98, 101, 97, 102, 99, 103, 98, 100], []),
        ([7.0], []),
        ([0.0, 0.0, 5.0], [2]),
        ([], []),
    ],
)
def test_changes_of_level_are_found_and_noise_is_not(values: list[float], found: list[int]) -> None:
    assert steps(values) == found


def test_the_history_is_read_from_the_baselines_in_git(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    file = baseline.path_of(tmp_path / "test_a.py")
    assert history(file) == []
    for cpu_s, mib in ((0.1, 8.0), (0.2, 8.0), (0.1, 16.0)):
        baseline.save(file, [entry([repetition(cpu_s, peak_mib=mib)] * 9, "test_a[pi-4]", "train")])
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", f"peak of {mib:g} MiB")
    file.write_text("broken")
    git(tmp_path, "commit", "-q", "-a", "-m", "broken")
    for calls in (7, 9):
        counted = CountedEntry(
            test="test_a[pi-4]",
            function="train",
            torch="2",
            figures={"calls": calls},
            python={"3.11": PythonEntry(figures={}, instructions={"steps.train": 40, "steps.inner": 2})},
            native={"x86_64": {"spin": 30, "other functions": 3}},
        )
        baseline.save(file.with_name("test_b.json"), [], [counted])
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "-q", "-m", f"{calls}\N{LINE SEPARATOR}calls")
    exact = {one.figure: one for one in history(file.with_name("test_b.json"))}
    assert [point[1:] for point in exact["torch operations"].points] == [
        (f"{calls}\N{LINE SEPARATOR}calls", calls) for calls in (7, 9)
    ]
    assert exact["torch operations"].steps == [1]
    assert exact["Python bytecode instructions, Python 3.11"].points[0].value == 42
    assert exact["native instructions, x86_64"].points[0].value == 33
    memory = next(one for one in history(file) if one.unit == "MiB")
    assert (memory.test, memory.function) == ("test_a[pi-4]", "train")
    assert [point.value for point in memory.points][-1] == 16.0
    assert [memory.points[place].subject for place in memory.steps] == ["peak of 16 MiB"]


def test_without_git_there_is_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert history(tmp_path / "test_a.json") == []


def test_the_page_has_outcomes_history_and_no_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [(f"c{place}", f"commit <{place}>", value) for place, value in enumerate((8.0, 8.0, 16.0, 16.0))]
    series = Series("test_a[pi-4]", "train", "peak memory", "MiB", True, [Point(*one) for one in points])
    page = gate_page(RESULTS, [series], "2026-11-26")
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=\"https?:", page)
    assert "COULD NOT BE JUDGED" in page
    assert "Level last changed at c2: commit &lt;2&gt;" in page
    assert page.count("<svg") == 1
    assert "RED" in page
    assert "GREEN" in gate_page(GateResults(rows=(row(),)), [], "2026-11-26")
    assert "leaves out" not in page
    monkeypatch.setattr("edgefl.regression.gate_page.MAX_PICTURES", 1)
    page = gate_page(RESULTS, [series] * 3, "2026-11-26")
    assert page.count("<svg") == 1
    assert "leaves out 2 more figures." in page
