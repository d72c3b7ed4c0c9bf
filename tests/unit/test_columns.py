"""A run's tables as columns and as files, and the figure that is plotted from them."""

from __future__ import annotations

import copy
import csv
import math
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from shell import Shell

from edgefl.cli import main
from edgefl.errors import ConfigError
from edgefl.results.columns import TABLES_OF_A_RUN, Table
from edgefl.results.figure import plot
from edgefl.results.result import Result
from edgefl.results.store import Store
from edgefl.results.summary import summarize, write_summary
from tests.reports import evaluation, trip, write_run


def test_columns_equal_the_record(tmp_path: Path) -> None:
    result = Result(write_run(tmp_path / "run", clients=4, trips=20, lost=2))
    with Store(result.dir) as store:
        store.trip(trip(99, 0, 30.0, metrics={"drift": 1.5, "loss": 0.75}))
        store.evaluation(evaluation(9, 50.0, accuracy=math.nan, metrics={"mae": 0.25}))
    trips, curve = result.trips(), result.evaluations()
    record = result.record
    assert trips.rows == 21
    assert trips["task"].tolist() == record.trips["task"].tolist()
    assert trips["profile"][:2].tolist() == ["pixel-4", "pixel-4"]
    assert trips["drift"][-1] == 1.5
    assert np.isnan(trips["loss"][-1])  # no loss was passed to `context.step`
    assert trips["logged_loss"][-1] == 0.75
    assert not {"checksum_sent", "checksum_seen", "metrics"} & trips.keys()
    assert np.isnan(trips["staleness"][0])  # a lost trip
    np.testing.assert_array_equal(curve["accuracy"], [row.accuracy for row in record.evaluations])
    assert curve["mae"][-1] == 0.25
    assert np.isnan(curve["mae"][:-1]).all()
    weights = result.weights()
    assert [weights[name].tolist() for name in ("version", "task")] == [
        [1] * 5 + [2] * 5 + [3] * 5,
        [*range(2, 17)],
    ]
    assert set(weights["weight"].tolist()) == {0.2}
    np.testing.assert_array_equal(weights["client"], weights["task"] % 4)
    stale = result.staleness()
    assert stale["staleness"].dtype == np.int64
    assert stale["task"].tolist() == [*range(2, 20)]
    share = result.clients()
    by_client = summarize(result.dir)["applied_weight"]["by_client"]
    np.testing.assert_allclose(share["applied_weight"], list(by_client.values()), rtol=1e-5)
    assert share["trips"].sum() == 18
    assert result.versions()["version"].tolist() == [0, 1, 2, 3]
    record.close()


def test_a_run_without_trips_has_empty_columns(tmp_path: Path) -> None:
    result = Result(write_run(tmp_path / "run", trips=0, evaluations=False))
    assert {table.rows for table in (result.trips(), result.weights(), result.staleness())} == {0}
    assert result.evaluations().csv() == "version,at_s,wall_s,trips,accuracy,loss\n"


def test_the_curve_is_in_the_summary(tmp_path: Path) -> None:
    curve = summarize(write_run(tmp_path, trips=10))["curve"]
    assert curve["version"] == [0, 1, 2]
    assert curve["accuracy"] == [0.0, 0.1, 0.2]
    assert curve["trips"] == [0, 5, 10]
    assert set(curve) == {"version", "trips", "at_s", "accuracy", "loss"}


