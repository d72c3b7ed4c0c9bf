"""Pages of runs and comparisons: lead sentences, explained terms, the pictures' data, colours, curves."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
from html import escape
from itertools import combinations
from pathlib import Path
from urllib.parse import unquote

import matplotlib as mpl
import numpy as np
import pytest
from numpy.typing import NDArray
from shell import Shell

from edgefl.cli import main
from edgefl.results import pictures
from edgefl.results.compare import compare
from edgefl.results.page import CSS, TERMS, Picture, figure, glossary, hint, html_table, term_of
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
    """Return the data rows of each picture on a page."""
    texts = [unquote(link.partition(",")[2]) for link in Page(path).downloads]
    return [list(csv.DictReader(io.StringIO(text))) for text in texts]


def test_the_lead_sentence_of_a_report_has_its_main_figures(report: Path) -> None:
    assert (
        "4 phones reached 90.0% accuracy with fedbuff in 60 s of emulated time (60 client trips, 12 "
        "versions); on the classes held only by moto-g4, the accuracy is 90.0%; "
        "each phone of moto-g4 had 1 times its fair share of the weight."
    ) in Page(report).text


def test_the_lead_sentence_of_a_run_without_evaluations_states_that_it_has_none(tmp_path: Path) -> None:
    text = Page(write_report(write_run(tmp_path / "none", evaluations=False))).text
    assert "phones trained with fedbuff in" in text
    assert ", but no model was evaluated" in text


def test_terms_are_explained_in_tooltips_and_in_a_glossary(report: Path) -> None:
    html = report.read_text()
    words = html.partition("<h2>Terms</h2>")[2]
    for term in ("staleness", "applied weight", "fidelity", "slow phones", "client trip", "version"):
        assert f"<dt>{term}</dt>" in words
        assert html.count(f'title="{escape(TERMS[term])}"') >= 1
    assert "to target" not in words, "no heading of this page has this term"
    assert [term_of(each) for each in ("Weight", "fedstaleweight")] == ["applied weight", None]
    assert term_of("Trips to target") == "to target"
    assert (hint("Seed"), glossary("<p>nothing</p>")) == ("", "")


def test_the_page_has_the_data_of_each_picture(report: Path) -> None:
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


def test_the_data_of_a_picture_are_whole_if_a_name_has_a_hash() -> None:
    """A browser cuts off the content of a ``data:`` link at a #."""
    html = figure("Accuracy", "", Picture("<svg></svg>", data=[("curve",), ("run #1",), ("run 2",)]))
    (link,) = re.findall(r'href="([^"]*)"', html)
    assert "#" not in link
    assert unquote(link.partition(",")[2]) == "curve\nrun #1\nrun 2\n"


def colours(dark: bool) -> dict[str, NDArray[np.float64]]:
    """Return the colours among the CSS variables, as linear RGB."""
    light, _, rest = CSS.partition("@media (prefers-color-scheme: dark)")
    found = re.findall(r"--([\w-]+): #([0-9a-f]{6});", rest.partition("} }")[0] if dark else light)
    values = {name: np.array([int(code[k : k + 2], 16) for k in (0, 2, 4)]) / 255 for name, code in found}
    return {
        name: np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
        for name, value in values.items()
    }


