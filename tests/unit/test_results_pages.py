"""Pages that speak: a sentence at the top, words explained, each picture's data, curves told apart."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
from html import escape
from itertools import combinations
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from numpy.typing import NDArray

from edgefl.cli import main
from edgefl.results import pictures
from edgefl.results.compare import compare
from edgefl.results.page import CSS, TERMS, glossary, hint, html_table, term_of
from edgefl.results.pictures import Canvas, Curve
from edgefl.results.report import write_report
from edgefl.results.tables import as_text
from tests.reports import Page, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("pages") / "run", trips=60)


@pytest.fixture(scope="module")
def report(folder: Path) -> Path:
    return write_report(folder)


def tables(path: Path) -> list[list[dict[str, str]]]:
    """The data of a page's pictures."""
    texts = [unquote(link.partition(",")[2]) for link in Page(path).downloads]
    return [list(csv.DictReader(io.StringIO(text))) for text in texts]


def test_a_report_says_in_a_sentence_what_the_run_showed(report: Path) -> None:
    text = Page(report).text
    said = (
        "4 phones reached 90.0% accuracy with fedbuff in 60 s of emulated time (60 client trips, 12 "
        "versions); on the classes held only by moto-g4, it is 90.0%; "
        "each phone of moto-g4 had 1 times its fair share of the weight."
    )
    assert said in text


def test_a_run_without_any_measure_has_a_sentence_too(tmp_path: Path) -> None:
    text = Page(write_report(write_run(tmp_path / "none", evaluations=False))).text
    assert "phones trained with fedbuff in" in text
    assert ", but no model was evaluated" in text


def test_terms_are_explained_under_the_pointer_and_in_a_list(report: Path) -> None:
    html = report.read_text()
    words = html.partition("<h2>Terms</h2>")[2]
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


def test_the_data_of_each_picture_is_in_the_page(report: Path) -> None:
    over_time, over_trips, classes, weights, timeline = tables(report)
    assert [row["client_trips"] for row in over_trips if row["curve"] == "all classes"][-1] == "60"
    assert {row["curve"] for row in over_time} == {"all classes", "classes only on moto-g4"}
    last = [row for row in over_time if row["curve"] == "all classes"][-1]
    assert (last["emulated_s"], last["accuracy"]) == ("60", "0.9")
    assert [(row["class"], row["right"]) for row in classes] == [(str(k), "9") for k in range(10)]
    assert sum(row["only_slow_phones"] == "True" for row in classes) == 4
    assert {row["profile"] for row in weights} == {"pixel-4", "moto-g4"}
    assert {row["part"] for row in timeline} == {"download", "training", "upload"}
    assert all(float(row["start_s"]) <= float(row["end_s"]) for row in timeline)
    names = re.findall(r'download="([^"]+)"', report.read_text())
    assert names[0] == "accuracy-over-emulated-time.csv"
    assert len(set(names)) == len(names)


def colours(dark: bool) -> dict[str, NDArray[np.float64]]:
    """The CSS variables that are colours, as linear RGB."""
    light, _, rest = CSS.partition("@media (prefers-color-scheme: dark)")
    found = re.findall(r"--([\w-]+): #([0-9a-f]{6});", rest.partition("} }")[0] if dark else light)
    values = {name: np.array([int(code[k : k + 2], 16) for k in (0, 2, 4)]) / 255 for name, code in found}
    return {
        name: np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
        for name, value in values.items()
    }


def contrast(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Contrast ratio by WCAG 2.2."""
    low, high = sorted(float(rgb @ (0.2126, 0.7152, 0.0722)) for rgb in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_texts_and_drawings_have_contrast(dark: bool) -> None:
    found = colours(dark)
    for text in ("ink", "muted", "good", "bad", "link"):
        for ground in ("page", "card"):
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    assert contrast(found["bad"], found["bad-soft"]) >= 4.5
    for role in [*map(pictures.series, range(9)), "down", "compute", "up", "bad"]:
        assert contrast(found[role], found["card"]) >= 3, role


SIGHT = {
    "all cones": np.eye(3),
    "no long-wave cones": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no medium-wave cones": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no short-wave cones": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""Linear RGB as seen without one kind of cones (Machado, Oliveira, Fernandes 2009, severity 1)."""


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIELAB of linear sRGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / (0.9505, 1.0, 1.089)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("sight", SIGHT)
def test_colour_blind_readers_can_tell_the_series_apart(sight: str, dark: bool) -> None:
    """A blue and a purple of one lightness differ by 2 or 3 without medium-wave cones."""
    found = colours(dark)
    for roles in (map(pictures.series, range(9)), ("down", "compute", "up", "bad")):
        seen = {role: lab(np.array(SIGHT[sight]) @ found[role]) for role in roles}
        for one, other in combinations(seen, 2):
            assert np.linalg.norm(seen[one] - seen[other]) >= 12, (one, other)


def test_a_column_without_values_is_left_out_and_a_table_of_texts_becomes_blocks() -> None:
    html = html_table(
        ("Claim", ">Error", "Here", "Note"), [("a", None, "b", ""), ("c", None, "", "")], wrap=(0, 2)
    )
    assert re.findall(r'<th scope="col"[^>]*>(\w+)', html) == ["Claim", "Here"]
    assert re.findall(r'data-name="(\w+)">(\w*)', html) == [
        ("Claim", "a"),
        ("Here", "b"),
        ("Claim", "c"),
        ("Here", ""),
    ]
    assert "data-name" not in html_table(("Profile", ">Trips"), [("pi-4", 3)])
    assert ">Trips<" in html_table(("Profile", ">Trips"), [])


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
        (folders[-1] / "report.html").touch()
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


def test_a_comparison_without_classes_of_slow_phones_has_no_card_and_no_column_for_them(
    tmp_path: Path,
) -> None:
    fleet = {"pixel-4": (0.1, (0, 1)), "moto-g4": (1.0, (0, 1))}
    folders = [write_run(tmp_path / name, fleet=fleet, strategy=name) for name in ("fedbuff", "fedavg")]
    table = as_text(compare(folders, tmp_path / "out"))
    page = Page(tmp_path / "out" / "report.html").text
    assert "Accuracy over emulated time" in page
    for text in (page.lower(), table.lower()):
        assert "weight of slow phones" in " ".join(text.split())
        assert "slow phones' classes" not in text


def test_a_lead_that_seeds_do_not_settle_says_so_also_on_the_slow_phones_classes(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"{name} {seed}", trips=trips, strategy=name, seed=seed)
        for name, trips_of in (("fedbuff", (45, 30)), ("fedavg", (20, 40)))
        for seed, trips in enumerate(trips_of)
    ]
    compare(folders, tmp_path / "out")
    (lead,) = re.findall(r'<p class="lead">(.*?)</p>', (tmp_path / "out" / "report.html").read_text())
    assert lead.count("(these seeds do not tell them apart)") == 2
    assert lead.endswith("has the highest accuracy: 75.0 ±190.6% (these seeds do not tell them apart).")


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