def test_export_writes_every_table(tmp_path: Path, edgefl: Shell) -> None:
    run = write_run(tmp_path / "run")
    assert len(edgefl.shows("export", str(run)).splitlines()) == len(TABLES_OF_A_RUN)
    for name in TABLES_OF_A_RUN:
        with (run / "tables" / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == (0 if name == "incidents" else TABLES_OF_A_RUN[name](Result(run).record).rows)
    assert "give only one of them" in edgefl.refuses(2, "export", str(run), "--csv", "--parquet")
    with pytest.raises(ConfigError, match=r"must end in \.csv or \.parquet"):
        Table().write(tmp_path / "a.xls")


def test_missing_packages_for_parquet_and_frames_are_named(
    tmp_path: Path, edgefl: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pandas", "polars", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    said = edgefl.refuses(2, "export", str(write_run(tmp_path / "run")), "--parquet")
    assert said.startswith("Parquet needs polars or pyarrow")
    with pytest.raises(ConfigError, match="a data frame needs pandas or polars"):
        Table().frame()
    stand_in = ModuleType("polars")
    stand_in.DataFrame = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "polars", stand_in)
    assert Table(x=np.array([1])).frame() == {"x": np.array([1])}
    assert Table(kind=np.empty(0, object)).frame()["kind"].dtype.kind == "U"


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_data_frame_has_the_columns(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    if package == "polars":
        monkeypatch.setitem(sys.modules, "pandas", None)
    trips = Result(write_run(tmp_path / "run")).trips()
    frame = trips.frame()
    assert type(frame).__module__.startswith(package)
    assert list(frame.columns) == list(trips)
    assert len(frame) == trips.rows


def test_a_parquet_file_has_the_columns(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    trips = Result(write_run(tmp_path / "run")).trips()
    back = polars.read_parquet(trips.write(tmp_path / "trips.parquet"))
    np.testing.assert_array_equal(back["arrived_s"].to_numpy(), trips["arrived_s"])
    assert back["profile"].to_list() == trips["profile"].tolist()


def test_a_parquet_file_without_rows_has_the_columns(tmp_path: Path) -> None:
    """Regression: polars could not write the table of incidents of a run that had none."""
    polars = pytest.importorskip("polars")
    run = write_run(tmp_path / "run")
    assert main(["export", str(run), "--parquet"]) == 0
    back = polars.read_parquet(run / "tables" / "incidents.parquet")
    assert (back.height, list(back.columns)) == (0, ["id", "at_s", "client", "kind", "detail"])


def test_a_figure_is_a_reproducible_vector_graphic_with_embedded_fonts(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"a{seed}", trips=40, seed=seed)
        write_run(tmp_path / f"b{seed}", trips=60, seed=seed, buffer_size=3)
    runs = {name: [tmp_path / f"{name}{seed}" for seed in (1, 2, 3)] for name in "ab"}
    file = plot(runs, tmp_path / "figure.pdf", over="trips")
    content = file.read_bytes()
    with mpl.rc_context({"text.usetex": True, "savefig.bbox": "tight"}):  # the user's own settings
        assert content == plot(runs, tmp_path / "again.pdf", over="trips").read_bytes()
    assert b"/FontFile2" in content  # embedded, TrueType
    assert b"/Type3" not in content
    assert b"/Subtype /Image" not in content
    (box,) = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", content)
    assert [float(each) / 72 for each in box] == pytest.approx([3.4, 2.3])
    assert plot([*runs["a"]], tmp_path / "figure.svg", y="loss", band="range").read_text().startswith("<?xml")
    with pytest.raises(
        ConfigError, match="no mae was measured; measure 'mae' not found; available: accuracy, loss"
    ):
        plot(runs, file, y="mae")
    with pytest.raises(ConfigError, match=r"must end in one of \.pdf"):
        plot(runs, tmp_path / "figure.xls")
    with pytest.raises(ConfigError, match="name at least one run"):
        plot({}, file)


@pytest.mark.parametrize(("band", "low", "high"), [("range", 0.3, 0.5), ("interval", 0.0, 1.0)])
def test_a_figure_shows_the_mean_over_seeds_and_the_given_band(
    band: Any, low: float, high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 15 trips, the accuracies are 0.5 and 0.3. The interval of only two seeds is clipped to [0, 1]."""
    runs = {"a": [write_run(tmp_path / f"{k}", trips=15, buffer_size=k, seed=k) for k in (3, 5)]}
    drawn: dict[str, tuple[Any, ...]] = {}

    def spy_on(name: str) -> None:
        draw = getattr(Axes, name)

        def spy(axes: Axes, *rows: Any, **how: Any) -> Any:
            drawn[name] = rows
            return draw(axes, *rows, **how)

        monkeypatch.setattr(Axes, name, spy)

    spy_on("plot")
    spy_on("fill_between")
    plot(runs, tmp_path / "figure.svg", over="trips", band=band)
    assert [row[-1] for row in drawn["plot"]] == pytest.approx([15.0, 0.4])
    assert [row[-1] for row in drawn["fill_between"]] == pytest.approx([15.0, low, high])


def test_a_figure_in_eps_has_pale_bands_and_no_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: EPS has no transparency, so bands hid the curves. The file contained the current time."""
    runs = {"a": [write_run(tmp_path / f"a{seed}", trips=20 * seed, seed=seed) for seed in (1, 2)]}
    found = []
    for now_s in ("1", "1000000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", now_s)
        found.append(plot(runs, tmp_path / "figure.eps").read_bytes())
    assert found[0] == found[1]
    filled = re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) setrgbcolor\s+fill", found[0])
    assert filled
    assert all(min(map(float, colour)) > 0.8 for colour in filled)


@pytest.mark.parametrize("runs", ["runs/a", Path("runs/a"), [], None])
def test_a_figure_of_one_path_or_of_no_run_is_refused(runs: Any, tmp_path: Path) -> None:
    for given, what in ((runs, "runs"), ({"a": runs}, "runs of 'a'")):
        says = f"{what}: must be a list of at least one run, got {runs!r}"
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
            plot(given, tmp_path / "figure.pdf")


def test_a_table_is_shown_with_its_ends_and_the_columns_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table({f"x{k}": np.arange(12.0) for k in range(9)}, name=np.array(["<b>"] * 12, object))
    table["x0"][11] = math.nan
    monkeypatch.setenv("COLUMNS", "80")
    lines = repr(table).splitlines()
    assert lines[0].split() == [f"x{k}" for k in range(8)]
    starts = [line.split()[0] for line in lines[2:13]]
    assert starts == ["0", "1", "2", "3", "4", "…", "7", "8", "9", "10", "–"]
    assert " ".join(" ".join(lines[13:]).split()) == "12 rows, 10 columns; not shown: x8, name"
    monkeypatch.setenv("COLUMNS", "60")
    assert " ".join(repr(table).split()).endswith("columns; not shown: x6, x7, x8, name")
    assert max(map(len, repr(table).splitlines())) <= 60
    html = table._repr_html_()
    assert html.count("<tr>") == 12  # the heading, five rows of each end, and one row for the others
    assert "&lt;b&gt;" in html
    assert "<b>" not in html


def test_the_folder_of_a_sweep_is_refused_as_a_result(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "fedbuff-seed-1")
    with pytest.raises(ConfigError, match="is not a run but holds runs; name one of them: "):
        Result(tmp_path)


def test_a_result_is_shown_as_its_run_printed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = Result(write_run(tmp_path / "run"))
    assert str(result) == f"{result!r}: {result.dir} has no summary.json: the run did not end"
    assert result._repr_html_() is None
    figures = write_summary(result.dir)
    assert figures.exists()
    assert re.search(r"^model +[0-9a-f]{16}$|^client trips +\d+", str(result), re.MULTILINE)
    assert "<td" in str(result._repr_html_())
    assert repr(result) == f"Result({str(result.dir)!r})"


def test_a_result_whose_record_was_read_can_be_pickled_and_copied(tmp_path: Path) -> None:
    """For example, a worker process returns a result, or a study caches it."""
    result = Result(write_run(tmp_path / "run", trips=20))
    assert len(result.record.trips["task"]) == 20
    pickled = pickle.loads(pickle.dumps(result))  # noqa: S301 (its own bytes)
    for other in (pickled, copy.copy(result), copy.deepcopy(result)):
        assert (other.dir, len(other.record.trips["task"])) == (result.dir, 20)
