from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_record import make
from test_report import EVIL, Page
from test_report_trace import check, read

from edgefl.errors import ConfigError
from edgefl.results.compare import compare
from edgefl.results.comparison import FIGURES, common_target, estimate, group, load, reached
from edgefl.results.store import Store

SMALL = {"clients": 6, "trips": 240}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make(folder / "fedbuff", **SMALL)
    for seed in range(3):
        make(folder / f"fair-{seed}", strategy="fedstaleweight", fair=True, seed=seed, **SMALL)
    return folder


def printed(*folders: Path) -> str:
    file = StringIO()
    Console(file=file, width=80).print(compare(folders))
    return file.getvalue()


def test_the_table_fits_a_terminal(runs: Path) -> None:
    text = printed(runs / "fedbuff", *(runs / f"fair-{k}" for k in range(3)))
    assert max(map(len, text.splitlines())) <= 80
    assert "fedbuff" in text
    assert "fedstaleweight ×3" in text
    assert "±" in text
    assert "VALID" in text
    assert "only moto-g4 hold" in text


def test_runs_whose_times_are_computed_are_not_called_valid(runs: Path, tmp_path: Path) -> None:
    virtual = [make(tmp_path / f"v{seed}", clock="virtual", seed=seed, **SMALL) for seed in range(2)]
    text = printed(*virtual, runs / "fair-0")
    assert max(map(len, text.splitlines())) <= 80
    first, second = (line for line in text.splitlines() if line.startswith(("fedbuff", "fedstaleweight")))
    assert first.rstrip().endswith("computed")
    assert second.rstrip().endswith("VALID")
    compare(virtual, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["comparison"]["rows"][0]["valid"] is True
    assert "computed" in Page((tmp_path / "out" / "report.html").read_text()).text


def test_seeds_are_one_row_and_a_repeated_seed_is_not(runs: Path, tmp_path: Path) -> None:
    again = make(tmp_path / "again", strategy="fedstaleweight", fair=True, seed=1, **SMALL)
    rows = group(load([runs / "fair-0", runs / "fair-1", runs / "fedbuff"]))
    assert [(row.label, len(row.runs)) for row in rows] == [("fedstaleweight ×2", 2), ("fedbuff", 1)]
    rows = group(load([runs / "fair-1", again]))
    assert [row.label for row in rows] == ["fedstaleweight fair-1", "fedstaleweight again"]
    assert rows[0].figures["accuracy"].half is None


def test_an_estimate_is_students(runs: Path) -> None:
    mean, half = estimate([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert half == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, rel=1e-6)
    assert estimate([1.0]) == (1.0, None)
    assert math.isnan(estimate([1.0, math.nan]).mean)
    assert estimate([0.0, 1.0] * 50).half == pytest.approx(1.984217 * math.sqrt(25 / 99) / 10, rel=1e-6)


def test_the_target_is_what_all_runs_reached(runs: Path) -> None:
    loaded = load([runs / "fedbuff", runs / "fair-0"])
    target = common_target(loaded)
    assert target == min(run.summary["best_accuracy"] for run in loaded)
    for run in loaded:
        trips, at_s = reached(run.record, target)
        first = next(e for e in run.record.evaluations if e.accuracy >= target - 1e-6)
        assert (trips, at_s) == (first.trips, first.at_s)
    assert all(math.isnan(value) for value in reached(loaded[0].record, 1.01))
    assert all(math.isnan(value) for value in reached(loaded[0].record, None))


def test_a_comparison_folder_has_all_three_files(runs: Path) -> None:
    folders = [runs / "fedbuff", runs / "fair-0", runs / "fair-1"]
    (runs / "fedbuff" / "report.html").write_text("the run's own")
    compare(folders, runs)
    found = json.loads((runs / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found["strategy"] == "fedbuff"
    assert [run["folder"] for run in found["runs"]] == ["fedbuff", "fair-0", "fair-1"]
    first, second = found["comparison"]["rows"]
    assert first["minus_first"]["accuracy"] == 0
    assert set(second["figures"]) == set(FIGURES)
    assert second["seeds"] == [0, 1]
    difference = second["figures"]["accuracy"]["mean"] - first["figures"]["accuracy"]["mean"]
    assert second["minus_first"]["accuracy"] == pytest.approx(difference, abs=1e-5)
    assert second["figures"]["slow_weight"]["mean"] > first["figures"]["slow_weight"]["mean"]
    page = Page((runs / "report.html").read_text())
    assert [link for link in page.links if not link.startswith("#")] == ["fedbuff/report.html"]
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    check(read(runs / "trace.json"))


@pytest.mark.parametrize("mark", ["experiment.toml", "record.sqlite"])
def test_a_run_is_not_overwritten_by_a_comparison(runs: Path, tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).touch()
    (tmp_path / "summary.json").write_text("the run's own")
    with pytest.raises(ConfigError, match=f"^--out {tmp_path}: holds a run, which would be overwritten"):
        compare([runs / "fedbuff"], tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([mark, "summary.json"])
    assert (tmp_path / "summary.json").read_text() == "the run's own"
    with pytest.raises(ConfigError, match=f"^--out {tmp_path / mark}: a file, expected a folder$"):
        compare([runs / "fedbuff"], tmp_path / mark)


def test_other_results_are_not_overwritten_by_a_comparison_but_its_own_are(
    runs: Path, tmp_path: Path
) -> None:
    summary = tmp_path / "summary.json"
    for text in ('{"findings": []}', "[]", "broken {"):
        summary.write_text(text)
        with pytest.raises(ConfigError, match=r"holds another summary\.json, which would be overwritten"):
            compare([runs / "fedbuff"], tmp_path)
        assert summary.read_text() == text
    summary.unlink()
    for folder in ("fedbuff", "fair-0"):
        compare([runs / folder], tmp_path)
        assert [Path(run["folder"]).name for run in json.loads(summary.read_text())["runs"]] == [folder]


def test_runs_that_cannot_be_compared_say_why(runs: Path, tmp_path: Path) -> None:
    good = runs / "fedbuff"
    with pytest.raises(ConfigError, match="name at least one"):
        compare([])
    with pytest.raises(ConfigError, match="is named twice"):
        compare([good, runs / "fair-0" / ".." / "fedbuff"])
    with pytest.raises(ConfigError, match="is not a run's folder"):
        compare([good, tmp_path])
    other = make(tmp_path / "other", **SMALL)
    with Store(other) as store:
        store.set_meta(data="mnist")
    with pytest.raises(ConfigError, match=r"different data do not compare: .* has data mnist, .* has digits"):
        compare([good, other])
    classes = make(tmp_path / "classes", classes=12, **SMALL)
    with pytest.raises(ConfigError, match=r"has classes 12, .* has 10"):
        compare([good, classes])
    (other / "record.sqlite").write_text("nonsense " * 500)
    with pytest.raises(ConfigError, match="damaged or not a record"):
        compare([good, other])


@pytest.mark.parametrize(
    "fields",
    [
        {"clients": 1, "trips": 3, "lost": 0, "dropped": 0},
        {"clients": 3, "trips": 30, "evaluations": False},
        {"clients": 3, "trips": 30, "nan": True, "pacing_error": 0.5},
        {"clients": 3, "trips": 0, "lost": 0, "dropped": 0},
    ],
)
def test_poor_runs_compare_too(runs: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    poor = make(tmp_path / "poor", strategy=EVIL, **fields)
    compare([runs / "fedbuff", poor], tmp_path / "out")
    json.loads((tmp_path / "out" / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert "script" not in Page((tmp_path / "out" / "report.html").read_text()).tags
    assert max(map(len, printed(runs / "fedbuff", poor).splitlines())) <= 80
