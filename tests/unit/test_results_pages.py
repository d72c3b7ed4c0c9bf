"""Pages that speak: a sentence at the top, words explained, each picture's data, curves told apart."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from edgefl.cli import main
from edgefl.results import pictures
from edgefl.results.compare import compare
from edgefl.results.page import TERMS, glossary, hint, term_of
from edgefl.results.pictures import Canvas, Curve
from edgefl.results.report import write_report
from tests.reports import Page, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("pages") / "run", trips=60)


def tables(path: Path) -> list[list[dict[str, str]]]:
    """The data of a page's pictures."""
    texts = [unquote(link.partition(",")[2]) for link in Page(path).downloads]
    return [list(csv.DictReader(io.StringIO(text))) for text in texts]


def test_a_report_says_in_a_sentence_what_the_run_showed(folder: Path) -> None:
    text = Page(write_report(folder)).text
    said = (
        "4 phones reached 90.0% accuracy with fedbuff in 60 s of emulated time (60 client trips, 12 "
        "versions); on the classes that only moto-g4 hold, it is 90.0%; "
        "each phone of moto-g4 had 1 times its fair share of the weight."
    )
    assert said in text


def test_a_run_without_any_measure_has_a_sentence_too(tmp_path: Path) -> None:
    text = Page(write_report(write_run(tmp_path / "none", evaluations=False))).text
    assert "phones measured no model with fedbuff in" in text


def test_terms_are_explained_under_the_pointer_and_in_a_list(folder: Path) -> None:
    html = write_report(folder).read_text()
    words = html.partition("<h2>Words</h2>")[2]
    for term in ("staleness", "applied weight", "fidelity", "slow phones", "client trip", "version"):
        assert f"<dt>{term}</dt>" in words
        assert html.count(f'title="{escape(TERMS[term])}"') >= 1
    assert "to target" not in words, "no heading of this page says it"
    assert [term_of(each) for each in ("Weight", "fedstaleweight", "Trips to target")] == [
        "applied weight",
        None,
        "to target",
    ]
    assert (hint("Seed"), glossary("<p>nothing</p>")) == ("", "")


def test_the_data_of_each_picture_is_in_the_page(folder: Path) -> None:
    path = write_report(folder)
    over_time, over_trips, classes, weights, timeline = tables(path)
    assert [row["client_trips"] for row in over_trips if row["curve"] == "all classes"][-1] == "60"
    assert {row["curve"] for row in over_time} == {"all classes", "classes only on moto-g4"}
    last = [row for row in over_time if row["curve"] == "all classes"][-1]
    assert (last["emulated_s"], last["accuracy"]) == ("60", "0.9")
    assert [(row["class"], row["right"]) for row in classes] == [(str(k), "9") for k in range(10)]
    assert sum(row["only_slow_phones"] == "True" for row in classes) == 4
    assert {row["profile"] for row in weights} == {"pixel-4", "moto-g4"}
    assert {row["part"] for row in timeline} == {"download", "training", "upload"}
    assert all(float(row["start_s"]) <= float(row["end_s"]) for row in timeline)
    names = re.findall(r'download="([^"]+)"', path.read_text())
    assert names[0] == "accuracy-over-emulated-time.csv"
    assert len(set(names)) == len(names)


def test_a_report_goes_to_another_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    assert out.read_bytes() == write_report(folder).read_bytes()
    (tmp_path / "file").write_text("")
    for given, says in (
        (tmp_path, "a folder, expected a file"),
        (tmp_path / "file" / "x.html", "cannot be written"),
    ):
        capsys.readouterr()
        assert main(["report", str(folder), "--out", str(given)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


def test_a_report_that_the_runs_folder_does_not_take_names_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    (run / "report.html").mkdir()  # what not even root writes over
    assert main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("; another file: --out FILE")


def curve(k: int, y: list[float]) -> Curve:
    return Curve(pictures.series(k), f"run {k}", np.arange(len(y), dtype=float), np.array(y))


@pytest.mark.parametrize(
    ("ends", "low"), [((0.97, 0.98), 0.9), ((0.97, 0.4), 0.0), ((0.76, 0.99), 0.7), ((0.5, 0.6), 0.0)]
)
def test_the_axis_shows_the_top_where_all_curves_are_there(ends: tuple[float, float], low: float) -> None:
    curves = [curve(k, [0.1, *[end] * 19]) for k, end in enumerate(ends)]
    assert pictures._low_end(curves, 19.0) == pytest.approx(low)


def test_dots_at_one_place_are_rings_around_each_other() -> None:
    canvas = Canvas()
    canvas.axes.set_xlim(0, 20)
    canvas.shares()
    ends = (0.9, 0.901, 0.5, 0.899)
    pictures._end_dots(canvas, [curve(k, [0.1, *[end] * 19]) for k, end in enumerate(ends)])
    sizes = [line.get_markersize() for line in canvas.axes.lines]
    assert sizes == [5, 9, 5, 13]
    filled = [line.get_markerfacecolor() != "none" for line in canvas.axes.lines]
    assert filled == [True, False, True, False]


def test_a_comparison_names_the_best_and_links_every_run(tmp_path: Path) -> None:
    folders = []
    for name, seed in (("fedbuff", 1), ("fedbuff", 2), ("fedavg", 1)):
        folders.append(write_run(tmp_path / "far" / f"{name} {seed}", trips=60 if name == "fedbuff" else 30,
                                 strategy=name, seed=seed))  # fmt: skip
        write_report(folders[-1])
    compare(folders, tmp_path / "out")
    found = Page(tmp_path / "out" / "report.html")
    assert (
        "At the end fedbuff ×2 has the highest accuracy: 90.0%, 30.0 points above fedavg (one seed:"
    ) in found.text
    links = [unquote(link) for link in found.links if not link.startswith("#")]
    assert links == [f"../far/{folder.name}/report.html" for folder in folders]
    assert all((tmp_path / "out" / link).is_file() for link in links)
    compare([folders[0], folders[0].parent / "fedavg 1"], tmp_path / "out")
    assert {row["curve"] for row in tables(tmp_path / "out" / "report.html")[0]} == {"fedbuff", "fedavg"}


def test_a_home_that_cannot_be_written_is_no_line(folder: Path) -> None:
    """Matplotlib would print two warnings of its own."""
    home = {
        name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "MPLCONFIGDIR")
    }
    command = [sys.executable, "-m", "edgefl", "report", str(folder)]
    done = subprocess.run(
        command, env={**home, "HOME": "/proc/none"}, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (f"{folder / 'report.html'}\n", "")