def contrast(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the contrast ratio as defined by WCAG 2.2."""
    low, high = sorted(float(rgb @ (0.2126, 0.7152, 0.0722)) for rgb in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_texts_and_pictures_have_enough_contrast(dark: bool) -> None:
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
"""Matrices from linear RGB to the colour that a person without one kind of cones sees (Machado et al. 2009,
severity 1)."""


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert linear sRGB to CIELAB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / (0.9505, 1.0, 1.089)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("sight", SIGHT)
def test_series_differ_visibly_also_for_colour_blind_readers(sight: str, dark: bool) -> None:
    """For comparison: without medium-wave cones, a blue and a purple of equal lightness differ by 2 or 3."""
    found = colours(dark)
    for roles in (map(pictures.series, range(9)), ("down", "compute", "up", "bad")):
        seen = {role: lab(np.array(SIGHT[sight]) @ found[role]) for role in roles}
        for one, other in combinations(seen, 2):
            assert np.linalg.norm(seen[one] - seen[other]) >= 12, (one, other)


def test_a_table_omits_empty_columns_and_names_the_columns_of_texts_in_each_cell() -> None:
    rows = [("a", None, "b", ""), ("c", None, "", "")]
    html = html_table(("Claim", ">Error", "Here", "Note"), rows, wrap=(0, 2))
    assert re.findall(r'<th scope="col"[^>]*>(\w+)', html) == ["Claim", "Here"]
    cells = [("Claim", "a"), ("Here", "b"), ("Claim", "c"), ("Here", "")]
    assert re.findall(r'data-name="(\w+)">(\w*)', html) == cells
    assert "data-name" not in html_table(("Profile", ">Trips"), [("pi-4", 3)])
    assert ">Trips<" in html_table(("Profile", ">Trips"), [])


def test_a_report_is_written_to_the_given_file(folder: Path, report: Path, tmp_path: Path) -> None:
    before, out = report.read_bytes(), tmp_path / "mine.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    assert out.read_bytes() == before


def test_a_report_that_cannot_be_written_is_one_line(folder: Path, tmp_path: Path, edgefl: Shell) -> None:
    (tmp_path / "file").touch()
    for out, line in (
        (tmp_path, "is a folder; expected a file"),
        (tmp_path / "file" / "x", "cannot be written"),
    ):
        assert line in edgefl.refuses(2, "report", str(folder), "--out", str(out))
    shutil.copy(folder / "record.sqlite", tmp_path)
    (tmp_path / "report.html").mkdir()  # which even root cannot overwrite
    assert edgefl.refuses(2, "report", str(tmp_path)).endswith("; name another file: --out FILE")


def curve(k: int, y: list[float]) -> Curve:
    return Curve(pictures.series(k), f"run {k}", np.arange(len(y), dtype=float), np.array(y))


@pytest.mark.parametrize(
    ("ends", "low"), [((0.97, 0.98), 0.9), ((0.97, 0.4), 0.0), ((0.76, 0.99), 0.7), ((0.5, 0.6), 0.0)]
)
def test_the_axis_begins_high_only_if_all_curves_end_high(ends: tuple[float, float], low: float) -> None:
    curves = [curve(k, [0.1, *[end] * 19]) for k, end in enumerate(ends)]
    assert pictures._low_end(curves, 19.0) == pytest.approx(low)


def test_pictures_ignore_the_users_own_matplotlib_settings() -> None:
    """Regression: with ``text.usetex`` and without LaTeX, no report was written."""
    with mpl.rc_context({"text.usetex": True, "savefig.bbox": "tight"}), pictures.house_style():
        assert not mpl.rcParams["text.usetex"]
        assert mpl.rcParams["savefig.bbox"] is None


def test_end_points_at_the_same_place_become_concentric_rings() -> None:
    canvas = Canvas()
    canvas.axes.set_xlim(0, 20)
    canvas.shares()
    ends = (0.9, 0.901, 0.5, 0.899)
    pictures._end_dots(canvas, [curve(k, [0.1, *[end] * 19]) for k, end in enumerate(ends)])
    dots = [(line.get_markersize(), line.get_markerfacecolor() != "none") for line in canvas.axes.lines]
    assert dots == [(5, True), (9, False), (5, True), (13, False)]


def test_a_comparison_names_the_best_setting_and_links_each_report(tmp_path: Path) -> None:
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


def test_runs_in_folders_whose_names_are_not_utf_8_can_be_compared(tmp_path: Path) -> None:
    folders = []
    for name in ("a", os.fsdecode(b"caf\xe9")):
        folders.append(write_run(tmp_path / name, name="one"))
        (folders[-1] / "report.html").touch()
    compare(folders, tmp_path / "out")
    page = Page(tmp_path / "out" / "report.html")
    assert [link for link in page.links if not link.startswith("#")] == [
        "../a/report.html",
        "../caf%E9/report.html",
    ]
    assert {row["curve"] for row in tables(tmp_path / "out" / "report.html")[0]} == {
        "fedbuff a",
        "fedbuff caf?",
    }


def test_a_comparison_has_no_figures_on_the_slow_phones_classes_if_there_are_none(tmp_path: Path) -> None:
    fleet = {"pixel-4": (0.1, (0, 1)), "moto-g4": (1.0, (0, 1))}
    folders = [write_run(tmp_path / name, fleet=fleet, strategy=name) for name in ("fedbuff", "fedavg")]
    table = as_text(compare(folders, tmp_path / "out"))
    page = Page(tmp_path / "out" / "report.html").text
    assert "Accuracy over emulated time" in page
    for text in (page.lower(), table.lower()):
        assert "weight of slow phones" in " ".join(text.split())
        assert "slow phones' classes" not in text


def test_a_lead_that_depends_on_the_seeds_is_marked_as_uncertain(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"{name} {seed}", trips=trips, strategy=name, seed=seed)
        for name, trips_of in (("fedbuff", (45, 30)), ("fedavg", (20, 40)))
        for seed, trips in enumerate(trips_of)
    ]
    compare(folders, tmp_path / "out")
    (lead,) = re.findall(r'<p class="lead">(.*?)</p>', (tmp_path / "out" / "report.html").read_text())
    assert lead.count("(these seeds do not tell them apart)") == 2
    assert lead.endswith("has the highest accuracy: 75.0 ±190.6% (these seeds do not tell them apart).")


def test_matplotlib_prints_no_warning_if_the_home_folder_is_not_writable(folder: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key not in ("XDG_CACHE_HOME", "MPLCONFIGDIR")}
    command = [sys.executable, "-m", "edgefl", "report", str(folder)]
    env["HOME"] = "/proc/none"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{folder / 'report.html'}\n", "")
